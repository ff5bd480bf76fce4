// Collectives that give each rank something else.
#include <cstring>
#include <memory>

#include "collectives/collectives.h"

namespace hvd {

Status Collectives::ReduceScatter(const std::byte* in, std::byte* out, std::span<const Range> slices,
                                  DType dtype, ReduceOp op, const Scale& scale) {
  const size_t item = ItemSize(dtype);
  if (!several_hosts() && arena_.chunk_nbytes() >= item * slices.size())
    return hvd::ReduceScatter(arena_, local_tick_, in, out, slices, dtype, op, scale);
  // All of the accumulator passes all hosts, whoever gets the result, and the result travels back at the same
  // time; so a part of it would come no sooner than all of it.
  const size_t count = slices.back().end;
  const std::unique_ptr<std::byte[]> whole(new std::byte[count * item + 1]);
  const Piece piece{in, whole.get(), count};
  HVD_RETURN_IF_ERROR(Allreduce({&piece, 1}, dtype, op, scale));
  const Range mine = slices[static_cast<size_t>(topology_.rank)];
  if (mine.size() > 0) std::memcpy(out, whole.get() + mine.begin * item, mine.size() * item);
  return Status::Ok();
}

Status Collectives::Alltoall(const std::byte* in, std::byte* out, const Traffic& traffic) {
  const int first = topology_.leader(topology_.host), end = first + topology_.local_size();
  std::vector<std::byte*> place;
  for (int from = 0; from < topology_.size; ++from) {
    place.push_back(out);
    out += traffic.at(from, topology_.rank);
  }
  std::vector<size_t> shown;
  std::vector<Take> takes;
  for (int r = first; r < end; ++r) {
    shown.push_back(traffic.Sum(r, first, end));
    takes.push_back({r - first, traffic.Sum(r, first, topology_.rank), traffic.at(r, topology_.rank),
                     place[static_cast<size_t>(r)]});
  }
  HVD_RETURN_IF_ERROR(Show(arena_, local_tick_, in + traffic.Sum(topology_.rank, 0, first), shown, takes));
  return several_hosts() ? AlltoallBetweenHosts(in, place, traffic) : Status::Ok();
}

int Collectives::CarrierOf(int rank) const { return topology_.LocalRankOf(rank) % topology_.slices(); }

size_t Collectives::ToHost(const Traffic& traffic, int rank, int host) const {
  return traffic.Sum(rank, topology_.leader(host), topology_.leader(host + 1));
}

// Ranks without links show what they have for other hosts; adds what this rank carries of it to *sent, by
// local rank.
Status Collectives::Borrow(const std::byte* in, const Traffic& traffic, Rooms* rooms,
                           std::vector<const std::byte*>* sent) {
  const int first = topology_.leader(topology_.host), end = first + topology_.local_size();
  std::vector<size_t> shown;
  std::vector<Take> takes;
  for (int r = first; r < end; ++r) {
    const bool has_links = r - first < topology_.slices();
    shown.push_back(has_links ? 0 : traffic.Sum(r, 0, topology_.size));
    if (has_links || CarrierOf(r) != topology_.local_rank) continue;
    std::byte* const room = rooms->emplace_back(new std::byte[shown.back() + 1]).get();
    const size_t before = traffic.Sum(r, 0, first), after = traffic.Sum(r, 0, end);
    takes.push_back({r - first, 0, before, room});
    takes.push_back({r - first, after, shown.back() - after, room + after});
    (*sent)[static_cast<size_t>(r - first)] = room;
  }
  return Show(arena_, local_tick_, in, shown, takes);
}

// What is under way in one direction: of the ranks that this one carries, what it has itself, then what comes
// and stays here (got[rank]) or goes on.
void Collectives::AddTrips(bool rising, const Traffic& traffic, std::span<const std::byte* const> sent,
                           std::span<std::byte* const> got, Rooms* rooms, std::vector<Relay::Flow>* flows) {
  const int here = topology_.host, before = rising ? here - 1 : here + 1;
  std::vector<Relay::Part> parts;
  const auto for_carried = [&](const Trip& trip, auto at) {
    for (int r = topology_.leader(trip.from); r < topology_.leader(trip.from + 1); ++r) {
      if (CarrierOf(r) != topology_.local_rank) continue;
      const size_t nbytes = ToHost(traffic, r, trip.to);
      parts.push_back({{at(r, nbytes), nbytes}, trip.to == here});
    }
  };
  for (const Trip& trip : Departures(here, topology_.hosts(), rising)) {
    if (trip.from != here) continue;
    for_carried(trip, [&](int r, size_t) {
      const auto* in = sent[static_cast<size_t>(topology_.LocalRankOf(r))];
      return const_cast<std::byte*>(in) + traffic.Sum(r, 0, topology_.leader(trip.to));  // is only read
    });
  }
  const size_t own = parts.size();
  if (before >= 0 && before < topology_.hosts()) {
    for (const Trip& trip : Departures(before, topology_.hosts(), rising)) {
      for_carried(trip, [&](int r, size_t nbytes) {
        if (trip.to == here) return got[static_cast<size_t>(r)];
        return rooms->emplace_back(new std::byte[nbytes + 1]).get();
      });
    }
  }
  AddFlows(rising, parts, own, flows);
}

Status Collectives::AlltoallBetweenHosts(const std::byte* in, std::span<std::byte* const> place,
                                         const Traffic& traffic) {
  HVD_RETURN_IF_ERROR(Agree());
  const int me = topology_.rank, first = topology_.leader(topology_.host);
  const auto local_size = static_cast<size_t>(topology_.local_size());
  Rooms rooms;
  std::vector<const std::byte*> sent(local_size, in);
  if (topology_.local_size() > topology_.slices()) HVD_RETURN_IF_ERROR(Borrow(in, traffic, &rooms, &sent));

  // What comes from a rank for all of this host goes to its carrier, which then shows it to the others; who
  // is alone on a host gets it in its place.
  std::vector<size_t> shown(local_size), begins(place.size());
  for (int r = 0; r < topology_.size; ++r) {
    if (topology_.SameHost(r)) continue;
    size_t& so_far = shown[static_cast<size_t>(CarrierOf(r))];
    begins[static_cast<size_t>(r)] = so_far;
    so_far += ToHost(traffic, r, topology_.host);
  }
  std::vector<std::byte*> got(place.begin(), place.end());
  const std::byte* show = nullptr;
  if (local_size > 1) {
    const size_t nbytes = shown[static_cast<size_t>(topology_.local_rank)];
    std::byte* const room = rooms.emplace_back(new std::byte[nbytes + 1]).get();
    for (int r = 0; r < topology_.size; ++r) {
      const auto from = static_cast<size_t>(r);
      if (!topology_.SameHost(r) && CarrierOf(r) == topology_.local_rank) got[from] = room + begins[from];
    }
    show = room;
  }
  if (owns_slice()) {
    std::vector<Relay::Flow> flows;
    for (const bool rising : {true, false}) AddTrips(rising, traffic, sent, got, &rooms, &flows);
    HVD_RETURN_IF_ERROR(Run(std::move(flows)));
  }
  if (local_size == 1) return Status::Ok();
  std::vector<Take> takes;
  for (int r = 0; r < topology_.size; ++r) {
    const auto from = static_cast<size_t>(r);
    if (topology_.SameHost(r)) continue;
    takes.push_back({CarrierOf(r), begins[from] + traffic.Sum(r, first, me), traffic.at(r, me), place[from]});
  }
  return Show(arena_, local_tick_, show, shown, takes);
}

}  // namespace hvd
