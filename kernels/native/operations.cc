#include "operations.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "fetching.h"
#include "pool.h"

namespace anyfold {
namespace {

// Below so many bytes read, handing work to another thread costs more than it saves.
constexpr int64_t kAlone = 64 << 10;

// A block with a value of this share of its row's sum of squares has 24 bits: its other values
// would be left few of 16, and what 16 leave out of it would be the most of what they leave out.
constexpr float kWideShare = 0.02f;

// Fewer positions than this are not worth a piece of their own.
constexpr int64_t kPositionsAPiece = 256;

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

// Rows as integers, in the thread's scratch.
Inputs quantised(const Matrix& x, int64_t rows, int64_t blocks, float share) {
  const size_t count = static_cast<size_t>(rows * blocks);
  char* lines = room<0>(count * Inputs::kBytes);
  char* lows = lines + count * Inputs::kLine;
  char* scales = lows + count * Inputs::kLine;
  char* offsets = scales + count * 4;
  const Inputs in = {rows,
                     blocks,
                     share,
                     reinterpret_cast<uint8_t*>(lines),
                     reinterpret_cast<uint8_t*>(lows),
                     reinterpret_cast<float*>(scales),
                     reinterpret_cast<int32_t*>(offsets),
                     reinterpret_cast<bool*>(offsets + count * 8)};
  in_pieces(rows, rows * x.cols * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) level().quantise(x.row(i), x.cols, in, i);
  });
  return in;
}

// All rows a few at a time, as evenly as it goes: two at a time take nearly as long as four.
template <class Work>
void by_rows(int64_t rows, const Work& work) {
  const int64_t groups = (rows + kMostRows - 1) / kMostRows;
  for (int64_t group = 0, row = 0; group < groups; group++) {
    const int64_t end = rows * (group + 1) / groups;
    work(row, static_cast<int>(end - row));
    row = end;
  }
}

// One column of tiles, for all rows.
void column_of(const Product& p, const Inputs& in, int64_t ahead, int64_t column) {
  float part[kMostRows * kSide];
  const uint8_t* tiles = p.tiles.data + column * p.tiles.blocks * kTileBytes;
  const size_t width = static_cast<size_t>(std::min<int64_t>(kSide, p.outputs - column * kSide));
  by_rows(in.rows, [&](int64_t row, int count) {
    level().product(tiles, in, row, count, ahead, part);
    for (int r = 0; r < count; r++)
      std::memcpy(p.out + (row + r) * p.outputs + column * kSide, part + r * kSide, width * 4);
  });
}

void gated_column_of(std::span<const Product> two, const Inputs& in, Binary gate, int64_t ahead,
                     int64_t column) {
  float parts[2][kMostRows * kSide];
  const Product& p = two[0];
  const int64_t width = std::min<int64_t>(kSide, p.outputs - column * kSide);
  by_rows(in.rows, [&](int64_t row, int count) {
    for (int i = 0; i < 2; i++)
      level().product(two[i].tiles.data + column * two[i].tiles.blocks * kTileBytes, in, row,
                      count, ahead, parts[i]);
    for (int r = 0; r < count; r++)
      level().binary(gate, parts[0] + r * kSide, parts[1] + r * kSide, width,
                     p.out + (row + r) * p.outputs + column * kSide);
  });
}

int64_t columns_of(const Product& p) { return (p.outputs + kSide - 1) / kSide; }

}  // namespace

void products(const Matrix& x, int64_t rows, bool exact, std::span<const Product> all,
              const Binary* gated) {
  const int64_t blocks = all[0].tiles.blocks;
  const Inputs in = quantised(x, rows, blocks, exact ? 0 : kWideShare);
  int64_t columns = 0;
  for (const Product& p : gated ? all.first(1) : all) columns += columns_of(p);
  const int64_t bytes = columns * blocks * kTileBytes * (gated ? 2 : 1);
  const Fetched fetched(rows, bytes);
  const int64_t ahead = fetched.ahead();
  in_pieces(columns, bytes * std::min<int64_t>(rows, 64), 8, [&](int64_t from, int64_t to) {
    if (gated) {
      for (int64_t c = from; c < to; c++) gated_column_of(all, in, *gated, ahead, c);
      return;
    }
    int64_t before = 0;
    for (const Product& p : all) {
      const int64_t end = before + columns_of(p);
      for (int64_t c = std::max(from, before); c < std::min(to, end); c++)
        column_of(p, in, ahead, c - before);
      before = end;
    }
  });
}

void embed(std::span<const int32_t> ids, int64_t first, int64_t held, const Tiles& tiles,
           const Matrix& out) {
  const int64_t rows = static_cast<int64_t>(ids.size());
  in_pieces(rows, rows * out.cols * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const int64_t id = static_cast<int64_t>(ids[i]) - first;
      if (id >= 0 && id < held)
        level().embed(tiles.data, tiles.blocks, id, out.cols, out.row(i));
      else
        std::fill(out.row(i), out.row(i) + out.cols, 0.0f);
    }
  });
}

void norm(const Matrix& x, int64_t rows, const Matrix& weight, float epsilon, const Matrix& out) {
  const int64_t width = weight.cols, each = x.cols / width;
  in_pieces(rows * each, rows * x.cols * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++)
      level().rms_norm(x.row(0) + i * width, weight.row(0), width, epsilon,
                       out.row(0) + i * width);
  });
}

void turn(const Matrix& x, int64_t rows, const Matrix& cos, const Matrix& sin, Positions positions,
          int64_t heads, const Matrix& out) {
  in_pieces(rows, rows * x.cols * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const int64_t at = std::clamp<int64_t>(positions.of(i) - 1, 0, cos.rows - 1) * cos.cols;
      level().rope(x.row(i), cos.batch(i) + at, sin.batch(i) + at, heads, x.cols / heads, cos.cols,
                   out.row(i));
    }
  });
}

void write_rows(const Matrix& cache, const Matrix& x, int64_t rows, Positions positions) {
  for (int64_t i = 0; i < rows; i++) {
    const int64_t at = positions.of(i) - 1;
    if (at < 0 || at >= cache.rows) continue;
    char* to = cache.part(i);
    if (cache.of == Matrix::Of::kHalves)
      level().to_half(x.row(i), x.cols, reinterpret_cast<uint16_t*>(to) + at * cache.cols);
    else
      std::memcpy(reinterpret_cast<float*>(to) + at * cache.cols, x.row(i),
                  static_cast<size_t>(x.cols) * 4);
  }
}

void fold(std::span<const Matrix> chips, int64_t rows, std::span<const Matrix> out) {
  const int64_t cols = chips[0].cols, count = static_cast<int64_t>(chips.size());
  in_pieces(rows, rows * cols * count * 8, 4, [&](int64_t from, int64_t to) {
    const size_t bytes = static_cast<size_t>((to - from) * cols) * 4;
    float* sum = out[0].row(from);
    std::memcpy(sum, chips[0].row(from), bytes);
    for (const Matrix& chip : chips.subspan(1))
      level().binary(Binary::kPlus, sum, chip.row(from), (to - from) * cols, sum);
    for (const Matrix& copy : out.subspan(1)) std::memcpy(copy.row(from), sum, bytes);
  });
}

void join(std::span<const Matrix> chips, int64_t rows, std::span<const int64_t> held,
          std::span<const Matrix> out) {
  const int64_t cols = out[0].cols, count = static_cast<int64_t>(chips.size());
  in_pieces(rows, rows * cols * count * 4, 4, [&](int64_t from, int64_t to) {
    for (const Matrix& whole : out)
      for (int64_t row = from; row < to; row++) {
        float* at = whole.row(row);
        for (size_t i = 0; i < chips.size(); at += held[i++])
          std::memcpy(at, chips[i].row(row), static_cast<size_t>(held[i]) * 4);
      }
  });
}

void argmax(const Matrix& x, int32_t* out) {
  in_pieces(x.rows, x.rows * x.cols * 4, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++)
      out[i] = static_cast<int32_t>(level().argmax(x.row(i), x.cols));
  });
}

void unary(Unary kind, const Matrix& x, int64_t rows, float number, const Matrix& out) {
  in_pieces(rows, rows * x.cols * 4, 4, [&](int64_t from, int64_t to) {
    level().unary(kind, x.row(from), (to - from) * x.cols, number, out.row(from));
  });
}

void binary(Binary kind, const Matrix& a, const Matrix& b, int64_t rows, const Matrix& out) {
  in_pieces(rows, rows * out.cols * 4, 4, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++)
      level().binary(kind, a.row(a.rows == 1 ? 0 : i), b.row(b.rows == 1 ? 0 : i), out.cols,
                     out.row(i));
  });
}

namespace {

// Puts the softmax of some positions beside that of those before: both sides, outputs and sums,
// are brought to the larger of the two largest scores.
void merge(Part& so_far, float* out, const Part& more, const float* from, int64_t width) {
  if (more.total == 0) return;  // of no position; among NaN it is NaN
  const float most = std::max(so_far.most, more.most);
  const float ours = std::exp(so_far.most - most), theirs = std::exp(more.most - most);
  so_far = {most, so_far.total * ours + more.total * theirs};
  for (int64_t i = 0; i < width; i++) out[i] = out[i] * ours + from[i] * theirs;
}

void finish(Part part, const float* sink, float* out, int64_t width) {
  float factor = 1.0f / part.total;
  if (sink != nullptr) {
    const float most = std::max(part.most, *sink), ours = std::exp(part.most - most);
    factor = ours / (part.total * ours + std::exp(*sink - most));
  }
  for (int64_t i = 0; i < width; i++) out[i] *= factor;
}

}  // namespace

void attend(Attention a, const Matrix& q, int64_t rows, const Matrix& keys, const Matrix& values,
            const float* sinks, Positions positions, const Matrix& out) {
  if (rows == 0) return;
  a.half = keys.of == Matrix::Of::kHalves;
  const int64_t heads = a.heads / a.groups, result = heads * a.value_width;
  const auto end_of = [&](int64_t row) {
    return std::clamp<int64_t>(positions.of(row), 1, keys.rows);
  };
  int64_t most = 0, all = 0;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t n = end_of(row) - a.from(end_of(row));
    most = std::max(most, n);
    all += n;
  }
  // With few rows a long context is cut in pieces as well; the last step puts them together.
  const int64_t wanted = (2 * Pool::the().threads() + rows * a.groups - 1) / (rows * a.groups);
  const int64_t spans = std::clamp<int64_t>(std::min(most / kPositionsAPiece, wanted), 1, 64);
  const size_t scratch = attention_room(a, most);
  const size_t one = static_cast<size_t>(result + 2 * heads);
  float* partial = spans == 1 ? nullptr
                              : reinterpret_cast<float*>(room<2>(
                                    one * 4 * static_cast<size_t>(rows * a.groups * spans)));
  const int64_t bytes = all * (a.width + a.value_width) * a.heads * 4;
  const int64_t pieces = rows > 1 ? 16 : spans > 1 ? 8 : 2;
  in_pieces(rows * a.groups * spans, bytes, pieces, [&](int64_t first, int64_t last) {
    float* scores = reinterpret_cast<float*>(room<1>(scratch * 4));
    for (int64_t i = first; i < last; i++) {
      const int64_t span = i % spans, group = i / spans % a.groups, row = i / spans / a.groups;
      Attention here = a;
      here.keys = keys.part(row);
      here.values = values.part(row);
      const int64_t end = end_of(row), begin = a.from(end), each = (end - begin + spans - 1) / spans;
      const int64_t from = begin + span * each, to = std::min(end, from + each);
      float* to_out = partial ? partial + one * static_cast<size_t>(i)
                              : out.row(row) + group * result;
      Part own[256];
      std::unique_ptr<Part[]> many;
      Part* parts = own;
      if (partial)
        parts = reinterpret_cast<Part*>(to_out + result);
      else if (heads > 256)
        parts = (many = std::make_unique<Part[]>(static_cast<size_t>(heads))).get();
      if (from < to) {
        level().attend(here, q.row(row) + group * heads * a.width, group, from, to, scores, to_out,
                       parts);
      } else {
        std::fill(to_out, to_out + result, 0.0f);
        std::fill(parts, parts + heads, Part{-INFINITY, 0.0f});
      }
      if (partial) continue;
      for (int64_t h = 0; h < heads; h++) {
        const float* sink = sinks ? sinks + group * heads + h : nullptr;
        finish(parts[h], sink, to_out + h * a.value_width, a.value_width);
      }
    }
  });
  if (!partial) return;
  for (int64_t i = 0; i < rows * a.groups; i++) {
    float* to_out = out.row(i / a.groups) + i % a.groups * result;
    float* from = partial + one * static_cast<size_t>(i * spans);
    Part* parts = reinterpret_cast<Part*>(from + result);
    for (int64_t h = 0; h < heads; h++) {
      float* head = from + h * a.value_width;
      Part total = parts[h];
      for (int64_t span = 1; span < spans; span++) {
        const float* other = from + one * static_cast<size_t>(span);
        const Part* others = reinterpret_cast<const Part*>(other + result);
        merge(total, head, others[h], other + h * a.value_width, a.value_width);
      }
      finish(total, sinks ? sinks + i % a.groups * heads + h : nullptr, head, a.value_width);
      std::copy(head, head + a.value_width, to_out + h * a.value_width);
    }
  }
}

}  // namespace anyfold
