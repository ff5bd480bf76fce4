// A Group of one rank, linked with what stands in for transport on systems other than Linux.
#include <poll.h>

#include <cstring>

#include "check.h"
#include "group.h"

namespace hvd {
namespace {

std::unique_ptr<Group> One() { return std::move(Group::Connect(nullptr, {"solo"}, {}, {}).value()); }

Request Make(Op op, std::vector<int64_t> shape) {
  Request request;
  request.op = op;
  request.name = "x";
  request.members.push_back({"x", DType::kFloat32, std::move(shape), {}});
  return request;
}

TEST(one_rank_reduces_gathers_and_broadcasts_on_its_own) {
  const auto group = One();
  float in[] = {1, 2, 3}, out[3] = {};
  const auto* from = reinterpret_cast<const std::byte*>(in);
  auto* to = reinterpret_cast<std::byte*>(out);
  Request scaled = Make(Op::kAllreduce, {3});
  scaled.reduce = ReduceOp::kAverage;
  scaled.prescale = 2;
  scaled.postscale = 5;
  CHECK(group->Submit(scaled, {{from, to}}).value()->done());
  for (int i = 0; i < 3; ++i) CHECK_EQ(out[i], in[i] * 10);
  CHECK(group->Submit(Make(Op::kBroadcast, {3}), {{from, to}}).value()->done());
  CHECK(std::memcmp(in, out, sizeof in) == 0);
  const auto gathered = group->Submit(Make(Op::kAllgather, {3}), {{from, nullptr}}).value();
  CHECK_EQ(gathered->gathered().size(), 1u);
  CHECK(std::memcmp(gathered->gathered()[0].data.get(), in, sizeof in) == 0);
  const auto back = group->Submit(Make(Op::kAlltoall, {3}), {{from, nullptr}}).value();
  CHECK(std::memcmp(back->gathered()[0].data.get(), in, sizeof in) == 0);
  CHECK(back->gathered()[0].rows == std::vector<int64_t>{3});
  std::memset(out, 0, sizeof out);
  CHECK(group->Submit(Make(Op::kReducescatter, {3}), {{from, to}}).value()->done());
  CHECK(std::memcmp(in, out, sizeof in) == 0);
  Request barrier = Make(Op::kBarrier, {});
  barrier.members.clear();
  CHECK(group->Submit(barrier, {}).value()->done());
  CHECK_EQ(group->counters().collectives.load(), 6u);
  CHECK(group->Empty(100).ok());
}

TEST(a_bad_request_is_refused_and_an_abort_is_final) {
  const auto group = One();
  Request bad = Make(Op::kBroadcast, {1});
  bad.root = 1;
  CHECK(group->Submit(bad, {{}}).status().code() == Code::kInvalid);
  group->Abort("enough");
  CHECK(group->Submit(Make(Op::kBarrier, {}), {{}}).status().code() == Code::kAborted);
  pollfd death{group->death_fd(), POLLIN, 0};
  CHECK_EQ(::poll(&death, 1, 0), 1);
  group->Close();
  CHECK(group->status().code() == Code::kAborted);
}

TEST(more_ranks_are_refused_by_name) {
  const auto listener = Listener::Bind("", "");
  CHECK(!listener.ok());
  CHECK(listener.status().text().find("Linux") != std::string_view::npos);
}

}  // namespace
}  // namespace hvd
