// A test is TEST(name) { CHECK(...); }; one source is one program, whose main stands here. A failed check
// prints where and goes on; the program exits with 1. Arguments choose tests by name.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

namespace hvd {

// Sweeps and laps that only repeat themselves are this many times shorter where everything is ten times
// slower.
#if defined(HVD_SANITIZED)
inline constexpr int kFewer = 4;
#else
inline constexpr int kFewer = 1;
#endif

}  // namespace hvd

namespace hvd::check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline int failures = 0;

// After so many a test has said enough.
inline constexpr int kMostPrinted = 20;

inline void Fail(const char* file, int line, const std::string& text) {
  if (++failures <= kMostPrinted) std::cerr << file << ':' << line << ": " << text << std::endl;
}

// For what is drawn anew in every run. The environment's SEED, or a new one; a failed test prints it.
inline uint64_t Seed() {
  static const uint64_t seed = [] {
    const char* const given = std::getenv("SEED");
    return given == nullptr ? uint64_t{std::random_device()()} : std::strtoull(given, nullptr, 10);
  }();
  return seed;
}

template <class T>
std::string Show(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_enum_v<T>) {
    out << static_cast<long long>(value);
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else {
    out << '(' << sizeof value << " bytes)";
  }
  return out.str();
}

template <class A, class B>
void Equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (!(a == b)) Fail(file, line, std::string(text) + ": " + Show(a) + " against " + Show(b));
}

}  // namespace hvd::check

#define TEST(name)                                            \
  static void name();                                         \
  [[maybe_unused]] static const bool name##_is_registered =   \
      (::hvd::check::Tests().push_back({#name, name}), true); \
  static void name()

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) ::hvd::check::Fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(a, b) ::hvd::check::Equal(__FILE__, __LINE__, #a " == " #b, a, b)

int main(int argc, char** argv) {
  int ran = 0;
  for (const auto& test : hvd::check::Tests()) {
    bool is_chosen = argc == 1;
    for (int i = 1; i < argc; ++i) is_chosen |= std::strcmp(argv[i], test.name) == 0;
    if (!is_chosen) continue;
    const int before = hvd::check::failures;
    test.run();
    ++ran;
    const bool is_ok = hvd::check::failures == before;
    std::printf("%s %s\n", is_ok ? "ok    " : "FAILED", test.name);
    if (!is_ok) std::printf("SEED=%llu\n", static_cast<unsigned long long>(hvd::check::Seed()));
    std::fflush(stdout);
  }
  if (ran == 0) std::puts("no test of that name");
  return ran > 0 && hvd::check::failures == 0 ? 0 : 1;
}
