// FP8 values as operand B of P V.
//
// SlabTile: the values stay e4m3. wgmma takes 8-bit operands only K-major, which here means
// contiguous along the keys, but in memory V is contiguous along the head. The transposed tile
// consists of slabs of 16 keys: [slab][column of the head][16 keys], a byte each, so that eight
// columns are one core matrix. The keys of a slab are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7
// 14 15. The scores of keys 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, which a wgmma accumulator gives one
// lane, are then neighbours: the four bytes of a register of operand A.
//
// HalfTile: the values are widened to float16, which is exact, and keep their layout.
//
// flash_attention_fp8_values stores prepared tiles in global memory in this layout, [key head][tile
// of all sequences], indexed by first_value_tile().
#pragma once

#include "common/hopper/shared_tile.cuh"
#include "common/platform.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/wgmma.cuh"

namespace cukit {

// Tiles of Rows x Columns bytes as TMA loads them: swizzled rows of at most 128 bytes.
template <int Rows, int Columns>
using ByteTile = SharedTile<unsigned char, Rows, Columns,
                            Columns <= 64 ? OperandSwizzle::Bytes64 : OperandSwizzle::Bytes128>;

// Index of a sequence's first tile of `Keys` keys. VARLEN: sequence b begins at row `first_kv` of
// the concatenated sequences; adding b leaves an index for the partial tile of each earlier
// sequence. Otherwise all sequences have `tiles` tiles.
template <int Keys>
CUKIT_DEVICE int first_value_tile(bool varlen, int b, int first_kv, int tiles) {
  return varlen ? first_kv / Keys + b : b * tiles;
}

template <int Keys, int Columns>
struct SlabTile {
  using Raw = ByteTile<Keys, Columns>;
  static constexpr int kSlabBytes = 16 * Columns;
  static constexpr int kBytes = Keys * Columns;
  static_assert(Keys % 32 == 0 && Columns % 16 == 0, "whole units of 32 keys x 16 columns");

  // The interface of SharedTile.
  static constexpr int kStage = kBytes / 16;
  static constexpr int kRowSteps = Keys / 32;
  static constexpr int mn_step(int step) { return step * 2 * kSlabBytes / 16; }
  CUKIT_DEVICE static unsigned long long mn_major(const unsigned char* tile) {
    return matrix_descriptor(tile, OperandSwizzle::None, kSlabBytes, 8 * 16);
  }

  // Warp `warp` of `warps` transposes its share of `raw` into `slabs`. Rows from `rows` on become
  // zeros.
  CUKIT_DEVICE static void prepare(const unsigned char* raw, unsigned char* slabs, int rows,
                                   int warp, int warps) {
    const int lane = threadIdx.x % kWarpSize;
    // Of two columns, the lower half-warp stores the even one first, the upper half-warp the odd
    // one: eight rows of 16 bytes then use different banks.
    const unsigned first = lane < 16 ? 0x6420 : 0x7531;
    const unsigned second = lane < 16 ? 0x7531 : 0x6420;
    const int row = lane % 8;
    const int stored = lane / 16 * kSlabBytes + (2 * row + (lane / 8 % 2 ^ row / 4)) * 16;
    const unsigned from = shared_address(raw);
    const unsigned to = shared_address(slabs) + stored;
    constexpr int kChunks = Columns / 16;
#pragma unroll 2
    for (int unit = warp; unit < Keys / 32 * kChunks; unit += warps) {
      const int chunk = unit % kChunks;
      const int keys = unit / kChunks * 32;
      unsigned in[4], out[4];
      ldmatrix_x4_trans(in, Raw::address(from, lane, chunk) + keys * Raw::kRowBytes);
      if (keys + 32 > rows) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = keys + 8 * i + lane % 4 * 2;  // and key + 1, two bytes each
          in[i] &= key + 1 < rows ? 0xffffffffu : key < rows ? 0xffffu : 0u;
        }
      }
      out[0] = __byte_perm(in[0], in[1], first);
      out[1] = __byte_perm(in[0], in[1], second);
      out[2] = __byte_perm(in[2], in[3], first);
      out[3] = __byte_perm(in[2], in[3], second);
      stmatrix_x4(to + keys * Columns + chunk * 16 * 16, out);
    }
  }
};

template <int Keys, int Columns>
struct HalfTile : SharedTile<__half, Keys, Columns> {
  using Raw = ByteTile<Keys, Columns>;
  using Wide = SharedTile<__half, Keys, Columns>;
  static_assert(Keys % 16 == 0 && Columns % 16 == 0, "tiles divide into the warps' units");

  // As SlabTile::prepare.
  CUKIT_DEVICE static void prepare(const unsigned char* raw, unsigned char* halves, int rows,
                                   int warp, int warps) {
    constexpr int kChunks = Raw::kRowBytes / 16;
    constexpr int kWarpRows = kWarpSize / kChunks;
    const int lane = threadIdx.x % kWarpSize;
    const int lane_chunk = lane % kChunks;
    // Sixteen columns are two chunks of float16. Lanes that write to the second part of 64 columns
    // start with the odd chunk, so that a row's lanes write to different banks.
    const int odd = lane_chunk / 4;
#pragma unroll 1
    for (int unit = warp; unit < Keys / kWarpRows * Raw::kParts; unit += warps) {
      const int row = unit / Raw::kParts * kWarpRows + lane / kChunks;
      const int chunk = unit % Raw::kParts * kChunks + lane_chunk;
      if (chunk >= Columns / 16) continue;
      uint4 bytes = *reinterpret_cast<const uint4*>(raw + Raw::address(0, row, chunk));
      if (row >= rows) bytes = uint4{};
      const unsigned in[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
      unsigned out[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) unpack_e4m3(out[i], in[i]);
      const uint4 even_chunk = make_uint4(out[0][0], out[0][1], out[1][0], out[1][1]);
      const uint4 odd_chunk = make_uint4(out[2][0], out[2][1], out[3][0], out[3][1]);
      const int first = 2 * chunk + odd;
      *reinterpret_cast<uint4*>(halves + Wide::address(0, row, first)) =
          odd ? odd_chunk : even_chunk;
      *reinterpret_cast<uint4*>(halves + Wide::address(0, row, first ^ 1)) =
          odd ? even_chunk : odd_chunk;
    }
  }
};

}  // namespace cukit
