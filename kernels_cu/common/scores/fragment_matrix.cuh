// Bias and mask matrices, loaded sixteen bytes at a time and exchanged within the quads that hold
// the scores.
//
// For matrices with contiguous columns and rows aligned to sixteen bytes (a row stride of 0
// included), in tiles without columns beyond the last key; fragment_scores.cuh handles the others.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/quad.cuh"
#include "common/scores/fragment_scores.cuh"
#include "common/scores/score_options.cuh"
#include "common/types.cuh"

namespace cukit {

// Whether rows can be read sixteen bytes at a time.
template <typename E>
CUKIT_DEVICE bool rows_are_aligned(const E* first, long long row_stride, long long column_stride) {
  return column_stride == 1 && reinterpret_cast<unsigned long long>(first) % 16 == 0 &&
         row_stride * static_cast<int>(sizeof(E)) % 16 == 0;
}

// Address of the tile's first column in the lane's row `half` (0 or 1, eight rows apart); rows
// beyond the last query are clamped to it.
template <typename E>
CUKIT_DEVICE const E* tile_row(const E* matrix, long long row_stride, const FragmentPlace& at,
                               int half, int seq_q) {
  const int row = min(at.row + 8 * half, seq_q - 1);
  return matrix + row * row_stride + (at.column - 2 * static_cast<int>(threadIdx.x % 4));
}

// scores += log2(e) * bias, for float elements.
template <int N>
CUKIT_DEVICE void add_rows(float (&scores)[N], const float* bias, long long row_stride,
                           const FragmentPlace& at, int seq_q) {
  const int quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* row = tile_row(bias, row_stride, at, half, seq_q);
#pragma unroll
    for (int n = 0; n < N / 4; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(row + 8 * n + 2 * quad_lane);
      float* to = &scores[4 * n + 2 * half];
      to[0] = fmaf(pair.x, kLog2E, to[0]);
      to[1] = fmaf(pair.y, kLog2E, to[1]);
    }
  }
}

// The same for 16-bit elements: a lane loads eight of each 32 columns, and the quad exchanges
// pairs.
template <typename E, int N>
CUKIT_DEVICE void add_rows(float (&scores)[N], const E* bias, long long row_stride,
                           const FragmentPlace& at, int seq_q) {
  const int quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const E* row = tile_row(bias, row_stride, at, half, seq_q);
#pragma unroll
    for (int first = 0; first < N / 4; first += 4) {
      const int chunks = N / 4 - first < 4 ? N / 4 - first : 4;  // of eight columns
      const uint4 read =
          *reinterpret_cast<const uint4*>(row + 8 * (first + min(quad_lane, chunks - 1)));
      unsigned pairs[4] = {read.x, read.y, read.z, read.w};
      transpose_quad(pairs);
#pragma unroll
      for (int n = 0; n < chunks; ++n) {
        float added[2];
        unpack<E>(added, pairs[n]);
        float* to = &scores[4 * (first + n) + 2 * half];
        to[0] = fmaf(added[0], kLog2E, to[0]);
        to[1] = fmaf(added[1], kLog2E, to[1]);
      }
    }
  }
}

// Sets scores to -infinity where the mask's byte is 0: a lane loads sixteen of each 64 columns, and
// the quad exchanges two pairs at a time.
template <int N>
CUKIT_DEVICE void mask_rows(float (&scores)[N], const unsigned char* mask, long long row_stride,
                            const FragmentPlace& at, int seq_q) {
  const int quad_lane = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const unsigned char* row = tile_row(mask, row_stride, at, half, seq_q);
#pragma unroll
    for (int first = 0; first < N / 4; first += 8) {
      const int chunks = (N / 4 - first < 8 ? N / 4 - first : 8) / 2;  // of sixteen columns
      const uint4 read =
          *reinterpret_cast<const uint4*>(row + 8 * first + 16 * min(quad_lane, chunks - 1));
      // Lane j receives pairs j and 4 + j of each lane's eight pairs.
      unsigned pairs[4] = {__byte_perm(read.x, read.z, 0x5410), __byte_perm(read.x, read.z, 0x7632),
                           __byte_perm(read.y, read.w, 0x5410), __byte_perm(read.y, read.w, 0x7632)};
      transpose_quad(pairs);
#pragma unroll
      for (int chunk = 0; chunk < chunks; ++chunk)
#pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
          if (!(pairs[chunk] & 0xffu << 8 * byte)) {
            scores[4 * (first + 2 * chunk + byte / 2) + 2 * half + byte % 2] = -infinity();
          }
        }
    }
  }
}

}  // namespace cukit
