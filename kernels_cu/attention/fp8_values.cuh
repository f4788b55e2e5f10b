// Values of eight bits on their way to being operand b of a product over the keys.
//
// Fp8Values stay eight bits: wgmma wants those contiguous along the keys, memory has them contiguous
// along the head. A transposed tile is made of slabs of 16 keys: [slab][column of the head][16 keys], a byte each,
// so that eight columns are one core matrix. The keys of a slab come in the order 0 1 8 9 2 3 10 11
// 4 5 12 13 6 7 14 15. A lane that has the scores of keys 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, as
// wgmma leaves them, then has four neighbours: four bytes of operand a.
//
// HalfValues become float16, which they fit exactly, and stay as they lie: parts of 64 columns,
// rows of 128 bytes whose chunks are swizzled.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/ptx/stmatrix.cuh"

namespace cukit {

// Tiles of Keys rows of Width bytes as the copy engine brings them: parts of at most 128 columns,
// rows swizzled over their width.
template <int Keys, int Width>
struct Fp8Rows {
  static constexpr int kRowBytes = Width < 128 ? Width : 128;
  static constexpr int kParts = Width / kRowBytes;
  static constexpr int kPartBytes = Keys * kRowBytes;
  static_assert(kRowBytes == 64 || kRowBytes == 128, "whole swizzles");
};

template <int Keys, int Width>
struct Fp8Values : Fp8Rows<Keys, Width> {
  using Rows = Fp8Rows<Keys, Width>;
  using Rows::kParts;
  using Rows::kPartBytes;
  using Rows::kRowBytes;
  static constexpr int kBytes = Keys * Width;
  static constexpr int kSlabKeys = 16;
  static constexpr int kSlabBytes = kSlabKeys * Width;
  static_assert(Keys % 32 == 0, "whole units of work");

  // The calling warp's share, one of `warps`, of making `slabs` out of `rows`.
  CUKIT_DEVICE static void prepare(const unsigned char* rows, unsigned char* slabs, int warp,
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

template <int Keys, int Width>
struct HalfValues : Fp8Rows<Keys, Width> {
  using Rows = Fp8Rows<Keys, Width>;
  using Rows::kParts;
  using Rows::kPartBytes;
  using Rows::kRowBytes;
  static constexpr int kBytes = 2 * Keys * Width;
  static constexpr int kHalfRowBytes = 128;
  static constexpr int kHalfPartBytes = Keys * kHalfRowBytes;
  static_assert(Keys % 16 == 0, "whole units of work");

  // The calling warp's share, one of `warps`, of making `halves` out of `rows`.
  CUKIT_DEVICE static void prepare(const unsigned char* rows, unsigned char* halves, int warp,
                                   int warps) {
    constexpr int kChunks = kRowBytes / 16;
    constexpr int kWarpRows = kWarpSize / kChunks;
    const int lane = threadIdx.x % kWarpSize;
    const int chunk = lane % kChunks;
    const int lane_row = lane / kChunks;
    // Sixteen columns are two chunks of float16. Lanes that write to the second part of 64 columns
    // begin with the odd one, so that a row's lanes write to different banks.
    const int odd = chunk / 4;
    unsigned char* const part = halves + chunk / 4 * kHalfPartBytes;
#pragma unroll 1
    for (int unit = warp; unit < Keys / kWarpRows * kParts; unit += warps) {
      const int row = unit / kParts * kWarpRows + lane_row;
      const int from = unit % kParts;
      const int swizzle = kRowBytes == 128 ? row % 8 : row / 2 % 4;
      const uint4 bytes = *reinterpret_cast<const uint4*>(rows + from * kPartBytes +
                                                          row * kRowBytes + (chunk ^ swizzle) * 16);
      const unsigned in[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
      unsigned out[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) unpack_e4m3(out[i], in[i]);
      const uint4 even_chunk = make_uint4(out[0][0], out[0][1], out[1][0], out[1][1]);
      const uint4 odd_chunk = make_uint4(out[2][0], out[2][1], out[3][0], out[3][1]);
      unsigned char* const to = part + from * 2 * kHalfPartBytes + row * kHalfRowBytes;
      const int first = 2 * (chunk % 4) + odd;
      *reinterpret_cast<uint4*>(to + (first ^ row % 8) * 16) = odd ? odd_chunk : even_chunk;
      *reinterpret_cast<uint4*>(to + (first ^ 1 ^ row % 8) * 16) = odd ? even_chunk : odd_chunk;
    }
  }
};

}  // namespace cukit
