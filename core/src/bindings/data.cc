// Rows and orders for hvd_core.train. Converts and checks; the work is in src/data, without the GIL.
#include "bindings/data.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/permutation.h"
#include "data/rows.h"

namespace nb = nanobind;

namespace hvd {
namespace {

template <class T, class Shape>
using Array = nb::ndarray<T, Shape, nb::c_contig, nb::device::cpu>;
using Bytes = Array<const uint8_t, nb::ndim<1>>;
using MutableBytes = Array<uint8_t, nb::ndim<1>>;
using Indices = Array<const int64_t, nb::ndim<1>>;
using Hashes = Array<const uint64_t, nb::shape<-1, 2>>;
using NewIndices = nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>;
using NewHashes = nb::ndarray<nb::numpy, uint64_t, nb::shape<-1, 2>>;

const std::byte* BytesOf(const Bytes& array) { return reinterpret_cast<const std::byte*>(array.data()); }

// Rows in `array`, which must hold a whole number of them.
size_t RowsIn(const Bytes& array, size_t row_nbytes) {
  if (row_nbytes == 0 || array.size() % row_nbytes != 0) {
    const std::string text = std::to_string(array.size()) + " bytes are not whole rows of " +
                             std::to_string(row_nbytes) + " bytes";
    throw nb::value_error(text.c_str());
  }
  return array.size() / row_nbytes;
}

// Gives `values` to Python as an array of the shape that `Result` has.
template <class Result, class T>
Result Adopt(std::unique_ptr<std::vector<T>> values, std::initializer_list<size_t> shape) {
  auto* data = reinterpret_cast<typename Result::Scalar*>(values->data());
  nb::capsule owner(values.get(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  values.release();
  return Result(data, shape, owner);
}

void GatherRowsPy(const Bytes& base, size_t row_nbytes, const Indices& index, const MutableBytes& out) {
  const size_t rows = RowsIn(base, row_nbytes);
  const size_t count = index.size();
  if (out.size() / row_nbytes != count || out.size() % row_nbytes != 0) {
    const std::string text = "out has " + std::to_string(out.size()) + " bytes for " + std::to_string(count) +
                             " rows of " + std::to_string(row_nbytes);
    throw nb::value_error(text.c_str());
  }
  const int64_t* indices = index.data();
  bool is_inside = true;
  {
    nb::gil_scoped_release release;
    // As unsigned, a negative index is beyond every row.
    uint64_t largest = 0;
    for (size_t k = 0; k < count; ++k) largest = std::max(largest, static_cast<uint64_t>(indices[k]));
    is_inside = count == 0 || largest < rows;
    if (is_inside) {
      GatherRows(BytesOf(base), row_nbytes, indices, count, reinterpret_cast<std::byte*>(out.data()));
    }
  }
  if (!is_inside) {
    const int64_t* wrong = std::find_if(indices, indices + count,
                                        [rows](int64_t i) { return static_cast<uint64_t>(i) >= rows; });
    const std::string text = "index " + std::to_string(*wrong) + " at position " +
                             std::to_string(wrong - indices) + " is not in [0, " + std::to_string(rows) + ")";
    throw nb::index_error(text.c_str());
  }
}

NewHashes HashRowsPy(const std::vector<std::pair<Bytes, size_t>>& blocks, size_t rows, uint64_t seed) {
  std::vector<Block> parts;
  for (const auto& [array, row_nbytes] : blocks) {
    if (RowsIn(array, row_nbytes) < rows) {
      const std::string text =
          "a block has " + std::to_string(RowsIn(array, row_nbytes)) + " rows, not " + std::to_string(rows);
      throw nb::value_error(text.c_str());
    }
    parts.push_back({BytesOf(array), row_nbytes});
  }
  auto hashes = std::make_unique<std::vector<RowHash>>(rows);
  {
    nb::gil_scoped_release release;
    HashRows(parts, seed, 0, *hashes);
  }
  return Adopt<NewHashes>(std::move(hashes), {rows, 2});
}

NewIndices SortByHashPy(const Hashes& hashes) {
  const size_t rows = hashes.shape(0);
  auto order = std::make_unique<std::vector<int64_t>>();
  {
    nb::gil_scoped_release release;
    *order = SortByHash({reinterpret_cast<const RowHash*>(hashes.data()), rows});
  }
  return Adopt<NewIndices>(std::move(order), {rows});
}

NewIndices PermutationPy(uint64_t n, uint64_t seed, uint64_t epoch, uint64_t begin, uint64_t count) {
  if (n > uint64_t{1} << 62) throw nb::value_error("n is greater than 2**62");
  if (begin > n || count > n - begin) {
    const std::string text = "[begin, begin + count) = [" + std::to_string(begin) + ", " +
                             std::to_string(begin) + " + " + std::to_string(count) + ") is not in [0, " +
                             std::to_string(n) + ")";
    throw nb::index_error(text.c_str());
  }
  auto order = std::make_unique<std::vector<int64_t>>(count);
  if (count > 0) {
    nb::gil_scoped_release release;
    Permutation(n, seed, epoch).Fill(begin, *order);
  }
  return Adopt<NewIndices>(std::move(order), {static_cast<size_t>(count)});
}

}  // namespace

void BindData(nb::module_& module) {
  module.def(
      "gather_rows", GatherRowsPy, nb::arg("base").noconvert(), nb::arg("row_nbytes"),
      nb::arg("index").noconvert(), nb::arg("out").noconvert(),
      "Copy row index[k] of `base` to row k of `out`. IndexError, and nothing written, if one is outside.");
  module.def("hash_rows", HashRowsPy, nb::arg("blocks").noconvert(), nb::arg("rows"), nb::arg("seed"),
             "128-bit hash of each of the first `rows` rows over all blocks [(bytes, row_nbytes), ...].");
  module.def("sort_by_hash", SortByHashPy, nb::arg("hashes").noconvert(),
             "The rows in order of their hashes; equal ones in order of position.");
  module.def("permutation", PermutationPy, nb::arg("n"), nb::arg("seed"), nb::arg("epoch"), nb::arg("begin"),
             nb::arg("count"),
             "Elements [begin, begin + count) of the random order of [0, n) for (seed, epoch).");
}

}  // namespace hvd
