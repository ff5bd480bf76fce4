#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "scheduler/trace.h"
#include "scheduler/trace_file.h"

namespace hvd {

// The timeline of a Group, seen by one rank: whether notes are taken, and how they get to rank 0, which
// writes the file. Rank 0 starts and stops it on all ranks.
//
// The engine calls OnFrame, Step, Finish and Gone, one at a time; all others may be called by any thread.
class Tracer {
 public:
  using Clock = std::chrono::steady_clock;
  struct Ways {
    std::function<void(int rank, const std::string& payload)> post;  // a frame to one rank
    std::function<void(const std::string& payload)> post_all;        // to all others
    std::function<void()> wake;                                      // lets the engine call Step soon
  };

  // one_clock: rank 0 is on this host.
  Tracer(int rank, int size, bool one_clock, Ways ways);
  ~Tracer();
  Tracer(const Tracer&) = delete;
  Tracer& operator=(const Tracer&) = delete;

  // Null when off. Stays valid as long as the Tracer.
  Trace* trace() const { return on_.load(std::memory_order_acquire); }
  bool mark_cycles() const { return mark_cycles_.load(std::memory_order_relaxed); }

  // Rank 0: opens the file and starts notes, here at once and on the others soon. kInvalid if the file cannot
  // be written or a timeline is being written already. Other ranks: nothing.
  Status Start(const std::string& path, bool mark_cycles) EXCLUDES(mutex_);
  // Rank 0: ends the timeline on all ranks. Returns when the file is complete, or after `patience` without
  // what some rank still had. Nothing on other ranks, nor if none is being written.
  void Stop(Clock::duration patience) EXCLUDES(mutex_);

  // Before the engine begins, on ranks that know that rank 0 will start: notes from now on.
  void Expect();

  void OnFrame(int from, std::string_view payload) EXCLUDES(mutex_);
  // Sends what is due.
  void Step() EXCLUDES(mutex_);
  // When Step should be called even if there is no news; max() if never.
  Clock::time_point next_step() const { return next_step_; }

  // The Group ends: sends what is left, or asks the others for it. Rank 0 passes frames on to OnFrame until
  // all_ended() or its patience is over, then calls CloseFile.
  void Finish() EXCLUDES(mutex_);
  // This rank will send nothing more.
  void Gone(int rank) EXCLUDES(mutex_);
  bool all_ended() const EXCLUDES(mutex_);
  void CloseFile() EXCLUDES(mutex_);

 private:
  enum class What : uint8_t { kStart = 1, kStop, kNotes, kEnd, kPing, kPong };
  // Rank 0's: kStarting and kStopping are wishes that the next Step sends to the others.
  enum class Stage : uint8_t { kOff, kStarting, kOn, kStopping, kEnding };

  void Begin(bool mark_cycles);
  void End();
  void SendNotes();
  void SendPing();
  void Announce();

  const int rank_;
  const bool one_clock_;
  const Ways ways_;
  const std::string place_;
  Trace trace_;
  std::atomic<Trace*> on_{nullptr};
  std::atomic<bool> mark_cycles_{false};

  // Of the engine.
  std::vector<Ping> pings_;
  Clock::time_point next_step_ = Clock::time_point::max();

  mutable Mutex mutex_;
  CondVar ended_all_;
  Stage stage_ GUARDED_BY(mutex_) = Stage::kOff;
  std::vector<bool> ended_ GUARDED_BY(mutex_);  // by rank: has nothing more to say
  std::unique_ptr<TraceFile> file_ GUARDED_BY(mutex_);
};

}  // namespace hvd
