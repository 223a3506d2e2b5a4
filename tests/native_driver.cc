// Runs the compiled handler on chains that tests/native_calls.py wrote down, without Python or XLA,
// for scripts/sanitize:
//   native_driver FILE operations|threads|chips
// Results of the levels of the CPU's instructions are compared with one another, those of chips
// too; what they should be is for the tests in Python. Exit status 1: they differ, or a call failed.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <fstream>
#include <sstream>
#include <thread>

#include "native_frame.h"

namespace driver {
namespace {

std::atomic<int> g_wrong{0};

void wrong(const std::string& what) {
  std::fprintf(stderr, "native_driver: %s\n", what.c_str());
  g_wrong++;
}

// --- What was written down

struct Written {
  std::vector<int32_t> code;
  std::deque<Array> given, made;
  std::vector<int64_t> place;  // of what is made: which of the given it is, or -1
};

// Of each chip its calls.
using Group = std::vector<std::vector<Written>>;

class Reader {
 public:
  explicit Reader(const char* path) : file_(path, std::ios::binary) {}

  bool good() const { return file_.good(); }

  int64_t number() {
    int64_t value = 0;
    file_.read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  }

  void array(std::deque<Array>& to) {
    constexpr XLA_FFI_DataType kKinds[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_F16,
                                           XLA_FFI_DataType_U8, XLA_FFI_DataType_S32};
    const XLA_FFI_DataType kind = kKinds[number()];
    std::vector<int64_t> sizes(static_cast<size_t>(number()));
    for (int64_t& size : sizes) size = number();
    to.emplace_back(kind, std::move(sizes));
  }

  Written call() {
    Written call;
    call.code.resize(static_cast<size_t>(number()));
    for (int32_t& one : call.code) one = static_cast<int32_t>(number());
    for (int64_t n = number(); n > 0; n--) {
      array(call.given);
      file_.read(call.given.back().as<char>(), static_cast<int64_t>(call.given.back().bytes()));
    }
    for (int64_t n = number(); n > 0; n--) {
      array(call.made);
      call.place.push_back(number());
    }
    return call;
  }

  std::vector<Group> groups() {
    std::vector<Group> all(static_cast<size_t>(number()));
    for (Group& group : all) {
      group.resize(static_cast<size_t>(number()));
      const int64_t calls = number();
      for (auto& chip : group)
        for (int64_t i = 0; i < calls; i++) chip.push_back(call());
    }
    return all;
  }

 private:
  std::ifstream file_;
};

// --- Running it

// What the calls of a chip make. What is changed is so in place, or else in a copy, as where
// somebody wants it as it was.
std::deque<Array> ran(const std::vector<Written>& calls, int64_t id, bool in_place) {
  std::deque<Array> all;
  for (const Written& written : calls) {
    std::deque<Array> given(written.given), made(written.made);
    Call call = {written.code, {}, {}};
    for (Array& array : given) call.given.push_back(&array);
    for (size_t i = 0; i < made.size(); i++) {
      const int64_t place = in_place ? written.place[i] : -1;
      call.made.push_back(place < 0 ? &made[i] : call.given[static_cast<size_t>(place)]);
    }
    if (!call.run(id)) wrong("a call failed");
    for (const Array* array : call.made) all.push_back(*array);
  }
  return all;
}

// How far floats are from one another over the largest of them; 0 for what else is alike.
float distance(const Array& a, const Array& b) {
  if (a.of() != XLA_FFI_DataType_F32) return std::memcmp(a.data(), b.data(), a.bytes()) ? 1 : 0;
  float most = 1, off = 0;
  for (size_t i = 0; i < a.count(); i++) {
    const float x = a.as<float>()[i], y = b.as<float>()[i];
    if (std::isnan(x) && std::isnan(y)) continue;  // rows of a cache that were never written
    most = std::max(most, std::fabs(x));
    off = std::isnan(x - y) ? INFINITY : std::max(off, std::fabs(x - y));
  }
  return off / most;
}

void compare(const std::string& what, const std::deque<Array>& a, const std::deque<Array>& b,
             float tolerance) {
  for (size_t i = 0; i < a.size(); i++)
    if (const float off = distance(a[i], b[i]); !(off <= tolerance))
      wrong(what + ": result " + std::to_string(i) + " differs by " + std::to_string(off));
}

std::atomic<int64_t> g_runs{1};

void operations(const std::vector<Group>& groups) {
  std::istringstream names(anyfold_levels());
  std::vector<std::string> levels;
  for (std::string name; names >> name;) levels.push_back(name);
  for (size_t i = 0; i < groups.size(); i++) {
    if (groups[i].size() > 1) continue;
    anyfold_use_level(levels[0].c_str());
    const std::deque<Array> best = ran(groups[i][0], g_runs++, true);
    for (const std::string& level : levels) {
      anyfold_use_level(level.c_str());
      const std::string what = "call " + std::to_string(i) + " by " + level;
      compare(what, best, ran(groups[i][0], g_runs++, false), 1e-3f);
    }
  }
  anyfold_use_level(levels[0].c_str());
}

// Callers who share the threads.
void threads(const std::vector<Group>& groups) {
  for (int count : {2, 3}) {
    anyfold_set_threads(count);
    std::vector<std::thread> callers;
    for (size_t caller = 0; caller < 3; caller++)
      callers.emplace_back([&, caller] {
        for (size_t i = caller; i < groups.size(); i++) {
          if (groups[i].size() > 1) continue;
          const std::deque<Array> found = ran(groups[i][0], g_runs++, true);
          compare("call " + std::to_string(i), found, ran(groups[i][0], g_runs++, true), 0);
        }
      });
    for (std::thread& caller : callers) caller.join();
  }
}

// Chips that meet, of two executions at a time.
void chips(const std::vector<Group>& groups) {
  for (const Group& group : groups) {
    const size_t count = group.size();
    if (count == 1) continue;
    for (int threads : {1, 1, 3, 3}) {
      anyfold_set_threads(threads);
      const int64_t run = g_runs.fetch_add(2);
      std::vector<std::deque<Array>> found(2 * count);
      std::vector<std::thread> all;
      for (size_t i = 0; i < 2 * count; i++)
        all.emplace_back([&, i] {
          found[i] = ran(group[i % count], run + static_cast<int64_t>(i / count), true);
        });
      for (std::thread& one : all) one.join();
      for (size_t i = 0; i < count; i++) compare("a chip", found[i], found[i + count], 0);
      // What the chips are told by a fold and a join is the same for all.
      for (size_t i = 1; i < count; i++)
        for (size_t result : {0, 1})
          if (distance(found[0][result], found[i][result]) != 0) wrong("chips differ");
    }
  }
}

int drive(const char* path, const std::string& part) {
  Reader reader(path);
  const std::vector<Group> groups = reader.groups();
  if (!reader.good()) wrong(std::string(path) + " ends too soon");
  else if (part == "operations")
    operations(groups);
  else if (part == "threads")
    threads(groups);
  else if (part == "chips")
    chips(groups);
  else
    wrong("wanted operations, threads or chips, not '" + part + "'");
  return g_wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace driver

int main(int argc, char** argv) {
  if (argc == 3) return driver::drive(argv[1], argv[2]);
  std::fprintf(stderr, "wanted a file and a part\n");
  return 2;
}
