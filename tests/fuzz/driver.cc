// Stands in for libFuzzer where there is none: mutates the corpus for some seconds.
//
//   fuzz_frames [seconds [seed]]   the same seed gives the same inputs in the same order
//   fuzz_frames corpus DIR         writes the corpus for libFuzzer
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz.h"

namespace {

// Values at which lengths and counts go wrong.
constexpr uint32_t kEdges[] = {0, 1, 0x7f, 0x80, 0xff, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};

void Mutate(std::string& input, const std::vector<std::string>& corpus, std::mt19937_64& random) {
  const auto below = [&](size_t end) { return static_cast<size_t>(random() % end); };
  const size_t at = below(input.size() + 1);
  switch (below(6)) {
    case 0:  // a bit
      if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << below(8)));
      break;
    case 1:  // a byte
      if (at < input.size()) input[at] = static_cast<char>(random());
      break;
    case 2: {  // a number
      const uint32_t value = kEdges[below(std::size(kEdges))];
      if (at + sizeof value <= input.size()) std::memcpy(input.data() + at, &value, sizeof value);
      break;
    }
    case 3:  // cut
      input.erase(at, below(24));
      break;
    case 4:  // repeat
      input.insert(at, input.substr(below(input.size() + 1), below(24)));
      break;
    default: {  // graft
      const std::string& other = corpus[below(corpus.size())];
      const size_t from = below(other.size());
      input.insert(at, other.substr(from, below(64)));
    }
  }
  if (input.size() > 4096) input.resize(4096);
}

void Run(const std::string& input) {
  hvd::fuzz::FuzzOne(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> corpus = hvd::fuzz::Corpus();
  if (argc == 3 && std::strcmp(argv[1], "corpus") == 0) {
    for (size_t i = 0; i < corpus.size(); ++i)
      std::ofstream(std::string(argv[2]) + "/" + std::to_string(i), std::ios::binary) << corpus[i];
    return 0;
  }
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device()();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);  // before anything can die
  for (const std::string& input : corpus) Run(input);

  std::mt19937_64 random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  uint64_t inputs = 0;
  for (; std::chrono::steady_clock::now() < end; ++inputs) {
    std::string input = corpus[random() % corpus.size()];
    for (uint64_t i = 1 + random() % 8; i > 0; --i) Mutate(input, corpus, random);
    Run(input);
  }
  std::printf("%llu inputs\n", static_cast<unsigned long long>(inputs));
  return 0;
}
