#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "scheduler/trace.h"

namespace hvd {

// The notes of all ranks as events of the Trace Event Format ("JSON array", which viewers also take without
// its end): one process for each rank; in it a row of fused batches and their phases, one of plan batches,
// and one for each tensor; tensors without a name of their own share rows. All events are complete ones
// ("ph": "X"), in microseconds since the start of the timeline. Text in, text out: no I/O and no clock.
class TraceJson {
 public:
  // zero_ns: rank 0's clock at the start.
  explicit TraceJson(int64_t zero_ns) : zero_ns_(zero_ns) {}

  // The notes of `rank`, whose clock is `ahead_ns` ahead of rank 0's; `place` ("node-7, pid 12") names it.
  // Appends to *out. False if the notes are damaged.
  bool Add(int rank, std::string_view place, int64_t ahead_ns, std::string_view notes, std::string* out);

  // Ends the array.
  void End(std::string* out);

 private:
  class Writer;
  struct Process {
    std::unordered_map<uint32_t, int64_t> named;  // by row: when it is free again
    std::vector<int64_t> shared;                  // the same of the shared rows,
    std::vector<int64_t> batches[2];              // and of those of batches: one, unless threads of a rank
                                                  // compute side by side
  };

  const int64_t zero_ns_;
  bool begun_ = false;
  std::unordered_map<std::string, uint32_t> row_of_name_;  // one number on all ranks
  std::unordered_map<int, Process> processes_;
};

}  // namespace hvd
