// Values of eight bits as operand b of a product over the keys: wgmma wants those contiguous along
// the keys, memory has them contiguous along the head.
//
// A transposed tile is made of slabs of 16 keys: [slab][column of the head][16 keys], a byte each,
// so that eight columns are one core matrix. The keys of a slab come in the order 0 1 8 9 2 3 10 11
// 4 5 12 13 6 7 14 15. A lane that has the scores of keys 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, as
// wgmma leaves them, then has four neighbours: four bytes of operand a.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/ptx/stmatrix.cuh"

namespace cukit {

// Tiles of Keys keys of heads of Width columns.
template <int Keys, int Width>
struct Fp8Values {
  static constexpr int kBytes = Keys * Width;
  static constexpr int kSlabKeys = 16;
  static constexpr int kSlabBytes = kSlabKeys * Width;
  // As the copy engine brings them: parts of at most 128 columns, rows swizzled over their width.
  static constexpr int kRowBytes = Width < 128 ? Width : 128;
  static constexpr int kParts = Width / kRowBytes;
  static constexpr int kPartBytes = Keys * kRowBytes;
  static_assert(Keys % 32 == 0 && (kRowBytes == 64 || kRowBytes == 128), "whole units of work");

  // The calling warp's share, one of `warps`, of making `slabs` out of `rows`.
  CUKIT_DEVICE static void transpose(const unsigned char* rows, unsigned char* slabs, int warp,
                                     int warps) {
    const int lane = threadIdx.x % kWarpSize;
    // Of two columns, lanes of the lower half of the warp store the even one first, those of the
    // upper half the odd one: eight rows of 16 bytes then lie in different banks.
    const unsigned first = lane < 16 ? 0x6420 : 0x7531;
    const unsigned second = lane < 16 ? 0x7531 : 0x6420;
    const int swizzle = kRowBytes == 128 ? lane % 8 : lane / 2 % 4;
    const int row = lane % 8;
    const int stored = lane / 16 * kSlabBytes + (2 * row + (lane / 8 % 2 ^ row / 4)) * 16;
    const unsigned from = shared_address(rows) + lane * kRowBytes;
    const unsigned to = shared_address(slabs) + stored;
    constexpr int kChunks = kRowBytes / 16;
#pragma unroll 1
    for (int unit = warp; unit < Keys / 32 * kParts * kChunks; unit += warps) {
      const int chunk = unit % kChunks;
      const int part = unit / kChunks % kParts;
      const int keys = unit / kChunks / kParts * 32;
      unsigned in[4], out[4];
      ldmatrix_x4_trans(in, from + part * kPartBytes + keys * kRowBytes + ((chunk ^ swizzle) * 16));
      out[0] = __byte_perm(in[0], in[1], first);
      out[1] = __byte_perm(in[0], in[1], second);
      out[2] = __byte_perm(in[2], in[3], first);
      out[3] = __byte_perm(in[2], in[3], second);
      stmatrix_x4(to + keys * Width + (part * kRowBytes + chunk * 16) * 16, out);
    }
  }
};

}  // namespace cukit
