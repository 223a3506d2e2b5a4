// The operations as XLA calls them, each on arrays that may have leading axes of batches.
//
// An operand has as many batches as the result, or one that all of them share.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "level.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

namespace anyfold {
namespace {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Bytes = ffi::Buffer<ffi::U8>;
using Integers = ffi::Buffer<ffi::S32>;
using Result = ffi::Result<Floats>;

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

const Level& level() { return *g_level.load(std::memory_order_relaxed); }

// Below so many bytes read, handing work to another thread costs more than it saves.
constexpr int64_t kAlone = 64 << 10;

// A matrix (or a number) a batch.
template <class Buffer>
struct Batches {
  decltype(std::declval<Buffer>().typed_data()) data;
  int64_t count = 1;
  int64_t size = 1;     // of one
  int64_t axis[3] = {};  // its last axes

  Batches(Buffer buffer, size_t axes) : data(buffer.typed_data()) {
    const auto sizes = buffer.dimensions();
    const size_t lead = sizes.size() < axes ? 0 : sizes.size() - axes;
    for (size_t i = 0; i < lead; i++) count *= sizes[i];
    for (size_t i = lead; i < sizes.size(); i++) size *= axis[i - lead] = sizes[i];
  }

  auto of(int64_t batch) const { return data + (count == 1 ? 0 : batch * size); }
  bool fits(int64_t batches) const { return count == 1 || count == batches; }
};

template <class Buffer>
Batches(Buffer, size_t) -> Batches<Buffer>;

ffi::Error wrong(const char* what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string("anyfold: ") + what);
}

// Scratch that a thread keeps, so that a step allocates nothing.
template <int kUse>
char* room(size_t bytes) {
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local size_t held = 0;
  if (bytes > held) {
    held = (bytes + bytes / 2 + 4095) / 64 * 64;
    memory.reset(static_cast<char*>(std::aligned_alloc(64, held)));
  }
  return memory.get();
}

// In a few contiguous pieces a thread, so that memory is read in long runs.
template <class Work>
void in_pieces(int64_t count, int64_t bytes, int64_t pieces_a_thread, const Work& work) {
  Pool& pool = Pool::the();
  const int64_t most = bytes < kAlone ? 1 : pool.threads() * pieces_a_thread;
  const int64_t each = std::max<int64_t>(1, (count + most - 1) / most);
  pool.run((count + each - 1) / each, [&](int64_t piece) {
    work(piece * each, std::min(count, (piece + 1) * each));
  });
}

// --- Products

Inputs inputs(int64_t rows, int64_t blocks) {
  const size_t count = static_cast<size_t>(rows * blocks);
  char* memory = room<0>(count * (kLine + 12));
  char* scales = memory + count * kLine;
  return {rows, blocks, reinterpret_cast<uint8_t*>(memory), reinterpret_cast<float*>(scales),
          reinterpret_cast<int32_t*>(scales + count * 4)};
}

void multiply(const float* x, int64_t rows, int64_t cols, const uint8_t* tiles, int64_t blocks,
              int64_t outputs, float* out) {
  const Level& now = level();
  const Inputs in = inputs(rows, blocks);
  in_pieces(rows, rows * cols * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; row++) now.quantise(x + row * cols, cols, in, row);
  });
  const int64_t columns = (outputs + kSide - 1) / kSide;
  const int64_t bytes = columns * blocks * kTileBytes;
  const int64_t pieces = rows == 1 ? 4 : 16;
  in_pieces(columns, bytes * std::min<int64_t>(rows, 64), pieces, [&](int64_t from, int64_t to) {
    float part[kMostRows * kSide];
    for (int64_t column = from; column < to; column++) {
      const uint8_t* tile = tiles + column * blocks * kTileBytes;
      const int64_t width = std::min<int64_t>(kSide, outputs - column * kSide);
      for (int64_t row = 0; row < rows; row += kMostRows) {
        const int count = static_cast<int>(std::min<int64_t>(kMostRows, rows - row));
        now.product(tile, in, row, count, part);
        for (int r = 0; r < count; r++)
          std::memcpy(out + (row + r) * outputs + column * kSide, part + r * kSide,
                      static_cast<size_t>(width) * 4);
      }
    }
  });
}

ffi::Error matmul(Floats x_, Bytes tiles_, Result out_) {
  const Batches x(x_, 2), out(*out_, 2);
  const Batches tiles(tiles_, 3);
  const int64_t rows = x.axis[0], cols = x.axis[1], blocks = tiles.axis[1];
  if (!x.fits(out.count) || !tiles.fits(out.count) || tiles.axis[2] != kTileBytes ||
      cols > blocks * kSide || out.axis[1] > tiles.axis[0] * kSide || out.axis[0] != rows)
    return wrong("a product of shapes that do not fit");
  if (tiles.count == 1 && x.count == out.count) {
    multiply(x.data, out.count * rows, cols, tiles.data, blocks, out.axis[1], out.data);
  } else {
    for (int64_t b = 0; b < out.count; b++)
      multiply(x.of(b), rows, cols, tiles.of(b), blocks, out.axis[1], out.of(b));
  }
  return ffi::Error::Success();
}

ffi::Error embedding(Integers ids_, Bytes tiles_, Integers first_, int32_t held, Result out_) {
  const Batches ids(ids_, 1), first(first_, 0);
  const Batches tiles(tiles_, 3);
  const Batches out(*out_, 2);
  if (!ids.fits(out.count) || !first.fits(out.count) || !tiles.fits(out.count) ||
      held > tiles.axis[0] * kSide || out.axis[1] > tiles.axis[1] * kSide)
    return wrong("an embedding of shapes that do not fit");
  for (int64_t b = 0; b < out.count; b++) {
    for (int64_t row = 0; row < out.axis[0]; row++) {
      const int64_t id = static_cast<int64_t>(ids.of(b)[row]) - *first.of(b);
      float* to = out.of(b) + row * out.axis[1];
      if (id >= 0 && id < held)
        level().embed(tiles.of(b), tiles.axis[1], id, out.axis[1], to);
      else
        std::fill(to, to + out.axis[1], 0.0f);
    }
  }
  return ffi::Error::Success();
}

// --- Rows

ffi::Error rms_norm(Floats x_, Floats weight_, float epsilon, Result out_) {
  const Batches x(x_, 2), weight(weight_, 2), out(*out_, 2);
  const int64_t width = weight.size;
  if (!x.fits(out.count) || !weight.fits(out.count) || width == 0 || x.size % width != 0)
    return wrong("a norm of shapes that do not fit");
  const int64_t each = x.size / width;
  in_pieces(out.count * each, out.count * x.size * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const int64_t b = i / each, at = i % each * width;
      level().rms_norm(x.of(b) + at, weight.of(b), width, epsilon, out.of(b) + at);
    }
  });
  return ffi::Error::Success();
}

ffi::Error rope(Floats x_, Floats cos_, Floats sin_, Integers position_, int32_t heads,
                Result out_) {
  const Batches x(x_, 2), cos(cos_, 2), sin(sin_, 2), out(*out_, 2);
  const Batches position(position_, 0);
  const int64_t rows = out.axis[0], cols = out.axis[1], half = cos.axis[1], table = cos.axis[0];
  if (!x.fits(out.count) || !cos.fits(out.count) || !sin.fits(out.count) ||
      !position.fits(out.count) || cos.size != sin.size || table == 0 || cols % heads != 0 ||
      2 * half > cols / heads)
    return wrong("a rotation of shapes that do not fit");
  in_pieces(out.count * rows, out.count * x.size * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const int64_t b = i / rows, row = i % rows;
      const int64_t at =
          std::clamp<int64_t>(static_cast<int64_t>(*position.of(b)) - 1 + row, 0, table - 1) * half;
      level().rope(x.of(b) + row * cols, cos.of(b) + at, sin.of(b) + at, heads, cols / heads, half,
                   out.of(b) + row * cols);
    }
  });
  return ffi::Error::Success();
}

ffi::Error swiglu(Floats gate_, Floats up_, Result out_) {
  const Batches gate(gate_, 2), up(up_, 2), out(*out_, 2);
  if (!gate.fits(out.count) || !up.fits(out.count) || gate.size != out.size || up.size != out.size)
    return wrong("a swiglu of shapes that do not fit");
  const int64_t rows = out.axis[0], cols = out.axis[1];
  in_pieces(out.count * rows, out.count * out.size * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const int64_t b = i / rows, at = i % rows * cols;
      level().swiglu(gate.of(b) + at, up.of(b) + at, cols, out.of(b) + at);
    }
  });
  return ffi::Error::Success();
}

// Either side may be one row, added to all of the other's.
ffi::Error plus(Floats a_, Floats b_, Result out_) {
  const Batches a(a_, 2), b(b_, 2), out(*out_, 2);
  const int64_t rows = out.axis[0], cols = out.axis[1];
  if (!a.fits(out.count) || !b.fits(out.count) || a.axis[1] != cols || b.axis[1] != cols)
    return wrong("a sum of shapes that do not fit");
  const int64_t a_step = a.axis[0] == 1 ? 0 : cols, b_step = b.axis[0] == 1 ? 0 : cols;
  in_pieces(out.count * rows, out.count * out.size * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const int64_t n = i / rows, row = i % rows;
      level().plus(a.of(n) + row * a_step, b.of(n) + row * b_step, cols, out.of(n) + row * cols);
    }
  });
  return ffi::Error::Success();
}

// --- Caches

ffi::Error set_rows(Floats matrix_, Floats x_, Integers row_, Integers count_, Result out_) {
  const Batches matrix(matrix_, 2), x(x_, 2), out(*out_, 2);
  const Batches row(row_, 0), count(count_, 0);
  const int64_t rows = out.axis[0], cols = out.axis[1];
  if (matrix.count != out.count || !x.fits(out.count) || !row.fits(out.count) ||
      !count.fits(out.count) || x.axis[1] != cols)
    return wrong("rows that do not fit");
  // XLA gives the matrix its own place wherever nobody else wants it as it was.
  if (matrix.data != out.data)
    std::memcpy(out.data, matrix.data, static_cast<size_t>(out.count * out.size) * 4);
  for (int64_t b = 0; b < out.count; b++) {
    const int64_t at = static_cast<int64_t>(*row.of(b)) - 1;
    const int64_t real = std::min<int64_t>(*count.of(b), x.axis[0]);
    for (int64_t i = 0; i < real; i++)
      if (at + i >= 0 && at + i < rows)
        std::memcpy(out.of(b) + (at + i) * cols, x.of(b) + i * cols,
                    static_cast<size_t>(cols) * 4);
  }
  return ffi::Error::Success();
}

// --- Attention

// Row j stands at `position + j`; one that is not real reads what the last real one does.
ffi::Error attention(Floats q_, Floats keys_, Floats values_, Floats sinks_, Integers position_,
                     Integers count_, int32_t heads, int32_t groups, float scale, float cap,
                     int32_t last, int32_t chunk, bool with_sinks, Result out_) {
  const Batches q(q_, 2), keys(keys_, 2), values(values_, 2), sinks(sinks_, 2), out(*out_, 2);
  const Batches position(position_, 0), count(count_, 0);
  const int64_t batches = out.count, rows = q.axis[0], written = keys.axis[0];
  if (!q.fits(batches) || !keys.fits(batches) || !values.fits(batches) || !sinks.fits(batches) ||
      !position.fits(batches) || !count.fits(batches) || heads % groups != 0 ||
      keys.axis[1] % groups != 0 || values.axis[1] % groups != 0 ||
      q.axis[1] != keys.axis[1] / groups * heads || out.axis[1] != values.axis[1] / groups * heads ||
      (with_sinks && sinks.size != heads) || values.axis[0] != written || written == 0)
    return wrong("an attention of shapes that do not fit");
  Attention a = {nullptr, nullptr, nullptr, heads, groups, keys.axis[1] / groups,
                 values.axis[1] / groups, scale, cap, last, chunk};
  int64_t most = 0, all = 0;
  const auto place = [&](int64_t b, int64_t row) {
    const int64_t real = std::max<int64_t>(0, std::min(row, int64_t{*count.of(b)} - 1));
    return std::clamp<int64_t>(*position.of(b) + real, 1, written);
  };
  for (int64_t b = 0; b < batches; b++)
    for (int64_t row = 0; row < rows; row++) {
      const int64_t at = place(b, row), n = at - a.from(at);
      most = std::max(most, n);
      all += n;
    }
  const size_t floats = attention_room(a, most);
  const int64_t bytes = all * (a.width + a.value_width) * heads * 4;
  // Later rows read more than early ones: many pieces even that out.
  in_pieces(batches * groups * rows, bytes, rows > 1 ? 16 : 2, [&](int64_t from, int64_t to) {
    float* scratch = reinterpret_cast<float*>(room<1>(floats * 4));
    for (int64_t i = from; i < to; i++) {
      const int64_t b = i / rows / groups, group = i / rows % groups, row = i % rows;
      Attention here = a;
      here.keys = keys.of(b);
      here.values = values.of(b);
      here.sinks = with_sinks ? sinks.of(b) : nullptr;
      level().attend(here, q.of(b) + row * q.axis[1], group, place(b, row), scratch,
                     out.of(b) + row * out.axis[1]);
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(anyfold_matmul, matmul,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Bytes>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    anyfold_embedding, embedding,
    ffi::Ffi::Bind().Arg<Integers>().Arg<Bytes>().Arg<Integers>().Attr<int32_t>("held").Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    anyfold_rms_norm, rms_norm,
    ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Attr<float>("epsilon").Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(anyfold_rope, rope,
                              ffi::Ffi::Bind()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Attr<int32_t>("heads")
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(anyfold_swiglu, swiglu,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(anyfold_plus, plus,
                              ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    anyfold_set_rows, set_rows,
    ffi::Ffi::Bind().Arg<Floats>().Arg<Floats>().Arg<Integers>().Arg<Integers>().Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(anyfold_attention, attention,
                              ffi::Ffi::Bind()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Attr<int32_t>("heads")
                                  .Attr<int32_t>("groups")
                                  .Attr<float>("scale")
                                  .Attr<float>("cap")
                                  .Attr<int32_t>("last")
                                  .Attr<int32_t>("chunk")
                                  .Attr<bool>("with_sinks")
                                  .Ret<Floats>());

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

extern "C" void anyfold_set_threads(int count) { Pool::the().set_threads(count); }

}  // namespace anyfold
