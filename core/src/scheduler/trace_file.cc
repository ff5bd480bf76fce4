#include "scheduler/trace_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/log.h"

namespace hvd {
namespace {

constexpr auto kEvery = std::chrono::milliseconds(100);
constexpr int kLowestPriority = 19;

// Notes are made in the middle of the work; making text of them can wait until a core has nothing to do.
void StepBack() {
#if defined(__linux__)
  ::pthread_setname_np(::pthread_self(), "hvd-timeline");
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kLowestPriority);
#endif
}

Status OpenFile(const std::string& path, UniqueFd* fd) {
  fd->Reset(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (fd->valid()) return Status::Ok();
  return Status(Code::kInvalid, "the timeline cannot be written to '" + path + "': " + std::strerror(errno));
}

}  // namespace

Result<std::unique_ptr<TraceFile>> TraceFile::Open(const std::string& path, Trace* own, TraceChunk mine) {
  UniqueFd fd;
  HVD_RETURN_IF_ERROR(OpenFile(path, &fd));
  return std::unique_ptr<TraceFile>(new TraceFile(path, std::move(fd), own, std::move(mine)));
}

Status TraceFile::Check(const std::string& path) {
  UniqueFd fd;
  return OpenFile(path, &fd);
}

TraceFile::TraceFile(std::string path, UniqueFd fd, Trace* own, TraceChunk mine)
    : path_(std::move(path)), own_(own), mine_(std::move(mine)), fd_(std::move(fd)), json_(NowNs()) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  thread_ = std::thread([this] { Run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void TraceFile::Add(TraceChunk chunk) {
  if (failed()) return;
  MutexLock lock(mutex_);
  chunks_.push_back(std::move(chunk));
}

void TraceFile::Close() {
  {
    MutexLock lock(mutex_);
    close_ = true;
  }
  changed_.SignalAll();
  if (!thread_.joinable()) return;
  thread_.join();
  WriteNotes();  // here, since the thread would wait for an idle core
  std::string end;
  json_.End(&end);
  Write(end);
  fd_.Reset();
}

void TraceFile::Run() {
  StepBack();
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (!close_) changed_.WaitFor(mutex_, kEvery);
      if (close_) return;
    }
    WriteNotes();
  }
}

void TraceFile::WriteNotes() {
  std::vector<TraceChunk> chunks;
  {
    MutexLock lock(mutex_);
    chunks.swap(chunks_);
  }
  chunks.push_back(mine_);
  chunks.back().notes = own_->Take();
  for (const TraceChunk& chunk : chunks) {
    std::string text;
    json_.Add(chunk.rank, chunk.place, chunk.ahead_ns, chunk.notes, &text);
    Write(text);
  }
}

void TraceFile::Write(const std::string& text) {
  for (size_t done = 0; done < text.size() && !failed();) {
    const ssize_t written = ::write(fd_.get(), text.data() + done, text.size() - done);
    if (written > 0) {
      done += static_cast<size_t>(written);
    } else if (errno != EINTR) {
      Log(Level::kWarning,
          "the timeline ends here: '" + path_ + "' cannot be written: " + std::strerror(errno));
      failed_.store(true, std::memory_order_relaxed);
    }
  }
}

}  // namespace hvd
