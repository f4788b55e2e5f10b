// A warpgroup's outputs on their way from its registers to memory.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/quad.cuh"

namespace cukit {

// Two rows of a warp's sixteen, 8 apart: what they are multiplied with, and where they go.
template <typename T>
struct ResultRows {
  float factor[2];
  bool exists[2];
  T* first;  // the first row's
  long long row_stride;
  int columns;
};

// Elements lie as wgmma leaves them. A quad writes 64 bytes of a row at a time; `Guarded`: chunks of
// 32 columns reach beyond the last one.
template <bool Guarded, typename T, int N>
CUKIT_DEVICE void write_rows(const float (&sums)[N], const ResultRows<T>& rows) {
  const int quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    T* const out = rows.first + 8 * half * rows.row_stride;
#pragma unroll
    for (int four = 0; four < (N + 15) / 16; ++four) {
      unsigned chunk[4] = {};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (4 * four + n < N / 4) {
          const float* pair = &sums[4 * (4 * four + n) + 2 * half];
          chunk[n] = pack<T>(pair[0] * rows.factor[half], pair[1] * rows.factor[half]);
        }
      }
      transpose_quad(chunk);
      const int column = 32 * four + 8 * quad_lane;
      if (rows.exists[half] && (!Guarded || column < rows.columns)) {
        *reinterpret_cast<uint4*>(out + column) = make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
  }
}

}  // namespace cukit
