// Float8 latents on their way from a cache to an operand of wgmma (sm_90).
//
// A token of the cache has 656 bytes: 512 codes (e4m3), 4 float32 scales, each of 128 codes, and 64
// bfloat16 of rotated key, which TMA copies. Codes times their scales become bfloat16, rounded once.
// They pass through registers: shared memory has no room for them beside the pages.
#pragma once

#include "attention/mla_work.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/ptx/shared_address.cuh"

namespace cukit::mla {

constexpr int kScaleColumns = 128;
constexpr int kRopeByte = kLatent + kLatent / kScaleColumns * 4;  // of a token
constexpr int kCodedBytes = kRopeByte + kRope * 2;

// A lane's share of a quarter page, 32 rows of one half: of every fourth row eight columns, which are one
// chunk of 16 bytes in shared memory. As soon as a row is stored, the same of the next quarter takes its
// place, so that kRows loads are always under way.
struct CodedQuarter {
  static constexpr int kRows = kPage / 2 / kWarpgroupWarps;

  uint2 codes[kRows];
  float scales[kRows];

  // Where this lane's part of a quarter lies.
  struct Source {
    const unsigned char* codes;
    const unsigned char* scales;

    // `page`: the first token's first byte. `lower`: rows 32 to 63.
    CUKIT_DEVICE Source(const unsigned char* page, int half, int lower) {
      const int lane = threadIdx.x % kWarpSize;
      const int row = lower * (kPage / 2) + threadIdx.x / kWarpSize;
      const int column = half * (kLatent / 2) + 8 * lane;
      codes = page + row * kCodedBytes + column;
      scales = page + row * kCodedBytes + kLatent + column / kScaleColumns * 4;
    }
  };

  CUKIT_DEVICE void load(int i, const Source& from) {
    constexpr int kStep = kWarpgroupWarps * kCodedBytes;
    codes[i] = __ldcg(reinterpret_cast<const uint2*>(from.codes + i * kStep));
    scales[i] = __ldcg(reinterpret_cast<const float*>(from.scales + i * kStep));
  }

  // To a page in shared memory.
  template <typename PageTile>
  CUKIT_DEVICE void store(int i, unsigned char* page, int half, int lower) const {
    const unsigned words[2] = {codes[i].x, codes[i].y};
    unsigned packed[4];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      unsigned pairs[2];
      unpack_e4m3(pairs, words[word]);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float values[2];
        unpack<__half>(values, pairs[pair]);
        packed[2 * word + pair] = pack<T>(values[0] * scales[i], values[1] * scales[i]);
      }
    }
    const unsigned row = kWarpgroupWarps * i + threadIdx.x / kWarpSize;
    const unsigned chunk = half * (kLatent / 16) + threadIdx.x % kWarpSize;
    const unsigned offset = PageTile::address(lower * (kPage / 2) * PageTile::kRowBytes, row, chunk);
    *reinterpret_cast<uint4*>(page + offset) =
        make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
};

}  // namespace cukit::mla
