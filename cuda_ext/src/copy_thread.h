// One thread that copies memory in submission order, at the pace of a link.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

namespace specter {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: the clock of time.monotonic()
using Time = Clock::time_point;
using Seconds = std::chrono::duration<double>;

// What the link does to a copy. A copy longer than the granularity is cut into pieces, and every
// piece after the first costs what of its latency the pieces queued before it do not hide.
struct Pace {
  double bytes_per_s;  // 0: as fast as the memory
  double latency_s;
  std::size_t granularity_bytes;  // 0: never cut
  int queue_depth;

  Seconds data(std::size_t size) const;
};

// A finished copy. Also the layout that Python reads.
struct Completion {
  std::int64_t tag;
  std::uint64_t copied_bytes;
  double began_s;
  double ended_s;
};

class CopyThread {
 public:
  explicit CopyThread(Pace pace);
  ~CopyThread();
  CopyThread(const CopyThread&) = delete;
  CopyThread& operator=(const CopyThread&) = delete;

  // False once closed.
  bool submit(std::int64_t tag, void* destination, const void* source, std::size_t size);

  // Takes up to `room` completions, oldest first, and returns their number. Waits up to `timeout`
  // for the first while any copy is outstanding.
  std::size_t take(Completion* completions, std::size_t room, Seconds timeout);

  // Copies submitted and not yet finished.
  std::size_t outstanding();

  // Drops what has not finished; memory is left alone afterwards.
  void close();

 private:
  struct Copy {
    std::int64_t tag;
    std::byte* destination;
    const std::byte* source;
    std::size_t size;
    Time submitted;
    std::size_t moved = 0;
  };

  struct Moved {
    std::int64_t tag;
    std::size_t size;
    Time began;
    Time ended;
  };

  using Lock = std::unique_lock<std::mutex>;

  void serve();
  void report_due(Time now);
  bool can_move() const;
  void move_chunk(Lock& lock);
  void schedule(const Copy& copy, Time moved);
  void sleep(Lock& lock);

  const Pace pace_;
  std::mutex mutex_;
  std::condition_variable wake_;      // the thread: submitted to or stopped
  std::condition_variable finished_;  // callers of take
  std::deque<Copy> queue_;            // not all bytes moved yet
  std::deque<Moved> moved_;           // all bytes moved, the link not done yet
  std::deque<Completion> completions_;
  Time previous_end_{};
  bool stop_ = false;
  std::mutex joining_;
  std::thread thread_;
};

}  // namespace specter
