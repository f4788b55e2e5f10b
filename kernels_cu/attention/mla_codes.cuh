// Conversion of an FP8 latent cache to wgmma operands (sm_90).
//
// A token of the cache has 656 bytes: 512 codes (e4m3), 4 float32 scales, each of 128 codes, and 64
// bfloat16 of rotated key, which TMA loads. A code times its scale is converted to float16 in a
// unit that the page's tokens share: a power of two, at most 2^-5 times the largest scale so far
// and growing with it, so that no product exceeds 57344 and scales down to 2^-12 of the largest
// keep all eleven bits. One exact instruction converts two codes to float16, and one multiplies
// both. The queries' latent columns are converted to float16 too, times a power of two per tile;
// rotated columns stay as they are.
//
//   scores = unit_q * unit * (Q16 C16^T) + Q_rope R^T,   outputs = unit * (P C16)
//
// Units are stored as the exponent field of a float.
#pragma once

#include "attention/mla_work.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/ptx/prmt.cuh"
#include "common/ptx/shared_address.cuh"

namespace cukit::mla {

constexpr int kScaleColumns = 128;
constexpr int kRopeByte = kLatent + kLatent / kScaleColumns * 4;  // offset in a token
constexpr int kCodedBytes = kRopeByte + kRope * 2;

constexpr int kExponentBias = 127;
constexpr unsigned kInfinityBits = 0x7f800000u;
constexpr int kLeastUnit = kExponentBias - 60;  // latents in smaller units are zero

// 2^(exponent - bias); the exponent is clamped to the normal floats.
CUKIT_DEVICE float power_of_two(int exponent) {
  return __uint_as_float(static_cast<unsigned>(min(max(exponent, 1), 254)) << 23);
}

// A warp's share of a page: every second row of one half. A lane has eight columns of each row, one
// 16-byte chunk in shared memory. The next page is loaded after a page has been committed, since
// the fence before the commit waits for all loads in flight.
struct CodedPage {
  static constexpr int kWarps = kWarpgroupWarps / 2;  // per half
  static constexpr int kRows = kPage / kWarps;

  uint2 codes[kRows];
  uint4 scales[2];  // of tokens `lane` and `lane` + 32
  int unit = kLeastUnit;

  CUKIT_DEVICE static int half() { return threadIdx.x / kWarpSize % 2; }
  CUKIT_DEVICE static int first_row() { return threadIdx.x / kWarpSize / 2; }

  // `page`: the first token's first byte.
  CUKIT_DEVICE void load(const unsigned char* page) {
    const int lane = threadIdx.x % kWarpSize;
    const unsigned char* const of_lane = page + lane * kCodedBytes + kLatent;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scales[i] = __ldcg(reinterpret_cast<const uint4*>(of_lane + i * (kPage / 2) * kCodedBytes));
    }
    const unsigned char* const from =
        page + first_row() * kCodedBytes + half() * (kLatent / 2) + 8 * lane;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      codes[i] = __ldcg(reinterpret_cast<const uint2*>(from + i * kWarps * kCodedBytes));
    }
  }

  // Updates the unit for a page whose first `keys` rows are keys, and returns the scales in this
  // unit: ratios[i] holds the two of this half for token lane + first_row() + 32 i, float16.
  CUKIT_DEVICE void begin(unsigned (&ratios)[2], int keys) {
    unsigned top = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned words[4] = {scales[i].x, scales[i].y, scales[i].z, scales[i].w};
      const bool counts = static_cast<int>(threadIdx.x % kWarpSize) + i * (kPage / 2) < keys;
#pragma unroll
      for (const unsigned word : words) {
        const unsigned magnitude = word & ~(1u << 31);
        if (counts && magnitude < kInfinityBits) top = max(top, magnitude);
      }
    }
    top = __reduce_max_sync(kFullMask, top);
    const int exponent = static_cast<int>(top >> 23);
    // A scale is at most 2^7 units. A new unit leaves room for scales four times as large.
    if (exponent > unit + 6) unit = exponent - 4;
    const float by = power_of_two(2 * kExponentBias - unit);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned low = half() ? scales[i].z : scales[i].x;
      const unsigned high = half() ? scales[i].w : scales[i].y;
      const unsigned pair = pack<__half>(__uint_as_float(low) * by, __uint_as_float(high) * by);
      ratios[i] = __shfl_down_sync(kFullMask, pair, first_row());
    }
  }

  // Stores this warp's i-th row to a page in shared memory.
  template <typename PageTile>
  CUKIT_DEVICE void store(int i, unsigned char* page, const unsigned (&ratios)[2]) const {
    const unsigned lane = threadIdx.x % kWarpSize;
    const unsigned pair = __shfl_sync(kFullMask, ratios[i / (kRows / 2)], kWarps * i % kWarpSize);
    const unsigned ratio = permute_bytes(pair, pair, lane < kWarpSize / 2 ? 0x1010 : 0x3232);
    unsigned values[4];
    unsigned pairs[2];
    unpack_e4m3(pairs, codes[i].x);
    values[0] = multiply(pairs[0], ratio);
    values[1] = multiply(pairs[1], ratio);
    unpack_e4m3(pairs, codes[i].y);
    values[2] = multiply(pairs[0], ratio);
    values[3] = multiply(pairs[1], ratio);
    // Addresses of later rows differ from the first row's by a swizzle constant.
    constexpr int kPeriod = 8 / kWarps;
    const unsigned first = PageTile::address(0, first_row(), half() * (kLatent / 16) + lane);
    const unsigned offset = first ^ (i % kPeriod * kWarps * 16);
    *reinterpret_cast<uint4*>(page + offset + i * kWarps * PageTile::kRowBytes) =
        make_uint4(values[0], values[1], values[2], values[3]);
  }

 private:
  CUKIT_DEVICE static unsigned multiply(unsigned a, unsigned b) {
    const __half2 product =
        __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const unsigned*>(&product);
  }
};

// Converts the latent columns of a tile of queries to float16 in a unit, by `Threads` threads.
template <int Threads>
struct CodedQueries {
  static constexpr int kBytes = kRows * kLatent * 2;
  static constexpr int kMostScale = 20;  // largest exponent of the queries' factor
  static constexpr int kTop = 14;        // exponent of the largest query, in units

  // Bits of the largest magnitude among this thread's elements. `tile`: the latent columns are its
  // first parts. `thread`: 0 .. Threads - 1.
  CUKIT_DEVICE static unsigned largest(const unsigned char* tile, int thread) {
    unsigned top = 0;
#pragma unroll 4
    for (int byte = 16 * thread; byte < kBytes; byte += 16 * Threads) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(tile + byte);
      const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (const unsigned word : words) {
        top = max(top, max(word & 0x7fff0000u, word << 16 & 0x7fff0000u));
      }
    }
    return top;
  }

  // The unit for queries of magnitudes up to `top`; 1 if one is not finite.
  CUKIT_DEVICE static int unit(unsigned top) {
    const int exponent = static_cast<int>(top >> 23);
    if (top >= kInfinityBits) return kExponentBias;
    return max(exponent - kTop, kExponentBias - kMostScale);
  }

  CUKIT_DEVICE static void convert(unsigned char* tile, int thread, int unit) {
    const float by = power_of_two(2 * kExponentBias - unit);
#pragma unroll 4
    for (int byte = 16 * thread; byte < kBytes; byte += 16 * Threads) {
      uint4& chunk = *reinterpret_cast<uint4*>(tile + byte);
      unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (unsigned& word : words) {
        float values[2];
        unpack<T>(values, word);
        word = pack<__half>(values[0] * by, values[1] * by);
      }
      chunk = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

}  // namespace cukit::mla
