// A fuzz target: everything that this process parses before or after it trusts a peer. The first byte chooses
// the parser, the rest are its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hvd::fuzz {

// Aborts if a parser accepts what it would not write; memory errors are for the sanitizers to see.
int FuzzOne(const uint8_t* data, size_t size);

// Inputs to begin with: what real ranks send.
std::vector<std::string> Corpus();

}  // namespace hvd::fuzz
