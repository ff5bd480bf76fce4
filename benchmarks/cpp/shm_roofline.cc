// What synchronisation costs an allreduce in the arena, and which way through a host is the fastest at which
// size.
//
//   shm_roofline arena PAIRS           2 ranks, each on a core of its own: for each size the median
//   microseconds of
//                                      the kernel alone and of AllreduceInArena, turn by turn
//   shm_roofline ways RANKS PAIRS      the same for the ways of ordinary tensors (collectives/in_host.h)
//   shm_roofline many PAIRS            2 ranks, 2 MB as one tensor, in order and in random order as 500 of
//                                      4 KiB: the staged way, and then adding alone without synchronisation
//
// One line per row: nbytes, then medians. Ranks are processes; a turn takes as long as its slowest rank;
// buffers are rewritten before every turn.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "collectives/in_host.h"

namespace hvd {
namespace {

constexpr int kMostRanks = 16;
constexpr size_t kMostTurns = 1024;
constexpr double kNoQuota = 0;
const Arena::Tick kNeverGiveUp = [](int) { return Status::Ok(); };

// What the ranks know of each other before they have an arena.
struct Meeting {
  struct {
    std::atomic<int> control_fd, tensor_fd;
    std::atomic<pid_t> process;
  } rank[kMostRanks];
  double taken_us[kMostRanks][kMostTurns];
};

void Require(bool what, const char* text) {
  if (what) return;
  std::fprintf(stderr, "shm_roofline: %s\n", text);
  std::exit(1);
}

UniqueFd OpenOf(pid_t process, int fd) {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", static_cast<int>(process), fd);
  return UniqueFd(::open(path, O_RDWR | O_CLOEXEC));
}

struct Rank {
  int rank, size;
  Meeting& meeting;
  std::unique_ptr<Arena> arena;
  std::vector<std::shared_ptr<Segment>> tensors;  // of every rank

  Rank(int rank_, int size_, Meeting& meeting_, size_t nbytes) : rank(rank_), size(size_), meeting(meeting_) {
    auto created = Arena::Create(rank, size, 256 << 10);
    Require(created.ok(), "no shared memory");
    arena = std::move(created).value();
    auto own = Segment::Create(nbytes);
    Require(own.ok(), "no shared memory");
    auto& me = meeting.rank[rank];
    me.control_fd = arena->control()->fd();
    me.tensor_fd = own.value()->fd();
    me.process = ::getpid();
    for (int r = 0; r < size; ++r) {
      auto& peer = meeting.rank[r];
      while (peer.process == 0) ::sched_yield();
      if (r == rank) {
        tensors.push_back(own.value());
        continue;
      }
      auto control = Segment::Map(OpenOf(peer.process, peer.control_fd), arena->control_nbytes());
      auto tensor = Segment::Map(OpenOf(peer.process, peer.tensor_fd), nbytes);
      Require(control.ok() && tensor.ok(), "cannot map the memory of a peer");
      Require(arena->AddSegment(r, 0, control.value()).ok(), "no arena");
      tensors.push_back(tensor.value());
    }
    Require(arena->CountCpus(kNoQuota, kNeverGiveUp).ok(), "no arena");
  }

  void Together() { Require(arena->ArriveAndAwait(kNeverGiveUp).ok(), "lost a rank"); }

  // Medians over `turns` of what each way takes, in turns; rewrite() comes before each. On rank 0.
  std::vector<double> Race(
      size_t turns, const std::function<void()>& rewrite, const std::vector<std::function<void()>>& ways,
      const std::function<void(size_t way)>& check = [](size_t) {}) {
    std::vector<std::vector<double>> taken(ways.size());
    for (size_t turn = 0; turn < turns + 2; ++turn) {
      for (size_t w = 0; w < ways.size(); ++w) {
        rewrite();
        Together();
        Together();
        const auto begin = std::chrono::steady_clock::now();
        ways[w]();
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
        meeting.taken_us[rank][w] = took.count();
        Together();
        check(w);
        double slowest = 0;
        for (int r = 0; r < size; ++r) slowest = std::max(slowest, meeting.taken_us[r][w]);
        if (turn >= 2) taken[w].push_back(slowest);
        Together();
      }
    }
    std::vector<double> medians;
    for (auto& t : taken) {
      std::nth_element(t.begin(), t.begin() + static_cast<ptrdiff_t>(t.size() / 2), t.end());
      medians.push_back(t[t.size() / 2]);
    }
    return medians;
  }

  void Print(size_t nbytes, const std::vector<double>& medians) const {
    if (rank != 0) return;
    std::printf("%zu", nbytes);
    for (const double median : medians) std::printf(" %.2f", median);
    std::printf("\n");
    std::fflush(stdout);
  }
};

void RaceArena(Rank& me, size_t pairs) {
  for (const size_t mib : {1, 4, 25, 100}) {
    const size_t nbytes = mib << 20, count = nbytes / sizeof(float);
    ArenaPiece piece{{}, count};
    for (auto& segment : me.tensors) piece.at.push_back(segment->data());
    auto* own = reinterpret_cast<float*>(me.tensors[static_cast<size_t>(me.rank)]->data());
    const Range slice = SliceOf({0, count}, sizeof(float), me.rank, me.size);
    std::vector<void*> at;
    for (std::byte* p : piece.at) at.push_back(p + slice.begin * sizeof(float));
    const auto kernel = [&] {
      Reduce(DType::kFloat32, ReduceOp::kSum, {}, at.data(), me.size, at.data(), me.size, slice.size());
    };
    const auto ours = [&] {
      Require(
          AllreduceInArena(*me.arena, kNeverGiveUp, {&piece, 1}, DType::kFloat32, ReduceOp::kSum, {}).ok(),
          "lost a rank");
    };
    const auto check = [&](size_t) {
      const auto sum = static_cast<float>(me.size);
      Require(std::all_of(own, own + count, [&](float value) { return value == sum; }), "a wrong sum");
    };
    me.Print(nbytes, me.Race(
                         mib < 10 ? 10 * pairs : pairs, [&] { std::fill_n(own, count, 1.0f); },
                         {kernel, ours}, check));
  }
}

void RaceWays(Rank& me, size_t pairs) {
  if (me.rank == 0) std::printf("nbytes inline oneshot staged (0: not possible)\n");
  for (size_t nbytes = 4; nbytes <= 64 << 20; nbytes *= 4) {
    const size_t count = nbytes / sizeof(float);
    std::vector<float> data(count);
    auto* bytes = reinterpret_cast<std::byte*>(data.data());
    const Piece piece{bytes, bytes, count};
    using Way = Status (*)(Arena&, const Arena::Tick&, std::span<const Piece>, DType, ReduceOp, const Scale&);
    const auto call = [&](Way way, bool possible) -> std::function<void()> {
      if (!possible) return [] {};
      return [&, way] {
        Require(way(*me.arena, kNeverGiveUp, {&piece, 1}, DType::kFloat32, ReduceOp::kSum, {}).ok(), "lost");
        Require(data.back() == static_cast<float>(me.size), "a wrong sum");
      };
    };
    const size_t turns = std::min(kMostTurns, std::max(pairs, pairs * (4 << 20) / nbytes));
    me.Print(nbytes,
             me.Race(std::min<size_t>(turns, 20 * pairs), [&] { std::fill(data.begin(), data.end(), 1.0f); },
                     {call(AllreduceInline, nbytes <= Arena::kInlineNbytes),
                      call(AllreduceOneShot, nbytes <= Arena::kSlotNbytes), call(AllreduceStaged, true)}));
  }
}

// The memory of 500 tensors that torch made one by one, and of one: no control, no Python.
void RaceMany(Rank& me, size_t pairs) {
  constexpr size_t kMany = 500, kCount = 1024;
  std::vector<float> whole(kMany * kCount), other(kMany * kCount, 1.0f);
  std::vector<std::unique_ptr<float[]>> parts;
  const auto bytes = [](float* p) { return reinterpret_cast<std::byte*>(p); };
  std::vector<Piece> in_order;
  for (size_t i = 0; i < kMany; ++i) {
    parts.push_back(std::make_unique<float[]>(kCount + 16 + 16 * (i % 7)));
    in_order.push_back({bytes(parts[i].get()), bytes(parts[i].get()), kCount});
  }
  std::vector<Piece> shuffled = in_order;
  std::shuffle(shuffled.begin(), shuffled.end(), std::minstd_rand(1));  // ranks run one order
  const Piece one{bytes(whole.data()), bytes(whole.data()), whole.size()};
  const auto rewrite = [&] {
    std::fill(whole.begin(), whole.end(), 1.0f);
    for (auto& part : parts) std::fill_n(part.get(), kCount, 1.0f);
  };
  const auto staged = [&](std::span<const Piece> pieces) {
    return [&me, pieces] {
      Require(AllreduceStaged(*me.arena, kNeverGiveUp, pieces, DType::kFloat32, ReduceOp::kSum, {}).ok(),
              "lost");
    };
  };
  const auto added = [&](std::span<const Piece> pieces) {
    return [&other, pieces] {
      const float* from = other.data();
      for (const Piece& piece : pieces) {
        const void* srcs[] = {piece.in, from};
        void* dst = piece.out;
        Reduce(DType::kFloat32, ReduceOp::kSum, {}, srcs, 2, &dst, 1, piece.count);
        from += piece.count;
      }
    };
  };
  if (me.rank == 0) std::printf("nbytes staged: one, 500, shuffled; added: one, 500, shuffled\n");
  me.Print(kMany * kCount * sizeof(float), me.Race(10 * pairs, rewrite,
                                                   {staged({&one, 1}), staged(in_order), staged(shuffled),
                                                    added({&one, 1}), added(in_order), added(shuffled)}));
}

int Main(int argc, char** argv) {
  const bool ways = argc == 4 && std::strcmp(argv[1], "ways") == 0;
  const bool many = argc == 3 && std::strcmp(argv[1], "many") == 0;
  Require(ways || many || (argc == 3 && std::strcmp(argv[1], "arena") == 0),
          "arena PAIRS | ways RANKS PAIRS | many PAIRS");
  const int size = ways ? std::atoi(argv[2]) : 2;
  const int pairs = std::atoi(argv[argc - 1]);
  Require(size >= 2 && size <= kMostRanks && pairs > 0, "ranks or pairs out of range");
  void* shared = ::mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  Require(shared != MAP_FAILED, "no memory");
  auto& meeting = *static_cast<Meeting*>(shared);  // zeros
  int rank = 0;
  for (int r = 1; r < size && rank == 0; ++r) {
    if (::fork() == 0) rank = r;
  }
  if (rank != 0) ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (OneForEach(std::vector(static_cast<size_t>(size), Cpus::OfThisThread(kNoQuota)))) {
    cpu_set_t allowed, one;
    ::sched_getaffinity(0, sizeof allowed, &allowed);
    int cpu = 0;
    for (int left = rank; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &allowed) && left-- == 0) break;
    }
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ::sched_setaffinity(0, sizeof one, &one);
  }
  Rank me(rank, size, meeting, ways || many ? 4096 : 100 << 20);
  (ways ? RaceWays : many ? RaceMany : RaceArena)(me, static_cast<size_t>(pairs));
  if (rank == 0) {
    while (::wait(nullptr) > 0) {
    }
  }
  return 0;
}

}  // namespace
}  // namespace hvd

int main(int argc, char** argv) { return hvd::Main(argc, argv); }
