// Vectors of LANES floats, and what all levels compute alike with them. A level defines LANES and
// TO_HALF and FROM_HALF where it has such instructions, opens its namespace, and includes this.

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

inline Vector load(const float* p) {
  Vector v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vector load_first(const float* p, int64_t n) {
  Vector v = {};
  std::memcpy(&v, p, 4 * static_cast<size_t>(n));
  return v;
}

inline void store(float* p, Vector v) { std::memcpy(p, &v, sizeof v); }

inline void store_first(float* p, Vector v, int64_t n) {
  std::memcpy(p, &v, 4 * static_cast<size_t>(n));
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent == 0) {
    const float tiny = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return sign != 0 ? -tiny : tiny;
  }
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// To the nearest, ties to even; what float16 cannot hold becomes infinite.
[[maybe_unused]] inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000;
  const float size = std::fabs(value);
  if (size != size) return static_cast<uint16_t>(sign | 0x7e00);
  if (size >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  if (size < 6.103515625e-5f)  // 2^-14: counted in steps of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(size * 16777216.0f)));
  bits &= 0x7fffffff;
  bits += 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((bits >> 13) - (112u << 10)));
}

#ifndef FROM_HALF
inline Vector load_half(const uint16_t* p) {
  Vector v;
  for (int i = 0; i < LANES; i++) v[i] = half_to_float(p[i]);
  return v;
}
#endif

// What a cache holds, as floats; a level says how it reads LANES float16.
inline Vector load_as(const float* p) { return load(p); }
inline Vector load_as(const uint16_t* p) { return load_half(p); }

inline Vector load_first_as(const float* p, int64_t n) { return load_first(p, n); }
inline Vector load_first_as(const uint16_t* p, int64_t n) {
  uint16_t padded[LANES] = {};
  std::memcpy(padded, p, 2 * static_cast<size_t>(n));
  return load_half(padded);
}

inline Vector all(float x) { return x - Vector{}; }

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

inline float sum(Vector v) {
  float parts[LANES];
  store(parts, v);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

inline float largest(Vector v) {
  float found = v[0];
  for (int i = 1; i < LANES; i++) found = v[i] > found ? v[i] : found;
  return found;
}

// e^x to 2e-7 of itself (Cephes); arguments are kept from -87 to 88, and NaN stays what it is.
inline Vector exponential(Vector x) {
  x = x < all(-87.0f) ? all(-87.0f) : x;
  x = x > all(88.0f) ? all(88.0f) : x;
  const Vector magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vector n = (x * 1.44269504f + magic) - magic;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
  Vector two_to_n;
  std::memcpy(&two_to_n, &power, sizeof power);
  return p * two_to_n;
}

inline Vector silu(Vector x) { return x / (1.0f + exponential(-x)); }

// tanh(u) = 1 - 2 / (e^2u + 1), so 0.5 * (1 + tanh(u)) is a sigmoid of 2u.
inline Vector gelu(Vector x) {
  const Vector u = 0.7978845608f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-2.0f * u));
}

inline Vector capped(Vector x, float cap) {
  const Vector e = exponential(x * (2.0f / cap));
  return cap * (1.0f - 2.0f / (e + 1.0f));
}

// --- Rows

void rms_norm(const float* x, const float* weight, int64_t width, float epsilon, float* out) {
  Vector squares[2] = {};
  int64_t i = 0;
  for (; i + 2 * LANES <= width; i += 2 * LANES) {
    const Vector a = load(x + i), b = load(x + i + LANES);
    squares[0] += a * a;
    squares[1] += b * b;
  }
  for (; i < width; i += LANES) {
    const Vector a = load_first(x + i, std::min<int64_t>(LANES, width - i));
    squares[0] += a * a;
  }
  const float mean = sum(squares[0] + squares[1]) / static_cast<float>(width);
  const float factor = 1.0f / std::sqrt(mean + epsilon);
  for (int64_t j = 0; j < width; j++) out[j] = x[j] * factor * weight[j];
}

void rope(const float* x, const float* cos, const float* sin, int64_t heads, int64_t width,
          int64_t half, float* out) {
  for (int64_t head = 0; head < heads; head++, x += width, out += width) {
    for (int64_t j = 0; j < half; j++) {
      const float low = x[j], high = x[j + half];
      out[j] = low * cos[j] - high * sin[j];
      out[j + half] = high * cos[j] + low * sin[j];
    }
    std::memcpy(out + 2 * half, x + 2 * half, 4 * static_cast<size_t>(width - 2 * half));
  }
}

template <class Function>
inline void each(const float* x, int64_t n, float* out, const Function& function) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, function(load(x + i)));
  if (i < n) store_first(out + i, function(load_first(x + i, n - i)), n - i);
}

template <class Function>
inline void each(const float* a, const float* b, int64_t n, float* out, const Function& function) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, function(load(a + i), load(b + i)));
  if (i == n) return;
  store_first(out + i, function(load_first(a + i, n - i), load_first(b + i, n - i)), n - i);
}

void unary(Unary kind, const float* x, int64_t n, float number, float* out) {
  switch (kind) {
    case Unary::kSilu: return each(x, n, out, [](Vector v) { return silu(v); });
    case Unary::kSigmoid: return each(x, n, out, [](Vector v) { return 1.0f / (1.0f + exponential(-v)); });
    case Unary::kGelu: return each(x, n, out, [](Vector v) { return gelu(v); });
    case Unary::kScaled: return each(x, n, out, [=](Vector v) { return v * number; });
    case Unary::kCapped: return each(x, n, out, [=](Vector v) { return capped(v, number); });
  }
}

void binary(Binary kind, const float* a, const float* b, int64_t n, float* out) {
  switch (kind) {
    case Binary::kPlus: return each(a, b, n, out, [](Vector v, Vector w) { return v + w; });
    case Binary::kHadamard: return each(a, b, n, out, [](Vector v, Vector w) { return v * w; });
    case Binary::kSwiglu: return each(a, b, n, out, [](Vector v, Vector w) { return silu(v) * w; });
    case Binary::kGeglu: return each(a, b, n, out, [](Vector v, Vector w) { return gelu(v) * w; });
  }
}

#ifndef TO_HALF
void to_half(const float* x, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; i++) out[i] = float_to_half(x[i]);
}
#endif

// What the largest value of a block has to exceed for the block to have 24 bits.
inline float wide_from(const float* x, int64_t n, float share) {
  if (share == 0) return -1;
  Vector squares = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const Vector v = i + LANES <= n ? load(x + i) : load_first(x + i, n - i);
    squares += v * v;
  }
  const float energy = sum(squares);
  return std::isfinite(energy) ? std::sqrt(share * energy) : -1;
}

// Where the largest is, the first of equals; where the first NaN is, if there is one.
int64_t argmax(const float* x, int64_t n) {
  Vector most = all(-INFINITY);
  Integers lost = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Vector v = load(x + i);
    most = larger(v, most);
    lost |= v != v;
  }
  int32_t any = 0;
  for (int lane = 0; lane < LANES; lane++) any |= lost[lane];
  for (int64_t j = i; j < n; j++) any |= x[j] != x[j];
  if (any != 0) return std::find_if(x, x + n, [](float v) { return v != v; }) - x;
  float top = largest(most);
  for (; i < n; i++) top = x[i] > top ? x[i] : top;
  const Vector tops = all(top);
  for (i = 0; i + LANES <= n; i += LANES) {
    const Integers here = load(x + i) == tops;
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= here[lane];
    if (found != 0) break;
  }
  for (; i < n; i++)
    if (x[i] == top) return i;
  return 0;
}

// --- Attention

// Sums of the lanes of LANES vectors at once: lane i of the result is the sum of v[i].
template <int kHalf, size_t... kLane>
inline Vector paired(Vector a, Vector b, std::index_sequence<kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, ((kLane & kHalf) ? LANES + kLane : kLane)...) +
         __builtin_shufflevector(a, b, ((kLane & kHalf) ? LANES + (kLane ^ kHalf) : kLane ^ kHalf)...);
#else
  const Integers own = {((kLane & kHalf) ? int(LANES + kLane) : int(kLane))...};
  const Integers other = {
      ((kLane & kHalf) ? int(LANES + (kLane ^ kHalf)) : int(kLane ^ kHalf))...};
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
#endif
}

template <int kCount>
inline Vector sums(const Vector* v) {
  if constexpr (kCount == 1) {
    return v[0];
  } else {
    constexpr int kHalf = kCount / 2;
    Vector fewer[kHalf];
    for (int i = 0; i < kHalf; i++)
      fewer[i] = paired<kHalf>(v[i], v[i + kHalf], std::make_index_sequence<LANES>());
    return sums<kHalf>(fewer);
  }
}

// How far ahead of the row at hand a cache is fetched: its rows lie too far apart for the CPU to
// guess the next one.
constexpr int64_t kRowsAhead = 2 * LANES;

template <class Cached>
inline void fetch_row(const Cached* row, int64_t width) {
  for (int64_t at = 0; at < width; at += 64 / static_cast<int64_t>(sizeof(Cached)))
    __builtin_prefetch(row + at);
}

// The lanes of a row of keys times each head's queries, before they are added up.
template <int kHeads, int kVectors, class Cached>
inline void dot_lanes(const float* q, int64_t width, const Cached* k, Vector* out) {
  Vector total[kHeads] = {};
  const int64_t whole = kVectors > 0 ? kVectors * LANES : width / LANES * LANES;
  for (int64_t d = 0; d < whole; d += LANES) {
    const Vector key = load_as(k + d);
    for (int h = 0; h < kHeads; h++) total[h] += load(q + h * width + d) * key;
  }
  if (kVectors == 0 && whole < width) {
    const Vector key = load_first_as(k + whole, width - whole);
    for (int h = 0; h < kHeads; h++)
      total[h] += load_first(q + h * width + whole, width - whole) * key;
  }
  for (int h = 0; h < kHeads; h++) out[h * LANES] = total[h];
}

// The scores of some heads in rows [from, to), in whole vectors: lanes past the end are -inf. A
// row of keys is read once for all of them.
template <int kHeads, int kVectors, class Cached>
void score(const Attention& a, const float* q, const Cached* keys, int64_t from, int64_t to,
           float* out, int64_t stride) {
  const int64_t cols = a.groups * a.width;
  for (int64_t t = from; t < to; t += LANES) {
    Vector dots[kHeads][LANES];
    for (int64_t i = 0; i < LANES; i++) {
      fetch_row(keys + std::min(t + i + kRowsAhead, to - 1) * cols, a.width);
      dot_lanes<kHeads, kVectors>(q, a.width, keys + std::min(t + i, to - 1) * cols, &dots[0][i]);
    }
    for (int h = 0; h < kHeads; h++) {
      Vector s = sums<LANES>(dots[h]) * a.scale;
      if (a.cap > 0) s = capped(s, a.cap);
      for (int64_t i = to - t; i < LANES; i++) s[i] = -INFINITY;
      store(out + h * stride + (t - from), s);
    }
  }
}

template <int kHeads, class Cached>
void scored(const Attention& a, const float* q, const Cached* keys, int64_t from, int64_t to,
            float* out, int64_t stride) {
  const auto some = a.width == 4 * LANES   ? score<kHeads, 4, Cached>
                    : a.width == 8 * LANES ? score<kHeads, 8, Cached>
                                           : score<kHeads, 0, Cached>;
  some(a, q, keys, from, to, out, stride);
}

// Turns scores into weights that are still to be divided by their total.
inline Part weigh(float* scores, int64_t n) {
  Vector most = all(-INFINITY);
  for (int64_t i = 0; i < n; i += LANES) most = larger(load(scores + i), most);
  const float top = largest(most);
  Vector total = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const Vector e = exponential(load(scores + i) - top);
    store(scores + i, e);
    total += e;
  }
  // Lanes past the end are e^-87 each, and no more than LANES: nothing beside the top's 1.
  return {top, sum(total)};
}

// kHeads rows of weights times kVectors vectors of columns of the values.
template <int kHeads, int kVectors, class Cached>
inline void mix(const float* weights, int64_t stride, const Cached* values, int64_t cols, int64_t n,
                int64_t columns, float* out, int64_t width) {
  Vector total[kHeads][kVectors] = {};
  const bool whole = columns == kVectors * LANES;
  for (int64_t t = 0; t < n; t++, values += cols) {
    Vector v[kVectors];
    fetch_row(values + std::min(kRowsAhead, n - 1 - t) * cols, columns);
    for (int j = 0; j < kVectors; j++)
      v[j] = whole ? load_as(values + j * LANES)
                   : load_first_as(values + j * LANES, columns - j * LANES);
    for (int h = 0; h < kHeads; h++)
      for (int j = 0; j < kVectors; j++) total[h][j] += weights[h * stride + t] * v[j];
  }
  for (int h = 0; h < kHeads; h++)
    for (int j = 0; j < kVectors; j++)
      store_first(out + h * width + j * LANES, total[h][j],
                  std::min<int64_t>(LANES, columns - j * LANES));
}

template <int kHeads, class Cached>
void mixed(const float* weights, int64_t stride, const Cached* values, int64_t cols, int64_t n,
           float* out, int64_t width) {
  constexpr int kVectors = LANES == 16 ? 4 : 2;
  int64_t at = 0;
  for (; at + kVectors * LANES <= width; at += kVectors * LANES)
    mix<kHeads, kVectors>(weights, stride, values + at, cols, n, kVectors * LANES, out + at, width);
  for (; at < width; at += LANES)
    mix<kHeads, 1>(weights, stride, values + at, cols, n, std::min<int64_t>(LANES, width - at),
                   out + at, width);
}

template <class Cached>
void attend_to(const Attention& a, const float* q, int64_t group, int64_t from, int64_t to,
               float* room, float* out, Part* parts) {
  const int64_t heads = a.heads / a.groups, n = to - from;
  const int64_t stride = (n + LANES - 1) / LANES * LANES;
  const Cached* keys = static_cast<const Cached*>(a.keys) + group * a.width;
  const Cached* values = static_cast<const Cached*>(a.values) + group * a.value_width;
  const int64_t value_cols = a.groups * a.value_width;
  for (int64_t h = 0; h < heads; h += 4) {
    const int64_t count = std::min<int64_t>(4, heads - h);
    const auto scores = count == 4   ? scored<4, Cached>
                        : count == 3 ? scored<3, Cached>
                        : count == 2 ? scored<2, Cached>
                                     : scored<1, Cached>;
    scores(a, q + h * a.width, keys, from, to, room + h * stride, stride);
    for (int64_t i = h; i < h + count; i++) parts[i] = weigh(room + i * stride, n);
    const auto mixes = count == 4   ? mixed<4, Cached>
                       : count == 3 ? mixed<3, Cached>
                       : count == 2 ? mixed<2, Cached>
                                    : mixed<1, Cached>;
    mixes(room + h * stride, stride, values + from * value_cols, value_cols, n,
          out + h * a.value_width, a.value_width);
  }
}

void attend(const Attention& a, const float* q, int64_t group, int64_t from, int64_t to,
            float* room, float* out, Part* parts) {
  const auto some = a.half ? attend_to<uint16_t> : attend_to<float>;
  some(a, q, group, from, to, room, out, parts);
}

// --- Tiles

[[maybe_unused]] inline void fetch(const uint8_t* tile) {
  for (int line = 0; line < kTileBytes; line += 64) __builtin_prefetch(tile + line);
}

inline float scale_of(const uint8_t* tile, int64_t output) {
  uint16_t half;
  std::memcpy(&half, tile + 2 * output, sizeof half);
  return half_to_float(half);
}

void embed(const uint8_t* tiles, int64_t blocks, int64_t output, int64_t cols, float* out) {
  const uint8_t* tile = tiles + output / kSide * blocks * kTileBytes;
  const int64_t row = output % kSide;
  for (int64_t at = 0; at < cols; at += kSide, tile += kTileBytes) {
    const float scale = scale_of(tile, row);
    const uint8_t* values = tile + 64 + row / 16 * 64 + row % 16 * 4;
    for (int64_t k = 0; k < std::min<int64_t>(kSide, cols - at); k++)
      out[at + k] = scale * static_cast<float>(values[k / 4 * 128 + k % 4] - 128);
  }
}

// One row in its own order as int16, high parts before low ones.
[[maybe_unused]] void quantise(const float* x, int64_t cols, const Inputs& out, int64_t row) {
  const float from = wide_from(x, cols, out.share);
  for (int64_t b = 0; b < out.blocks; b++) {
    const int64_t at = row * out.blocks + b;
    float block[kSide] = {};
    const int64_t n = std::min<int64_t>(kSide, cols - b * kSide);
    std::memcpy(block, x + b * kSide, 4 * static_cast<size_t>(n));
    float most = 0;
    bool finite = true;
    for (float v : block) {
      most = std::max(most, std::fabs(v));
      finite &= std::isfinite(v);
    }
    const bool wide = out.wide[at] = most > from;
    const float limit = wide ? kLargest24 : kLargest16;
    const float factor = most > 0 ? limit / most : 0.0f;
    int16_t parts[2][kSide];
    int32_t sums[2] = {};
    for (int i = 0; i < kSide; i++) {
      const int32_t v = finite ? static_cast<int32_t>(std::nearbyint(block[i] * factor)) : 0;
      const int32_t high = wide ? (v + 128) >> 8 : v;
      const int32_t low = wide ? v - high * 256 : 0;
      parts[0][i] = static_cast<int16_t>(high);
      parts[1][i] = static_cast<int16_t>(low);
      sums[0] += high;
      sums[1] += low;
    }
    std::memcpy(out.lines + at * Inputs::kLine, parts[0], sizeof parts[0]);
    if (wide) std::memcpy(out.lows + at * Inputs::kLine, parts[1], sizeof parts[1]);
    out.scales[at] = finite ? most / kLargest16 : NAN;
    out.offsets[2 * at] = -128 * sums[0];
    out.offsets[2 * at + 1] = -128 * sums[1];
  }
}
