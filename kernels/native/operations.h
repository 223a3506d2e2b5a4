// The operations of a chain, on matrices in memory.
#pragma once

#include <cstdint>
#include <span>

#include "level.h"

namespace anyfold {

// The level in use.
const Level& level();

// A matrix, or one for each sequence of a batch; of floats unless it says otherwise.
struct Matrix {
  enum class Of { kFloats, kHalves, kBytes, kIntegers };

  void* data = nullptr;
  Of of = Of::kFloats;
  int64_t batches = 1;
  int64_t rows = 0;  // of one
  int64_t cols = 0;

  int64_t size() const { return rows * cols; }  // of one
  float* row(int64_t i) const { return static_cast<float*>(data) + i * cols; }
  // One that all sequences share, or the one of a sequence.
  float* batch(int64_t i) const {
    return static_cast<float*>(data) + (batches == 1 ? 0 : i * size());
  }
  char* part(int64_t i) const {
    return static_cast<char*>(data) + (batches == 1 ? 0 : i * size() * (of == Of::kHalves ? 2 : 4));
  }
};

// Where rows stand: one after the other from a position, or each at a position of its own.
struct Positions {
  const int32_t* first;
  int64_t count;

  int64_t of(int64_t row) const { return count == 1 ? int64_t{*first} + row : first[row]; }
};

// A weight in tiles: [columns of tiles, blocks, kTileBytes].
struct Tiles {
  const uint8_t* data;
  int64_t columns;
  int64_t blocks;

  int64_t bytes() const { return columns * blocks * kTileBytes; }
};

// x times each weight, as exactly as float32 has it, or in 16 bits a value where that is enough.
// `gated`: two weights, whose products a Binary makes one of.
struct Product {
  Tiles tiles;
  float* out;
  int64_t outputs;
};
void products(const Matrix& x, int64_t rows, bool exact, std::span<const Product> products,
              const Binary* gated);

void embed(std::span<const int32_t> ids, int64_t first, int64_t held, const Tiles& tiles,
           const Matrix& out);
void norm(const Matrix& x, int64_t rows, const Matrix& weight, float epsilon, const Matrix& out);
void turn(const Matrix& x, int64_t rows, const Matrix& cos, const Matrix& sin, Positions positions,
          int64_t heads, const Matrix& out);
void write_rows(const Matrix& cache, const Matrix& x, int64_t rows, Positions positions);
// The sum of what chips have, and their columns side by side, `held` of each: to all of them.
void fold(std::span<const Matrix> chips, int64_t rows, std::span<const Matrix> out);
void join(std::span<const Matrix> chips, int64_t rows, std::span<const int64_t> held,
          std::span<const Matrix> out);
void argmax(const Matrix& x, int32_t* out);
void unary(Unary kind, const Matrix& x, int64_t rows, float number, const Matrix& out);
void binary(Binary kind, const Matrix& a, const Matrix& b, int64_t rows, const Matrix& out);
// `a` but for its keys and values; sinks are of all heads, or null.
void attend(Attention a, const Matrix& q, int64_t rows, const Matrix& keys, const Matrix& values,
            const float* sinks, Positions positions, const Matrix& out);

}  // namespace anyfold
