#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace hvd {

// Finds the slot of a name; the names themselves are its user's. One look at a cache line for most names.
class NameIndex {
 public:
  static constexpr uint32_t kNone = ~0u;

  // is(slot) says whether that slot has this name.
  template <class Is>
  uint32_t Find(std::string_view name, const Is& is) const {
    if (cells_.empty()) return kNone;
    const uint32_t hash = Hash(name);
    for (size_t at = Home(hash); cells_[at].slot != kNone; at = Next(at)) {
      if (cells_[at].hash == hash && is(cells_[at].slot)) return cells_[at].slot;
    }
    return kNone;
  }

  // The name has no slot yet.
  void Insert(std::string_view name, uint32_t slot) {
    if (2 * (size_ + 1) > cells_.size()) Grow();
    Put({Hash(name), slot});
    ++size_;
  }

  // The name has this slot.
  void Erase(std::string_view name, uint32_t slot) {
    size_t hole = Home(Hash(name));
    while (cells_[hole].slot != slot) hole = Next(hole);
    // What would no longer be found past the hole moves into it.
    for (size_t at = Next(hole); cells_[at].slot != kNone; at = Next(at)) {
      const size_t from_home = (at - Home(cells_[at].hash)) & (cells_.size() - 1);
      if (from_home < ((at - hole) & (cells_.size() - 1))) continue;
      cells_[hole] = cells_[at];
      hole = at;
    }
    cells_[hole] = {};
    --size_;
  }

  size_t size() const { return size_; }

 private:
  struct Cell {
    uint32_t hash = 0;
    uint32_t slot = kNone;
  };

  static uint32_t Hash(std::string_view name) {
    return static_cast<uint32_t>(std::hash<std::string_view>()(name));
  }
  size_t Home(uint32_t hash) const { return hash & (cells_.size() - 1); }
  size_t Next(size_t at) const { return (at + 1) & (cells_.size() - 1); }

  void Put(Cell cell) {
    size_t at = Home(cell.hash);
    while (cells_[at].slot != kNone) at = Next(at);
    cells_[at] = cell;
  }
  void Grow() {
    std::vector<Cell> before(cells_.empty() ? 16 : 2 * cells_.size());
    before.swap(cells_);
    for (const Cell& cell : before) {
      if (cell.slot != kNone) Put(cell);
    }
  }

  std::vector<Cell> cells_;  // a power of two, at most half of it taken
  size_t size_ = 0;
};

}  // namespace hvd
