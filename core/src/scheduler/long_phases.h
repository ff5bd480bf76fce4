#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "transport/exchange.h"

namespace hvd {

inline std::string WholeSeconds(Clock::duration duration) {
  return std::to_string(std::chrono::duration_cast<std::chrono::seconds>(duration).count()) + " s";
}

// A rank has begun something that takes long and that the others rightly wait for (a checkpoint, an
// evaluation), or has ended what it began last.
struct PhaseNews {
  bool begins = false;
  std::string name;
  double timeout_s = 0;  // it takes at most so long
};

// Who is in a declared phase, as every rank hears it. No clock of its own; any thread.
class LongPhases {
 public:
  void Hear(int rank, const PhaseNews& news, Clock::time_point now) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (news.begins) {
      open_.push_back({rank, news.name, now, now + Seconds(news.timeout_s)});
      return;
    }
    // The innermost that the rank is in.
    const auto last =
        std::find_if(open_.rbegin(), open_.rend(), [&](const Phase& p) { return p.rank == rank; });
    if (last == open_.rend()) return;
    ended_ = std::max(ended_, std::min(now, last->until));
    open_.erase(std::next(last).base());
  }

  // Waiting was legal until then: a stall is counted from here at the earliest.
  Clock::time_point ExcusedUntil(Clock::time_point now) const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    Clock::time_point latest = ended_;
    for (const Phase& phase : open_) latest = std::max(latest, std::min(now, phase.until));
    return latest;
  }

  // "; rank 2 is in 'checkpoint' for 40 s of at most 300 s"; empty if nobody is in a phase.
  std::string Describe(Clock::time_point now) const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    std::string text;
    for (const Phase& phase : open_) {
      text += "; rank " + std::to_string(phase.rank) + " is in '" + phase.name + "' for " +
              WholeSeconds(now - phase.since) + " of at most " + WholeSeconds(phase.until - phase.since);
    }
    return text;
  }

 private:
  struct Phase {
    int rank;
    std::string name;
    Clock::time_point since;
    Clock::time_point until;
  };

  mutable Mutex mutex_;
  std::vector<Phase> open_ GUARDED_BY(mutex_);
  Clock::time_point ended_ GUARDED_BY(mutex_) = Clock::time_point::min();
};

}  // namespace hvd
