#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

namespace hvd {

// One tensor of a fused batch; in == out is in place.
struct Piece {
  const std::byte* in;
  std::byte* out;
  size_t count;
};

// One tensor that lies in the arena on every rank of a host: at[r] is where local rank r has it.
struct ArenaPiece {
  std::vector<std::byte*> at;
  size_t count;
};

// Elements of a fused batch, whose tensors stand one after another as if they were one.
struct Range {
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// Slice number `slice` of `range`, for one of `slices` owners. In whole cache lines, so that no two owners
// write the same one.
inline Range SliceOf(Range range, size_t item_nbytes, int slice, int slices) {
  const size_t per_line = 64 / item_nbytes, owners = static_cast<size_t>(slices);
  const size_t share = (range.size() + owners - 1) / owners;
  const size_t each = (share + per_line - 1) / per_line * per_line;
  const size_t begin = std::min(range.end, range.begin + each * static_cast<size_t>(slice));
  return {begin, std::min(range.end, begin + each)};
}

// The rows of `rank` in a reducescatter: as many for each as can be, and the first ranks get one more.
inline Range RowsOf(size_t rows, int rank, int size) {
  const size_t n = static_cast<size_t>(size), r = static_cast<size_t>(rank);
  const size_t begin = r * (rows / n) + std::min(r, rows % n);
  return {begin, begin + rows / n + (r < rows % n ? 1 : 0)};
}

// `part`-th part of `range`, if parts have `each` elements.
inline Range Part(Range range, size_t each, size_t part) {
  const size_t begin = std::min(range.end, range.begin + part * each);
  return {begin, std::min(range.end, begin + each)};
}

// Calls visit(tensor, first, count) for the elements of each tensor that lie in `range`, in order.
// count_of(i) is the number of elements of tensor i.
template <class CountOf, class Visit>
void ForEachPart(size_t tensors, CountOf count_of, Range range, Visit visit) {
  size_t begin = 0;
  for (size_t i = 0; i < tensors && begin < range.end; ++i) {
    const size_t count = count_of(i);
    const size_t from = std::max(begin, range.begin), to = std::min(begin + count, range.end);
    if (from < to) visit(i, from - begin, to - from);
    begin += count;
  }
}

// The tensors of a fused batch, found fast wherever a range of it begins.
class Batch {
 public:
  explicit Batch(std::span<const Piece> pieces) : pieces_(pieces) {
    ends_.reserve(pieces.size());
    for (const Piece& piece : pieces) ends_.push_back(count() + piece.count);
  }
  size_t count() const { return ends_.empty() ? 0 : ends_.back(); }

  // Calls visit(piece, first, count) for the elements of each tensor that lie in `range`, in order.
  template <class Visit>
  void ForEach(Range range, Visit visit) const {
    auto i = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), range.begin) - ends_.begin());
    for (size_t at = range.begin; at < range.end; ++i) {
      const size_t end = std::min(range.end, ends_[i]);
      if (at < end) visit(pieces_[i], at - (ends_[i] - pieces_[i].count), end - at);
      at = end;
    }
  }

 private:
  std::span<const Piece> pieces_;
  std::vector<size_t> ends_;
};

template <class Pieces>
size_t CountOf(const Pieces& pieces) {
  size_t count = 0;
  for (const auto& piece : pieces) count += piece.count;
  return count;
}

}  // namespace hvd
