// The one handler that XLA calls: a chain of operations, written as integers by chain.py.
//
// A chain has slots, matrices by number: first the call's arguments, then its results, then what
// lies in scratch. The code is
//   header: where the count of real rows is (-1: all are), the rows that it counts, from how many
//     rows on 16 bits are enough, chips, where the chip's number is
//   results that are arguments changed in place: how many, then (argument, result) each
//   the other results: how many, then each
//   scratch: how many slots, the floats of all, then (begin, rows, columns) each
//   operations: a number of Kind, then what `Chain` reads of it below; a float is its bits
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "group.h"
#include "level.h"
#include "operations.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace anyfold {
namespace {

namespace ffi = xla::ffi;

const Level* const kLevels[] = {
#if defined(__x86_64__)
    &kAvx512, &kAvx2,
#endif
    &kPlain};

const Level* best() {
  for (const Level* level : kLevels)
    if (level->runs_here()) return level;
  return &kPlain;
}

std::atomic<const Level*> g_level{best()};

}  // namespace

const Level& level() { return *g_level.load(std::memory_order_relaxed); }

namespace {

enum Kind { kProducts, kEmbed, kNorm, kTurn, kWrite, kAttend, kUnary, kBinary, kFold, kJoin, kRow,
            kArgmax };

// Scratch of one call; kept for the next one, whichever thread makes it.
class Scratch {
 public:
  explicit Scratch(size_t floats) {
    std::lock_guard<std::mutex> held(mutex());
    if (!kept().empty()) {
      memory_ = std::move(kept().back());
      kept().pop_back();
    }
    if (memory_.floats < floats)
      memory_ = {std::unique_ptr<float, Free>(static_cast<float*>(
                     std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64))),
                 floats};
  }
  ~Scratch() {
    std::lock_guard<std::mutex> held(mutex());
    kept().push_back(std::move(memory_));
  }
  float* data() const { return memory_.data.get(); }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  struct Memory {
    std::unique_ptr<float, Free> data;
    size_t floats = 0;
  };
  static std::mutex& mutex() {
    static std::mutex* mutex = new std::mutex;
    return *mutex;
  }
  static std::vector<Memory>& kept() {
    static auto* kept = new std::vector<Memory>;
    return *kept;
  }
  Memory memory_;
};

Matrix matrix(ffi::AnyBuffer buffer) {
  Matrix m;
  m.data = buffer.untyped_data();
  m.of = buffer.element_type() == ffi::DataType::F16   ? Matrix::Of::kHalves
         : buffer.element_type() == ffi::DataType::U8  ? Matrix::Of::kBytes
         : buffer.element_type() == ffi::DataType::S32 ? Matrix::Of::kIntegers
                                                       : Matrix::Of::kFloats;
  const auto sizes = buffer.dimensions();
  const size_t n = sizes.size();
  m.cols = n > 0 ? sizes[n - 1] : 1;
  m.rows = n > 1 ? sizes[n - 2] : 1;
  m.batches = n > 2 ? sizes[n - 3] : 1;
  return m;
}

class Chain {
 public:
  Chain(int64_t run, ffi::Span<const int32_t> code, ffi::RemainingArgs& args,
        ffi::RemainingRets& rets)
      : run_(run), at_(code.begin()), end_(code.end()) {
    slots_.reserve(args.size() + rets.size() + 64);
    for (size_t i = 0; i < args.size(); i++) slots_.push_back(matrix(*args.get<ffi::AnyBuffer>(i)));
    for (size_t i = 0; i < rets.size(); i++)
      slots_.push_back(matrix(**rets.get<ffi::AnyBuffer>(i)));
  }

  ffi::Error call() {
    const int64_t count = next();
    counted_ = next();
    real_ = count < 0 ? counted_ : std::clamp<int64_t>(*integers(count).first, 0, counted_);
    inexact_ = next();
    chips_ = next();
    const int64_t chip = next();
    chip_ = chip < 0 ? 0 : *integers(chip).first;
    for (int64_t n = next(); n > 0; n--) {
      const Matrix& from = slot();
      const Matrix& to = slot();
      // XLA gives the result its argument's place wherever nobody else wants it as it was.
      if (from.data != to.data)
        std::memcpy(to.data, from.data,
                    static_cast<size_t>(from.batches * from.size()) *
                        (from.of == Matrix::Of::kHalves ? 2 : 4));
    }
    std::vector<int32_t> padded(static_cast<size_t>(next()));
    for (int32_t& slot : padded) slot = next();
    int64_t n = next();
    const Scratch scratch(static_cast<size_t>(next()));
    for (; n > 0; n--) {
      Matrix m;
      m.data = scratch.data() + next();
      m.rows = next();
      m.cols = next();
      slots_.push_back(m);
    }
    if (chips_ == 1) {
      operations();
    } else if (!Group<Chain>::together(run_, chip_, chips_, this, all_chips)) {
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                        "anyfold: chip " + std::to_string(chip_) + " waited " +
                            std::to_string(Group<Chain>::kPatience.count()) +
                            " seconds for the others");
    }
    for (int32_t slot : padded) clear_padding(slots_[static_cast<size_t>(slot)]);
    return ffi::Error::Success();
  }

 private:
  int32_t next() { return *at_++; }
  float next_float() {
    float value;
    std::memcpy(&value, at_++, sizeof value);
    return value;
  }
  const Matrix& slot() { return slots_[static_cast<size_t>(next())]; }

  Positions integers(int64_t slot) const {
    const Matrix& m = slots_[static_cast<size_t>(slot)];
    return {static_cast<const int32_t*>(m.data), m.size()};
  }
  Positions positions() { return integers(next()); }

  Tiles tiles() {
    const Matrix& m = slot();
    return {static_cast<const uint8_t*>(m.data), m.batches, m.rows};
  }

  // The rows that are real: of a chunk that is padded, the first ones.
  int64_t rows(const Matrix& m) const {
    return m.rows == counted_ && m.batches == 1 ? real_ : m.rows;
  }

  void clear_padding(const Matrix& m) const {
    if (m.rows != counted_) return;
    std::memset(m.row(real_), 0, static_cast<size_t>((m.rows - real_) * m.cols) * 4);
  }

  // What all chips do: each goes on to its next fold or join, and then they make that.
  static void all_chips(std::span<Chain* const> chips) {
    for (size_t i = 0; i < chips.size(); i++) chips[i]->next_chip_ = chips[(i + 1) % chips.size()];
    for (;;) {
      for (Chain* chip : chips) chip->operations();
      if (chips[0]->at_ == chips[0]->end_) return;
      meeting(chips);
    }
  }

  static void meeting(std::span<Chain* const> chips) {
    std::vector<Matrix> shown, made;
    std::vector<int64_t> held;
    int32_t kind = kFold;
    for (Chain* chip : chips) {
      kind = chip->next();
      shown.push_back(chip->slot());
      made.push_back(chip->slot());
      if (kind == kFold) continue;
      held.clear();
      for (size_t i = 0; i < chips.size(); i++) held.push_back(chip->next());
    }
    const int64_t count = chips[0]->rows(shown[0]);
    kind == kFold ? fold(shown, count, made) : join(shown, count, held, made);
  }

  // Up to the next fold or join, or the end.
  void operations() {
    while (at_ < end_ && *at_ != kFold && *at_ != kJoin) operation();
  }

  void operation() {
    switch (next()) {
      case kProducts: return multiply();
      case kEmbed: {
        const Positions ids = positions();
        const Tiles table = tiles();
        const int64_t first = *positions().first, held = next();
        const Matrix& out = slot();
        embed({ids.first, static_cast<size_t>(std::min(ids.count, rows(out)))}, first, held, table,
              out);
        return;
      }
      case kNorm: {
        const Matrix &x = slot(), &weight = slot();
        const float epsilon = next_float();
        norm(x, rows(x), weight, epsilon, slot());
        return;
      }
      case kTurn: {
        const Matrix &x = slot(), &cos = slot(), &sin = slot();
        const Positions at = positions();
        const int64_t heads = next();
        turn(x, rows(x), cos, sin, at, heads, slot());
        return;
      }
      case kWrite: {
        const Matrix &cache = slot(), &x = slot();
        write_rows(cache, x, rows(x), positions());
        return;
      }
      case kAttend: return attend_over();
      case kUnary: {
        const Unary kind = static_cast<Unary>(next());
        const Matrix& x = slot();
        const float number = next_float();
        unary(kind, x, rows(x), number, slot());
        return;
      }
      case kBinary: {
        const Binary kind = static_cast<Binary>(next());
        const Matrix &a = slot(), &b = slot(), &out = slot();
        binary(kind, a, b, rows(out), out);
        return;
      }
      case kArgmax: {
        const Matrix& x = slot();
        argmax(x, static_cast<int32_t*>(slot().data));
        return;
      }
      case kRow: {
        const Matrix& x = slot();
        const int64_t row = std::clamp<int64_t>(*positions().first - 1, 0, x.rows - 1);
        std::memcpy(slot().data, x.row(row), static_cast<size_t>(x.cols) * 4);
        return;
      }
    }
  }

  // Says which weights are read next: this chip's, or after its last product before a fold or join
  // the next chip's, which were to come when that one had done its last.
  void multiply() {
    const Matrix& x = slot();
    const int64_t gate = next(), count = next();
    std::vector<Product>& all = products_;
    all.clear();
    for (int64_t i = 0; i < count; i++) all.push_back({tiles(), nullptr, 0});
    for (int64_t i = 0; i < (gate < 0 ? count : 1); i++) {
      const Matrix& out = slot();
      all[i].out = out.row(0);
      all[i].outputs = out.cols;
    }
    const Binary kind = static_cast<Binary>(gate);
    products(x, rows(x), rows(x) < inexact_, all, gate < 0 ? nullptr : &kind);
    const bool meets = next() != 0;
    upcoming_ = {};
    upcoming_.side_by_side = next() != 0;
    for (int64_t i = 0, n = next(); i < n; i++) {
      const Tiles weight = tiles();
      if (i < static_cast<int64_t>(upcoming_.weights.size()))
        upcoming_.weights[i] = {reinterpret_cast<const char*>(weight.data), weight.bytes()};
    }
    if (rows(x) == 1) Pool::the().will_read(meets ? next_chip_->upcoming_ : upcoming_);
  }

  void attend_over() {
    const Matrix &q = slot(), &keys = slot(), &values = slot();
    const int64_t sinks = next();
    const Positions at = positions();
    Attention a = {};
    a.heads = next();
    a.groups = next();
    a.width = keys.cols / a.groups;
    a.value_width = values.cols / a.groups;
    a.scale = next_float();
    a.cap = next_float();
    a.last = next();
    a.chunk = next();
    attend(a, q, rows(q), keys, values, sinks < 0 ? nullptr : slots_[sinks].row(0), at, slot());
  }

  const int64_t run_;
  const int32_t* at_;
  const int32_t* const end_;
  std::vector<Matrix> slots_;
  std::vector<Product> products_;
  int64_t counted_ = 1, real_ = 1, inexact_ = 0, chips_ = 1, chip_ = 0;
  Upcoming upcoming_;
  const Chain* next_chip_ = this;
};

ffi::Error chain(ffi::RunId run, ffi::Span<const int32_t> code, ffi::RemainingArgs args,
                 ffi::RemainingRets rets) {
  return Chain(run.run_id, code, args, rets).call();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(anyfold_chain, chain,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Attr<ffi::Span<const int32_t>>("code")
                                  .RemainingArgs()
                                  .RemainingRets());

// Names of the levels that run here, best first, with spaces between.
extern "C" const char* anyfold_levels() {
  static const std::string names = [] {
    std::string all;
    for (const Level* level : kLevels)
      if (level->runs_here()) all.append(all.empty() ? "" : " ").append(level->name);
    return all;
  }();
  return names.c_str();
}

// Takes a level by name from now on; false, and nothing changes, where it does not run here.
extern "C" bool anyfold_use_level(const char* name) {
  for (const Level* level : kLevels)
    if (std::strcmp(level->name, name) == 0 && level->runs_here()) {
      g_level.store(level);
      return true;
    }
  return false;
}

// How many threads work on one call, or on those of all chips.
extern "C" void anyfold_set_threads(int threads) { Pool::the().set_threads(threads); }

}  // namespace anyfold
