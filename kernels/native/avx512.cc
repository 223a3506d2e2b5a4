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
    const bool finite =
        most < INFINITY && _mm512_cmp_ps_mask(a[0], a[1], _CMP_UNORD_Q) == 0;
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
    out.scales[at] = finite ? most / kLargest16 : NAN;
    // What is not finite makes integers that mean nothing, and their sum may be too large.
    out.offsets[2 * at] = finite ? -128 * _mm512_reduce_add_epi32(high_sum) : 0;
    out.offsets[2 * at + 1] = finite ? -128 * _mm512_reduce_add_epi32(low_sum) : 0;
  }
}

inline __m512i four(const uint8_t* p) {
  int32_t bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return _mm512_set1_epi32(bytes);
}

// Planes [kFrom, kTo) of kRows rows, 32 bytes each, times a tile, which is read once for all. Where
// there is a `next` tile it is fetched on the way: in one burst it would hold up what comes after.
template <int kFrom, int kTo, int kPlanes, int kRows>
inline void planes(const uint8_t* tile, const uint8_t* const (&bytes)[kPlanes][kRows],
                   __m512i (&sums)[kPlanes][kRows][2], const uint8_t* next = nullptr) {
  const uint8_t* w = tile + 64;
  UNROLL
  for (int k = 0; k < 8; k++) {
    if (next != nullptr)
      for (int line = 0; line < 2; line++) __builtin_prefetch(next + 64 + 128 * k + 64 * line);
    const __m512i w0 = _mm512_loadu_si512(w + 128 * k), w1 = _mm512_loadu_si512(w + 128 * k + 64);
    UNROLL
    for (int p = kFrom; p < kTo; p++) {
      UNROLL
      for (int m = 0; m < kRows; m++) {
        const __m512i x = four(bytes[p][m] + 4 * k);
        sums[p][m][0] = _mm512_dpbusd_epi32(sums[p][m][0], w0, x);
        sums[p][m][1] = _mm512_dpbusd_epi32(sums[p][m][1], w1, x);
      }
    }
  }
}

inline void fill(__m512i (&sums)[2], int32_t value) {
  sums[0] = sums[1] = _mm512_set1_epi32(value);
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
  constexpr int kPlanes = kAllWide ? 3 : 2;
  constexpr bool kTogether = kRows * kPlanes <= 9;  // there are registers for all sums
  __m512 total[kRows][2];
  for (auto& t : total) t[0] = t[1] = _mm512_setzero_ps();
  for (int64_t b = 0; b < x.blocks; b++, tiles += kTileBytes) {
    const uint8_t* next = first == 0 && ahead > 0 ? tiles + ahead : nullptr;
    if (next != nullptr) __builtin_prefetch(next);
    if (first == 0 && ahead == 0) fetch(tiles);
    int64_t at[kRows];
    const uint8_t* bytes[kPlanes][kRows];
    __m512i sums[kPlanes][kRows][2];
    UNROLL
    for (int m = 0; m < kRows; m++) {
      at[m] = (first + m) * x.blocks + b;
      bytes[0][m] = x.lines + at[m] * Inputs::kLine;
      bytes[1][m] = bytes[0][m] + 32;
      fill(sums[0][m], 0);
      if constexpr (kAllWide) bytes[2][m] = x.lows + at[m] * Inputs::kLine;
      if constexpr (kAllWide && kTogether) fill(sums[2][m], x.offsets[2 * at[m] + 1]);
      if constexpr (kTogether) fill(sums[1][m], x.offsets[2 * at[m]]);
    }
    planes<0, kTogether ? kPlanes : 1>(tiles, bytes, sums, next);
    UNROLL
    for (int m = 0; m < kRows; m++) {
      if constexpr (!kTogether) fill(sums[1][m], x.offsets[2 * at[m]]);
      for (int i = 0; i < 2; i++)
        sums[1][m][i] = _mm512_add_epi32(_mm512_slli_epi32(sums[0][m][i], 8), sums[1][m][i]);
    }
    if constexpr (!kTogether) planes<1, 2>(tiles, bytes, sums);
    const __m256i* halves = reinterpret_cast<const __m256i*>(tiles);
    const __m512 scales[2] = {_mm512_cvtph_ps(_mm256_loadu_si256(halves)),
                              _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1))};
    UNROLL
    for (int m = 0; m < kRows; m++) add(sums[1][m], scales, x.scales[at[m]], total[m]);
    if constexpr (kAllWide && !kTogether) {
      UNROLL
      for (int m = 0; m < kRows; m++) fill(sums[2][m], x.offsets[2 * at[m] + 1]);
      planes<2, 3>(tiles, bytes, sums);
    }
    UNROLL
    for (int m = 0; m < kRows; m++) {
      if constexpr (kAllWide) {
        add(sums[2][m], scales, x.scales[at[m]] / 256, total[m]);
      } else if (x.wide[at[m]]) {
        const uint8_t* const low[1][1] = {{x.lows + at[m] * Inputs::kLine}};
        __m512i sum[1][1][2];
        fill(sum[0][0], x.offsets[2 * at[m] + 1]);
        planes<0, 1>(tiles, low, sum);
        add(sum[0][0], scales, x.scales[at[m]] / 256, total[m]);
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
