// The level of x86 CPUs with AVX-512 VNNI: 64 products of bytes an instruction.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "level.h"

#define LANES 16
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), \
    apply_to = function)
#define UNROLL _Pragma("unroll")
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#define UNROLL _Pragma("GCC unroll 8")
#endif

namespace anyfold {
namespace {

#define FROM_HALF
#define TO_HALF
typedef float Sixteen __attribute__((vector_size(64)));
inline Sixteen load_half(const uint16_t* p) {
  return (Sixteen)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

#define quantise quantise_in_order
#include "vectors.h"
#undef quantise

void to_half(const float* x, int64_t n, uint16_t* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; i++) out[i] = float_to_half(x[i]);
}

bool runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

inline __m512 half_block(const float* x, int64_t n) {
  if (n >= 16) return _mm512_loadu_ps(x);
  return n <= 0 ? _mm512_setzero_ps()
                : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), x);
}

// Takes the low byte off, to the nearest: v becomes what is left over 256.
inline __m512i low_byte(__m512i& v) {
  const __m512i whole = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_set1_epi32(128)), 8);
  const __m512i low = _mm512_sub_epi32(v, _mm512_slli_epi32(whole, 8));
  v = whole;
  return low;
}

// A line holds the high bytes of the high parts, 32 of them, then their low bytes.
void quantise(const float* x, int64_t cols, const Inputs& out, int64_t row) {
  const float from = wide_from(x, cols, out.share);
  for (int64_t b = 0; b < out.blocks; b++) {
    const int64_t left = cols - b * kSide, at = row * out.blocks + b;
    const __m512 a[2] = {half_block(x + b * kSide, left), half_block(x + b * kSide + 16, left - 16)};
    const float most =
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a[0]), _mm512_abs_ps(a[1])));
    const bool wide = out.wide[at] = most > from;
    const __m512 factor =
        _mm512_set1_ps(most > 0 ? (wide ? kLargest24 : kLargest16) / most : 0.0f);
    __m512i high_sum = _mm512_setzero_si512(), low_sum = high_sum;
    for (int i = 0; i < 2; i++) {
      __m128i* line = reinterpret_cast<__m128i*>(out.lines + at * Inputs::kLine) + i;
      __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(a[i], factor));
      if (wide) {
        const __m512i low = low_byte(v);
        low_sum = _mm512_add_epi32(low_sum, low);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out.lows + at * Inputs::kLine) + i,
                         _mm512_cvtepi32_epi8(low));
      }
      high_sum = _mm512_add_epi32(high_sum, v);
      _mm_storeu_si128(line + 2, _mm512_cvtepi32_epi8(low_byte(v)));
      _mm_storeu_si128(line, _mm512_cvtepi32_epi8(v));
    }
    out.scales[at] = most / kLargest16;
    out.offsets[2 * at] = -128 * _mm512_reduce_add_epi32(high_sum);
    out.offsets[2 * at + 1] = -128 * _mm512_reduce_add_epi32(low_sum);
  }
}

inline __m512i four(const uint8_t* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return _mm512_set1_epi32(bytes);
}

// 32 bytes each of kRows rows times a tile.
template <int kRows>
inline void plane(const uint8_t* tile, const uint8_t* const* bytes, __m512i (&sums)[kRows][2]) {
  const uint8_t* w = tile + 64;
  UNROLL
  for (int k = 0; k < 8; k++) {
    const __m512i w0 = _mm512_loadu_si512(w + 128 * k), w1 = _mm512_loadu_si512(w + 128 * k + 64);
    UNROLL
    for (int m = 0; m < kRows; m++) {
      const __m512i x = four(bytes[m] + 4 * k);
      sums[m][0] = _mm512_dpbusd_epi32(sums[m][0], w0, x);
      sums[m][1] = _mm512_dpbusd_epi32(sums[m][1], w1, x);
    }
  }
}

// `out` grows by sums of integers times the weights' scales times the activations'.
inline void add(const __m512i (&sums)[2], const __m512 (&scales)[2], float scale,
                __m512 (&total)[2]) {
  const __m512 factor = _mm512_set1_ps(scale);
  for (int i = 0; i < 2; i++)
    total[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i]), _mm512_mul_ps(scales[i], factor),
                               total[i]);
}

// kAllWide: every block of these rows has low parts; otherwise few have.
template <int kRows, bool kAllWide>
void product_of(const uint8_t* tiles, const Inputs& x, int64_t first, int64_t ahead, float* out) {
  __m512 total[kRows][2];
  for (auto& t : total) t[0] = t[1] = _mm512_setzero_ps();
  for (int64_t b = 0; b < x.blocks; b++, tiles += kTileBytes) {
    if (first == 0) fetch(tiles + ahead);
    int64_t at[kRows];
    const uint8_t* bytes[kRows];
    __m512i sums[kRows][2];
    UNROLL
    for (int m = 0; m < kRows; m++) {
      at[m] = (first + m) * x.blocks + b;
      bytes[m] = x.lines + at[m] * Inputs::kLine;
      sums[m][0] = sums[m][1] = _mm512_setzero_si512();
    }
    plane<kRows>(tiles, bytes, sums);
    UNROLL
    for (int m = 0; m < kRows; m++) {
      const __m512i offset = _mm512_set1_epi32(x.offsets[2 * at[m]]);
      for (int i = 0; i < 2; i++)
        sums[m][i] = _mm512_add_epi32(_mm512_slli_epi32(sums[m][i], 8), offset);
      bytes[m] += 32;
    }
    plane<kRows>(tiles, bytes, sums);
    const __m256i* halves = reinterpret_cast<const __m256i*>(tiles);
    const __m512 scales[2] = {_mm512_cvtph_ps(_mm256_loadu_si256(halves)),
                              _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))};
    UNROLL
    for (int m = 0; m < kRows; m++) add(sums[m], scales, x.scales[at[m]], total[m]);
    if constexpr (kAllWide) {
      UNROLL
      for (int m = 0; m < kRows; m++) {
        sums[m][0] = sums[m][1] = _mm512_set1_epi32(x.offsets[2 * at[m] + 1]);
        bytes[m] = x.lows + at[m] * Inputs::kLine;
      }
      plane<kRows>(tiles, bytes, sums);
      UNROLL
      for (int m = 0; m < kRows; m++) add(sums[m], scales, x.scales[at[m]] / 256, total[m]);
    } else {
      UNROLL
      for (int m = 0; m < kRows; m++) {
        if (!x.wide[at[m]]) continue;
        const uint8_t* const low[1] = {x.lows + at[m] * Inputs::kLine};
        __m512i sum[1][2];
        sum[0][0] = sum[0][1] = _mm512_set1_epi32(x.offsets[2 * at[m] + 1]);
        plane<1>(tiles, low, sum);
        add(sum[0], scales, x.scales[at[m]] / 256, total[m]);
      }
    }
  }
  for (int m = 0; m < kRows; m++) {
    _mm512_storeu_ps(out + m * kSide, total[m][0]);
    _mm512_storeu_ps(out + m * kSide + 16, total[m][1]);
  }
}

template <bool kAllWide>
void product_of(const uint8_t* tiles, const Inputs& x, int64_t first, int rows, int64_t ahead,
                float* out) {
  static_assert(kMostRows == 6);
  switch (rows) {
    case 1: return product_of<1, kAllWide>(tiles, x, first, ahead, out);
    case 2: return product_of<2, kAllWide>(tiles, x, first, ahead, out);
    case 3: return product_of<3, kAllWide>(tiles, x, first, ahead, out);
    case 4: return product_of<4, kAllWide>(tiles, x, first, ahead, out);
    case 5: return product_of<5, kAllWide>(tiles, x, first, ahead, out);
    case 6: return product_of<6, kAllWide>(tiles, x, first, ahead, out);
  }
}

void product(const uint8_t* tiles, const Inputs& x, int64_t first, int rows, int64_t ahead,
             float* out) {
  return x.all_wide() ? product_of<true>(tiles, x, first, rows, ahead, out)
                      : product_of<false>(tiles, x, first, rows, ahead, out);
}

}  // namespace

const Level kAvx512 = {"avx512", runs_here, quantise, product, embed,   rms_norm,
                        rope,      unary,    binary,  argmax, to_half, attend};

}  // namespace anyfold

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
