#include "check.h"
#include "scheduler/long_phases.h"

namespace hvd {
namespace {

Clock::time_point At(double seconds) { return Clock::time_point(Seconds(1000 + seconds)); }

}  // namespace

TEST(a_phase_excuses_until_it_ends_or_its_time_is_over) {
  LongPhases phases;
  CHECK(phases.ExcusedUntil(At(0)) < At(-900));
  phases.Hear(2, {true, "checkpoint", 10}, At(0));
  CHECK(phases.ExcusedUntil(At(5)) == At(5));
  CHECK(phases.ExcusedUntil(At(12)) == At(10));
  CHECK_EQ(phases.Describe(At(4)), "; rank 2 is in 'checkpoint' for 4 s of at most 10 s");
  phases.Hear(2, {}, At(6));
  CHECK(phases.ExcusedUntil(At(50)) == At(6));
  CHECK_EQ(phases.Describe(At(50)), "");
}

TEST(a_phase_that_ends_late_excuses_its_own_time_only) {
  LongPhases phases;
  phases.Hear(1, {true, "a", 10}, At(0));
  phases.Hear(1, {}, At(40));
  CHECK(phases.ExcusedUntil(At(50)) == At(10));
}

TEST(phases_nest_and_are_of_their_rank) {
  LongPhases phases;
  phases.Hear(1, {true, "outer", 100}, At(0));
  phases.Hear(1, {true, "inner", 5}, At(1));
  phases.Hear(0, {}, At(2));  // is in none
  phases.Hear(1, {}, At(3));
  CHECK_EQ(phases.Describe(At(4)), "; rank 1 is in 'outer' for 4 s of at most 100 s");
  CHECK(phases.ExcusedUntil(At(60)) == At(60));
}

}  // namespace hvd
