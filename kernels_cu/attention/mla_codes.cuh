// FP8 latents as wgmma operands in registers (sm_90).
//
// A token of the cache has 656 bytes: 512 codes (e4m3), 4 float32 scales, each for 128 codes, and
// 64 rotated columns of the key in bfloat16. A code times its scale is converted to float16 in the
// token's own unit, the largest power of two that is not above the token's largest scale: one exact
// instruction converts two codes to float16, and one multiplies both. The rotated columns are
// divided by the unit, exactly. The queries have a unit per tile:
//
//   score = unit_q * unit * (Q16 C16 + Q_rope R)
//
// The columns of the queries are stored in the order in which lanes hold a token's bytes: of every
// 64 columns, lane l holds 16-byte chunk l % 4 (of rotated columns: chunk l % 4 of each 64 bytes),
// two columns per register. Units are stored as the exponent field of a float.
#pragma once

#include "attention/mla_work.cuh"
#include "common/platform.cuh"
#include "common/ptx/min_max_packed.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/ptx/prmt.cuh"

namespace cukit::mla {

constexpr int kScaleColumns = 128;
constexpr int kScaleGroups = kLatent / kScaleColumns;
constexpr int kRopeByte = kLatent + kScaleGroups * 4;  // offset in a token
constexpr int kCodedBytes = kRopeByte + kRope * 2;

constexpr int kExponentBias = 127;
constexpr unsigned kInfinityBits = 0x7f800000u;

// 2^(exponent - kExponentBias), for the exponent field of a normal float.
CUKIT_DEVICE float power_of_two(int exponent) {
  return __uint_as_float(static_cast<unsigned>(exponent) << 23);
}

template <typename Element>
struct PairOf;
template <>
struct PairOf<__half> { using Type = __half2; };
template <>
struct PairOf<__nv_bfloat16> { using Type = __nv_bfloat162; };

// Products of two pairs of 16-bit elements.
template <typename Element>
CUKIT_DEVICE unsigned multiply_pairs(unsigned a, unsigned b) {
  using Pair = typename PairOf<Element>::Type;
  const Pair product = __hmul2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const unsigned*>(&product);
}

// The scales of a token and its unit.
struct KeyScales {
  static constexpr int kMinUnit = kExponentBias - 60;  // smaller scales lose bits, down to zero
  static constexpr int kMaxUnit = kExponentBias + 60;

  unsigned pairs[kScaleGroups / 2];  // float16, in the unit
  int exponent;                      // of the unit

  // `token`: the token's first byte. The scales of a token that does not exist are 0.
  CUKIT_DEVICE void load(const unsigned char* token, bool exists) {
    uint4 scales = *reinterpret_cast<const uint4*>(token + kLatent);
    if (!exists) scales = make_uint4(0, 0, 0, 0);
    const unsigned words[kScaleGroups] = {scales.x, scales.y, scales.z, scales.w};
    unsigned top = 0;
#pragma unroll
    for (const unsigned word : words) {
      top = max(top, word & ~(1u << 31));
    }
    exponent = min(max(static_cast<int>(top >> 23), kMinUnit), kMaxUnit);
    const float by = inverse();
#pragma unroll
    for (int i = 0; i < kScaleGroups / 2; ++i) {
      pairs[i] = pack<__half>(__uint_as_float(words[2 * i]) * by,
                              __uint_as_float(words[2 * i + 1]) * by);
    }
  }

  CUKIT_DEVICE float unit() const { return power_of_two(exponent); }
  CUKIT_DEVICE float inverse() const { return power_of_two(2 * kExponentBias - exponent); }
  CUKIT_DEVICE float unit_log2() const { return static_cast<float>(exponent - kExponentBias); }

  // 1 / unit twice, in bfloat16.
  CUKIT_DEVICE unsigned inverse_pair() const {
    return static_cast<unsigned>(2 * kExponentBias - exponent) * (1u << 23 | 1u << 7);
  }

  // The scale of a group of 128 columns, twice.
  CUKIT_DEVICE unsigned scale_pair(int group) const {
    const unsigned pair = pairs[group / 2];
    return permute_bytes(pair, pair, group % 2 == 0 ? 0x1010 : 0x3232);
  }

  // The scale of a group of 128 columns; the index need not be a compile-time constant.
  CUKIT_DEVICE __half scale(int group) const {
    const unsigned pair = group < 2 ? pairs[0] : pairs[1];
    return __ushort_as_half(static_cast<unsigned short>(group % 2 == 0 ? pair : pair >> 16));
  }
};

// Converts a tile of queries, in shared memory, by `threads` threads: latent columns to float16,
// all columns to the unit of the tile and to the order of a token's bytes.
template <typename QueryTile>
struct CodedQueries {
  static constexpr int kMaxScale = 20;  // queries are multiplied by at most 2^kMaxScale
  static constexpr int kTop = 14;       // exponent of the largest query, in units
  static constexpr int kLatentParts = kLatent / QueryTile::kPartColumns;
  static constexpr int kChunks = QueryTile::kRowBytes / 16;

  // Bits of the largest magnitude among this thread's latent columns. `thread`: 0 .. threads - 1.
  CUKIT_DEVICE static unsigned largest(const unsigned char* tile, int thread, int threads) {
    unsigned top = 0;  // of each half of the words
#pragma unroll 4
    for (int byte = 16 * thread; byte < kLatentParts * QueryTile::kPartBytes; byte += 16 * threads) {
      const uint4 chunk = *reinterpret_cast<const uint4*>(tile + byte);
      const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
      for (const unsigned word : words) {
        top = max_packed<T>(top, word & 0x7fff7fffu);
      }
    }
    return max(top & 0xffff0000u, top << 16);
  }

  // The exponent field of the unit for queries of magnitudes up to `top`; of 1 if a query is not
  // finite.
  CUKIT_DEVICE static int unit(unsigned top) {
    const int exponent = static_cast<int>(top >> 23);
    if (top >= kInfinityBits) return kExponentBias;
    return max(exponent - kTop, kExponentBias - kMaxScale);
  }

  CUKIT_DEVICE static void convert(unsigned char* tile, int thread, int threads, int unit) {
    const float by = power_of_two(2 * kExponentBias - unit);
    convert_parts<false>(tile, thread, threads, by);
    convert_parts<true>(tile + kLatentParts * QueryTile::kPartBytes, thread, threads, by);
  }

 private:
  // Converts the latent or, with Rotated, the rotated columns.
  template <bool Rotated>
  CUKIT_DEVICE static void convert_parts(unsigned char* parts, int thread, int threads, float by) {
    constexpr int kParts = Rotated ? QueryTile::kParts - kLatentParts : kLatentParts;
#pragma unroll 1
    for (int index = thread; index < kParts * QueryTile::kRows; index += threads) {
      unsigned char* const row = parts + index / QueryTile::kRows * QueryTile::kPartBytes;
      unsigned words[4 * kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const uint4 chunk = *reinterpret_cast<const uint4*>(row + offset(index, i));
        words[4 * i] = chunk.x;
        words[4 * i + 1] = chunk.y;
        words[4 * i + 2] = chunk.z;
        words[4 * i + 3] = chunk.w;
      }
#pragma unroll
      for (unsigned& word : words) {
        float values[2];
        unpack<T>(values, word);
        const float low = values[0] * by;
        const float high = values[1] * by;
        word = Rotated ? pack<T>(low, high) : pack<__half>(low, high);
      }
      // Chunk i holds k = 8 i .. 8 i + 7, two for each of four lanes.
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        unsigned own[4];
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
          own[lane] = words[Rotated ? i / 4 * 16 + 4 * lane + i % 4 : 8 * lane + i];
        }
        *reinterpret_cast<uint4*>(row + offset(index, i)) =
            make_uint4(own[0], own[1], own[2], own[3]);
      }
    }
  }

  // Offset of a 16-byte chunk in a part.
  CUKIT_DEVICE static unsigned offset(int index, int chunk) {
    return QueryTile::address(0, index % QueryTile::kRows, chunk);
  }
};

}  // namespace cukit::mla
