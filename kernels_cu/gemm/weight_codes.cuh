// Quantised weights packed in the fragment order of the tensor cores: the layout of a packed block,
// and the decoding of its codes to registers.
//
// A block is 64 rows (output features) x 128 columns (k) of the weight, contiguous in memory:
//   codes        a lane's codes of consecutive steps are adjacent, so that it loads 16 bytes
//   scales       Scale [128 / Group][4 warps][8][2]: rows g and g + 8 of a warp are adjacent
//   zero points  with ZeroPoints: one byte [128 / Group][4 warps][8], row g in the lower nibble
// Two blocks form a pair of 128 rows; pairs are stored consecutively along k. Rows and columns
// beyond the weight are zeros. cukit/gemm/quantized/weight_only_layout.py writes this layout.
//
// A step is 32 bytes of the other operand along k: 16 columns of 16-bit elements, 32 of float8.
// Lane l, with g = l / 4 and t = l % 4, holds this fragment of operand A of wgmma and mma.sync:
// a[0] is row g and a[1] row g + 8, both at the E = 2 or 4 columns from E t on; a[2] and a[3] are 4
// E columns further.
//
// Decoding is exact: it gives code - zero point. The kernels multiply a group's accumulators by the
// scale in float or, with FOLD (gemm/weight_only.cuh), round scaled elements to 16 bits.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/lop3.cuh"
#include "common/ptx/prmt.cuh"
#include "common/types.cuh"

namespace cukit {

constexpr int kBlockRows = 64;
constexpr int kBlockColumns = 128;

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

// An integer from -15 to 15 as e4m3.
CUKIT_DEVICE constexpr unsigned e4m3_integer(int value) {
  const int magnitude = value < 0 ? -value : value;
  const int exponent = magnitude >= 8 ? 3 : magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;
  const int mantissa = (magnitude << (3 - exponent)) & 7;
  return (value < 0 ? 0x80u : 0u) | (magnitude ? (exponent + 7) << 3 | mantissa : 0);
}

// Byte `place` of the Int4Float8Codes table of the zero point `zero` - 8.
CUKIT_DEVICE constexpr unsigned float8_entry(int zero, int place) {
  const int pairs = (zero + 1) / 2;  // pairs of negative values
  const bool second = place >= 8;
  const bool negative = place % 8 < pairs;
  const int code = negative ? place % 8 + (second ? pairs : 0) : second ? place : place + pairs;
  const unsigned number = e4m3_integer(code - zero) | (negative ? 0x80u : 0u);
  return negative && second ? number ^ 0xffu : number;
}
// Four bytes of the table, starting at `first`.
CUKIT_DEVICE constexpr unsigned float8_entries(int zero, int first) {
  return float8_entry(zero, first) | float8_entry(zero, first + 1) << 8 |
         float8_entry(zero, first + 2) << 16 | float8_entry(zero, first + 3) << 24;
}

// a * b, two elements at a time.
CUKIT_DEVICE unsigned multiply_pairs(__half, unsigned a, unsigned b) {
  const __half2 product =
      __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const unsigned*>(&product);
}
CUKIT_DEVICE unsigned multiply_pairs(__nv_bfloat16, unsigned a, unsigned b) {
  const __nv_bfloat162 product =
      __hmul2(*reinterpret_cast<__nv_bfloat162*>(&a), *reinterpret_cast<__nv_bfloat162*>(&b));
  return *reinterpret_cast<const unsigned*>(&product);
}

}  // namespace detail

// int4 to 16-bit elements. A word holds eight codes, each + 8: field i of the lower half is the
// first column of a[i], field i of the upper half the second. Fields are 4 bits wide and start at
// bit 3, wrapping around the end of the word: field 0 is then the four highest mantissa bits of a
// bfloat16, or the middle ones of a float16. With the exponent or-ed in, the value is 16 + field
// (bfloat16) or 128 + field (float16), where field = code + 8.
template <typename T>
struct Int4Codes {
  static constexpr int kBits = 4;
  static constexpr int kStepColumns = 16;
  static constexpr int kWords = 1;  // per lane and step
  static constexpr int kTableBytes = 0;
  static constexpr unsigned kField = 0x00780078u;

  // Subtrahends for the lane's two rows.
  struct Zeros {
    unsigned row[2];
  };

  // `both`: the rows' zero points + 8, one nibble each, expanded in the same way as codes.
  CUKIT_DEVICE static Zeros zeros(unsigned both, const unsigned char*) {
    return {{(both & 15u) * 0x00080008u | exponent(T()),
             (both >> 4) * 0x00080008u | exponent(T())}};
  }
  CUKIT_DEVICE static Zeros no_zeros() { return zeros(0x88, nullptr); }

  CUKIT_DEVICE static void decode(unsigned (&a)[4], const unsigned* words, const Zeros& zeros) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned shifted = __funnelshift_r(words[0], words[0], 4 * i);
      a[i] = detail::subtract_pairs(T(), and_or(shifted, kField, exponent(T())), zeros.row[i % 2]);
    }
  }

 private:
  CUKIT_DEVICE static unsigned exponent(__nv_bfloat16) { return 0x41804180u; }  // 16
  CUKIT_DEVICE static unsigned exponent(__half) { return 0x58005800u; }         // 128
};

// int8 to 16-bit elements. A word holds four codes, each + 128; byte r + 2 p of word j is column p
// of a[r + 2 j].
template <typename T>
struct Int8Codes {
  static constexpr int kBits = 8;
  static constexpr int kStepColumns = 16;
  static constexpr int kWords = 2;
  static constexpr int kTableBytes = 0;

  struct Zeros {};

  CUKIT_DEVICE static Zeros no_zeros() { return {}; }

  CUKIT_DEVICE static void decode(unsigned (&a)[4], const unsigned* words, const Zeros&) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pair(T(), words[i / 2] >> (8 * (i % 2)));
  }

 private:
  // Bytes 0 and 2 of a word, minus 128. float16: 1024 + byte is exact.
  CUKIT_DEVICE static unsigned pair(__half, unsigned word) {
    return detail::subtract_pairs(__half(), and_or(word, 0x00ff00ffu, 0x64006400u), 0x64806480u);
  }
  // bfloat16: 128 + the lower seven bits of the byte, minus 128 if the eighth is set, else 256.
  CUKIT_DEVICE static unsigned pair(__nv_bfloat16, unsigned word) {
    return detail::subtract_pairs(__nv_bfloat16(), and_or(word, 0x007f007fu, 0x43004300u),
                                  and_xor(word, 0x00800080u, 0x43804380u));
  }
};

// int4 to float8 (e4m3), which represents all integers from -16 to 16, through a 16-byte table for
// each zero point. A word holds eight codes: nibble c is code c of a[2 j], nibble 4 + c code c of
// a[2 j + 1].
//
// prmt selects one of eight bytes by the lower three bits of a nibble; if the highest bit is set,
// it replicates the byte's sign bit eight times instead. So both halves of a table are looked up,
// one with the highest bits unchanged and one with them inverted, and the results are xor-ed: a
// byte from one half and a replicated sign from the other. To make this work, bytes i and i + 8 of
// a table have the same sign (-0 completes the last pair if the number of negative values is odd),
// and the second byte of a negative pair is stored inverted: its sign bit is 0, and the replicated
// sign of the first byte undoes the inversion. Packing replaces each code by its index in the table
// of its zero point.
struct Int4Float8Codes {
  static constexpr int kBits = 4;
  static constexpr int kStepColumns = 32;
  static constexpr int kWords = 2;
  static constexpr int kTableBytes = 16 * 16;  // shared memory for the tables of all zero points

  struct Zeros {
    unsigned table[2][4];
  };

  // Fills the tables; called by `threads` threads, numbered by `thread`.
  CUKIT_DEVICE static void prepare(unsigned char* tables, int thread, int threads) {
    for (int i = thread; i < kTableBytes; i += threads) {
      tables[i] = static_cast<unsigned char>(detail::float8_entry(i / 16, i % 16));
    }
  }

  CUKIT_DEVICE static Zeros zeros(unsigned both, const unsigned char* tables) {
    Zeros zeros;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const unsigned zero = row == 0 ? both & 15u : both >> 4;
      const uint4 words = reinterpret_cast<const uint4*>(tables)[zero];
      zeros.table[row][0] = words.x;
      zeros.table[row][1] = words.y;
      zeros.table[row][2] = words.z;
      zeros.table[row][3] = words.w;
    }
    return zeros;
  }

  CUKIT_DEVICE static Zeros no_zeros() {
    constexpr unsigned kTable[4] = {detail::float8_entries(8, 0), detail::float8_entries(8, 4),
                                    detail::float8_entries(8, 8), detail::float8_entries(8, 12)};
    Zeros zeros;
#pragma unroll
    for (int i = 0; i < 4; ++i) zeros.table[0][i] = zeros.table[1][i] = kTable[i];
    return zeros;
  }

  CUKIT_DEVICE static void decode(unsigned (&a)[4], const unsigned* words, const Zeros& zeros) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const unsigned inverted = words[j] ^ 0x88888888u;
      a[2 * j] = look_up(zeros.table[0], words[j], inverted);
      a[2 * j + 1] = look_up(zeros.table[1], words[j] >> 16, inverted >> 16);
    }
  }

 private:
  // Looks up the lower four nibbles of `places`; `inverted`: the same with inverted highest bits.
  CUKIT_DEVICE static unsigned look_up(const unsigned (&table)[4], unsigned places,
                                       unsigned inverted) {
    return permute_bytes(table[0], table[1], places) ^ permute_bytes(table[2], table[3], inverted);
  }
};

// The layout of a block. Group: columns that share a scale, 32, 64 or 128; 0 for one scale per row,
// which is then not stored in the block.
template <typename Codes, typename Scale, int Group, bool ZeroPoints>
struct WeightBlock {
  static constexpr int kCodeBytes = kBlockRows * kBlockColumns * Codes::kBits / 8;
  static constexpr int kGroups = Group ? kBlockColumns / Group : 0;
  static constexpr int kScales = kCodeBytes;  // byte offset
  static constexpr int kZeros = kScales + kGroups * kBlockRows * static_cast<int>(sizeof(Scale));
  static constexpr int kBytes = kZeros + (ZeroPoints ? kGroups * kBlockRows / 2 : 0);

  static_assert(kBytes % 16 == 0, "bulk copies need multiples of 16 bytes");

  // Loads the lane's words of steps `first` .. `first` + Steps - 1. A 16-byte chunk holds 4 /
  // kWords steps.
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

  // The scales of the two rows of thread `thread` of the block's 128 threads.
  CUKIT_DEVICE static Vec<Scale, 2> scale_pair(const unsigned char* block, int group, int thread) {
    const auto* const pairs = reinterpret_cast<const Vec<Scale, 2>*>(block + kScales);
    return pairs[group * kBlockRows / 2 + thread / 4];
  }
  CUKIT_DEVICE static void scales(float (&to)[2], const unsigned char* block, int group) {
    to_floats(to, scale_pair(block, group, threadIdx.x % 128));
  }

  // The zero points + 8 of these rows, one nibble each.
  CUKIT_DEVICE static unsigned char zero_points(const unsigned char* block, int group, int thread) {
    if constexpr (!ZeroPoints) return 0;
    return block[kZeros + group * kBlockRows / 2 + thread / 4];
  }

  // The decoding constants of two rows. `both`: their zero points + 8; `tables`: from
  // Codes::prepare.
  CUKIT_DEVICE static typename Codes::Zeros zeros(unsigned both, const unsigned char* tables) {
    if constexpr (ZeroPoints) {
      return Codes::zeros(both, tables);
    } else {
      return Codes::no_zeros();
    }
  }
};

}  // namespace cukit
