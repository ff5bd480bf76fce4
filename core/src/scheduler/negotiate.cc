#include "scheduler/negotiate.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace hvd {
namespace {

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string NumberText(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

std::string RanksText(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

// What a rank has to be compared with what the first one has.
struct Two {
  int rank, first_rank;
};

// "name: rank r has <what a>, rank 0 has <b>", or nothing when a == b.
std::string Differ(const std::string& name, Two ranks, const char* what, const std::string& theirs,
                   const std::string& first) {
  if (theirs == first) return {};
  return name + ": rank " + std::to_string(ranks.rank) + " has " + what + " " + theirs + ", rank " +
         std::to_string(ranks.first_rank) + " has " + first;
}

std::string CompareShapes(Op op, Two ranks, const Member& theirs, const Member& first) {
  auto a = theirs.shape, b = first.shape;
  if (NeedsRows(op) && (a.empty() || b.empty()))
    return theirs.name + ": " + Name(op) + " needs at least one dimension";
  if (RowsMayDiffer(op) && a.size() == b.size()) a[0] = b[0];
  if (a == b) return {};
  return Differ(theirs.name, ranks, "shape", ShapeText(theirs.shape), ShapeText(first.shape));
}

std::string Compare(Two ranks, const Request& theirs, const Request& first) {
  const auto differ = [&](const char* what, const std::string& a, const std::string& b) {
    return Differ(first.name, ranks, what, a, b);
  };
  std::string text = differ("operation", Name(theirs.op), Name(first.op));
  if (text.empty()) text = differ("reduction", Name(theirs.reduce), Name(first.reduce));
  if (text.empty()) text = differ("prescale", NumberText(theirs.prescale), NumberText(first.prescale));
  if (text.empty()) text = differ("postscale", NumberText(theirs.postscale), NumberText(first.postscale));
  if (text.empty()) text = differ("root", std::to_string(theirs.root), std::to_string(first.root));
  if (text.empty()) {
    text = differ("a number of tensors of", std::to_string(theirs.members.size()),
                  std::to_string(first.members.size()));
  }
  for (size_t m = 0; text.empty() && m < first.members.size(); ++m) {
    const Member &a = theirs.members[m], &b = first.members[m];
    text = Differ(a.name, ranks, "dtype", Name(a.dtype), Name(b.dtype));
    if (text.empty()) text = CompareShapes(first.op, ranks, a, b);
  }
  return text;
}

}  // namespace

std::string FindMismatch(const std::vector<std::optional<Request>>& by_rank) {
  const auto present = [](const std::optional<Request>& request) { return request.has_value(); };
  const auto first = std::find_if(by_rank.begin(), by_rank.end(), present);
  for (auto theirs = first; theirs != by_rank.end(); ++theirs) {
    if (!theirs->has_value()) continue;
    const Two ranks{static_cast<int>(theirs - by_rank.begin()), static_cast<int>(first - by_rank.begin())};
    std::string text = Compare(ranks, **theirs, **first);
    if (!text.empty()) return text;
  }
  return {};
}

const Request& Negotiator::Entry::first() const {
  return **std::find_if(by_rank.begin(), by_rank.end(),
                        [](const auto& request) { return request.has_value(); });
}

Negotiator::Negotiator(int size, size_t fusion_nbytes, size_t cache_capacity)
    : size_(size), fusion_nbytes_(fusion_nbytes), known_(cache_capacity) {}

void Negotiator::Announce(int rank, Request request, Clock::time_point now) {
  const bool joins = request.op == Op::kJoin;
  Entry& entry = EntryOf(request.name, now);
  Add(entry, rank, std::move(request), kNoId);
  if (joins) Join(rank, now);
}

// What waits for `rank` only is complete. By number it could not be: a stand-in is said in full.
void Negotiator::Join(int rank, Clock::time_point now) {
  joined_.Add(rank);
  ++num_joined_;
  last_joined_ = rank;
  std::vector<std::string> waiting;
  known_.ForEach([&](const Cache<Known>::Entry& entry) {
    if (entry.value.count > 0 && entry.value.count < size_) waiting.push_back(entry.name);
  });
  for (const std::string& name : waiting) EntryOf(name, now);
  for (auto& [name, entry] : entries_) PushIfComplete(name, entry);
}

void Negotiator::PushIfComplete(const std::string& name, Entry& entry) {
  if (entry.is_ready) return;
  for (int rank = 0; entry.announced < size_ && rank < size_; ++rank) {
    if (!entry.by_rank[static_cast<size_t>(rank)] && !joined_.Has(rank)) return;
  }
  entry.is_ready = true;
  ready_.push_back(kNoId);
  ready_in_full_.push_back(name);
}

bool Negotiator::Announce(int rank, CacheId id, Clock::time_point now) {
  auto* found = known_.Find(id);
  if (found == nullptr) return known_.WasGiven(id);
  Known& known = found->value;
  if (!entries_.empty()) {
    if (const auto entry = entries_.find(found->name); entry != entries_.end()) {
      Add(entry->second, rank, Expand(known, rank), id);
      return true;
    }
    if (num_joined_ > 0) {
      Add(EntryOf(found->name, now), rank, Expand(known, rank), id);
      return true;
    }
  }
  if (known.announced.Has(rank)) return true;
  known.announced.Add(rank);
  if (known.count == 0) {
    known.since = now;
    ++known_waiting_;
  }
  if (++known.count == size_) ready_.push_back(id);
  return true;
}

// Where the announcements in full of a name are collected. Ranks that have announced it by its id go along.
Negotiator::Entry& Negotiator::EntryOf(const std::string& name, Clock::time_point now) {
  Entry& entry = entries_[name];
  if (!entry.by_rank.empty()) return entry;
  entry.by_rank.resize(static_cast<size_t>(size_));
  entry.ids.resize(static_cast<size_t>(size_), kNoId);
  entry.since = now;
  auto* found = known_.Find(name);
  if (found == nullptr || found->value.count == 0 || found->value.count == size_) return entry;
  Known& known = found->value;
  entry.since = known.since;
  for (int rank = 0; rank < size_; ++rank) {
    if (known.announced.Has(rank)) Add(entry, rank, Expand(known, rank), found->id);
  }
  known.announced.Clear();
  known.count = 0;
  --known_waiting_;
  return entry;
}

void Negotiator::Add(Entry& entry, int rank, Request request, CacheId id) {
  auto& slot = entry.by_rank[static_cast<size_t>(rank)];
  if (slot.has_value()) return;
  const std::string name = request.name;
  slot = std::move(request);
  entry.ids[static_cast<size_t>(rank)] = id;
  ++entry.announced;
  if (entry.announced == size_ || num_joined_ > 0) PushIfComplete(name, entry);
}

Request Negotiator::Expand(const Known& known, int rank) {
  Request request = known.request;
  for (size_t m = 0; m < request.members.size(); ++m) {
    Member& member = request.members[m];
    member.where = known.where.empty() ? Location{} : known.where[static_cast<size_t>(rank)][m];
    if (request.op == Op::kAllgather) member.shape[0] = known.rows[m][static_cast<size_t>(rank)];
  }
  if (request.op == Op::kAlltoall) {
    request.splits = known.rows[static_cast<size_t>(rank)];
    request.members[0].shape[0] = std::accumulate(request.splits.begin(), request.splits.end(), int64_t{0});
  }
  return request;
}

Negotiator::Known Negotiator::Remember(const Entry& entry, const Decision& decision) const {
  Known known;
  known.request = *entry.by_rank[0];
  known.rows = decision.rows;
  bool in_arena = false;
  for (const auto& request : entry.by_rank) {
    auto& where = known.where.emplace_back();
    for (const Member& member : request->members) {
      where.push_back(member.where);
      in_arena = in_arena || member.where.valid();
    }
  }
  if (!in_arena) known.where.clear();
  return known;
}

// What ranks that have joined take part with, given what another one has.
Request Negotiator::StandIn(const Request& other) const {
  Request request = other;
  for (Member& member : request.members) {
    member.where = {};
    if (RowsMayDiffer(request.op) && !member.shape.empty()) member.shape[0] = 0;
  }
  if (request.op == Op::kAlltoall) request.splits.assign(static_cast<size_t>(size_), 0);
  return request;
}

Decision Negotiator::DecideAbout(const Entry& entry, const std::string& name) const {
  Decision decision;
  decision.name = name;
  decision.mismatch = FindMismatch(entry.by_rank);
  const auto& by_rank = entry.by_rank;
  const Request& first = entry.first();
  if (entry.announced < size_) decision.stand_in = StandIn(first);
  if (decision.mismatch.empty() && first.op == Op::kBroadcast && first.root >= 0 && first.root < size_ &&
      !by_rank[static_cast<size_t>(first.root)])
    decision.mismatch = name + ": its root, rank " + std::to_string(first.root) + ", has joined";
  if (first.op == Op::kJoin) decision.rows = {{last_joined_}};
  const auto of = [&](size_t rank) -> const Request& {
    return by_rank[rank] ? *by_rank[rank] : *decision.stand_in;
  };
  const size_t members = decision.mismatch.empty() ? first.members.size() : 0;
  for (size_t m = 0; m < members; ++m) {
    std::vector<int64_t> rows;
    std::vector<Location> places;
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      const Member& member = of(rank).members[m];
      if (first.op == Op::kAllgather) rows.push_back(member.shape[0]);
      places.push_back(member.where);
    }
    const bool in_arena =
        std::all_of(places.begin(), places.end(), [](const Location& p) { return p.valid(); });
    if (first.op == Op::kAllgather) decision.rows.push_back(std::move(rows));
    if (first.op == Op::kAllreduce || first.op == Op::kPlan)
      decision.places.push_back(in_arena ? std::move(places) : std::vector<Location>());
  }
  if (first.op == Op::kAlltoall && members > 0) {
    for (size_t rank = 0; rank < by_rank.size(); ++rank) decision.rows.push_back(of(rank).splits);
  }
  return decision;
}

Round Negotiator::Decide() {
  Round round;
  if (ready_.empty()) return round;
  round.fusion_nbytes = fusion_nbytes_;
  auto name = ready_in_full_.begin();
  for (const CacheId id : ready_) {
    if (id == kNoId) {
      const auto entry = entries_.find(*name);
      Decision& decision = round.in_full.emplace_back(DecideAbout(entry->second, *name));
      const Op op = entry->second.first().op;
      if (IsRemembered(op, decision)) known_.Add(*name, Remember(entry->second, decision));
      if (op == Op::kJoin) {
        joined_.Clear();
        num_joined_ = 0;
      }
      entries_.erase(entry);
      ++name;
      continue;
    }
    Known& known = known_.Find(id)->value;
    known.announced.Clear();
    known.count = 0;
    --known_waiting_;
    known_.Touch(id);
  }
  round.ids.swap(ready_);
  ready_in_full_.clear();
  known_.Trim([this](const Cache<Known>::Entry& entry) { Forget(entry); });
  return round;
}

// Who has announced by an id that is now forgotten announces in full when it learns of this round.
void Negotiator::Forget(const Cache<Known>::Entry& forgotten) {
  if (forgotten.value.count > 0) --known_waiting_;
  const auto entry = entries_.find(forgotten.name);
  if (entry == entries_.end()) return;
  for (size_t rank = 0; rank < entry->second.ids.size(); ++rank) {
    if (entry->second.ids[rank] != forgotten.id) continue;
    entry->second.ids[rank] = kNoId;
    entry->second.by_rank[rank].reset();
    --entry->second.announced;
  }
  if (entry->second.announced == 0) entries_.erase(entry);
}

std::vector<Negotiator::Waiting> Negotiator::Waits() const {
  std::vector<Waiting> waits;
  const auto add = [&](const std::string& name, Op op, Clock::time_point since, const auto& has_announced) {
    Waiting waiting{name, op, since, {}, {}};
    for (int rank = 0; rank < size_; ++rank) {
      const bool has = has_announced(static_cast<size_t>(rank));
      if (has || !joined_.Has(rank)) (has ? waiting.announced : waiting.missing).push_back(rank);
    }
    waits.push_back(std::move(waiting));
  };
  for (const auto& [name, entry] : entries_) {
    if (entry.is_ready) continue;
    add(name, entry.first().op, entry.since,
        [&by_rank = entry.by_rank](size_t rank) { return by_rank[rank].has_value(); });
  }
  if (known_waiting_ == 0) return waits;
  known_.ForEach([&](const Cache<Known>::Entry& entry) {
    const Known& known = entry.value;
    if (known.count == 0 || known.count == size_) return;
    add(entry.name, known.request.op, known.since,
        [&](size_t rank) { return known.announced.Has(static_cast<int>(rank)); });
  });
  return waits;
}

std::optional<std::string> Negotiator::WaitsFor(int rank) const {
  for (const Waiting& waiting : Waits()) {
    if (std::find(waiting.missing.begin(), waiting.missing.end(), rank) != waiting.missing.end())
      return waiting.name;
  }
  return std::nullopt;
}

std::string Negotiator::WaitsIn(int rank) const {
  for (const Waiting& waiting : Waits()) {
    if (std::find(waiting.announced.begin(), waiting.announced.end(), rank) != waiting.announced.end())
      return waiting.name;
  }
  return {};
}

std::string Negotiator::Describe(const Waiting& waiting) const {
  std::string text = std::string(Name(waiting.op)) + " '" + waiting.name + "' was submitted by " +
                     RanksText(waiting.announced) + " but not by ";
  for (size_t i = 0; i < waiting.missing.size(); ++i) {
    const int rank = waiting.missing[i];
    text += (i == 0 ? "" : ", ") + RanksText({rank});
    if (const std::string other = WaitsIn(rank); !other.empty()) text += " (which waits in '" + other + "')";
  }
  return text;
}

}  // namespace hvd
