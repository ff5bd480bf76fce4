#include "scheduler/trace_json.h"

#include <algorithm>
#include <charconv>

#include "scheduler/trace_notes.h"

namespace hvd {
namespace {

constexpr uint32_t kBatchRows = 1;  // + kBatchRowsEach * BatchRow
constexpr uint32_t kBatchRowsEach = 400;
constexpr uint32_t kNamedRows = 1000;
constexpr uint32_t kSharedRows = 100000;
// Of more names than this the rest share rows.
constexpr size_t kMostNames = 4096;

const char* const kBatchTitles[] = {"fused batches", "plan batches"};
const char* const kPhaseNames[kNumPhases] = {"copy in", "wait", "reduce", "wire", "copy out"};

void AppendNumber(int64_t value, std::string* out) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  out->append(digits, end);
}

// Nanoseconds as microseconds with three decimals.
void AppendMicroseconds(int64_t ns, std::string* out) {
  if (ns < 0) out->push_back('-');
  const uint64_t magnitude = ns < 0 ? 0 - static_cast<uint64_t>(ns) : static_cast<uint64_t>(ns);
  AppendNumber(static_cast<int64_t>(magnitude / 1000), out);
  const auto rest = static_cast<char>(magnitude % 1000 / 100);
  const auto rest2 = static_cast<char>(magnitude % 100 / 10), rest3 = static_cast<char>(magnitude % 10);
  const char decimals[4] = {'.', static_cast<char>('0' + rest), static_cast<char>('0' + rest2),
                            static_cast<char>('0' + rest3)};
  out->append(decimals, sizeof decimals);
}

void AppendText(std::string_view text, std::string* out) {
  constexpr char kHex[] = "0123456789abcdef";
  out->push_back('"');
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (byte < 0x20) {
      out->append("\\u00");
      out->push_back(kHex[byte >> 4]);
      out->push_back(kHex[byte & 15]);
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

// "allreduce.noname.17": its number says nothing, and there is no end of them.
bool IsNameless(std::string_view name) {
  const size_t digits = name.find_last_not_of("0123456789");
  constexpr std::string_view kNameless = ".noname.";
  if (digits == std::string_view::npos || digits + 1 == name.size()) return false;
  const std::string_view stem = name.substr(0, digits + 1);
  return stem.size() >= kNameless.size() && stem.substr(stem.size() - kNameless.size()) == kNameless;
}

}  // namespace

// Writes the notes of one Add.
class TraceJson::Writer final : public NoteReader {
 public:
  Writer(TraceJson* json, int rank, Process* process, int64_t ahead_ns, std::string* out)
      : json_(json), rank_(rank), process_(process), ahead_ns_(ahead_ns), out_(out) {}

  void OnBatch(const BatchTrace& b, const std::vector<PhaseSpan>& phases) override {
    const auto which = static_cast<size_t>(b.row);
    const uint32_t first = kBatchRows + kBatchRowsEach * static_cast<uint32_t>(which);
    const uint32_t row = FreeRow(first, &process_->batches[which], kBatchTitles[which], b.begin_ns, b.end_ns);
    Begin("batch", row, b.begin_ns, b.end_ns, "batch", b.number);
    out_->append(",\"args\":{\"what\":");
    AppendText(b.what, out_);
    Argument("batch", b.number);
    Argument("tensors", b.tensors);
    Argument("nbytes", b.nbytes);
    out_->append("}}");
    for (const PhaseSpan& span : phases) {
      Begin("phase", row, span.begin_ns, span.end_ns, kPhaseNames[static_cast<size_t>(span.phase)]);
      out_->push_back('}');
    }
  }

  void OnTensor(const TensorTrace& t) override {
    const uint32_t row = RowOf(t);
    Begin("tensor", row, t.queued_ns, t.done_ns, t.name);
    out_->append(",\"args\":{\"what\":");
    AppendText(t.what, out_);
    Argument("nbytes", t.nbytes);
    if (t.reduced_ns > 0) {
      Argument("batch", t.batch);
      if (t.row == BatchRow::kPlan) out_->append(",\"plan\":true");
    }
    if (t.failed) out_->append(",\"failed\":true");
    out_->append("}}");
    Stage(row, "negotiate", t.queued_ns, t.negotiated_ns > 0 ? t.negotiated_ns : t.done_ns);
    Stage(row, "queue", t.negotiated_ns, t.begun_ns);
    Stage(row, t.what, t.begun_ns, t.reduced_ns);
  }

  void OnMark(const MarkTrace& mark) override {
    Event("mark", mark.text);
    out_->append(",\"ph\":\"i\",\"s\":\"p\"");
    Place(kBatchRows, mark.at_ns);
    out_->push_back('}');
  }

  void Metadata(uint32_t row, const char* what, std::string_view key, std::string_view text) {
    Event("__metadata", what);
    out_->append(",\"ph\":\"M\",\"pid\":");
    AppendNumber(rank_, out_);
    out_->append(",\"tid\":");
    AppendNumber(row, out_);
    out_->append(",\"args\":{\"");
    out_->append(key);
    out_->append("\":");
    key == "sort_index" ? void(out_->append(text)) : AppendText(text, out_);
    out_->append("}}");
  }

  void RowMetadata(uint32_t row, std::string_view title) {
    Metadata(row, "thread_name", "name", title);
    Metadata(row, "thread_sort_index", "sort_index", std::to_string(row));
  }

 private:
  // A note of times that are missing (0) leaves its stage out.
  void Stage(uint32_t row, std::string_view name, int64_t begin_ns, int64_t end_ns) {
    if (begin_ns <= 0 || end_ns < begin_ns) return;
    Begin("stage", row, begin_ns, end_ns, name);
    out_->push_back('}');
  }

  void Begin(std::string_view category, uint32_t row, int64_t begin_ns, int64_t end_ns, std::string_view name,
             std::optional<uint64_t> number = std::nullopt) {
    if (number) {
      Event(category, std::string(name) + " " + std::to_string(*number));
    } else {
      Event(category, name);
    }
    out_->append(",\"ph\":\"X\"");
    Place(row, begin_ns);
    out_->append(",\"dur\":");
    AppendMicroseconds(std::max<int64_t>(end_ns - begin_ns, 0), out_);
  }

  void Event(std::string_view category, std::string_view name) {
    out_->append(json_->begun_ ? ",\n{\"cat\":\"" : "[\n{\"cat\":\"");
    json_->begun_ = true;
    out_->append(category);
    out_->append("\",\"name\":");
    AppendText(name, out_);
  }

  void Place(uint32_t row, int64_t at_ns) {
    out_->append(",\"pid\":");
    AppendNumber(rank_, out_);
    out_->append(",\"tid\":");
    AppendNumber(row, out_);
    out_->append(",\"ts\":");
    AppendMicroseconds(at_ns - ahead_ns_ - json_->zero_ns_, out_);
  }

  void Argument(std::string_view name, uint64_t value) {
    out_->append(",\"");
    out_->append(name);
    out_->append("\":");
    AppendNumber(static_cast<int64_t>(value), out_);
  }

  // Its own row, unless that has no title or is in use: then the first shared one that is free.
  uint32_t RowOf(const TensorTrace& t) {
    if (!IsNameless(t.name)) {
      auto found = json_->row_of_name_.find(std::string(t.name));
      if (found == json_->row_of_name_.end() && json_->row_of_name_.size() < kMostNames) {
        const auto next = static_cast<uint32_t>(json_->row_of_name_.size());
        found = json_->row_of_name_.emplace(t.name, next).first;
      }
      if (found != json_->row_of_name_.end()) {
        const uint32_t row = kNamedRows + found->second;
        const auto [entry, is_new] = process_->named.try_emplace(found->second, t.queued_ns);
        if (is_new) RowMetadata(row, t.name);
        if (entry->second <= t.queued_ns) {
          entry->second = t.done_ns;
          return row;
        }
      }
    }
    return FreeRow(kSharedRows, &process_->shared, "other tensors", t.queued_ns, t.done_ns);
  }

  // The first of the rows from `first` on that is free at begin_ns; free_at says when each is.
  uint32_t FreeRow(uint32_t first, std::vector<int64_t>* free_at, const char* title, int64_t begin_ns,
                   int64_t end_ns) {
    const auto free =
        std::find_if(free_at->begin(), free_at->end(), [&](int64_t at) { return at <= begin_ns; });
    const auto index = static_cast<uint32_t>(free - free_at->begin());
    if (free == free_at->end()) {
      free_at->push_back(0);
      RowMetadata(first + index, title);
    }
    (*free_at)[index] = end_ns;
    return first + index;
  }

  TraceJson* const json_;
  const int rank_;
  Process* const process_;
  const int64_t ahead_ns_;
  std::string* const out_;
};

bool TraceJson::Add(int rank, std::string_view place, int64_t ahead_ns, std::string_view notes,
                    std::string* out) {
  const auto [entry, is_new] = processes_.try_emplace(rank);
  Writer writer(this, rank, &entry->second, ahead_ns, out);
  if (is_new) {
    writer.Metadata(0, "process_name", "name",
                    "rank " + std::to_string(rank) + " (" + std::string(place) + ")");
    writer.Metadata(0, "process_sort_index", "sort_index", std::to_string(rank));
  }
  return ReadNotes(notes, &writer);
}

void TraceJson::End(std::string* out) { out->append(begun_ ? "\n]\n" : "[\n]\n"); }

}  // namespace hvd
