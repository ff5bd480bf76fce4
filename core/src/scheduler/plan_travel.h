#pragma once

#include <cstdint>
#include <vector>

#include "scheduler/plan_data.h"

namespace hvd {

// Bytes that every rank of a host has in shared memory, and one place for the result.
class SharedBytes final : public ChainMemory {
 public:
  SharedBytes() = default;
  SharedBytes(std::vector<const uint8_t*> of_ranks, uint8_t* result)
      : of_ranks_(std::move(of_ranks)), result_(result) {}

  Status Sources(const Chunk& chunk, Runs<const void*>* runs) override {
    runs->ranks = of_ranks_.size();
    for (const uint8_t* bytes : of_ranks_) runs->at.push_back(bytes + chunk.begin);
    runs->counts.push_back(chunk.count);
    return Status::Ok();
  }
  Status Targets(const Chunk& chunk, Runs<void*>* runs) override {
    runs->ranks = 1;
    runs->at.push_back(result_ + chunk.begin);
    runs->counts.push_back(chunk.count);
    return Status::Ok();
  }

 private:
  std::vector<const uint8_t*> of_ranks_;
  uint8_t* result_ = nullptr;
};

// The members of a fused batch.
class BatchBytes final : public ChainMemory {
 public:
  BatchBytes() = default;
  BatchBytes(PlanData* data, const Row* row, size_t item) : data_(data), row_(row), item_(item) {}

  Status Sources(const Chunk& chunk, Runs<const void*>* runs) override {
    return data_->Sources(*row_, item_, chunk, runs);
  }
  Status Targets(const Chunk& chunk, Runs<void*>* runs) override {
    data_->Targets(*row_, item_, chunk, true, runs);
    return Status::Ok();
  }

 private:
  PlanData* data_ = nullptr;
  const Row* row_ = nullptr;
  size_t item_ = 1;
};

// A fused batch on its way through the hosts. What each rank has of its members goes ahead of them, along the
// same streams: which of them get a result is known when the first result comes, and without a word before.
// A member that a rank has not counts as zeros on the way.
struct PlanTravel {
  SharedBytes statuses;
  BatchBytes bytes;
  bool is_appended = false;
  uint64_t job = 0;
};

}  // namespace hvd
