// The process's threads: the caller cuts its work into pieces, and whoever is free takes one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace anyfold {

inline void rest() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The caller works too, and never waits for a thread that took nothing. While one caller has the
// threads, others do their work alone.
class Pool {
 public:
  // Never destroyed: its threads outlive whatever the process tears down.
  static Pool& the() {
    static Pool* pool = new Pool;
    return *pool;
  }

  void set_threads(int count) { threads_.store(count < 1 ? 1 : count); }
  int threads() const { return threads_.load(std::memory_order_relaxed); }

  // What is read next in whole, two weights at the most: threads with nothing to do fetch how they
  // begin, so that memory does not rest while a few small steps are done.
  void will_read(const void* first, int64_t bytes, const void* second, int64_t more) {
    const void* begins[] = {first, second};
    const int64_t sizes[] = {bytes, more};
    for (int i = 0; i < 2; i++) {
      next_[i].store(static_cast<const char*>(begins[i]), std::memory_order_relaxed);
      next_bytes_[i].store(sizes[i] < kAhead ? sizes[i] : kAhead, std::memory_order_relaxed);
    }
    next_round_.fetch_add(1, std::memory_order_release);
  }

  // Calls work(i) for every i below `pieces`, in any order.
  template <class Work>
  void run(int64_t pieces, const Work& work) {
    if (pieces <= 1 || threads() <= 1 || pieces >= kMost || !busy_.try_lock()) {
      for (int64_t i = 0; i < pieces; i++) work(i);
      return;
    }
    std::lock_guard<std::mutex> held(busy_, std::adopt_lock);
    shared(pieces, [](const void* w, int64_t i) { (*static_cast<const Work*>(w))(i); }, &work);
  }

 private:
  using Function = void (*)(const void*, int64_t);
  static constexpr int64_t kMost = 1 << 20;
  static constexpr int64_t kAhead = 128 << 10;  // bytes of each weight, in a core's own cache
  static constexpr int kSpins = 2000;  // pauses before a thread sleeps: about 30 microseconds

  void shared(int64_t pieces, Function function, const void* work) {
    for (; started_ < threads() - 1; started_++) std::thread([this] { serve(); }).detach();
    function_.store(function, std::memory_order_relaxed);
    work_.store(work, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    // Seen in this order by whoever goes to sleep: either it sees the ticket, or we see it.
    ticket_.store(++round_ << 40 | static_cast<uint64_t>(pieces) << 20);
    if (sleeping_.load() > 0) {
      calls_.fetch_add(1);
      calls_.notify_all();
    }
    while (take(ticket_.load(std::memory_order_acquire))) {
    }
    // A thread that took a piece may have lost its core to another process: leave it ours.
    for (int waited = 0; done_.load(std::memory_order_acquire) < pieces; waited++) {
      if (waited < kSpins)
        rest();
      else
        std::this_thread::yield();
    }
  }

  static bool any(uint64_t ticket) { constexpr uint64_t kMask = kMost - 1;
    return (ticket & kMask) < (ticket >> 20 & kMask); }

  // Takes one piece, if there is one. A round ends only when all its pieces are done, so that
  // nobody who has one can see the function of another round.
  bool take(uint64_t ticket) {
    if (!any(ticket)) return false;
    const Function function = function_.load(std::memory_order_relaxed);
    const void* work = work_.load(std::memory_order_relaxed);
    if (ticket_.compare_exchange_strong(ticket, ticket + 1, std::memory_order_acq_rel)) {
      function(work, static_cast<int64_t>(ticket) & (kMost - 1));
      done_.fetch_add(1, std::memory_order_release);
    }
    return true;
  }

  // Fetches the beginnings of what is read next, until there is work.
  void fetch_next() {
    constexpr int64_t kStep = 16 * 64;
    for (int64_t at = 0; at < kAhead; at += kStep)
      for (int i = 0; i < 2; i++) {
        if (any(ticket_.load(std::memory_order_relaxed))) return;
        const char* begin = next_[i].load(std::memory_order_relaxed);
        const int64_t end = std::min(at + kStep, next_bytes_[i].load(std::memory_order_relaxed));
        for (int64_t line = at; line < end; line += 64) __builtin_prefetch(begin + line, 0, 2);
      }
  }

  void serve() {
    uint32_t fetched = 0;
    for (int idle = 0;;) {
      const uint32_t next = next_round_.load(std::memory_order_acquire);
      if (take(ticket_.load(std::memory_order_acquire))) {
        idle = 0;
      } else if (next != fetched) {
        fetched = next;
        fetch_next();
      } else if (++idle < kSpins) {
        rest();
      } else {
        const uint32_t calls = calls_.load();
        sleeping_.fetch_add(1);
        if (!any(ticket_.load())) calls_.wait(calls);
        sleeping_.fetch_sub(1);
        idle = 0;
      }
    }
  }

  std::mutex busy_;
  std::atomic<int> threads_{1};
  int started_ = 0;
  uint64_t round_ = 0;
  std::atomic<Function> function_{nullptr};
  std::atomic<const void*> work_{nullptr};
  alignas(64) std::atomic<uint64_t> ticket_{0};  // round << 40 | pieces << 20 | next
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> next_round_{0};
  std::atomic<const char*> next_[2]{};
  std::atomic<int64_t> next_bytes_[2]{};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<uint32_t> calls_{0};
};

}  // namespace anyfold
