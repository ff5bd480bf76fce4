#include "scheduler/solo.h"

#include <fcntl.h>

#include <cstring>
#include <new>

#include "collectives/reduce.h"

namespace hvd {

Solo::Solo() : tracer_(0, 1, true, {[](int, const std::string&) {}, [](const std::string&) {}, [] {}}) {
  int ends[2];
  if (::pipe(ends) != 0) return;  // then death_fd() is -1, which select refuses
  death_read_.Reset(ends[0]);
  death_write_.Reset(ends[1]);
  for (const int end : ends) ::fcntl(end, F_SETFD, FD_CLOEXEC);
}

Status Solo::Submit(Submission submission, Then) {
  HVD_RETURN_IF_ERROR(status());
  const Request& request = *submission.request;
  const auto begin = Clock::now();
  uint64_t nbytes = 0;
  for (size_t i = 0; i < request.members.size(); ++i) {
    HVD_RETURN_IF_ERROR(Run(request, submission.buffers[i], i, *submission.handle));
    ++counters_.fused_batches;
    nbytes += request.members[i].nbytes();
  }
  counters_.nbytes += nbytes;
  counters_.work_ns += static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin).count());
  const uint64_t number = counters_.collectives++;
  if (Trace* trace = tracer_.trace()) {
    const int64_t begin_ns = ToNs(begin), end_ns = NowNs();
    trace->Batch({BatchRow::kEager, number, Name(request.op), static_cast<uint32_t>(request.members.size()),
                  nbytes, begin_ns, end_ns},
                 {});
    for (const Member& member : request.members) {
      trace->Tensor({member.name, Name(request.op), BatchRow::kEager, number, member.nbytes(), begin_ns,
                     begin_ns, begin_ns, end_ns, end_ns, false});
    }
  }
  if (request.op == Op::kJoin) submission.handle->results().push_back({nullptr, {}, {}, {0}});
  submission.handle->Complete(Status::Ok());
  return Status::Ok();
}

Status Solo::Run(const Request& request, const Buffer& buffer, size_t index, Handle& handle) {
  const Member& member = request.members[index];
  const size_t nbytes = member.nbytes();
  switch (request.op) {
    case Op::kReducescatter:
    case Op::kAllreduce: {
      const void* in = buffer.in;
      void* out = buffer.out;
      const Scale scale{request.prescale, request.postscale, 1};
      if (nbytes > 0) Reduce(member.dtype, request.reduce, scale, &in, 1, &out, 1, member.count());
      return Status::Ok();
    }
    case Op::kAlltoall:
    case Op::kAllgather: {
      Gathered gathered{nullptr, member.dtype, member.shape, {member.shape[0]}};
      gathered.data = std::shared_ptr<std::byte[]>(new (std::nothrow) std::byte[nbytes + 1]);
      if (gathered.data == nullptr) {
        return Status(Code::kInvalid,
                      "no memory for the " + std::to_string(nbytes) + " bytes of '" + member.name + "'");
      }
      if (nbytes > 0) std::memcpy(gathered.data.get(), buffer.in, nbytes);
      handle.results().push_back(std::move(gathered));
      return Status::Ok();
    }
    case Op::kBroadcast:
      if (buffer.in != buffer.out && nbytes > 0) std::memmove(buffer.out, buffer.in, nbytes);
      return Status::Ok();
    case Op::kBarrier:
    case Op::kPlan:
    case Op::kJoin:
      break;
  }
  return Status::Ok();
}

Status Solo::status() const {
  MutexLock lock(mutex_);
  return dead_;
}

void Solo::Close() {
  Die(Status(Code::kShutdown, "the Group is closed"));
  tracer_.CloseFile();
}

void Solo::Die(const Status& status) {
  {
    MutexLock lock(mutex_);
    if (!dead_.ok()) return;
    dead_ = status;
  }
  death_write_.Reset();  // end of file makes the other end readable
}

}  // namespace hvd
