// Simulated chips of one process: how their calls come together.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace anyfold {

// The calls that the chips of one execution make side by side. The last one to come does what all
// of them are to do, while the others sleep: so that nobody waits for a chip that has no core, and
// all threads work on each chip in turn.
template <class Call>
class Group {
 public:
  static constexpr std::chrono::seconds kPatience{600};

  // Calls lead(calls in the order of the chips) once, whichever chip comes last, and returns when
  // that is done; false, and it was not called, where some chip did not come.
  template <class Lead>
  static bool together(int64_t run, int64_t chip, int64_t chips, Call* call, const Lead& lead) {
    std::unique_lock<std::mutex> held(mutex());
    std::shared_ptr<Group>& waiting = all()[run];
    if (!waiting) waiting.reset(new Group(chips));
    const std::shared_ptr<Group> group = waiting;
    group->calls_[static_cast<size_t>(chip)] = call;
    if (++group->came_ == chips) {
      all().erase(run);  // what comes now under this number belongs to the next call
      held.unlock();
      lead(std::span<Call* const>(group->calls_));
      held.lock();
      group->done_ = true;
      group->wake_.notify_all();
      return true;
    }
    group->wake_.wait_for(held, kPatience, [&] { return group->done_ || group->left_; });
    if (group->came_ < chips && !group->left_) {
      group->left_ = true;
      all().erase(run);
      group->wake_.notify_all();
    }
    group->wake_.wait(held, [&] { return group->done_ || group->left_; });
    return group->done_;
  }

 private:
  explicit Group(int64_t chips) : calls_(static_cast<size_t>(chips)) {}

  static std::mutex& mutex() {
    static std::mutex* mutex = new std::mutex;
    return *mutex;
  }

  static std::map<int64_t, std::shared_ptr<Group>>& all() {
    static auto* groups = new std::map<int64_t, std::shared_ptr<Group>>;
    return *groups;
  }

  std::vector<Call*> calls_;
  int64_t came_ = 0;
  bool done_ = false;
  bool left_ = false;  // one of them did not wait any longer
  std::condition_variable wake_;
};

}  // namespace anyfold
