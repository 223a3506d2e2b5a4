// The level that every CPU has.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "level.h"

#define LANES 4

namespace anyfold {
namespace {

#include "vectors.h"

bool runs_here() { return true; }

void product(const uint8_t* tiles, const Inputs& x, int64_t first, int rows, float* out) {
  std::fill(out, out + rows * kSide, 0.0f);
  const int count = x.wide ? 2 : 1;
  for (int64_t b = 0; b < x.blocks; b++, tiles += kTileBytes) {
    for (int row = 0; row < rows; row++) {
      const int64_t at = (first + row) * x.blocks + b;
      int16_t parts[2][kSide];
      std::memcpy(parts, x.lines + at * x.line(), static_cast<size_t>(x.line()));
      float total[kSide] = {};
      for (int part = 0; part < count; part++) {
        int32_t sums[kSide];
        std::fill(sums, sums + kSide, x.offsets[2 * at + part]);
        for (int k = 0; k < kSide; k++)
          for (int n = 0; n < kSide; n++)
            sums[n] += parts[part][k] * tiles[64 + k / 4 * 128 + n * 4 + k % 4];
        for (int n = 0; n < kSide; n++)
          total[n] = (part == 0 ? 0.0f : 256.0f * total[n]) + static_cast<float>(sums[n]);
      }
      for (int n = 0; n < kSide; n++)
        out[row * kSide + n] += total[n] * (x.scales[at] * scale_of(tiles, n));
    }
  }
}

}  // namespace

const Level kPlain = {"plain", runs_here, quantise, product, embed,   rms_norm,
                       rope,      unary,    binary,  lone,   argmax,  to_half, attend};

}  // namespace anyfold
