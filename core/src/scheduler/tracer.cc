#include "scheduler/tracer.h"

#include <unistd.h>

#include <algorithm>

#include "transport/wire.h"

namespace hvd {
namespace {

constexpr auto kSendEvery = std::chrono::milliseconds(100);
// The fastest of so many round trips tells the clock; on a quiet network the first would do.
constexpr size_t kPings = 8;

std::string PlaceOfThisProcess() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return std::string("host ") + host + ", pid " + std::to_string(::getpid());
}

}  // namespace

Tracer::Tracer(int rank, int size, bool one_clock, Ways ways)
    : rank_(rank),
      one_clock_(one_clock),
      ways_(std::move(ways)),
      place_(PlaceOfThisProcess()),
      ended_(static_cast<size_t>(size), false) {}

Tracer::~Tracer() { CloseFile(); }

Status Tracer::Start(const std::string& path, bool mark_cycles) {
  if (rank_ != 0) return Status::Ok();
  {
    MutexLock lock(mutex_);
    if (stage_ != Stage::kOff) return Status(Code::kInvalid, "a timeline is being written already");
    auto file = TraceFile::Open(path, &trace_, {0, place_, 0, {}});
    if (!file.ok()) return file.status();
    file_ = std::move(file).value();
    std::fill(ended_.begin(), ended_.end(), false);
    stage_ = Stage::kStarting;
    mark_cycles_.store(mark_cycles, std::memory_order_relaxed);
    on_.store(&trace_, std::memory_order_release);
  }
  ways_.wake();
  return Status::Ok();
}

void Tracer::Stop(Clock::duration patience) {
  if (rank_ != 0) return;
  {
    MutexLock lock(mutex_);
    if (stage_ != Stage::kOn && stage_ != Stage::kStarting) return;
    stage_ = Stage::kStopping;
    on_.store(nullptr, std::memory_order_release);
    ended_[0] = true;
  }
  ways_.wake();
  const auto deadline = Clock::now() + patience;
  {
    MutexLock lock(mutex_);
    const auto all = [this]() REQUIRES(mutex_) {
      return std::all_of(ended_.begin(), ended_.end(), [](bool e) { return e; });
    };
    while (stage_ != Stage::kOff && !all() && ended_all_.WaitUntil(mutex_, deadline)) {
    }
  }
  CloseFile();
}

void Tracer::CloseFile() {
  std::unique_ptr<TraceFile> file;
  {
    MutexLock lock(mutex_);
    on_.store(nullptr, std::memory_order_release);
    file = std::move(file_);
  }
  if (file != nullptr) file->Close();
  MutexLock lock(mutex_);
  stage_ = Stage::kOff;
}

// Rank 0: tells the others what Start and Stop wished.
void Tracer::Announce() {
  Stage wish;
  {
    MutexLock lock(mutex_);
    wish = stage_;
    if (file_ != nullptr && file_->failed() && stage_ == Stage::kOn) wish = Stage::kStopping;
    if (wish == Stage::kStarting) stage_ = Stage::kOn;
    if (wish == Stage::kStopping) stage_ = Stage::kEnding;
    if (wish == Stage::kStarting || stage_ == Stage::kOn) {
      next_step_ = Clock::now() + kSendEvery;
    } else {
      next_step_ = Clock::time_point::max();
    }
    if (wish == Stage::kStopping) on_.store(nullptr, std::memory_order_release);
  }
  if (wish != Stage::kStarting && wish != Stage::kStopping) return;
  Writer frame;
  frame.Put(wish == Stage::kStarting ? What::kStart : What::kStop);
  if (wish == Stage::kStarting) frame.Put(static_cast<uint8_t>(mark_cycles()));
  ways_.post_all(frame.Take());
}

void Tracer::Expect() {
  if (rank_ == 0) return;
  on_.store(&trace_, std::memory_order_release);
  next_step_ = Clock::now() + kSendEvery;
}

void Tracer::Begin(bool mark_cycles) {
  mark_cycles_.store(mark_cycles, std::memory_order_relaxed);
  on_.store(&trace_, std::memory_order_release);
  next_step_ = Clock::now() + kSendEvery;
  pings_.clear();
  if (!one_clock_) SendPing();
}

void Tracer::End() {
  on_.store(nullptr, std::memory_order_release);
  next_step_ = Clock::time_point::max();
  SendNotes();
  Writer frame;
  frame.Put(What::kEnd);
  ways_.post(0, frame.Take());
}

void Tracer::Step() {
  if (rank_ == 0) return Announce();
  if (on_.load(std::memory_order_relaxed) == nullptr) return;
  if (Clock::now() < next_step_ && !trace_.HasMany()) return;
  next_step_ = Clock::now() + kSendEvery;
  if (one_clock_ || pings_.size() >= kPings) SendNotes();
}

void Tracer::SendNotes() {
  const std::string notes = trace_.Take();
  if (notes.empty()) return;
  Writer frame;
  frame.Put(What::kNotes);
  frame.Put(ClockAheadNs(pings_));
  frame.PutString(place_);
  frame.PutString(notes);
  ways_.post(0, frame.Take());
}

void Tracer::SendPing() {
  Writer frame;
  frame.Put(What::kPing);
  frame.Put(NowNs());
  ways_.post(0, frame.Take());
}

void Tracer::OnFrame(int from, std::string_view payload) {
  Reader in(payload);
  const auto what = in.Get<What>();
  const bool from_writer = from == 0 && rank_ != 0;
  switch (what) {
    case What::kStart:
      if (from_writer) Begin(in.Get<uint8_t>() != 0);
      break;
    case What::kStop:
      if (from_writer) End();
      break;
    case What::kNotes: {
      TraceChunk chunk{from, {}, in.Get<int64_t>(), {}};
      chunk.place = in.GetString();
      chunk.notes = in.GetString();
      MutexLock lock(mutex_);
      if (in.ok() && IsTraceTime(chunk.ahead_ns) && file_ != nullptr) file_->Add(std::move(chunk));
      break;
    }
    case What::kEnd:
      Gone(from);
      break;
    case What::kPing: {
      Writer frame;
      frame.Put(What::kPong);
      frame.Put(in.Get<int64_t>());
      frame.Put(NowNs());
      ways_.post(from, frame.Take());
      break;
    }
    case What::kPong: {
      if (!from_writer) break;
      const auto sent_ns = in.Get<int64_t>(), answered_ns = in.Get<int64_t>();
      if (!in.ok() || !IsTraceTime(sent_ns) || !IsTraceTime(answered_ns)) break;
      pings_.push_back({sent_ns, answered_ns, NowNs()});
      if (pings_.size() < kPings) SendPing();
      break;
    }
  }
}

void Tracer::Finish() {
  if (rank_ != 0) {
    if (trace() != nullptr) End();
    return;
  }
  {
    MutexLock lock(mutex_);
    if (file_ == nullptr) return;
    on_.store(nullptr, std::memory_order_release);
    ended_[0] = true;
    if (stage_ == Stage::kEnding) return;
    stage_ = Stage::kStopping;
  }
  Announce();
}

void Tracer::Gone(int rank) {
  MutexLock lock(mutex_);
  ended_[static_cast<size_t>(rank)] = true;
  ended_all_.SignalAll();
}

bool Tracer::all_ended() const {
  MutexLock lock(mutex_);
  return file_ == nullptr || std::all_of(ended_.begin(), ended_.end(), [](bool e) { return e; });
}

}  // namespace hvd
