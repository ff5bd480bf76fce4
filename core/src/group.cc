#include "group.h"

#include <iterator>

#include "collectives/reduce.h"
#include "scheduler/solo.h"

namespace hvd {
namespace {

// Names travel with every announcement and are printed in errors.
constexpr size_t kMaxNameBytes = 4096;
// How long the end of a timeline waits for the notes of other ranks.
constexpr auto kLastNotes = std::chrono::seconds(2);

// Of an alltoall without splits.
Result<std::vector<int64_t>> EqualSplits(const Member& member, int size) {
  if (member.shape.empty()) return std::vector<int64_t>();
  const int64_t each = member.shape[0] / size;
  if (each * size == member.shape[0]) return std::vector<int64_t>(static_cast<size_t>(size), each);
  return Status(Code::kInvalid, member.name + ": " + std::to_string(member.shape[0]) +
                                    " rows cannot be split equally among " + std::to_string(size) +
                                    " ranks; pass splits");
}

Status CheckSplits(const Request& request, int size) {
  const std::vector<int64_t>& splits = request.splits;
  const Member& member = request.members.front();
  const auto bad = [&](const std::string& why) { return Status(Code::kInvalid, member.name + ": " + why); };
  if (splits.size() != static_cast<size_t>(size)) {
    return bad("there are " + std::to_string(splits.size()) + " splits for " + std::to_string(size) +
               " ranks; pass one for each");
  }
  int64_t left = member.shape[0];
  for (const int64_t n : splits) {
    if (n < 0) return bad("the number of rows for a rank is " + std::to_string(n));
    if (n > left)
      return bad("the splits add up to more than its " + std::to_string(member.shape[0]) + " rows");
    left -= n;
  }
  if (left == 0) return Status::Ok();
  return bad("the splits leave " + std::to_string(left) + " of its " + std::to_string(member.shape[0]) +
             " rows");
}

}  // namespace

Result<std::unique_ptr<Group>> Group::Connect(Listener* listener, const std::vector<std::string>& endpoints,
                                              const Credentials& me, const GroupOptions& options) {
  if (me.size < 1 || me.rank < 0 || me.rank >= me.size) {
    return Status(Code::kInvalid, "rank " + std::to_string(me.rank) + " is not one of " +
                                      std::to_string(me.size) + " endpoints");
  }
  const bool writes = me.rank == 0 && !options.timeline.empty();
  if (writes) HVD_RETURN_IF_ERROR(TraceFile::Check(options.timeline));  // before others are waited for
  if (me.size == 1) {
    std::unique_ptr<Group> solo(new Group(Topology(), std::make_unique<Solo>()));
    if (writes) HVD_RETURN_IF_ERROR(solo->StartTimeline(options.timeline, options.timeline_mark_cycles));
    return solo;
  }
  if (listener == nullptr) return Status(Code::kInvalid, "a Group of several ranks needs a listener");
  if (me.token.empty()) return Status(Code::kInvalid, "a Group of several ranks needs a token");
  const auto topology = TopologyOf(endpoints, me.rank);
  if (!topology.ok()) return topology.status();
  auto engine = ConnectScheduler(*listener, endpoints, me, options);
  if (!engine.ok()) return engine.status();
  std::unique_ptr<Group> group(new Group(topology.value(), std::move(engine).value()));
  if (writes) HVD_RETURN_IF_ERROR(group->StartTimeline(options.timeline, options.timeline_mark_cycles));
  return group;
}

Status Group::StartTimeline(const std::string& path, bool mark_cycles) {
  HVD_RETURN_IF_ERROR(status());
  return engine_->tracer().Start(path, mark_cycles);
}

Status Group::BeginPhase(const std::string& name, double timeout_s) {
  if (!(timeout_s > 0)) {
    return Status(Code::kInvalid,
                  "phase '" + name + "' needs a positive timeout_s, not " + std::to_string(timeout_s));
  }
  engine_->DeclarePhase({true, name, timeout_s});
  return Status::Ok();
}

void Group::StopTimeline() { engine_->tracer().Stop(kLastNotes); }

Status Group::Check(const Request& request) const {
  if (request.name.empty()) return Status(Code::kInvalid, "a collective needs a name");
  if (request.name.size() > kMaxNameBytes) {
    return Status(Code::kInvalid, "a name of " + std::to_string(request.name.size()) + " bytes; at most " +
                                      std::to_string(kMaxNameBytes) + " are sent");
  }
  if (request.op == Op::kBroadcast && (request.root < 0 || request.root >= size_)) {
    return Status(Code::kInvalid, "root " + std::to_string(request.root) + " is not a rank; there are " +
                                      std::to_string(size_));
  }
  const Scale scale{request.prescale, request.postscale, request.reduce == ReduceOp::kAverage ? size_ : 1};
  for (const Member& member : request.members) {
    if (request.op == Op::kAllreduce || request.op == Op::kReducescatter)
      HVD_RETURN_IF_ERROR(CheckReduce(member.dtype, request.reduce, scale).Prepend(member.name));
    if (NeedsRows(request.op) && member.shape.empty()) {
      return Status(Code::kInvalid, member.name + ": " + Name(request.op) + " needs at least one dimension");
    }
  }
  if (request.op == Op::kAlltoall) return CheckSplits(request, size_);
  return Status::Ok();
}

Location Group::Locate(const Buffer& buffer, size_t nbytes) {
  if (size_ == 1 || buffer.in != buffer.out || nbytes == 0) return {};
  if (!has_segments_.load(std::memory_order_acquire)) return {};
  MutexLock lock(mutex_);
  auto after = segments_.upper_bound(buffer.in);
  if (after == segments_.begin()) return {};
  const Owned& owned = std::prev(after)->second;
  const auto segment = owned.segment.lock();
  if (segment == nullptr || !segment->Contains(buffer.in, nbytes)) return {};
  return {owned.number, static_cast<uint64_t>(buffer.in - segment->data())};
}

Result<std::shared_ptr<Handle>> Group::Submit(Request request, std::vector<Buffer> buffers, Then then,
                                              std::shared_ptr<Segment> kept) {
  if (request.op == Op::kAlltoall && request.splits.empty()) {
    auto equal = EqualSplits(request.members.front(), size_);
    if (!equal.ok()) return equal.status();
    request.splits = std::move(equal).value();
  }
  HVD_RETURN_IF_ERROR(Check(request));
  if (request.op == Op::kAllreduce) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      Member& member = request.members[i];
      member.where = Locate(buffers[i], member.nbytes());
    }
  }
  auto shared = std::make_shared<const Request>(std::move(request));
  auto handle = std::make_shared<Handle>(shared);
  if (kept != nullptr) handle->Keep(std::move(kept));
  HVD_RETURN_IF_ERROR(engine_->Submit({std::move(shared), std::move(buffers), handle}, then));
  return handle;
}

Result<std::shared_ptr<Handle>> Group::Submit(Call call, Then then) {
  if (call.op == Op::kAllreduce) {
    size_t nbytes = ItemSize(call.dtype);
    for (const int64_t extent : call.shape) nbytes *= static_cast<size_t>(extent);
    call.where = Locate(call.buffer, nbytes);
  }
  auto again = engine_->SubmitAgain(call, then);
  if (!again.ok() || again.value() != nullptr) return again;
  const std::string name(call.name);
  const Member member{name, call.dtype, {call.shape.begin(), call.shape.end()}, {}};
  return Submit({call.op, name, call.reduce, call.prescale, call.postscale, call.root, {member}},
                {call.buffer}, then);
}

Result<std::shared_ptr<Segment>> Group::Empty(size_t nbytes) {
  HVD_RETURN_IF_ERROR(status());
  auto segment = Segment::Create(nbytes > 0 ? nbytes : 1);
  if (!segment.ok()) return segment.status();
  MutexLock lock(mutex_);
  std::erase_if(segments_, [](const auto& owned) { return owned.second.segment.expired(); });
  segments_[segment.value()->data()] = {++num_segments_, segment.value()};
  has_segments_.store(true, std::memory_order_release);
  engine_->AddSegment(num_segments_, segment.value());
  return segment;
}

}  // namespace hvd
