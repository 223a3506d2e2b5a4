// How far before they are read tiles of weights are fetched.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "level.h"

namespace anyfold {

// Several rows leave time to fetch what comes later. With one row it depends on the CPU whether
// tiles are better fetched in a burst as they are read (Zen 4: 30 against 18 GB/s) or ahead of it
// (Zen 5: 54 against 45), and so the first few hundred large products of one row try both.
class Fetching {
 public:
  static Fetching& the() {
    static Fetching fetching;
    return fetching;
  }

  // The bytes ahead for a product of one row.
  int64_t ahead() {
    if (!trying()) return ahead_.load(std::memory_order_relaxed);
    // In no order that the products of a layer have too.
    const uint32_t mixed = tried_.load(std::memory_order_relaxed) * 0x9e3779b9u;
    return mixed >> 31 ? kFar : 0;
  }

  bool trying() const { return tried_.load(std::memory_order_relaxed) < kTries; }

  // Says how long a product took that fetched so far ahead.
  void took(int64_t ahead, int64_t bytes, int64_t nanoseconds) {
    Tally& tally = tallies_[ahead == kFar];
    tally.bytes.fetch_add(bytes);
    tally.nanoseconds.fetch_add(nanoseconds);
    if (tried_.fetch_add(1) + 1 == kTries)
      ahead_.store(tallies_[1].speed() > tallies_[0].speed() ? kFar : 0);
  }

  static constexpr int64_t kFar = 6 * kTileBytes;
  static constexpr int64_t kLeast = 256 << 10;  // bytes of a product that says something

 private:
  static constexpr uint32_t kTries = 600;

  struct Tally {
    std::atomic<int64_t> bytes{0}, nanoseconds{0};
    double speed() const {
      return static_cast<double>(bytes.load()) / static_cast<double>(nanoseconds.load() + 1);
    }
  };

  Tally tallies_[2];
  std::atomic<uint32_t> tried_{0};
  std::atomic<int64_t> ahead_{0};
};

// One product, timed while that is of use.
class Fetched {
 public:
  Fetched(int64_t rows, int64_t bytes)
      : bytes_(bytes),
        timed_(rows == 1 && bytes >= Fetching::kLeast && Fetching::the().trying()),
        ahead_(rows == 1 ? Fetching::the().ahead() : Fetching::kFar) {
    if (timed_) started_ = Clock::now();
  }

  ~Fetched() {
    if (timed_) Fetching::the().took(ahead_, bytes_, (Clock::now() - started_).count());
  }

  int64_t ahead() const { return ahead_; }

 private:
  using Clock = std::chrono::steady_clock;

  const int64_t bytes_;
  const bool timed_;
  const int64_t ahead_;
  Clock::time_point started_;
};

}  // namespace anyfold
