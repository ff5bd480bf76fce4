#include "scheduler/trace_notes.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

namespace hvd {
namespace {

enum class Note : uint8_t { kTensor = 1, kBatch, kMark };

template <class... Values>
void Put(std::string* out, const Values&... values) {
  const size_t at = out->size();
  out->resize(at + (sizeof values + ...));
  char* to = out->data() + at;
  ((std::memcpy(to, &values, sizeof values), to += sizeof values), ...);
}

void PutText(std::string_view text, std::string* out) {
  const auto nbytes = static_cast<uint16_t>(std::min<size_t>(text.size(), UINT16_MAX));
  Put(out, nbytes);
  out->append(text.data(), nbytes);
}

class Cursor {
 public:
  explicit Cursor(std::string_view rest) : rest_(rest) {}

  template <class... Values>
  bool Get(Values&... values) {
    constexpr size_t kNbytes = (sizeof values + ...);
    if (rest_.size() < kNbytes) return false;
    const char* from = rest_.data();
    ((std::memcpy(&values, from, sizeof values), from += sizeof values), ...);
    rest_.remove_prefix(kNbytes);
    return true;
  }
  bool GetText(std::string_view& text) {
    uint16_t nbytes = 0;
    if (!Get(nbytes) || rest_.size() < nbytes) return false;
    text = rest_.substr(0, nbytes);
    rest_.remove_prefix(nbytes);
    return true;
  }
  bool AtEnd() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

bool AreTimes(std::initializer_list<int64_t> times) {
  return std::all_of(times.begin(), times.end(), IsTraceTime);
}

bool ReadTensor(Cursor& in, NoteReader* reader) {
  TensorTrace t;
  uint8_t failed = 0;
  if (!in.Get(t.row, t.batch, t.nbytes, t.queued_ns, t.negotiated_ns, t.begun_ns, t.reduced_ns, t.done_ns,
              failed) ||
      !in.GetText(t.name) || !in.GetText(t.what) || t.row > BatchRow::kPlan ||
      !AreTimes({t.queued_ns, t.negotiated_ns, t.begun_ns, t.reduced_ns, t.done_ns}))
    return false;
  t.failed = failed != 0;
  reader->OnTensor(t);
  return true;
}

bool ReadBatch(Cursor& in, NoteReader* reader) {
  BatchTrace b;
  uint16_t count = 0;
  if (!in.Get(b.row, b.number, b.tensors, b.nbytes, b.begin_ns, b.end_ns, count) || !in.GetText(b.what) ||
      b.row > BatchRow::kPlan || !AreTimes({b.begin_ns, b.end_ns}))
    return false;
  std::vector<PhaseSpan> phases(count);
  for (PhaseSpan& span : phases) {
    if (!in.Get(span.phase, span.begin_ns, span.end_ns) || static_cast<int>(span.phase) >= kNumPhases ||
        !AreTimes({span.begin_ns, span.end_ns}))
      return false;
  }
  reader->OnBatch(b, phases);
  return true;
}

bool ReadMark(Cursor& in, NoteReader* reader) {
  MarkTrace mark;
  if (!in.Get(mark.at_ns) || !in.GetText(mark.text) || !IsTraceTime(mark.at_ns)) return false;
  reader->OnMark(mark);
  return true;
}

}  // namespace

void PutTensor(const TensorTrace& t, std::string* out) {
  Put(out, Note::kTensor, t.row, t.batch, t.nbytes, t.queued_ns, t.negotiated_ns, t.begun_ns, t.reduced_ns,
      t.done_ns, static_cast<uint8_t>(t.failed));
  PutText(t.name, out);
  PutText(t.what, out);
}

void PutBatch(const BatchTrace& b, const std::vector<PhaseSpan>& phases, std::string* out) {
  const auto count = static_cast<uint16_t>(std::min<size_t>(phases.size(), UINT16_MAX));
  Put(out, Note::kBatch, b.row, b.number, b.tensors, b.nbytes, b.begin_ns, b.end_ns, count);
  PutText(b.what, out);
  for (size_t i = 0; i < count; ++i) Put(out, phases[i].phase, phases[i].begin_ns, phases[i].end_ns);
}

void PutMark(const MarkTrace& mark, std::string* out) {
  Put(out, Note::kMark, mark.at_ns);
  PutText(mark.text, out);
}

bool ReadNotes(std::string_view notes, NoteReader* reader) {
  Cursor in(notes);
  while (!in.AtEnd()) {
    Note note{};
    if (!in.Get(note)) return false;
    const bool ok = note == Note::kTensor  ? ReadTensor(in, reader)
                    : note == Note::kBatch ? ReadBatch(in, reader)
                    : note == Note::kMark  ? ReadMark(in, reader)
                                           : false;
    if (!ok) return false;
  }
  return true;
}

}  // namespace hvd
