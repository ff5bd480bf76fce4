#include "transport/arena.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "base/pause.h"
#include "base/sha256.h"
#include "base/tuning.h"

namespace hvd {
namespace {

constexpr size_t kPage = 4096;
// How long a dead peer or an abort can go unnoticed by a rank that sleeps in a step.
constexpr auto kTick = std::chrono::milliseconds(20);

size_t RoundUp(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

Status Failed(const std::string& what) { return Status(Code::kInvalid, what + ": " + std::strerror(errno)); }

bool HasReached(uint32_t arrived, uint32_t step) { return static_cast<int32_t>(arrived - step) >= 0; }

void FutexWait(std::atomic<uint32_t>& word, uint32_t value) {
  const timespec timeout{0, std::chrono::nanoseconds(kTick).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

// A control segment: Control, mailbox, two slots, two staging buffers.
constexpr size_t kMailboxAt = kPage;
constexpr size_t kSlotsAt = kMailboxAt + Arena::kMailboxNbytes;
constexpr size_t kBeforeStaging = kSlotsAt + 2 * Arena::kSlotNbytes;
static_assert(kBeforeStaging % kPage == 0);

}  // namespace

Result<std::shared_ptr<Segment>> Segment::Create(size_t nbytes) {
  nbytes = RoundUp(nbytes, kPage);
  UniqueFd fd(::memfd_create("hvd", MFD_CLOEXEC));
  if (!fd.valid()) return Failed("cannot make shared memory");
  // Allocates the pages now.
  int why;
  do {
    why = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(nbytes));
  } while (why == EINTR);
  if (why != 0) {
    return Status(Code::kInvalid,
                  "no room for " + std::to_string(nbytes) + " bytes of shared memory: " + std::strerror(why));
  }
  return MapShared(std::move(fd), nbytes);
}

Result<std::shared_ptr<Segment>> Segment::Map(UniqueFd fd, size_t nbytes) {
  if (!fd.valid()) {
    return Status(Code::kInvalid,
                  "the descriptor of a peer's segment did not arrive: too many open files here (ulimit -n)?");
  }
  struct stat about{};
  if (::fstat(fd.get(), &about) != 0 || static_cast<size_t>(about.st_size) < nbytes || nbytes == 0) {
    return Status(Code::kInvalid, "a peer's segment is smaller than announced");
  }
  auto segment = MapShared(std::move(fd), nbytes);
  if (segment.ok()) segment.value()->fd_.Reset();  // only its owner passes it on
  return segment;
}

Result<std::shared_ptr<Segment>> Segment::MapShared(UniqueFd fd, size_t nbytes) {
  void* data = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return Failed("cannot map shared memory");
  ::madvise(data, nbytes, MADV_DONTFORK);
  return std::shared_ptr<Segment>(new Segment(std::move(fd), static_cast<std::byte*>(data), nbytes));
}

Segment::~Segment() { ::munmap(data_, nbytes_); }

Result<std::unique_ptr<Arena>> Arena::Create(int rank, int size, size_t chunk_nbytes) {
  std::unique_ptr<Arena> arena(new Arena(rank, size, RoundUp(chunk_nbytes, kPage)));
  auto control = Segment::Create(kBeforeStaging + 2 * arena->chunk_nbytes_);
  if (!control.ok()) return control.status();
  arena->control_ = control.value();
  static_assert(sizeof(Control) <= kPage);
  new (arena->control_->data()) Control{};
  arena->controls_[static_cast<size_t>(rank)] = arena->control_;
  return arena;
}

Arena::Arena(int rank, int size, size_t chunk_nbytes)
    : rank_(rank),
      chunk_nbytes_(chunk_nbytes),
      controls_(static_cast<size_t>(size)),
      segments_(static_cast<size_t>(size)) {}

Status Arena::AddSegment(int rank, uint32_t number, std::shared_ptr<Segment> segment) {
  // Never replaced: a step may be waiting in it.
  const Status twice(Code::kInvalid, "rank " + std::to_string(rank) + " announced a segment twice");
  if (number != 0) {
    const bool is_new = segments_[static_cast<size_t>(rank)].emplace(number, std::move(segment)).second;
    return is_new ? Status::Ok() : twice;
  }
  if (HasControl(rank)) return twice;
  if (segment->nbytes() != control_->nbytes()) {
    return Status(Code::kInvalid, "rank " + std::to_string(rank) + " has another chunk_bytes than rank " +
                                      std::to_string(rank_) +
                                      "; HVD_CHUNK_BYTES must be the same on all ranks");
  }
  controls_[static_cast<size_t>(rank)] = std::move(segment);
  return Status::Ok();
}

bool Arena::RemoveSegment(int rank, uint32_t number) {
  return segments_[static_cast<size_t>(rank)].erase(number) == 1;
}

std::vector<uint32_t> Arena::UnusedSegments() const {
  std::vector<uint32_t> unused;
  for (const auto& [number, segment] : segments_[static_cast<size_t>(rank_)]) {
    if (segment.use_count() == 1) unused.push_back(number);
  }
  return unused;
}

bool Arena::HasSegment(int rank, uint32_t number) const {
  return segments_[static_cast<size_t>(rank)].contains(number);
}

std::shared_ptr<Segment> Arena::SegmentOf(int rank, uint32_t number) const {
  const auto& mine = segments_[static_cast<size_t>(rank)];
  const auto found = mine.find(number);
  return found == mine.end() ? nullptr : found->second;
}

std::byte* Arena::At(int rank, const Location& where, size_t nbytes) const {
  const auto& mine = segments_[static_cast<size_t>(rank)];
  const auto found = mine.find(where.segment);
  if (found == mine.end()) return nullptr;
  const Segment& segment = *found->second;
  if (where.offset > segment.nbytes() || nbytes > segment.nbytes() - where.offset) return nullptr;
  return segment.data() + where.offset;
}

bool Arena::complete() const {
  for (const auto& control : controls_) {
    if (control == nullptr) return false;
  }
  return true;
}

std::byte* Arena::mailbox(int rank) const {
  return controls_[static_cast<size_t>(rank)]->data() + kMailboxAt;
}

std::byte* Arena::slot(int rank, uint32_t step) const {
  return controls_[static_cast<size_t>(rank)]->data() + kSlotsAt + step % 2 * kSlotNbytes;
}

std::byte* Arena::staging(int rank, int buffer) const {
  return controls_[static_cast<size_t>(rank)]->data() + kBeforeStaging +
         static_cast<size_t>(buffer) * chunk_nbytes_;
}

Status Arena::CountCpus(double quota, const Tick& tick) {
  control(rank_)->cpus = Cpus::OfThisThread(quota);
  HVD_RETURN_IF_ERROR(ArriveAndAwait(tick));
  std::vector<Cpus> cpus;
  for (int rank = 0; rank < size(); ++rank) cpus.push_back(control(rank)->cpus);
  has_cpu_for_each_ = OneForEach(cpus);
  return Status::Ok();
}

uint32_t Arena::Arrive() {
  Control& mine = *control(rank_);
  // seq_cst pairs with AwaitRank: either the sleeper sees the new step or we see the sleeper.
  std::atomic<uint32_t>& arrived = mine.line[++step_ % 2].arrived;
  arrived.store(step_, std::memory_order_seq_cst);
  if (mine.sleepers.load(std::memory_order_seq_cst) != 0) FutexWakeAll(arrived);
  return step_;
}

Status Arena::Await(uint32_t step, const Tick& tick) {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == rank_) continue;
    if (Status status = AwaitRank(rank, step, tick); !status.ok()) return status;
  }
  return Status::Ok();
}

bool Arena::Reached(uint32_t step) const {
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != rank_ &&
        !HasReached(control(rank)->line[step % 2].arrived.load(std::memory_order_acquire), step))
      return false;
  }
  return true;
}

Status Arena::AwaitRank(int rank, uint32_t step, const Tick& tick) {
  const PhaseScope scope(phases_, Phase::kWait);
  Control& peer = *control(rank);
  std::atomic<uint32_t>& arrived = peer.line[step % 2].arrived;
  const auto reached = [&] { return HasReached(arrived.load(std::memory_order_acquire), step); };
  const int spins = has_cpu_for_each_ ? kSpins : 1;
  for (int i = 0; i < spins; ++i) {
    if (reached()) return Status::Ok();
    Pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (reached()) return Status::Ok();
    ::sched_yield();
  }
  for (;;) {
    peer.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = arrived.load(std::memory_order_seq_cst);
    if (!HasReached(seen, step)) FutexWait(arrived, seen);
    peer.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (reached()) return Status::Ok();
    Status status = tick(rank);
    if (reached()) return Status::Ok();
    if (!status.ok()) return status;
  }
}

Status Arena::ShareOut(uint32_t parts, const std::function<void(uint32_t part)>& work, const Tick& tick) {
  if (parts == 0) return Status::Ok();
  Shares& mine = control(0)->shares[++shared_out_ % 2];
  while (true) {
    const uint32_t part = mine.taken.fetch_add(1, std::memory_order_relaxed);
    if (part >= parts) break;
    if (part == 0) {  // all ranks have left the one before, and none begins the next before this one is done
      Shares& next = control(0)->shares[(shared_out_ + 1) % 2];
      next.taken.store(0, std::memory_order_relaxed);
      next.done.store(0, std::memory_order_relaxed);
    }
    work(part);
    // seq_cst pairs with the sleeper below: either it sees the last part done or we see it.
    if (mine.done.fetch_add(1, std::memory_order_seq_cst) + 1 == parts &&
        mine.sleepers.load(std::memory_order_seq_cst) != 0)
      FutexWakeAll(mine.done);
    HVD_RETURN_IF_ERROR(Beat(tick));
  }
  const PhaseScope scope(phases_, Phase::kWait);
  for (int i = 0; i < kYields; ++i) {
    if (mine.done.load(std::memory_order_acquire) == parts) return Status::Ok();
    ::sched_yield();
  }
  for (;;) {
    mine.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = mine.done.load(std::memory_order_seq_cst);
    if (seen != parts) FutexWait(mine.done, seen);
    mine.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (mine.done.load(std::memory_order_acquire) == parts) return Status::Ok();
    HVD_RETURN_IF_ERROR(tick(rank_));
  }
}

Status Arena::Beat(const Tick& tick) {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_beat_ < kTick) return Status::Ok();
  last_beat_ = now;
  return tick(rank_);
}

}  // namespace hvd
