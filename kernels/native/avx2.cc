// The level of x86 CPUs since 2013: sixteen products of int16 an instruction.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "level.h"

#define LANES 8
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace anyfold {
namespace {

#define FROM_HALF
#define TO_HALF
typedef float Eight __attribute__((vector_size(32)));
inline Eight load_half(const uint16_t* p) {
  return (Eight)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

#include "vectors.h"

void to_half(const float* x, int64_t n, uint16_t* out) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; i++) out[i] = float_to_half(x[i]);
}

bool runs_here() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

// Sums of 32 outputs, eight a vector: pairs of sums of an output each, added at the end.
inline void part_sums(const uint8_t* tile, const uint8_t* x, int32_t offset, __m256i (&sums)[4]) {
  __m256i pairs[8];
  for (__m256i& p : pairs) p = _mm256_setzero_si256();
  for (int k = 0; k < 8; k++) {
    int64_t four;
    std::memcpy(&four, x + 8 * k, sizeof four);
    const __m256i values = _mm256_set1_epi64x(four);
    const uint8_t* w = tile + 64 + 128 * k;
    for (int j = 0; j < 8; j++) {
      const __m256i weights =
          _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 16 * j)));
      pairs[j] = _mm256_add_epi32(pairs[j], _mm256_madd_epi16(weights, values));
    }
  }
  for (int j = 0; j < 4; j++) {
    const __m256i crossed = _mm256_hadd_epi32(pairs[2 * j], pairs[2 * j + 1]);  // 01 45 23 67
    sums[j] = _mm256_add_epi32(_mm256_permute4x64_epi64(crossed, 0xd8), _mm256_set1_epi32(offset));
  }
}

// `out` is [32] and grows by one block's share.
inline void block_product(const uint8_t* tile, const Inputs& x, int64_t at, float* out) {
  const bool wide = x.wide[at];
  __m256i high[4], low[4];
  part_sums(tile, x.lines + at * Inputs::kLine, x.offsets[2 * at], high);
  if (wide) part_sums(tile, x.lows + at * Inputs::kLine, x.offsets[2 * at + 1], low);
  for (int j = 0; j < 4; j++) {
    const __m256 scales =
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + 16 * j)));
    const __m256 factor = _mm256_mul_ps(scales, _mm256_set1_ps(x.scales[at]));
    __m256 total = _mm256_cvtepi32_ps(high[j]);
    if (wide)
      total = _mm256_fmadd_ps(_mm256_cvtepi32_ps(low[j]), _mm256_set1_ps(1.0f / 256), total);
    _mm256_storeu_ps(out + 8 * j, _mm256_fmadd_ps(total, factor, _mm256_loadu_ps(out + 8 * j)));
  }
}

void product(const uint8_t* tiles, const Inputs& x, int64_t first, int rows, int64_t ahead,
             float* out) {
  std::fill(out, out + rows * kSide, 0.0f);
  for (int64_t b = 0; b < x.blocks; b++, tiles += kTileBytes) {
    if (first == 0) fetch(tiles + ahead);
    for (int row = 0; row < rows; row++)
      block_product(tiles, x, (first + row) * x.blocks + b, out + row * kSide);
  }
}

}  // namespace

const Level kAvx2 = {"avx2", runs_here, quantise, product, embed,   rms_norm,
                      rope,      unary,    binary,  argmax, to_half, attend};

}  // namespace anyfold

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
