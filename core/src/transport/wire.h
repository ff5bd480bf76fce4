#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace hvd {

// Serialises plain values in the byte order of the host (all supported hosts are little-endian) and strings
// with a 32-bit length in front.
class Writer {
 public:
  template <class T>
  void Put(T value) {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void PutString(std::string_view text) {
    Put(static_cast<uint32_t>(text.size()));
    out_.append(text);
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads what a Writer wrote. Reading past the end gives zeros and makes ok() false for good, so a caller
// checks once at the end.
class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}

  template <class T>
  T Get() {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>);
    T value{};
    if (!Has(sizeof value)) return value;
    std::memcpy(&value, in_.data(), sizeof value);
    in_.remove_prefix(sizeof value);
    return value;
  }
  std::string GetString() {
    const auto size = Get<uint32_t>();
    if (!Has(size)) return {};
    std::string text(in_.substr(0, size));
    in_.remove_prefix(size);
    return text;
  }
  // A count of items that take at least one byte each; more than what is left cannot be meant.
  uint32_t GetCount() {
    const auto count = Get<uint32_t>();
    return Has(count) ? count : 0;
  }
  bool ok() const { return ok_; }
  bool AtEnd() const { return ok_ && in_.empty(); }

 private:
  bool Has(size_t nbytes) {
    if (in_.size() < nbytes) ok_ = false;
    return ok_;
  }

  std::string_view in_;
  bool ok_ = true;
};

}  // namespace hvd
