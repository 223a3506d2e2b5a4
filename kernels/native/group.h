// Simulated chips of one process: where they put their partial results and wait for each other.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pool.h"

namespace anyfold {

// The chips of one execution. Every chip makes the same meetings in the same order. What a chip
// shows at a meeting stays as it is until it has come to the next one, so that one barrier a
// meeting is enough: by then all have read it.
class Group {
 public:
  static constexpr std::chrono::seconds kPatience{60};

  // The group of an execution; every chip enters it once a call, and leaves it.
  static Group* enter(int64_t run, int chips) {
    std::lock_guard<std::mutex> held(mutex_of_all());
    std::unique_ptr<Group>& group = all()[run];
    if (!group) group.reset(new Group(chips));
    group->entered_++;
    return group.get();
  }

  // The last of a whole round of chips takes the group with it.
  static void leave(int64_t run, Group* group) {
    std::lock_guard<std::mutex> held(mutex_of_all());
    group->left_++;
    if (group->left_ == group->entered_ && group->left_ % group->chips() == 0) all().erase(run);
  }

  int64_t chips() const { return static_cast<int64_t>(places_.size()); }

  // Where a chip puts what it shows at its next meeting.
  float* room(int64_t chip, size_t floats) {
    std::vector<float>& room = places_[chip].rooms[places_[chip].meetings % 2];
    if (room.size() < floats) room.resize(floats);
    return room.data();
  }

  // Waits for all chips; false where they did not come. Few meetings take long: with a core for
  // each chip it is quicker to look again than to sleep, and with fewer cores to leave this one to
  // a chip that still has work.
  bool meet(int64_t chip, bool core_each) {
    const uint64_t all_there = ++places_[chip].meetings * places_.size();
    if (arrived_.fetch_add(1) + 1 == all_there) {
      if (asleep_.load() > 0) {
        std::lock_guard<std::mutex> held(mutex_);
        wake_.notify_all();
      }
      return true;
    }
    for (int looked = 0; looked < (core_each ? kLooks : kYields); looked++) {
      if (arrived_.load(std::memory_order_acquire) >= all_there) return true;
      core_each ? rest() : std::this_thread::yield();
    }
    std::unique_lock<std::mutex> held(mutex_);
    asleep_.fetch_add(1);
    const bool came = wake_.wait_for(held, kPatience, [&] { return arrived_.load() >= all_there; });
    asleep_.fetch_sub(1);
    return came;
  }

  // What a chip showed at the meeting that was last.
  const float* shown(int64_t chip, int64_t by) const {
    return places_[chip].rooms[(places_[by].meetings - 1) % 2].data();
  }

 private:
  static constexpr int kLooks = 1000, kYields = 40;

  struct alignas(64) Place {
    uint64_t meetings = 0;
    std::vector<float> rooms[2];
  };

  explicit Group(int chips) : places_(chips) {}

  static std::mutex& mutex_of_all() {
    static std::mutex* mutex = new std::mutex;
    return *mutex;
  }

  static std::map<int64_t, std::unique_ptr<Group>>& all() {
    static auto* groups = new std::map<int64_t, std::unique_ptr<Group>>;
    return *groups;
  }

  std::vector<Place> places_;
  int64_t entered_ = 0, left_ = 0;
  alignas(64) std::atomic<uint64_t> arrived_{0};
  alignas(64) std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace anyfold
