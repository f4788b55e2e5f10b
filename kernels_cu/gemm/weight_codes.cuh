// Quantised weights in the order in which tensor cores take them: the blocks of a packed weight, and
// their way into registers.
//
// A block is 64 rows (output features) x 128 columns (k) of the weight, contiguous in memory:
//   codes        a lane's codes of consecutive k16 steps lie side by side, so that it reads 16 bytes
//   scales       SCALE [128 / Group][4 warps][8][2]: rows g and g + 8 of a warp are neighbours
//   zero points  int4: a byte [128 / Group][4 warps][8], row g in the lower half; only with ZeroPoints
// Blocks of one 64 rows follow each other along k. Rows and columns beyond the weight are zeros.
// cukit/gemm/weight_only_layout.py writes this order; lane l, with g = l / 4 and t = l % 4, has operand
// A of wgmma (and of mma.sync): a[0] row g, a[1] row g + 8, columns 2t 2t+1; a[2] a[3] columns + 8.
//
// Codes become numbers of type T exactly: (code - zero point), without the scale, which multiplies the
// sums of a group in float. Nothing is rounded before the accumulators.
//
// int4: eight codes, each + 8, of one k16 step are a word; field i of the lower half is the first and of
//   the upper half the second column of a[i]. Fields are 4 bits wide and begin at bit 3, round the word's
//   end: field 0 is the highest bits of a mantissa of bfloat16, and the middle of float16's. With the
//   exponent or-ed in it reads 16 + code (128 + code in float16).
// int8: four codes, each + 128, are a word; two words a k16 step. Byte r + 2 p of word j is a[r + 2 j],
//   column p.
#pragma once

#include "common/platform.cuh"
#include "common/types.cuh"

namespace cukit {

constexpr int kBlockRows = 64;
constexpr int kBlockColumns = 128;
constexpr int kBlockSteps = kBlockColumns / 16;

namespace detail {

// a - b, two elements at a time.
CUKIT_DEVICE unsigned subtract_pairs(__half, unsigned a, unsigned b) {
  const __half2 difference =
      __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const unsigned*>(&difference);
}
CUKIT_DEVICE unsigned subtract_pairs(__nv_bfloat16, unsigned a, unsigned b) {
  const __nv_bfloat162 difference =
      __hsub2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<const unsigned*>(&difference);
}

// Numbers whose lowest bits of the mantissa a code is or-ed into, in both halves of a word.
template <typename T>
struct Magic;
template <>
struct Magic<__nv_bfloat16> {
  static constexpr unsigned kInt4 = 0x41804180u;  // 16
};
template <>
struct Magic<__half> {
  static constexpr unsigned kInt4 = 0x58005800u;  // 128
};

}  // namespace detail

// What a lane subtracts from the codes of its two rows.
struct RowPair {
  unsigned row[2];
};

template <typename T>
struct Int4Codes {
  static constexpr int kBits = 4;
  static constexpr int kBytes = kBlockRows * kBlockColumns / 2;
  static constexpr int kWords = 1;  // of a lane in a k16 step
  static constexpr unsigned kField = 0x00780078u;

  // `byte`: the zero points + 8 of two rows.
  CUKIT_DEVICE static RowPair zeros(unsigned byte) {
    return {{(byte & 15u) * 0x00080008u | detail::Magic<T>::kInt4,
             (byte >> 4) * 0x00080008u | detail::Magic<T>::kInt4}};
  }
  CUKIT_DEVICE static RowPair no_zeros() { return zeros(0x88); }

  CUKIT_DEVICE static void decode(unsigned (&a)[4], const unsigned* words, const RowPair& zeros) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned field = __funnelshift_r(words[0], words[0], 4 * i) & kField;
      a[i] = detail::subtract_pairs(T(), field | detail::Magic<T>::kInt4, zeros.row[i % 2]);
    }
  }
};

template <typename T>
struct Int8Codes {
  static constexpr int kBits = 8;
  static constexpr int kBytes = kBlockRows * kBlockColumns;
  static constexpr int kWords = 2;

  CUKIT_DEVICE static RowPair no_zeros() { return {}; }

  CUKIT_DEVICE static void decode(unsigned (&a)[4], const unsigned* words, const RowPair&) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pair(T(), words[i / 2] >> (8 * (i % 2)));
  }

 private:
  // Bytes 0 and 2 of a word, - 128. float16: 1024 + code is exact.
  CUKIT_DEVICE static unsigned pair(__half, unsigned word) {
    return detail::subtract_pairs(__half(), (word & 0x00ff00ffu) | 0x64006400u, 0x64806480u);
  }
  // bfloat16: the lower seven bits over 128, less 128 or, where the eighth is not set, 256.
  CUKIT_DEVICE static unsigned pair(__nv_bfloat16, unsigned word) {
    return detail::subtract_pairs(__nv_bfloat16(), (word & 0x007f007fu) | 0x43004300u,
                                  (word & 0x00800080u) ^ 0x43804380u);
  }
};

// The layout of a block. Group: columns that share a scale, 32, 64 or 128, or 0 where a row has one
// scale, which the block then does not hold.
template <typename Codes, typename Scale, int Group, bool ZeroPoints>
struct WeightBlock {
  static constexpr int kGroups = Group ? kBlockColumns / Group : 0;
  static constexpr int kScales = Codes::kBytes;  // bytes before
  static constexpr int kZeros = kScales + kGroups * kBlockRows * static_cast<int>(sizeof(Scale));
  static constexpr int kBytes = kZeros + (ZeroPoints ? kGroups * kBlockRows / 2 : 0);

  static_assert(kBytes % 16 == 0, "as bulk copies ask for");

  // The lane's words of k16 steps `first` .. `first` + Steps - 1. A 16-byte chunk holds
  // 4 / kWords steps.
  template <int Steps>
  CUKIT_DEVICE static void load(unsigned (&words)[Steps * Codes::kWords], const unsigned char* block,
                                int first) {
    constexpr int kChunkSteps = 4 / Codes::kWords;
    const int thread = threadIdx.x % 128;
    if constexpr (Steps >= kChunkSteps) {
#pragma unroll
      for (int chunk = 0; chunk < Steps / kChunkSteps; ++chunk) {
        const uint4 four = *reinterpret_cast<const uint4*>(
            block + ((first / kChunkSteps + chunk) * 128 + thread) * 16);
        words[4 * chunk] = four.x;
        words[4 * chunk + 1] = four.y;
        words[4 * chunk + 2] = four.z;
        words[4 * chunk + 3] = four.w;
      }
    } else {
      const uint2 two = *reinterpret_cast<const uint2*>(
          block + (first / kChunkSteps * 128 + thread) * 16 + first % kChunkSteps * 4 * Codes::kWords);
      words[0] = two.x;
      words[1] = two.y;
    }
  }

  // The scales of the lane's two rows.
  CUKIT_DEVICE static void scales(float (&to)[2], const unsigned char* block, int group) {
    const int pair = group * kBlockRows / 2 + threadIdx.x % 128 / 4;
    const Scale* const two = reinterpret_cast<const Scale*>(block + kScales) + 2 * pair;
    Vec<Scale, 2> values;
    values = *reinterpret_cast<const Vec<Scale, 2>*>(two);
    to[0] = to_float(values[0]);
    to[1] = to_float(values[1]);
  }

  CUKIT_DEVICE static RowPair zeros(const unsigned char* block, int group) {
    if constexpr (ZeroPoints) {
      return Codes::zeros(block[kZeros + group * kBlockRows / 2 + threadIdx.x % 128 / 4]);
    } else {
      return Codes::no_zeros();
    }
  }
};

}  // namespace cukit
