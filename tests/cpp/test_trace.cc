#include <fcntl.h>
#include <unistd.h>

#include <deque>
#include <fstream>
#include <sstream>

#include "base/log.h"
#include "check.h"
#include "scheduler/trace_file.h"
#include "scheduler/trace_json.h"
#include "scheduler/trace_notes.h"
#include "scheduler/tracer.h"

namespace hvd {
namespace {

struct Seen final : NoteReader {
  std::vector<std::string> lines;
  void OnTensor(const TensorTrace& t) override {
    std::ostringstream line;
    line << "tensor " << t.name << ' ' << t.what << ' ' << t.batch << ' ' << t.nbytes << ' ' << t.queued_ns
         << ' ' << t.negotiated_ns << ' ' << t.begun_ns << ' ' << t.reduced_ns << ' ' << t.done_ns << ' '
         << t.failed << ' ' << static_cast<int>(t.row);
    lines.push_back(line.str());
  }
  void OnBatch(const BatchTrace& b, const std::vector<PhaseSpan>& phases) override {
    std::ostringstream line;
    line << "batch " << b.number << ' ' << b.what << ' ' << b.tensors << ' ' << b.nbytes << ' ' << b.begin_ns
         << ' ' << b.end_ns;
    for (const PhaseSpan& p : phases)
      line << " [" << static_cast<int>(p.phase) << ' ' << p.begin_ns << ' ' << p.end_ns << ']';
    lines.push_back(line.str());
  }
  void OnMark(const MarkTrace& mark) override {
    lines.push_back("mark " + std::string(mark.text) + ' ' + std::to_string(mark.at_ns));
  }
};

std::string SomeNotes() {
  Trace trace;
  Phases phases;
  phases.Add(Phase::kCopyIn, 40, 50);
  phases.Add(Phase::kReduce, 50, 60);
  phases.Add(Phase::kReduce, 70, 80);
  trace.Batch({BatchRow::kEager, 7, "allreduce float32", 1, 4096, 40, 80}, phases.spans());
  trace.Tensor({"grad/x", "allreduce", BatchRow::kEager, 7, 4096, 10, 20, 40, 80, 90, false});
  trace.Mark("round 3", 95);
  return trace.Take();
}

size_t Count(const std::string& text, const std::string& what) {
  size_t count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

std::string Slurp(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string TemporaryPath() {
  char path[] = "/tmp/hvd-test-trace-XXXXXX";
  ::close(::mkstemp(path));
  return path;
}

std::vector<std::string> logged;
void KeepLog(Level, std::string_view text) { logged.emplace_back(text); }

}  // namespace

TEST(notes_come_back_as_they_were) {
  Seen seen;
  CHECK(ReadNotes(SomeNotes(), &seen));
  CHECK_EQ(seen.lines.size(), 3u);
  CHECK_EQ(seen.lines[0], "batch 7 allreduce float32 1 4096 40 80 [0 40 50] [2 50 80]");
  CHECK_EQ(seen.lines[1], "tensor grad/x allreduce 7 4096 10 20 40 80 90 0 0");
  CHECK_EQ(seen.lines[2], "mark round 3 95");
}

TEST(damaged_notes_are_refused_at_every_length) {
  const std::string notes = SomeNotes();
  int whole = 0;
  for (size_t size = 0; size <= notes.size(); ++size) {
    Seen seen;
    whole += ReadNotes(std::string_view(notes).substr(0, size), &seen) ? 1 : 0;
  }
  CHECK_EQ(whole, 4);  // nothing, and after each of the three
  Seen seen;
  CHECK(!ReadNotes("\x09", &seen));
}

TEST(what_nobody_takes_is_dropped_and_counted) {
  Trace trace;
  const std::string name(4000, 'n');
  for (size_t i = 0; i < Trace::kMostNbytes / 4000 + 100; ++i)
    trace.Tensor({name, "allreduce", BatchRow::kEager, 0, 4, 1, 1, 1, 1, 1, false});
  const std::string notes = trace.Take();
  CHECK(notes.size() < Trace::kMostNbytes + 5000);
  Seen seen;
  CHECK(ReadNotes(notes, &seen));
  CHECK(seen.lines.back().find("notes dropped") != std::string::npos);
  CHECK(trace.Take().empty());
}

TEST(the_fastest_ping_tells_the_clock) {
  CHECK_EQ(ClockAheadNs({}), 0);
  // Here is 1000 ahead; ways of 10 there and 10 back, then of 100 and 900.
  CHECK_EQ(ClockAheadNs({{2000, 1010, 2020}}), 1000);
  CHECK_EQ(ClockAheadNs({{2000, 1100, 3000}, {5000, 4010, 5020}, {6000, 5500, 7000}}), 1000);
  // However unequal the two ways: wrong by at most half of the fastest round trip.
  for (int64_t there = 0; there <= 100; there += 10) {
    const Ping ping{50000, 50000 + there - 777, 50100};
    const int64_t error = ClockAheadNs({ping, {0, 1 << 20, 5000}}) - 777;
    CHECK(error <= 50 && error >= -50);
  }
}

TEST(events_have_rows_and_one_clock) {
  TraceJson json(1000);
  std::string text;
  CHECK(json.Add(1, "host a, pid 5", 500, SomeNotes(), &text));
  CHECK(text.find("\"args\":{\"name\":\"rank 1 (host a, pid 5)\"}") != std::string::npos);
  // queued at 10 of a clock that is 500 ahead, 1000 being zero: 10 - 500 - 1000 ns, for 80 ns
  CHECK(text.find("\"name\":\"grad/x\",\"ph\":\"X\",\"pid\":1,\"tid\":1000,\"ts\":-1.490,\"dur\":0.080") !=
        std::string::npos);
  CHECK(text.find("{\"cat\":\"batch\",\"name\":\"batch 7\",\"ph\":\"X\",\"pid\":1,\"tid\":1,\"ts\":-1.460") !=
        std::string::npos);
  CHECK_EQ(Count(text, "\"cat\":\"phase\""), 2u);
  CHECK_EQ(Count(text, "\"cat\":\"stage\""), 3u);
  const size_t metadata = Count(text, "__metadata");
  Trace later;
  later.Tensor({"grad/x", "allreduce", BatchRow::kEager, 8, 4096, 100, 110, 120, 130, 140, false});
  CHECK(json.Add(1, "host a, pid 5", 500, later.Take(), &text));
  CHECK_EQ(Count(text, "__metadata"), metadata);
  json.End(&text);
  CHECK_EQ(text.substr(0, 2), "[\n");
  CHECK_EQ(text.substr(text.size() - 3), "\n]\n");
}

TEST(names_are_escaped_and_the_nameless_share_rows) {
  Trace trace;
  trace.Tensor({"a\"b\\c\nd", "allreduce", BatchRow::kEager, 0, 4, 1, 2, 3, 4, 5, false});
  for (int i = 0; i < 100; ++i) {  // two at a time
    const std::string name = "allreduce.noname." + std::to_string(i);
    const int64_t at = i / 2 * 10;
    trace.Tensor({name, "allreduce", BatchRow::kEager, 0, 4, at + 1, at + 2, at + 3, at + 4, at + 5, false});
  }
  TraceJson json(0);
  std::string text;
  CHECK(json.Add(0, "here", 0, trace.Take(), &text));
  CHECK(text.find("\"a\\\"b\\\\c\\u000ad\"") != std::string::npos);
  CHECK_EQ(Count(text, "\"other tensors\""), 2u);
  CHECK_EQ(Count(text, "\"tid\":100000,\"ts\""), 200u);
  CHECK_EQ(Count(text, "\"tid\":100001,\"ts\""), 200u);
}

TEST(a_name_that_is_used_twice_at_once_does_not_overlap) {
  Trace trace;
  trace.Tensor({"x", "allreduce", BatchRow::kEager, 0, 4, 10, 11, 12, 13, 20, false});
  trace.Tensor({"x", "allreduce", BatchRow::kEager, 0, 4, 15, 16, 17, 18, 30, false});
  trace.Tensor({"x", "allreduce", BatchRow::kEager, 0, 4, 30, 31, 32, 33, 40, false});
  TraceJson json(0);
  std::string text;
  CHECK(json.Add(0, "here", 0, trace.Take(), &text));
  CHECK_EQ(Count(text, "\"tid\":1000,\"ts\""), 8u);
  CHECK_EQ(Count(text, "\"tid\":100000,\"ts\""), 4u);
}

TEST(a_failed_tensor_shows_how_far_it_came) {
  Trace trace;
  trace.Tensor({"x", "allreduce", BatchRow::kEager, 0, 4, 10, 0, 0, 0, 20, true});
  TraceJson json(0);
  std::string text;
  CHECK(json.Add(0, "here", 0, trace.Take(), &text));
  CHECK(text.find("\"failed\":true") != std::string::npos);
  CHECK_EQ(Count(text, "\"cat\":\"stage\""), 1u);
  CHECK(text.find("negotiate") != std::string::npos);
}

TEST(a_file_is_written_and_ended) {
  const std::string path = TemporaryPath();
  Trace trace;
  auto file = TraceFile::Open(path, &trace, {0, "here", 0, {}});
  CHECK(file.ok());
  trace.Mark("mine", NowNs());
  file.value()->Add({1, "there", 0, SomeNotes()});
  file.value()->Close();
  file.value()->Close();
  const std::string text = Slurp(path);
  CHECK_EQ(Count(text, "\"mine\""), 1u);
  CHECK_EQ(Count(text, "\"grad/x\""), 2u);  // the title of its row, and itself
  CHECK_EQ(text.substr(text.size() - 3), "\n]\n");
  ::unlink(path.c_str());
}

TEST(a_path_that_cannot_be_written_is_refused) {
  Trace trace;
  const auto file = TraceFile::Open("/nowhere/trace.json", &trace, {});
  CHECK_EQ(file.status().code(), Code::kInvalid);
  CHECK(file.status().text().find("/nowhere/trace.json") != std::string_view::npos);
}

TEST(a_full_disk_is_said_once) {
  SetLogSink(KeepLog);
  Trace trace;
  auto file = TraceFile::Open("/dev/full", &trace, {0, "here", 0, {}});
  CHECK(file.ok());
  file.value()->Add({1, "there", 0, SomeNotes()});
  file.value()->Close();
  SetLogSink(nullptr);
  CHECK(file.value()->failed());
  CHECK_EQ(logged.size(), 1u);
  CHECK(logged.front().find("No space left") != std::string::npos);
}

namespace {

// Ranks whose frames wait in queues.
struct Job {
  struct Frame {
    int from, to;
    std::string payload;
  };
  std::deque<Frame> frames;
  std::vector<std::unique_ptr<Tracer>> ranks;

  Job(int size, bool one_clock) {
    for (int r = 0; r < size; ++r) {
      const auto post = [this, r](int to, const std::string& payload) { frames.push_back({r, to, payload}); };
      const auto post_all = [post, r, size](const std::string& payload) {
        for (int to = 0; to < size; ++to) {
          if (to != r) post(to, payload);
        }
      };
      ranks.push_back(
          std::make_unique<Tracer>(r, size, r == 0 || one_clock, Tracer::Ways{post, post_all, [] {}}));
    }
  }
  void Deliver() {
    for (const auto& rank : ranks) rank->Step();
    while (!frames.empty()) {
      const Frame frame = std::move(frames.front());
      frames.pop_front();
      ranks[static_cast<size_t>(frame.to)]->OnFrame(frame.from, frame.payload);
    }
  }
};

void StartStop(bool one_clock) {
  const std::string path = TemporaryPath();
  Job job(3, one_clock);
  CHECK(job.ranks[0]->trace() == nullptr);
  CHECK(job.ranks[1]->Start("/nowhere/ignored", false).ok());
  CHECK(job.ranks[0]->Start(path, true).ok());
  CHECK(!job.ranks[0]->Start(path, true).ok());
  job.Deliver();
  for (const auto& rank : job.ranks) {
    CHECK(rank->mark_cycles());
    CHECK(rank->trace() != nullptr);
    if (rank->trace() != nullptr) rank->trace()->Mark("noted", NowNs());
  }
  job.ranks[1]->Stop(std::chrono::seconds(20));  // not its to stop
  CHECK(job.ranks[1]->trace() != nullptr);
  std::thread stopper([&] { job.ranks[0]->Stop(std::chrono::seconds(20)); });
  while (!job.ranks[0]->all_ended()) job.Deliver();
  stopper.join();
  for (const auto& rank : job.ranks) CHECK(rank->trace() == nullptr);
  const std::string text = Slurp(path);
  CHECK_EQ(Count(text, "\"noted\""), 3u);
  for (int r = 0; r < 3; ++r) CHECK_EQ(Count(text, "\"rank " + std::to_string(r) + " (host "), 1u);
  CHECK(text.substr(text.size() - 3) == "\n]\n");
  ::unlink(path.c_str());
}

}  // namespace

TEST(rank_0_starts_and_stops_all) {
  StartStop(true);
  StartStop(false);
}

TEST(the_end_of_the_group_ends_the_file) {
  const std::string path = TemporaryPath();
  Job job(3, true);
  for (size_t r : {1, 2}) job.ranks[r]->Expect();
  CHECK(job.ranks[0]->Start(path, false).ok());
  job.Deliver();
  for (const auto& rank : job.ranks) rank->trace()->Mark("noted", NowNs());
  job.ranks[1]->Finish();
  job.ranks[0]->Gone(2);
  job.ranks[0]->Finish();
  job.Deliver();
  CHECK(job.ranks[0]->all_ended());
  job.ranks[0]->CloseFile();
  CHECK_EQ(Count(Slurp(path), "\"noted\""), 3u);
  ::unlink(path.c_str());
}

}  // namespace hvd
