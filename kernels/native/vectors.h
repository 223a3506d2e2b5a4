// Vectors of kLanes floats, and what all levels compute alike with them. A level defines LANES,
// opens its namespace, and includes this.

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

void swiglu(const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(out + i, silu(load(gate + i)) * load(up + i));
  if (i == n) return;
  const int64_t rest = n - i;
  store_first(out + i, silu(load_first(gate + i, rest)) * load_first(up + i, rest), rest);
}

void plus(const float* a, const float* b, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
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

inline Vector product_of_lanes(const float* q, const float* k, int64_t width) {
  Vector total = {};
  int64_t d = 0;
  for (; d + LANES <= width; d += LANES) total += load(q + d) * load(k + d);
  if (d < width) total += load_first(q + d, width - d) * load_first(k + d, width - d);
  return total;
}

// The scores of one head in rows [from, to), in whole vectors: lanes past the end are -inf.
template <int kVectors>
inline void score(const Attention& a, const float* q, const float* keys, int64_t from, int64_t to,
                  float* out) {
  const int64_t cols = a.groups * a.width;
  const int64_t width = kVectors > 0 ? kVectors * LANES : a.width;
  for (int64_t t = from; t < to; t += LANES) {
    Vector dots[LANES];
    for (int64_t i = 0; i < LANES; i++)
      dots[i] = product_of_lanes(q, keys + std::min(t + i, to - 1) * cols, width);
    Vector s = sums<LANES>(dots) * a.scale;
    if (a.cap > 0) {  // tanh(x) = 1 - 2 / (e^2x + 1)
      const Vector e = exponential(s * (2.0f / a.cap));
      s = a.cap * (1.0f - 2.0f / (e + 1.0f));
    }
    for (int64_t i = to - t; i < LANES; i++) s[i] = -INFINITY;
    store(out + (t - from), s);
  }
}

// Turns scores into weights that are still to be divided by what is returned.
inline float weigh(float* scores, int64_t n, const float* sink) {
  Vector most = all(sink != nullptr ? *sink : -INFINITY);
  for (int64_t i = 0; i < n; i += LANES) most = larger(load(scores + i), most);
  const float top = largest(most);
  Vector total = {};
  for (int64_t i = 0; i < n; i += LANES) {
    const Vector e = exponential(load(scores + i) - top);
    store(scores + i, e);
    total += e;
  }
  // Lanes past the end are e^-87 each, and no more than LANES: nothing beside the top's 1.
  return sum(total) + (sink != nullptr ? std::exp(*sink - top) : 0.0f);
}

// kHeads rows of weights times kVectors vectors of columns of the values.
template <int kHeads, int kVectors>
inline void mix(const float* weights, int64_t stride, const float* values, int64_t cols, int64_t n,
                int64_t columns, float* out, int64_t width) {
  Vector total[kHeads][kVectors] = {};
  const bool whole = columns == kVectors * LANES;
  for (int64_t t = 0; t < n; t++, values += cols) {
    Vector v[kVectors];
    for (int j = 0; j < kVectors; j++)
      v[j] = whole ? load(values + j * LANES) : load_first(values + j * LANES, columns - j * LANES);
    for (int h = 0; h < kHeads; h++)
      for (int j = 0; j < kVectors; j++) total[h][j] += weights[h * stride + t] * v[j];
  }
  for (int h = 0; h < kHeads; h++)
    for (int j = 0; j < kVectors; j++)
      store_first(out + h * width + j * LANES, total[h][j],
                  std::min<int64_t>(LANES, columns - j * LANES));
}

template <int kHeads>
void mixed(const float* weights, int64_t stride, const float* values, int64_t cols, int64_t n,
           float* out, int64_t width) {
  constexpr int kVectors = LANES == 16 ? 4 : 2;
  int64_t at = 0;
  for (; at + kVectors * LANES <= width; at += kVectors * LANES)
    mix<kHeads, kVectors>(weights, stride, values + at, cols, n, kVectors * LANES, out + at, width);
  for (; at < width; at += LANES)
    mix<kHeads, 1>(weights, stride, values + at, cols, n, std::min<int64_t>(LANES, width - at),
                   out + at, width);
}

void attend(const Attention& a, const float* q, int64_t group, int64_t position, float* room,
            float* out) {
  const int64_t heads = a.heads / a.groups;
  const int64_t from = a.from(position), n = position - from;
  const int64_t stride = (n + LANES - 1) / LANES * LANES;
  const float* keys = a.keys + group * a.width;
  const float* values = a.values + group * a.value_width;
  const int64_t value_cols = a.groups * a.value_width;
  const float* rows = q + group * heads * a.width;
  float* result = out + group * heads * a.value_width;
  const auto scores = a.width == 4 * LANES   ? score<4>
                      : a.width == 8 * LANES ? score<8>
                                             : score<0>;
  for (int64_t h = 0; h < heads; h++) {
    float* of_head = room + h * stride;
    scores(a, rows + h * a.width, keys, from, position, of_head);
    const float* sink = a.sinks == nullptr ? nullptr : a.sinks + group * heads + h;
    const float factor = 1.0f / weigh(of_head, n, sink);
    for (int64_t t = 0; t < n; t++) of_head[t] *= factor;
  }
  for (int64_t h = 0; h < heads; h += 4) {
    const int64_t count = std::min<int64_t>(4, heads - h);
    const auto some = count == 4 ? mixed<4> : count == 3 ? mixed<3> : count == 2 ? mixed<2> : mixed<1>;
    some(room + h * stride, stride, values + from * value_cols, value_cols, n,
         result + h * a.value_width, a.value_width);
  }
}

// --- Tiles

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

// One row in its own order, high parts as int16 before low ones. NaN comes out as some number.
[[maybe_unused]] void quantise(const float* x, int64_t cols, const Inputs& out, int64_t row) {
  for (int64_t b = 0; b < out.blocks; b++) {
    const int64_t at = row * out.blocks + b;
    float block[kSide] = {};
    const int64_t n = std::min<int64_t>(kSide, cols - b * kSide);
    std::memcpy(block, x + b * kSide, 4 * static_cast<size_t>(n));
    float most = 0;
    for (float v : block) most = std::max(most, std::fabs(v));
    const float factor = most > 0 ? kLargest / most : 0.0f;
    int16_t parts[2][kSide];
    int32_t sums[2] = {};
    for (int i = 0; i < kSide; i++) {
      const int32_t v = static_cast<int32_t>(std::nearbyint(block[i] * factor));
      const int32_t high = (v + 128) >> 8;
      parts[0][i] = static_cast<int16_t>(high);
      parts[1][i] = static_cast<int16_t>(v - high * 256);
      sums[0] += high;
      sums[1] += v - high * 256;
    }
    std::memcpy(out.lines + at * kLine, parts, kLine);
    out.scales[at] = most / kLargest;
    out.offsets[2 * at] = -128 * sums[0];
    out.offsets[2 * at + 1] = -128 * sums[1];
  }
}
