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

void product(const uint8_t* tiles, const Inputs& x, int64_t first, int rows, int64_t, float* out) {
  std::fill(out, out + rows * kSide, 0.0f);
  for (int64_t b = 0; b < x.blocks; b++, tiles += kTileBytes) {
    for (int row = 0; row < rows; row++) {
      const int64_t at = (first + row) * x.blocks + b;
      float total[kSide] = {};
      for (int part = 0; part <= x.wide[at]; part++) {
        int16_t values[kSide];
        std::memcpy(values, (part == 0 ? x.lines : x.lows) + at * Inputs::kLine, sizeof values);
        int32_t sums[kSide];
        std::fill(sums, sums + kSide, x.offsets[2 * at + part]);
        for (int k = 0; k < kSide; k++)
          for (int n = 0; n < kSide; n++)
            sums[n] += values[k] * tiles[64 + k / 4 * 128 + n * 4 + k % 4];
        const float weight = part == 0 ? 1.0f : 1.0f / 256;
        for (int n = 0; n < kSide; n++) total[n] += weight * static_cast<float>(sums[n]);
      }
      for (int n = 0; n < kSide; n++)
        out[row * kSide + n] += total[n] * (x.scales[at] * scale_of(tiles, n));
    }
  }
}

}  // namespace

const Level kPlain = {"plain", runs_here, quantise, product, embed,   rms_norm,
                       rope,      unary,    binary,  argmax, to_half, attend};

}  // namespace anyfold
