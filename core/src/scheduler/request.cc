#include "scheduler/request.h"

#include <algorithm>

#include "transport/wire.h"

namespace hvd {
namespace {

void Put(Writer& out, const Location& where) {
  out.Put(where.segment);
  out.Put(where.offset);
}

Location GetLocation(Reader& in) {
  Location where;
  where.segment = in.Get<uint32_t>();
  where.offset = in.Get<uint64_t>();
  return where;
}

void Put(Writer& out, const std::vector<int64_t>& values) {
  out.Put(static_cast<uint32_t>(values.size()));
  for (const int64_t value : values) out.Put(value);
}

// More than any address space holds; the sizes of all ranks can still be added up.
constexpr int64_t kMaxTensorBytes = int64_t{1} << 48;

// An authenticated peer of another build may still send values that mean nothing here.
bool Makes(const Request& request) {
  if (request.op > Op::kJoin || static_cast<int>(request.reduce) >= kNumReduceOps) return false;
  if (request.op == Op::kAlltoall && request.members.size() != 1) return false;
  for (const Member& member : request.members) {
    if (static_cast<int>(member.dtype) >= kNumDTypes) return false;
    int64_t nbytes = static_cast<int64_t>(ItemSize(member.dtype));
    for (const int64_t extent : member.shape) {
      if (extent < 0 || extent > kMaxTensorBytes) return false;
      if (__builtin_mul_overflow(nbytes, extent, &nbytes) || nbytes > kMaxTensorBytes) return false;
    }
  }
  if (request.op != Op::kAlltoall) return true;
  if (request.members[0].shape.empty()) return false;
  int64_t rest = request.members[0].shape[0];
  for (const int64_t rows : request.splits) {
    if (rows < 0 || rows > rest) return false;
    rest -= rows;
  }
  return rest == 0;
}

std::vector<int64_t> GetInts(Reader& in) {
  std::vector<int64_t> values(in.GetCount());
  for (int64_t& value : values) value = in.Get<int64_t>();
  return values;
}

void Put(Writer& out, const Request& request) {
  out.Put(request.op);
  out.PutString(request.name);
  out.Put(request.reduce);
  out.Put(request.prescale);
  out.Put(request.postscale);
  out.Put(request.root);
  out.Put(static_cast<uint32_t>(request.members.size()));
  for (const Member& member : request.members) {
    out.PutString(member.name);
    out.Put(member.dtype);
    Put(out, member.shape);
    Put(out, member.where);
  }
  Put(out, request.splits);
}

Request GetRequest(Reader& in) {
  Request request;
  request.op = in.Get<Op>();
  request.name = in.GetString();
  request.reduce = in.Get<ReduceOp>();
  request.prescale = in.Get<double>();
  request.postscale = in.Get<double>();
  request.root = in.Get<int32_t>();
  request.members.resize(in.GetCount());
  for (Member& member : request.members) {
    member.name = in.GetString();
    member.dtype = in.Get<DType>();
    member.shape = GetInts(in);
    member.where = GetLocation(in);
  }
  request.splits = GetInts(in);
  return request;
}

}  // namespace

const char* Name(Op op) {
  switch (op) {
    case Op::kAllreduce:
      return "allreduce";
    case Op::kAllgather:
      return "allgather";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kBarrier:
      return "barrier";
    case Op::kPlan:
      return "plan";
    case Op::kAlltoall:
      return "alltoall";
    case Op::kReducescatter:
      return "reducescatter";
    case Op::kJoin:
      return "join";
  }
  return "?";
}

std::string Serialize(const std::vector<Announcement>& announcements) {
  Writer out;
  out.Put(static_cast<uint32_t>(announcements.size()));
  for (const Announcement& announcement : announcements) {
    out.Put(announcement.id);
    if (announcement.id != kNoId) continue;
    Put(out, announcement.request);
  }
  return out.Take();
}

Result<std::vector<Announcement>> ParseAnnouncements(std::string_view bytes) {
  Reader in(bytes);
  bool sane = true;
  std::vector<Announcement> announcements(in.GetCount());
  for (Announcement& announcement : announcements) {
    announcement.id = in.Get<CacheId>();
    if (announcement.id != kNoId) continue;
    announcement.request = GetRequest(in);
    sane = sane && Makes(announcement.request);
  }
  if (!in.AtEnd() || !sane) return Status(Code::kPeerLost, "it sent a broken announcement");
  return announcements;
}

std::string Serialize(const Round& round) {
  Writer out;
  out.Put(round.fusion_nbytes);
  out.Put(static_cast<uint32_t>(round.ids.size()));
  for (const CacheId id : round.ids) out.Put(id);
  for (const Decision& decision : round.in_full) {
    out.PutString(decision.name);
    out.PutString(decision.mismatch);
    out.Put(static_cast<uint32_t>(decision.rows.size()));
    for (const auto& rows : decision.rows) Put(out, rows);
    out.Put(static_cast<uint32_t>(decision.places.size()));
    for (const auto& places : decision.places) {
      out.Put(static_cast<uint32_t>(places.size()));
      for (const Location& place : places) Put(out, place);
    }
    out.Put(static_cast<uint8_t>(decision.stand_in.has_value()));
    if (decision.stand_in) Put(out, *decision.stand_in);
  }
  return out.Take();
}

Result<Round> ParseRound(std::string_view bytes) {
  Reader in(bytes);
  bool sane = true;
  Round round;
  round.fusion_nbytes = in.Get<uint64_t>();
  round.ids.resize(in.GetCount());
  for (CacheId& id : round.ids) id = in.Get<CacheId>();
  if (!in.ok()) return Status(Code::kPeerLost, "it sent a broken decision");
  round.in_full.resize(static_cast<size_t>(std::count(round.ids.begin(), round.ids.end(), kNoId)));
  for (Decision& decision : round.in_full) {
    decision.name = in.GetString();
    decision.mismatch = in.GetString();
    decision.rows.resize(in.GetCount());
    for (auto& rows : decision.rows) rows = GetInts(in);
    decision.places.resize(in.GetCount());
    for (auto& places : decision.places) {
      places.resize(in.GetCount());
      for (Location& place : places) place = GetLocation(in);
    }
    const auto has_stand_in = in.Get<uint8_t>();
    if (has_stand_in == 1) decision.stand_in = GetRequest(in);
    sane = sane && has_stand_in <= 1 && (!decision.stand_in || Makes(*decision.stand_in));
  }
  if (!in.AtEnd() || !sane) return Status(Code::kPeerLost, "it sent a broken decision");
  return round;
}

}  // namespace hvd
