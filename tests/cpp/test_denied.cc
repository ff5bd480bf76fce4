// A rank to which a security policy forbids Unix sockets: a seccomp filter on its threads.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>

#include "group.h"
#include "rank_threads.h"

namespace hvd {
namespace {

// Of this thread and of those that it begins, for good.
bool ForbidUnixSockets() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EACCES),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

Status Add(Group& group) {
  for (const size_t count : {3, 100'000}) {
    std::vector<float> data(count, static_cast<float>(group.rank() + 1));
    auto* const bytes = reinterpret_cast<std::byte*>(data.data());
    const std::vector<int64_t> shape{static_cast<int64_t>(count)};
    Call call;
    call.name = "x";
    call.shape = shape;
    call.buffer = {bytes, bytes};
    const auto handle = group.Submit(call, Then::kWaits);
    if (!handle.ok()) return handle.status();
    CHECK(group.Wait(*handle.value(), In(15), {}));
    HVD_RETURN_IF_ERROR(handle.value()->status());
    CHECK(std::all_of(data.begin(), data.end(), [](float value) { return value == 6; }));
  }
  return Status::Ok();
}

TEST(a_rank_that_may_not_use_unix_sockets_talks_tcp_to_the_others_of_its_machine) {
  constexpr int kSize = 3, kForbidden = 2;
  std::vector<std::unique_ptr<Listener>> listeners(kSize);
  std::atomic<bool> is_possible{true};
  const auto on_every_rank = [&](const auto& body) {
    OnEveryRank(kSize, [&](int rank) {
      if (rank == kForbidden && !ForbidUnixSockets()) is_possible = false;
      body(rank, listeners[static_cast<size_t>(rank)]);
    });
  };
  on_every_rank([](int, auto& listener) { listener = Listener::Bind("", "").value(); });
  if (!is_possible) return std::puts("skipped: needs seccomp filters"), void();
  std::vector<Endpoint> endpoints;
  std::vector<std::string> texts;
  for (const auto& listener : listeners) {
    endpoints.push_back(listener->endpoint());
    texts.push_back(endpoints.back().ToString());
  }
  CHECK(PartedRanks(endpoints).starts_with(
      "ranks 0 and 2 have the same boot id and network namespace, but a security policy"));
  on_every_rank([&](int rank, auto& listener) {
    GroupOptions options;
    options.connect_timeout_s = 20;
    const auto group = Group::Connect(listener.get(), texts, {rank, kSize, "token", 1}, options);
    CHECK_EQ(group.status().text(), "");
    if (!group.ok()) return;
    CHECK_EQ(group.value()->topology().hosts(), 2);
    CHECK_EQ(group.value()->topology().local_size(), rank == kForbidden ? 1 : 2);
    CHECK_EQ(Add(*group.value()).text(), "");
    group.value()->Close();
    CHECK_EQ(listener->dropped(), 0u);
  });
}

}  // namespace
}  // namespace hvd
