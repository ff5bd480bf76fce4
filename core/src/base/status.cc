#include "base/status.h"

#include <cassert>

namespace hvd {

const char* Name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kMismatch:
      return "mismatch";
    case Code::kPeerLost:
      return "peer lost";
    case Code::kTimeout:
      return "timeout";
    case Code::kAborted:
      return "aborted";
    case Code::kInvalid:
      return "invalid";
    case Code::kShutdown:
      return "shutdown";
  }
  return "unknown";
}

Status::Status(Code code, std::string text)
    : failure_(std::make_shared<const Failure>(Failure{code, std::move(text)})) {
  assert(code != Code::kOk);
}

Status Status::Prepend(std::string_view view) const {
  if (ok()) return *this;
  std::string text;
  text.reserve(view.size() + 2 + failure_->text.size());
  text.append(view).append(": ").append(failure_->text);
  return Status(failure_->code, std::move(text));
}

}  // namespace hvd
