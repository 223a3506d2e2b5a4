// The process's threads: the caller cuts its work into pieces, and all take their share of them.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>

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

// What is read next, in whole: weights one after the other, or side by side.
struct Upcoming {
  struct Weight {
    const char* data = nullptr;
    int64_t bytes = 0;
  };
  std::array<Weight, 4> weights;
  bool side_by_side = false;
};

// Every thread has a run of neighbouring pieces to itself, so that it reads memory on and on; who
// is done with its own takes from the ends of the others'. The caller works too, and never waits
// for a thread that took nothing. While one caller has the threads, others do their work alone.
class Pool {
 public:
  static constexpr int kMostThreads = 256;

  // Never destroyed: its threads outlive whatever the process tears down.
  static Pool& the() {
    static Pool* pool = new Pool;
    return *pool;
  }

  void set_threads(int count) { threads_.store(std::clamp(count, 1, kMostThreads)); }
  int threads() const { return threads_.load(std::memory_order_relaxed); }

  // Threads with nothing to do fetch where they begin in what is read next, so that memory does not
  // rest while a few small steps are done.
  void will_read(const Upcoming& upcoming) {
    for (size_t i = 0; i < upcoming.weights.size(); i++) {
      next_[i].data.store(upcoming.weights[i].data, std::memory_order_relaxed);
      next_[i].bytes.store(upcoming.weights[i].bytes, std::memory_order_relaxed);
    }
    side_by_side_.store(upcoming.side_by_side, std::memory_order_relaxed);
    told_.fetch_add(1, std::memory_order_release);
  }

  // Calls work(i) for every i below `pieces`, in any order.
  template <class Work>
  void run(int64_t pieces, const Work& work) {
    if (pieces <= 1 || threads() <= 1 || pieces >= kMostPieces || !busy_.try_lock()) {
      for (int64_t i = 0; i < pieces; i++) work(i);
      return;
    }
    std::lock_guard<std::mutex> held(busy_, std::adopt_lock);
    shared(pieces, [](const void* w, int64_t i) { (*static_cast<const Work*>(w))(i); }, &work);
  }

 private:
  using Function = void (*)(const void*, int64_t);
  static constexpr int64_t kMostPieces = 1 << 20;
  static constexpr int64_t kAhead = 128 << 10;  // bytes of each weight, in a core's own cache
  static constexpr int kSpins = 2000;  // pauses before a thread sleeps: about 30 microseconds

  // The pieces that are left of a thread's run.
  struct alignas(64) Run {
    std::atomic<uint64_t> left{0};  // round << 40 | end << 20 | next

    static uint64_t word(uint64_t round, int64_t next, int64_t end) {
      return round << 40 | static_cast<uint64_t>(end) << 20 | static_cast<uint64_t>(next);
    }
  };

  void shared(int64_t pieces, Function function, const void* work) {
    const int threads = this->threads();
    for (; started_ < threads - 1; started_++)
      std::thread([this, me = started_ + 1] { serve(me); }).detach();
    function_.store(function, std::memory_order_relaxed);
    work_.store(work, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t round = round_.load(std::memory_order_relaxed) + 1;
    for (int i = 0; i < threads; i++)
      runs_[i].left.store(Run::word(round, pieces * i / threads, pieces * (i + 1) / threads),
                          std::memory_order_release);
    sharing_.store(threads, std::memory_order_relaxed);
    // Seen in this order by whoever goes to sleep: either it sees the round, or we see it.
    round_.store(round);
    if (sleeping_.load() > 0) {
      calls_.fetch_add(1);
      calls_.notify_all();
    }
    take_all(0, threads);
    // A thread that took a piece may have lost its core to another process: leave it ours.
    for (int waited = 0; done_.load(std::memory_order_acquire) < pieces; waited++) {
      if (waited < kSpins)
        rest();
      else
        std::this_thread::yield();
    }
  }

  // Takes pieces, its own first, until there are none.
  void take_all(int me, int threads) {
    if (me >= threads) return;
    while (take(runs_[me], true)) {
    }
    for (int i = 1; i < threads; i++)
      while (take(runs_[(me + i) % threads], false)) {
      }
  }

  // Takes one piece of a run, if there is one. A round ends only when all its pieces are done, so
  // that nobody who has one can see the function of another round.
  bool take(Run& run, bool own) {
    uint64_t left = run.left.load(std::memory_order_acquire);
    for (;;) {
      const int64_t next = left & (kMostPieces - 1), end = left >> 20 & (kMostPieces - 1);
      if (next >= end) return false;
      const Function function = function_.load(std::memory_order_relaxed);
      const void* work = work_.load(std::memory_order_relaxed);
      const uint64_t after = own ? Run::word(left >> 40, next + 1, end)
                                 : Run::word(left >> 40, next, end - 1);
      if (!run.left.compare_exchange_weak(left, after, std::memory_order_acq_rel)) continue;
      function(work, own ? next : end - 1);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }

  void serve(int me) {
    uint64_t served = 0;
    uint32_t heard = 0;
    for (int idle = 0;;) {
      const uint32_t told = told_.load(std::memory_order_acquire);
      const uint64_t round = round_.load(std::memory_order_acquire);
      if (round != served) {
        take_all(me, sharing_.load(std::memory_order_relaxed));
        served = round;
        idle = 0;
      } else if (told != heard) {
        heard = told;
        fetch_next(me, served);
      } else if (++idle < kSpins) {
        rest();
      } else {
        const uint32_t calls = calls_.load();
        sleeping_.fetch_add(1);
        if (round_.load() == served) calls_.wait(calls);
        sleeping_.fetch_sub(1);
        idle = 0;
      }
    }
  }

  // Fetches where a thread begins in what is read next, until there is work. The first helper does
  // so for the caller too, who does the small steps meanwhile.
  void fetch_next(int me, uint64_t served) {
    constexpr int64_t kStep = 16 * 64;
    const int threads = this->threads();
    if (me >= threads) return;
    int64_t total = 0;
    for (const Next& next : next_) total += next.bytes.load(std::memory_order_relaxed);
    const bool side_by_side = side_by_side_.load(std::memory_order_relaxed);
    for (int64_t at = 0; at < kAhead; at += kStep)
      for (int who = me; who >= 0; who -= me == 1 ? 1 : threads) {
        int64_t from = total * who / threads + at;  // in the weights one after the other
        for (const Next& next : next_) {
          if (round_.load(std::memory_order_relaxed) != served) return;
          const char* data = next.data.load(std::memory_order_relaxed);
          const int64_t bytes = next.bytes.load(std::memory_order_relaxed);
          if (side_by_side) from = bytes * who / threads + at;
          const int64_t end = std::min(from + kStep, bytes);
          for (int64_t line = std::max<int64_t>(from, 0); line < end; line += 64)
            __builtin_prefetch(data + line, 0, 2);
          from -= bytes;
        }
      }
  }

  struct Next {
    std::atomic<const char*> data{nullptr};
    std::atomic<int64_t> bytes{0};
  };

  std::mutex busy_;
  std::atomic<int> threads_{1};
  int started_ = 0;
  std::atomic<Function> function_{nullptr};
  std::atomic<const void*> work_{nullptr};
  std::atomic<int> sharing_{0};  // threads that this round was cut for
  std::array<Run, kMostThreads> runs_;
  alignas(64) std::atomic<uint64_t> round_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> told_{0};
  std::array<Next, 4> next_;
  std::atomic<bool> side_by_side_{false};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<uint32_t> calls_{0};
};

}  // namespace anyfold
