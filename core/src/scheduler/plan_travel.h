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
  BatchBytes(PlanData* data, size_t batch) : data_(data), batch_(batch) {}

  Status Sources(const Chunk& chunk, Runs<const void*>* runs) override {
    data_->Sources(batch_, chunk, runs);
    return Status::Ok();
  }
  Status Targets(const Chunk& chunk, Runs<void*>* runs) override {
    data_->Targets(batch_, chunk, runs);
    return Status::Ok();
  }

 private:
  PlanData* data_ = nullptr;
  size_t batch_ = 0;
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
