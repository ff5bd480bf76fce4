#include "transport/endpoint.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <map>

#include "base/sha256.h"

namespace hvd {
namespace {

constexpr char kPrefix[] = "hvd1";
constexpr int kBacklog = 512;
// In the key of a rank that may not use Unix sockets.
constexpr char kNoUnix[] = "/no-unix-";

Status Failed(const std::string& what) { return Status(Code::kInvalid, what + ": " + std::strerror(errno)); }

std::string RandomHex(size_t nbytes) {
  std::string raw(nbytes, '\0'), hex;
  RandomBytes(std::as_writable_bytes(std::span(raw)));
  for (const char c : raw) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(c));
    hex += digits;
  }
  return hex;
}

std::string ToText(uint32_t address) {
  const in_addr network{htonl(address)};
  char text[INET_ADDRSTRLEN] = {};
  ::inet_ntop(AF_INET, &network, text, sizeof text);
  return text;
}

// The first bytes of a file of /proc; "" if it cannot be read.
std::string ReadStart(const char* path, size_t most) {
  std::string text(most, '\0');
  std::FILE* const file = std::fopen(path, "r");
  text.resize(file == nullptr ? 0 : std::fread(text.data(), 1, most, file));
  if (file != nullptr) std::fclose(file);
  return text;
}

// Boot id and network namespace: processes that differ in one cannot share an abstract socket. Machines that
// were started from one snapshot are equal in both, but not in their addresses. And what AppArmor or SELinux
// call this process: containers with different labels may not talk over one either.
std::string KeyOfThisHost() {
  const std::string boot = ReadStart("/proc/sys/kernel/random/boot_id", 36);
  char space[64] = {};
  [[maybe_unused]] const ssize_t size = ::readlink("/proc/self/ns/net", space, sizeof space - 1);
  std::string key = boot + "/" + space + "/";
  if (const auto interfaces = Interfaces(); interfaces.ok()) {
    const auto& all = interfaces.value();
    const auto outer = std::find_if(all.begin(), all.end(), [](const auto& i) { return !i.is_loopback; });
    if (outer != all.end()) key += ToText(outer->address);
  }
  if (const std::string label = ReadStart("/proc/self/attr/current", 256); !label.empty()) key += "/" + label;
  std::erase_if(key, [](char c) { return c == ';' || c == ',' || c == '@' || c <= ' '; });
  return key;
}

sockaddr_un Abstract(const std::string& name, socklen_t* size) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// A Unix socket of that name that can be reached; not valid, with errno, otherwise.
UniqueFd ListenUnix(const std::string& name) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return {};
  socklen_t size = 0;
  const sockaddr_un address = Abstract(name, &size);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
      ::listen(fd.get(), kBacklog) == 0 && ConnectUnix(name).valid()) {
    const UniqueFd tried(::accept4(fd.get(), nullptr, nullptr, SOCK_CLOEXEC));
    return fd;
  }
  const int why = errno;
  fd.Reset();
  errno = why;
  return {};
}

bool IsForbidden(int why) { return why == EPERM || why == EACCES || why == EAFNOSUPPORT; }

// Addresses of the interfaces that are up, loopback last; only those of `only` unless that is empty.
Result<std::vector<std::string>> Addresses(const std::string& only) {
  auto interfaces = Interfaces();
  if (!interfaces.ok()) return interfaces.status();
  std::vector<std::string> addresses, loopback;
  std::string names;
  for (const Interface& interface : interfaces.value()) {
    names += (names.empty() ? "" : ", ") + interface.name;
    if (!only.empty() && only != interface.name) continue;
    (interface.is_loopback ? loopback : addresses).push_back(ToText(interface.address));
  }
  addresses.insert(addresses.end(), loopback.begin(), loopback.end());
  if (addresses.empty() && !only.empty()) {
    return Status(Code::kInvalid, "no network interface '" + only + "' (HVD_INTERFACE); there are: " + names);
  }
  return addresses;
}

// What of a key stands behind boot id, network namespace and address.
std::string PolicyOf(std::string_view key) {
  for (int i = 0; i < 3; ++i) key.remove_prefix(std::min(key.find('/'), key.size() - 1) + 1);
  return std::string(key);
}

std::vector<std::string_view> Split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

}  // namespace

Result<std::vector<Interface>> Interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return Failed("cannot list network interfaces");
  const auto ipv4 = [](const sockaddr* address) {
    return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr);
  };
  std::vector<Interface> interfaces;
  for (const ifaddrs* i = list; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET || (i->ifa_flags & IFF_UP) == 0) continue;
    const uint32_t mask = i->ifa_netmask != nullptr ? ipv4(i->ifa_netmask) : ~uint32_t{0};
    interfaces.push_back({i->ifa_name, ipv4(i->ifa_addr), mask, (i->ifa_flags & IFF_LOOPBACK) != 0});
  }
  ::freeifaddrs(list);
  return interfaces;
}

std::vector<std::string> InOrderOfTrial(const std::vector<std::string>& addresses,
                                        std::span<const Interface> mine) {
  const auto place = [&](const std::string& text) {
    in_addr network{};
    if (::inet_pton(AF_INET, text.c_str(), &network) != 1) return 4;
    const uint32_t address = ntohl(network.s_addr);
    if (address >> 24 == 127) return 3;
    int best = 1;
    for (const Interface& i : mine) {
      if (i.address == address) return 2;
      if (!i.is_loopback && (i.address & i.mask) == (address & i.mask)) best = 0;
    }
    return best;
  };
  std::vector<std::string> ordered = addresses;
  std::stable_sort(ordered.begin(), ordered.end(),
                   [&](const std::string& a, const std::string& b) { return place(a) < place(b); });
  return ordered;
}

std::string Endpoint::ToString() const {
  std::string text = std::string(kPrefix) + ";" + HostKey() + ";unix=" + unix_name + ";tcp=";
  for (size_t i = 0; i < addresses.size(); ++i) text += (i == 0 ? "" : ",") + addresses[i];
  return text + ":" + std::to_string(port);
}

Result<Endpoint> Endpoint::Parse(std::string_view text) {
  const auto bad = [&] {
    return Status(Code::kInvalid, "'" + std::string(text) + "' is not an endpoint of this version of hvd");
  };
  const auto parts = Split(text, ';');
  if (parts.size() != 4 || parts[0] != kPrefix) return bad();
  Endpoint endpoint;
  const bool is_forced = parts[1].starts_with("forced=");
  const size_t at = parts[1].rfind('@');
  if (is_forced ? at == std::string_view::npos : !parts[1].starts_with("host=")) return bad();
  if (is_forced) endpoint.forced_id = parts[1].substr(7, at - 7);
  endpoint.host = parts[1].substr(is_forced ? at + 1 : 5);
  if (!parts[2].starts_with("unix=") || !parts[3].starts_with("tcp=")) return bad();
  endpoint.unix_name = parts[2].substr(5);
  const auto tcp = parts[3].substr(4);
  const size_t colon = tcp.rfind(':');
  if (colon == std::string_view::npos) return bad();
  for (const auto address : Split(tcp.substr(0, colon), ',')) endpoint.addresses.emplace_back(address);
  const auto port = tcp.substr(colon + 1);
  const auto parsed = std::from_chars(port.data(), port.data() + port.size(), endpoint.port);
  if (parsed.ec != std::errc() || parsed.ptr != port.data() + port.size()) return bad();
  return endpoint;
}

UniqueFd ConnectUnix(const std::string& name) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid() || name.size() + 1 > sizeof(sockaddr_un::sun_path)) return {};
  socklen_t size = 0;
  const sockaddr_un address = Abstract(name, &size);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0) return fd;
  const int why = errno;
  fd.Reset();
  errno = why;
  return {};
}

std::string PartedRanks(std::span<const Endpoint> endpoints) {
  std::map<std::string, size_t> first;  // by what they look like
  for (size_t rank = 0; rank < endpoints.size(); ++rank) {
    const Endpoint& endpoint = endpoints[rank];
    const bool is_forced = !endpoint.forced_id.empty();
    const auto parts = Split(endpoint.host, '/');
    if (!is_forced && parts[0].empty()) continue;  // there is none
    const auto [same, is_new] =
        first.emplace(is_forced ? "@" + endpoint.forced_id : std::string(parts[0]), rank);
    const Endpoint& other = endpoints[same->second];
    if (is_new || other.HostKey() == endpoint.HostKey()) continue;
    const std::string who = "ranks " + std::to_string(same->second) + " and " + std::to_string(rank) +
                            " have " + (is_forced ? "HVD_HOST_ID=" + endpoint.forced_id : "the same boot id");
    const auto theirs = Split(other.host, '/');
    const bool one_network = parts.size() > 1 && theirs.size() > 1 && parts[1] == theirs[1];
    if (one_network && parts.size() + theirs.size() > 6) {
      return who +
             " and network namespace, but a security policy (AppArmor, SELinux, seccomp) parts them: '" +
             PolicyOf(other.host) + "' and '" + PolicyOf(endpoint.host) +
             "', so they share no memory and talk TCP";
    }
    return who +
           " but no network namespace in common, so they share no memory and talk TCP; containers of one "
           "machine that share one (as with docker's --network=host) are one host";
  }
  return "";
}

Result<std::unique_ptr<Listener>> Listener::Bind(const std::string& host_id, const std::string& interface) {
  if (host_id.find_first_of(";,") != std::string::npos)
    return Status(Code::kInvalid, "HVD_HOST_ID must not contain ';' or ','");
  std::unique_ptr<Listener> listener(new Listener);
  Endpoint& endpoint = listener->endpoint_;
  endpoint.forced_id = host_id;
  endpoint.host = KeyOfThisHost();
  endpoint.unix_name = "hvd-" + RandomHex(16);
  auto addresses = Addresses(interface);
  if (!addresses.ok()) return addresses.status();
  endpoint.addresses = std::move(addresses).value();

  listener->tcp_.Reset(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  sockaddr_in any{};
  any.sin_family = AF_INET;
  if (!interface.empty()) ::inet_pton(AF_INET, endpoint.addresses.front().c_str(), &any.sin_addr);
  socklen_t size = sizeof any;
  if (!listener->tcp_.valid() || ::bind(listener->tcp_.get(), reinterpret_cast<sockaddr*>(&any), size) != 0 ||
      ::listen(listener->tcp_.get(), kBacklog) != 0 ||
      ::getsockname(listener->tcp_.get(), reinterpret_cast<sockaddr*>(&any), &size) != 0) {
    return Failed("cannot listen on TCP");
  }
  endpoint.port = ntohs(any.sin_port);

  listener->unix_ = ListenUnix(endpoint.unix_name);
  if (!listener->unix_.valid()) {
    if (!IsForbidden(errno)) return Failed("cannot listen on a Unix socket");
    endpoint.host += std::string(kNoUnix) + RandomHex(8);  // a host of its own: this rank talks TCP
  }
  return listener;
}

}  // namespace hvd
