// How a Trace packs its notes: {uint8 kind, fields}, one after another, no padding, strings with a 16-bit
// length in front. Lives between the ranks of one job, in memory and on the wire.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "scheduler/trace.h"

namespace hvd {

struct MarkTrace {
  std::string_view text;
  int64_t at_ns = 0;
};

void PutTensor(const TensorTrace& tensor, std::string* out);
void PutBatch(const BatchTrace& batch, const std::vector<PhaseSpan>& phases, std::string* out);
void PutMark(const MarkTrace& mark, std::string* out);

// Who wants to see the notes. Strings live as long as the call.
class NoteReader {
 public:
  virtual ~NoteReader() = default;
  virtual void OnTensor(const TensorTrace& tensor) = 0;
  virtual void OnBatch(const BatchTrace& batch, const std::vector<PhaseSpan>& phases) = 0;
  virtual void OnMark(const MarkTrace& mark) = 0;
};

// False if the bytes are not what Put... wrote; what comes before the damage is read.
bool ReadNotes(std::string_view notes, NoteReader* reader);

}  // namespace hvd
