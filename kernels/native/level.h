// What a level of the CPU's instructions offers; each is one translation unit of its own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace anyfold {

// A tile is 32 outputs by 32 of the summed axis: 32 float16 scales, then w + 128 as
// [of the sum / 4: 8][outputs / 16: 2][output: 16][of the sum: 4].
constexpr int kSide = 32;
constexpr int kTileBytes = 64 + kSide * kSide;

// Rows of activations as integers of 16 or 24 bits a block of 32, times the block's scale, in
// whatever order a level's product reads them. 24 bits are as exact as float32; 16 leave 1.5e-5 of
// a block's largest value and take two thirds of the work. A value of 24 bits is 256 * (its high
// part, 16 bits) + (its low part, 8 bits); one of 16 is a high part alone.
constexpr float kLargest16 = 32512.0f;    // 127 * 2^8
constexpr float kLargest24 = 8323072.0f;  // 127 * 2^16

struct Inputs {
  int64_t rows;
  int64_t blocks;
  float share;       // a block with more of its row's sum of squares in one value has 24 bits
  uint8_t* lines;    // [rows, blocks, kLine]: high parts
  uint8_t* lows;     // [rows, blocks, kLine]: low parts, where there are some
  float* scales;     // [rows, blocks]: of high parts
  int32_t* offsets;  // [rows, blocks, 2]: what the 128 in the weights adds to the sums of high and
                     // of low parts, to be taken off
  bool* wide;        // [rows, blocks]: which have low parts

  static constexpr int kLine = 64;
  static constexpr size_t kBytes = 2 * kLine + 13;  // of a block

  bool all_wide() const { return share == 0; }
};

struct Attention {
  const void* keys;
  const void* values;
  bool half;  // float16 instead of float32
  int64_t heads;
  int64_t groups;
  int64_t width;        // of a key
  int64_t value_width;  // of a value
  float scale;
  float cap;      // 0: none
  int64_t last;   // 0: all
  int64_t chunk;  // 0: one

  // The rows that a position reads, counted from 0: [from, position).
  int64_t from(int64_t position) const {
    int64_t first = 0;
    if (last > 0 && position - last > first) first = position - last;
    if (chunk > 0 && (position - 1) / chunk * chunk > first) first = (position - 1) / chunk * chunk;
    return first;
  }
};

// A softmax over some of the positions: weights relative to the largest score, and their sum.
struct Part {
  float most;
  float total;
};

enum class Unary { kSilu, kSigmoid, kGelu, kScaled, kCapped };
enum class Binary { kPlus, kHadamard, kSwiglu, kGeglu };

struct Level {
  const char* name;
  bool (*runs_here)();
  // One row of `cols` floats, the rest of its last block zeros. A block that is not all finite has
  // NaN for a scale, and so has whatever is made of it.
  void (*quantise)(const float* x, int64_t cols, const Inputs& out, int64_t row);
  // Rows [first, first + rows) times one column of tiles; `out` is [rows, 32]. At most kMostRows.
  // With the first row, tiles are fetched so many bytes before they are read.
  void (*product)(const uint8_t* tiles, const Inputs& x, int64_t first, int rows, int64_t ahead,
                  float* out);
  void (*embed)(const uint8_t* tiles, int64_t blocks, int64_t output, int64_t cols, float* out);
  void (*rms_norm)(const float* x, const float* weight, int64_t width, float epsilon, float* out);
  void (*rope)(const float* x, const float* cos, const float* sin, int64_t heads, int64_t width,
               int64_t half, float* out);
  void (*unary)(Unary kind, const float* x, int64_t n, float number, float* out);
  void (*binary)(Binary kind, const float* a, const float* b, int64_t n, float* out);
  int64_t (*argmax)(const float* x, int64_t n);
  void (*to_half)(const float* x, int64_t n, uint16_t* out);
  // The heads of one group over rows [from, to) of the cache: `out`, not yet divided by the totals,
  // and a Part a head. `room` as `attention_room` says.
  void (*attend)(const Attention& a, const float* q, int64_t group, int64_t from, int64_t to,
                 float* room, float* out, Part* parts);
};

constexpr int kMostRows = 6;

// Floats of scratch that `attend` wants for so many positions.
inline size_t attention_room(const Attention& a, int64_t positions) {
  return static_cast<size_t>((a.heads / a.groups) * ((positions + 31) / 16 * 16));
}

extern const Level kPlain;
#if defined(__x86_64__)
extern const Level kAvx2;
extern const Level kAvx512;
#endif

}  // namespace anyfold
