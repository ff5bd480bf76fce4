#include "scheduler/negotiate.h"

#include <algorithm>
#include <cstdio>

#include "scheduler/fusion.h"

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

// "name: rank r has <what a>, rank 0 has <b>", or nothing when a == b.
std::string Differ(const std::string& name, int rank, const char* what, const std::string& theirs,
                   const std::string& first) {
  if (theirs == first) return {};
  return name + ": rank " + std::to_string(rank) + " has " + what + " " + theirs + ", rank 0 has " + first;
}

std::string CompareShapes(Op op, int rank, const Member& theirs, const Member& first) {
  auto a = theirs.shape, b = first.shape;
  if (op == Op::kAllgather) {
    if (a.empty() || b.empty()) return theirs.name + ": an allgather needs at least one dimension";
    if (a.size() == b.size()) a[0] = b[0];  // rows may differ
  }
  if (a == b) return {};
  return Differ(theirs.name, rank, "shape", ShapeText(theirs.shape), ShapeText(first.shape));
}

std::string Compare(int rank, const Request& theirs, const Request& first) {
  const auto differ = [&](const char* what, const std::string& a, const std::string& b) {
    return Differ(first.name, rank, what, a, b);
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
    text = Differ(a.name, rank, "dtype", Name(a.dtype), Name(b.dtype));
    if (text.empty()) text = CompareShapes(first.op, rank, a, b);
  }
  return text;
}

}  // namespace

std::string FindMismatch(const std::vector<std::optional<Request>>& by_rank) {
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    std::string text = Compare(static_cast<int>(rank), *by_rank[rank], *by_rank[0]);
    if (!text.empty()) return text;
  }
  return {};
}

Negotiator::Negotiator(int size, size_t fusion_nbytes) : size_(size), fusion_nbytes_(fusion_nbytes) {}

void Negotiator::Announce(int rank, Request request, Clock::time_point now) {
  const std::string name = request.name;
  Entry& entry = entries_[name];
  if (entry.by_rank.empty()) {
    entry.by_rank.resize(static_cast<size_t>(size_));
    entry.since = now;
  }
  auto& slot = entry.by_rank[static_cast<size_t>(rank)];
  if (slot.has_value()) return;
  slot = std::move(request);
  if (++entry.announced == size_) ready_.push_back(name);
}

Round Negotiator::Decide() {
  Round round;
  std::vector<const Request*> requests;
  for (const std::string& name : ready_) {
    const Entry& entry = entries_.at(name);
    Decision decision;
    decision.name = name;
    decision.mismatch = FindMismatch(entry.by_rank);
    const Request& first = *entry.by_rank[0];
    requests.push_back(&first);
    const size_t members = decision.mismatch.empty() ? first.members.size() : 0;
    for (size_t m = 0; m < members; ++m) {
      std::vector<int64_t> rows;
      std::vector<Location> places;
      for (const auto& request : entry.by_rank) {
        const Member& member = request->members[m];
        if (first.op == Op::kAllgather) rows.push_back(member.shape[0]);
        places.push_back(member.where);
      }
      const bool in_arena =
          std::all_of(places.begin(), places.end(), [](const Location& p) { return p.valid(); });
      if (first.op == Op::kAllgather) decision.rows.push_back(std::move(rows));
      if (first.op == Op::kAllreduce || first.op == Op::kPlan)
        decision.places.push_back(in_arena ? std::move(places) : std::vector<Location>());
    }
    round.decisions.push_back(std::move(decision));
  }
  round.batches = Fuse(round.decisions, requests, fusion_nbytes_);
  for (const std::string& name : ready_) entries_.erase(name);
  ready_.clear();
  return round;
}

std::vector<Negotiator::Waiting> Negotiator::Waits() const {
  std::vector<Waiting> waits;
  for (const auto& [name, entry] : entries_) {
    if (entry.announced == size_) continue;
    Waiting waiting{name, entry.since, {}, {}};
    for (int rank = 0; rank < size_; ++rank) {
      (entry.by_rank[static_cast<size_t>(rank)] ? waiting.announced : waiting.missing).push_back(rank);
    }
    waits.push_back(std::move(waiting));
  }
  return waits;
}

std::optional<std::string> Negotiator::WaitsFor(int rank) const {
  for (const auto& [name, entry] : entries_) {
    if (!entry.by_rank[static_cast<size_t>(rank)]) return name;
  }
  return std::nullopt;
}

std::string Negotiator::Describe(const Waiting& waiting) const {
  const Entry& entry = entries_.at(waiting.name);
  const Request& request = *entry.by_rank[static_cast<size_t>(waiting.announced.front())];
  std::string text = std::string(Name(request.op)) + " '" + waiting.name + "' was submitted by " +
                     RanksText(waiting.announced) + " but not by ";
  for (size_t i = 0; i < waiting.missing.size(); ++i) {
    const int rank = waiting.missing[i];
    text += (i == 0 ? "" : ", ") + RanksText({rank});
    for (const auto& [name, other] : entries_) {
      if (!other.by_rank[static_cast<size_t>(rank)]) continue;
      text += " (which waits in '" + name + "')";
      break;
    }
  }
  return text;
}

}  // namespace hvd
