// What a plan says about a wait, and when it is too long.
#include <algorithm>

#include "base/log.h"
#include "scheduler/plan.h"

namespace hvd {

template <class IsLate>
std::string Plan::Late(const char* what, IsLate is_late) const {
  std::string ranks;
  for (int rank = 0; rank < size(); ++rank) {
    if (is_late(rank)) ranks += (ranks.empty() ? "" : ", ") + NameOf(rank);
  }
  return ranks.empty() ? "" : ", " + std::string(what) + " by rank " + ranks;
}

bool Plan::HasEnded(int rank) const {
  return words_[static_cast<size_t>(rank)].head().ended.load() == step_.load(std::memory_order_relaxed);
}

// What this rank waits for: a fused batch by its first tensor, and who has not handed it over. Who is in End
// itself waits for others.
std::string Plan::Waits() const {
  const uint32_t step = step_.load(std::memory_order_relaxed);
  const auto words = [&](int rank, size_t b) -> const auto& {
    return words_[static_cast<size_t>(rank)].batch(b);
  };
  std::string late, text = "'" + spec_.name + "'";
  for (size_t b = 0; b < batches_.size(); ++b) {
    if (batches_[b].is_done) continue;
    const uint32_t first = layout_.batches[b].row.parts().front().member;
    text += ", fused batch of '" + spec_.members[first].name + "'";
    late = Late("not handed over",
                [&](int rank) { return words(rank, b).declared.load() != step && !HasEnded(rank); });
    if (late.empty())
      late = Late("not handed over", [&](int rank) { return words(rank, b).declared.load() != step; });
    if (late.empty() && several_hosts()) {
      const int beyond = AwaitsLinks() ? host_.chain->awaited_rank() : -1;
      return text + ", not back from " +
             (beyond < 0 ? "other hosts" : "the host of rank " + std::to_string(beyond));
    }
    if (late.empty())
      late = Late("not reduced", [&](int rank) { return words(rank, b).reduced.load() != step; });
    return text + late;
  }
  late = Late("not ended", [&](int rank) { return !HasEnded(rank); });
  if (!late.empty()) return text + late;
  if (several_hosts() && !is_settled_) return text + ", not ended on other hosts";
  return text + Late("not ended", [&](int rank) {
           return static_cast<int32_t>(words_[static_cast<size_t>(rank)].head().finished.load() - step) < 0;
         });
}

bool Plan::IsLateElsewhere() const {
  if (!several_hosts()) return false;
  const uint32_t step = step_.load(std::memory_order_relaxed);
  return std::all_of(words_.begin(), words_.end(), [&](const PlanWords& words) {
    const bool waits = words.head().ended.load() == step;
    return waits || (first_ < batches_.size() && words.batch(first_).declared.load() == step);
  });
}

Status Plan::CheckStall() {
  const auto now = Clock::now();
  const auto age = now - ended_at_;
  const LongPhases* const phases = host_.long_phases;
  const auto excused_until = phases == nullptr ? Clock::time_point::min() : phases->ExcusedUntil(now);
  const auto unexcused = now - std::max(ended_at_, excused_until);
  const auto text = [&](const char* setting) {
    return Waits() + " for " + WholeSeconds(age) + " (" + setting + ")" +
           (phases == nullptr ? "" : phases->Describe(now));
  };
  // Who waits for another host leaves it to a rank there to say who is missing.
  const auto limit = IsLateElsewhere() ? host_.stall_shutdown * 3 / 2 : host_.stall_shutdown;
  if (host_.stall_shutdown > Clock::duration::zero() && unexcused > limit) {
    const Status status(Code::kTimeout, text("stall_shutdown_s"));
    host_.kill(status);
    return status;
  }
  if (warned_ || age < host_.stall_warn) return Status::Ok();
  warned_ = true;
  // One rank speaks for all that wait.
  for (int rank = 0; rank < host_.rank; ++rank) {
    if (HasEnded(rank)) return Status::Ok();
  }
  Log(Level::kWarning, text("stall_warn_s"));
  return Status::Ok();
}

}  // namespace hvd
