#include "collectives/cross_host.h"

#include <algorithm>

namespace hvd {
namespace {

constexpr size_t kLine = 64;

size_t RoundUp(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

std::vector<Range> Windows(size_t count, size_t window) {
  if (window == 0) window = count;
  std::vector<Range> windows;
  for (size_t at = 0; at < count; at += window) windows.push_back({at, std::min(count, at + window)});
  return windows;
}

std::vector<Chunk> Chunks(Range slice, size_t item_nbytes, int streams) {
  const size_t nbytes =
      std::clamp(slice.size() * item_nbytes / kChunksWanted, kMinChunkNbytes, kMaxChunkNbytes);
  const size_t most = RoundUp(nbytes, kLine) / item_nbytes;
  std::vector<Chunk> chunks;
  for (size_t at = slice.begin; at < slice.end; at += most) {
    const auto stream = static_cast<int>(chunks.size() % static_cast<size_t>(streams));
    chunks.push_back({at, std::min(most, slice.end - at), stream});
  }
  return chunks;
}

RelayPlan PlanRelay(int host, int hosts, bool rising, int root) {
  RelayPlan plan;
  const int step = rising ? -1 : 1;  // towards the hosts whose blocks come
  // The nearest first: it has the shortest way, so it is there when it is to be passed on.
  for (int h = host; h >= 0 && h < hosts; h += step) {
    if (root == kEveryHost || root == h) plan.hosts.push_back(h);
  }
  plan.own = !plan.hosts.empty() && plan.hosts.front() == host;
  plan.sends = !plan.hosts.empty() && (rising ? host + 1 < hosts : host > 0);
  return plan;
}

std::vector<Trip> Departures(int host, int hosts, bool rising) {
  const int step = rising ? 1 : -1;
  std::vector<Trip> trips;
  for (int h = rising ? 0 : hosts - 1;; h += step) {
    std::erase_if(trips, [h](const Trip& trip) { return trip.to == h; });
    std::vector<Trip> own;  // who has the longest way goes first
    for (int to = rising ? hosts - 1 : 0; to != h; to -= step) own.push_back({h, to});
    trips.insert(trips.begin(), own.begin(), own.end());
    if (h == host) return trips;
  }
}

}  // namespace hvd
