// The outcome of a call. Below the bindings nothing throws: every level returns a Status and prepends its
// view.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace hvd {

enum class Code {
  kOk,
  kMismatch,  // the ranks disagree about a tensor: a bug in the program, never retried; the Group lives on
  kPeerLost,  // a rank is gone or silent; the Group is dead
  kTimeout,   // a deadline passed; the Group is dead
  kAborted,   // a rank called abort(reason); the Group is dead
  kInvalid,   // a bad argument, found on this rank alone
  kShutdown,  // the Group was closed
};

const char* Name(Code code);

// One pointer, null when ok: success costs a test against null, and copies of a failure share its text.
// Safe to read from several threads, as any const object.
class [[nodiscard]] Status {
 public:
  Status() = default;
  // `code` is not kOk.
  Status(Code code, std::string text);

  static Status Ok() { return Status(); }

  bool ok() const { return failure_ == nullptr; }
  Code code() const { return failure_ ? failure_->code : Code::kOk; }
  // Empty when ok.
  std::string_view text() const { return failure_ ? std::string_view(failure_->text) : std::string_view(); }

  // The same code with "`view`: " before the text; ok stays ok.
  Status Prepend(std::string_view view) const;

 private:
  struct Failure {
    Code code;
    std::string text;
  };
  std::shared_ptr<const Failure> failure_;
};

// A value or the reason why there is none. `value()` may be called only when ok().
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}  // NOLINT: implicit, so that `return value;` reads well
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: `status` is not ok
  Result(Code code, std::string text) : status_(code, std::move(text)) {}

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return *std::move(value_); }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace hvd

// Returns from the calling function with the failure of `expr`, if it failed.
#define HVD_RETURN_IF_ERROR(expr)                                \
  do {                                                           \
    if (::hvd::Status hvd_status_ = (expr); !hvd_status_.ok()) { \
      return hvd_status_;                                        \
    }                                                            \
  } while (false)
