#include "copy_thread.h"

#include <csignal>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>

#ifdef __linux__
#include <sys/prctl.h>
#endif

#include "export.h"

namespace specter {
namespace {

// Between two chunks the thread reports what is due and looks whether it should stop.
constexpr std::size_t kChunkBytes = std::size_t{256} << 10;

// Copies whose bytes may be in place before the link would have delivered them: while one is being
// delivered the next one is moved, so that a late wake-up costs the link nothing.
constexpr std::size_t kMovedAhead = 2;

double seconds(Time time) { return Seconds(time.time_since_epoch()).count(); }

// `duration` later, or a few years later when it does not fit the clock.
Time after(Time time, Seconds duration) {
  constexpr Seconds kLongest{1e8};
  return time + std::chrono::duration_cast<Clock::duration>(std::min(duration, kLongest));
}

// Gives the calling thread a name, and sleeps that end on time: by default Linux may add 50 us.
void become_copy_thread() {
#ifdef __linux__
  prctl(PR_SET_NAME, "specter-copy", 0UL, 0UL, 0UL);
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
#endif
}

// Signals belong to the interpreter's threads; a new thread inherits the mask set here.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Seconds Pace::data(std::size_t size) const {
  const auto bytes = static_cast<double>(size);
  const double cut = granularity_bytes > 0 ? static_cast<double>(granularity_bytes) : bytes;
  const double pieces = size > 0 ? std::ceil(bytes / cut) : 1.0;
  const double piece_s = bytes_per_s > 0 ? bytes / pieces / bytes_per_s : 0.0;
  const double alone_s = latency_s + piece_s;
  return Seconds(piece_s + (pieces - 1) * std::max(piece_s, alone_s / queue_depth));
}

CopyThread::CopyThread(Pace pace) : pace_(pace) {
  const SignalsBlocked blocked;
  thread_ = std::thread([this] { serve(); });
}

CopyThread::~CopyThread() { close(); }

bool CopyThread::submit(std::int64_t tag, void* destination, const void* source,
                        std::size_t size) {
  const std::lock_guard lock(mutex_);
  if (stop_) return false;
  queue_.push_back({tag, static_cast<std::byte*>(destination),
                    static_cast<const std::byte*>(source), size, Clock::now(), 0});
  wake_.notify_one();
  return true;
}

std::size_t CopyThread::take(Completion* completions, std::size_t room, Seconds timeout) {
  std::unique_lock lock(mutex_);
  if (timeout > Seconds::zero() && completions_.empty()) {
    finished_.wait_until(lock, after(Clock::now(), timeout), [this] {
      return !completions_.empty() || (queue_.empty() && moved_.empty());
    });
  }
  const auto taken = static_cast<std::ptrdiff_t>(std::min(room, completions_.size()));
  std::copy_n(completions_.begin(), taken, completions);
  completions_.erase(completions_.begin(), completions_.begin() + taken);
  return static_cast<std::size_t>(taken);
}

std::size_t CopyThread::outstanding() {
  const std::lock_guard lock(mutex_);
  return queue_.size() + moved_.size();
}

void CopyThread::close() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_one();
  }
  const std::lock_guard lock(joining_);
  if (thread_.joinable()) thread_.join();
}

void CopyThread::serve() {
  become_copy_thread();
  Lock lock(mutex_);
  while (!stop_) {
    report_due(Clock::now());
    if (can_move()) {
      move_chunk(lock);
    } else {
      sleep(lock);
    }
  }
  queue_.clear();
  moved_.clear();
  finished_.notify_all();
}

void CopyThread::report_due(Time now) {
  while (!moved_.empty() && moved_.front().ended <= now) {
    const Moved& copy = moved_.front();
    completions_.push_back({copy.tag, copy.size, seconds(copy.began), seconds(copy.ended)});
    moved_.pop_front();
    finished_.notify_all();
  }
}

bool CopyThread::can_move() const { return !queue_.empty() && moved_.size() < kMovedAhead; }

void CopyThread::move_chunk(Lock& lock) {
  Copy& copy = queue_.front();  // stays in place: only this thread removes from the queue
  const std::size_t chunk = std::min(kChunkBytes, copy.size - copy.moved);
  lock.unlock();
  if (chunk > 0) std::memcpy(copy.destination + copy.moved, copy.source + copy.moved, chunk);
  const Time now = Clock::now();
  lock.lock();
  copy.moved += chunk;
  if (copy.moved < copy.size) return;
  schedule(copy, now);
  queue_.pop_front();
}

// When the link delivers the last byte. A late wake-up delays a report, never the copies behind it:
// they follow the planned end, unless memory itself was slower than the link.
void CopyThread::schedule(const Copy& copy, Time moved) {
  const Time began = std::max(previous_end_, copy.submitted);
  const Time data_starts = std::max(began, after(copy.submitted, Seconds(pace_.latency_s)));
  previous_end_ = std::max(after(data_starts, pace_.data(copy.size)), moved);
  moved_.push_back({copy.tag, copy.size, began, previous_end_});
}

// Until something is submitted, due or stopped; an absolute sleep on CLOCK_MONOTONIC.
void CopyThread::sleep(Lock& lock) {
  const auto called = [this] { return stop_ || can_move(); };
  if (moved_.empty()) {
    wake_.wait(lock, called);
  } else {
    const Time due = moved_.front().ended;
    wake_.wait_until(lock, due, called);
  }
}

}  // namespace specter

// Null when the system has no thread left.
SPECTER_API specter::CopyThread* specter_copy_thread_new(double bytes_per_s, double latency_s,
                                                         std::uint64_t granularity_bytes,
                                                         int queue_depth) {
  try {
    return new specter::CopyThread({bytes_per_s, latency_s, granularity_bytes, queue_depth});
  } catch (const std::exception&) {
    return nullptr;
  }
}

// 1 when submitted, 0 when closed, -1 when memory is short.
SPECTER_API int specter_copy_thread_submit(specter::CopyThread* thread, std::int64_t tag,
                                           void* destination, const void* source,
                                           std::uint64_t size) {
  try {
    return thread->submit(tag, destination, source, size) ? 1 : 0;
  } catch (const std::exception&) {
    return -1;
  }
}

SPECTER_API std::uint64_t specter_copy_thread_take(specter::CopyThread* thread,
                                                   specter::Completion* completions,
                                                   std::uint64_t room, double timeout_s) {
  return thread->take(completions, room, specter::Seconds(timeout_s));
}

SPECTER_API std::uint64_t specter_copy_thread_outstanding(specter::CopyThread* thread) {
  return thread->outstanding();
}

SPECTER_API void specter_copy_thread_close(specter::CopyThread* thread) { thread->close(); }

SPECTER_API void specter_copy_thread_free(specter::CopyThread* thread) { delete thread; }
