// Instead of scheduler/ and transport/ on systems other than Linux: a Group of one rank works, more is
// refused.
#include <sys/mman.h>

#include "scheduler/connect.h"
#include "transport/arena.h"

namespace hvd {
namespace {

Status NeedsLinux() {
  return Status(Code::kInvalid, "more than one rank works on Linux only; on this system a Group has one");
}

}  // namespace

Result<std::unique_ptr<Listener>> Listener::Bind(const std::string&, const std::string&) {
  return NeedsLinux();
}

std::string Endpoint::ToString() const { return unix_name; }

Result<Topology> TopologyOf(const std::vector<std::string>&, int) { return NeedsLinux(); }

Result<std::unique_ptr<Engine>> ConnectScheduler(Listener&, const std::vector<std::string>&,
                                                 const Credentials&, const GroupOptions&) {
  return NeedsLinux();
}

Result<std::shared_ptr<Segment>> Segment::Create(size_t nbytes) {
  void* data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (data == MAP_FAILED) return Status(Code::kInvalid, "no room for " + std::to_string(nbytes) + " bytes");
  return std::shared_ptr<Segment>(new Segment(UniqueFd(), static_cast<std::byte*>(data), nbytes));
}

Segment::~Segment() { ::munmap(data_, nbytes_); }

}  // namespace hvd
