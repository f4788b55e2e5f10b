// Operands of paged attention's products, from 16-bit elements or from 8-bit or int4 codes.
//
// The products are transposed: keys are the rows of S^T = K Q^T, and columns of values the rows of
// O^T = V^T P^T. The result of mma.sync has sixteen rows and eight columns, so that a group of
// eight query heads fills the columns. The queries stay in registers where they fit, and a
// transposition turns P from a result into an operand.
//
// Codes are converted to float16 in registers, so that 8-bit codes need half the shared-memory
// reads, and the products are those of float16. A lane reads sixteen 8-bit codes of a key at a time
// and uses four of them per step; the columns of the queries are in the same order (query_place).
// ldmatrix reads two 8-bit codes of values as one 16-bit element; the lower codes of all pairs form
// one tile of output columns, the upper codes the next, so that output columns interleave.
//
// int8 codes are converted by their bits: 0x6400 | (code + 128) is 1152 + code in float16. For
// values the 1152 is subtracted; for keys the accumulators start at -1152 times the sum of the
// query's elements.
//
// int4: eight codes per word. With u = code + 8, 0x6400 | u is 1024 + u for codes 0, 2, 4 and 6,
// and 0x6400 | 16 u is 1024 + 16 u for the others: the queries of these columns are divided by 16,
// and the outputs of these columns are divided by 16 when they are stored. Keys have a scale and a
// zero point for each column of STEP keys: the scales multiply the queries, and the contributions
// of the zero points and of the 1024 are added to the scores.
//
// Macros: those of paged_attention.cu.
#pragma once

#include "attention/paged_rows.cuh"
#include "common/platform.cuh"
#include "common/ptx/lop3.cuh"
#include "common/ptx/movmatrix.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/pack_e4m3.cuh"
#include "common/ptx/prmt.cuh"
#include "common/tile.cuh"

namespace cukit::paged {

// F: the Form of the keys.
template <typename F>
using Scores = float[F::kKeyTiles][QUERY_TILES][4];
template <typename F>
using Probabilities = unsigned[F::kKeyTiles][QUERY_TILES][2];
using Outputs = float[kDimSteps][QUERY_TILES][4];

// The bias of converted int8 and int4 codes, as a pair of float16, and its negative.
constexpr unsigned kBias = CODE == 3 ? 0x64006400u : 0x64806480u;
constexpr unsigned kMinusBias = kBias | 0x80008000u;
constexpr bool kBiased = CODE >= 2;

constexpr int kPairsOfWord = CODE == 3 ? 4 : 2;

// Converts a word of codes to pairs of float16 plus kBias. Keys: codes 0 and 1, 2 and 3; values,
// Alternating: 0 and 2, 1 and 3. int4: 0 and 4, 1 and 5 times 16, 2 and 6, 3 and 7 times 16.
template <bool Alternating>
CUKIT_DEVICE void spread_codes(unsigned (&pairs)[kPairsOfWord], unsigned codes) {
#if CODE == 1
  unpack_e4m3(pairs, Alternating ? permute_bytes(codes, 0, 0x3120) : codes);
#elif CODE == 2
  const unsigned raised = codes ^ 0x80808080u;
  pairs[0] = permute_bytes(raised, 0x64646464u, Alternating ? 0x4240 : 0x4140);
  pairs[1] = permute_bytes(raised, 0x64646464u, Alternating ? 0x4341 : 0x4342);
#elif CODE == 3
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    pairs[2 * i] = and_xor(codes >> (8 * i), 0x000f000fu, 0x64086408u);
    pairs[2 * i + 1] = and_xor(codes >> (8 * i), 0x00f000f0u, 0x64806480u);
  }
#endif
}

CUKIT_DEVICE __half2 as_half2(unsigned pair) { return *reinterpret_cast<const __half2*>(&pair); }
CUKIT_DEVICE unsigned as_word(__half2 pair) { return *reinterpret_cast<const unsigned*>(&pair); }

CUKIT_DEVICE unsigned without_bias(unsigned pair) {
  return kBiased ? as_word(__hsub2(as_half2(pair), as_half2(kBias))) : pair;
}

// The chunk of a key's codes that lanes with lane % 4 == t read in load number `load`, chosen so
// that two neighbouring rows use all shared-memory banks.
constexpr bool kPairedChunks = CacheForm::kTileColumns % 64 == 0;
CUKIT_DEVICE int chunk_of_lane(int t, int load) {
  return kPairedChunks ? load / 2 * 8 + 2 * t + load % 2 : 4 * load + t;
}

// Index, in elements, of column `column` of query row `row` in the tile.
template <typename F>
CUKIT_DEVICE int query_place(int row, int column) {
  int step, t, part, half;
  if constexpr (F::kCode == 0) {
    step = column / 16;
    t = column % 8 / 2;
    part = column % 16 / 8;
    half = column % 2;
  } else {
    constexpr int kElements = 128 / F::kBits;  // of a chunk
    const int chunk = column / kElements;
    const int load = kPairedChunks ? chunk / 8 * 2 + chunk % 2 : chunk / 4;
    t = kPairedChunks ? chunk % 8 / 2 : chunk % 4;
    step = kElements / 4 * load;
    if constexpr (F::kCode == 3) {
      step += column % kElements / 8 * 2 + column % 4 / 2;
      part = column % 2;
      half = column % 8 / 4;
    } else {
      step += column % kElements / 4;
      part = column % 4 / 2;
      half = column % 2;
    }
  }
  return (((row / 8 * kDimSteps + step) * kWarpSize + row % 8 * 4 + t) * 2 + part) * 2 + half;
}

// A column of a query in the element type of the products.
template <typename F>
CUKIT_DEVICE typename F::product_t query_element(T value, int column) {
  const float factor = F::kCode == 3 && column % 2 == 1 ? 1.0f / 16 : 1.0f;
  return from_float<typename F::product_t>(to_float(value) * factor);
}

// Subtracts the contribution of the codes' bias from the accumulators.
CUKIT_DEVICE void subtract_bias(float (&sums)[4], const uint2& q) {
  const unsigned bias[4] = {kMinusBias, kMinusBias, kMinusBias, kMinusBias};
  mma_16x8x16<__half>(sums, bias, q.x, q.y);
}

// Initialises the accumulators of the scores. `start`: for each tile of query rows, the values of
// the lane's two rows.
template <typename F>
CUKIT_DEVICE void begin_scores(Scores<F>& scores, const float (&start)[QUERY_TILES][2]) {
#pragma unroll
  for (int m = 0; m < F::kKeyTiles; ++m)
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = start[n][i % 2];
}

// A lane's part of the queries as operand B, held in registers where they fit.
template <typename F>
class Queries {
 public:
  CUKIT_DEVICE explicit Queries(const unsigned char* tile)
      : tile_(reinterpret_cast<const uint2*>(tile) + threadIdx.x % kWarpSize) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) held_[i] = tile_[i * kWarpSize];
    }
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
      float sums[4] = {};
      if constexpr (F::kCode == 2) {
#pragma unroll
        for (int step = 0; step < kDimSteps; ++step) subtract_bias(sums, (*this)(n, step));
      }
      start_[n][0] = sums[0];
      start_[n][1] = sums[1];
    }
  }

  // The operand of rows 8 n .. 8 n + 7.
  CUKIT_DEVICE uint2 operator()(int n, int step) const {
    const int i = n * kDimSteps + step;
    if constexpr (kHeld) {
      return held_[i];
    } else {
      return tile_[i * kWarpSize];
    }
  }

  CUKIT_DEVICE void begin(Scores<F>& scores) const { begin_scores<F>(scores, start_); }

 private:
  static constexpr int kPairs = QUERY_TILES * kDimSteps;
  static constexpr bool kHeld = F::kCode == CODE && CODE != 3 && kPairs <= 16;

  const uint2* tile_;
  uint2 held_[kHeld ? kPairs : 1];
  float start_[QUERY_TILES][2];
};

#if CODE == 3

// Reorders eight float16 into pairs 0 and 4, 1 and 5, 2 and 6, 3 and 7.
CUKIT_DEVICE void by_pair(unsigned (&pairs)[4], const uint4& from) {
  pairs[0] = permute_bytes(from.x, from.z, 0x5410);
  pairs[1] = permute_bytes(from.x, from.z, 0x7632);
  pairs[2] = permute_bytes(from.y, from.w, 0x5410);
  pairs[3] = permute_bytes(from.y, from.w, 0x7632);
}

// -8 minus the zero point, for a pair of zero points.
CUKIT_DEVICE unsigned offset_of_zeros(unsigned zeros) {
  return as_word(__hsub2(__float2half2_rn(-8.0f), as_half2(zeros)));
}

// int4: the queries for one group of keys, multiplied by the scales of its columns.
class GroupQueries {
 public:
  // `factors`: HEAD_DIM scales, then HEAD_DIM zero points. The contributions of the codes' bias
  // (rows 0 to 7 of operand A) and of the zero points (rows 8 to 15) are computed by products of
  // their own.
  CUKIT_DEVICE GroupQueries(const Queries<CacheForm>& queries, const unsigned char* factors) {
    const int t = threadIdx.x % kWarpSize % 4;
    const uint4* chunks = reinterpret_cast<const uint4*>(factors);
    constexpr unsigned kMinus64 = 0xd400d400u;
    constexpr int kChains = 2;  // of dependent products
    float sums[kChains][QUERY_TILES][4] = {};
#pragma unroll
    for (int step = 0; step < kDimSteps; step += 2) {  // eight columns, one word of codes
      const int at = 4 * chunk_of_lane(t, step / 8) + step % 8 / 2;
      unsigned scales[4];
      unsigned zeros[4];
      by_pair(scales, chunks[at]);
      by_pair(zeros, chunks[HEAD_DIM / 8 + at]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned a[4] = {kMinusBias, offset_of_zeros(zeros[2 * i]), kMinus64,
                               offset_of_zeros(zeros[2 * i + 1])};
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
          uint2 q = queries(n, step + i);
          q.x = as_word(__hmul2(as_half2(q.x), as_half2(scales[2 * i])));
          q.y = as_word(__hmul2(as_half2(q.y), as_half2(scales[2 * i + 1])));
          scaled_[n][step + i] = q;
          q.y = as_word(__hmul2(as_half2(q.y), __float2half2_rn(16.0f)));
          mma_16x8x16<__half>(sums[i][n], a, q.x, q.y);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        start_[n][i] = (sums[0][n][i] + sums[1][n][i]) + (sums[0][n][2 + i] + sums[1][n][2 + i]);
      }
  }

  // scores = K Q^T of STEP keys of the group.
  CUKIT_DEVICE void multiply(Scores<CacheForm>& scores, const unsigned char* keys) const {
    using F = CacheForm;
    const int lane = threadIdx.x % kWarpSize;
    clear(scores);
#pragma unroll
    for (int load = 0; load < F::kTileColumns / 32; ++load) {
      unsigned codes[F::kKeyTiles][2][4];  // of keys lane / 4 and lane / 4 + 8
#pragma unroll
      for (int m = 0; m < F::kKeyTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * m + 8 * half + lane / 4;
          const unsigned at = Swizzle<F::kTileColumns>::offset(row, chunk_of_lane(lane % 4, load));
          *reinterpret_cast<uint4*>(codes[m][half]) = *reinterpret_cast<const uint4*>(keys + at);
        }
#pragma unroll
      for (int word = 0; word < 4; ++word)
#pragma unroll
        for (int m = 0; m < F::kKeyTiles; ++m) {
          unsigned upper[4];
          unsigned lower[4];
          spread_codes<false>(upper, codes[m][0][word]);
          spread_codes<false>(lower, codes[m][1][word]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const unsigned a[4] = {upper[2 * i], lower[2 * i], upper[2 * i + 1], lower[2 * i + 1]};
#pragma unroll
            for (int n = 0; n < QUERY_TILES; ++n) {
              const uint2 q = scaled_[n][2 * (4 * load + word) + i];
              mma_16x8x16<__half>(scores[m][n], a, q.x, q.y);
            }
          }
        }
    }
#pragma unroll
    for (int m = 0; m < F::kKeyTiles; ++m)
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] += start_[n][i % 2];
  }

 private:
  uint2 scaled_[QUERY_TILES][kDimSteps];
  float start_[QUERY_TILES][2];  // added to the scores of all keys
};

#endif  // CODE == 3

// scores = K Q^T of a warp's keys; int4 uses GroupQueries::multiply instead.
template <typename F>
CUKIT_DEVICE void multiply_keys(Scores<F>& scores, const Queries<F>& queries,
                                const unsigned char* keys) {
  queries.begin(scores);
  if constexpr (F::kCode == 0) {
    const LeftMK<F::kTileColumns> operand(shared_address(keys), 0, 0);
#pragma unroll
    for (int step = 0; step < kDimSteps; ++step)
#pragma unroll
      for (int m = 0; m < F::kKeyTiles; ++m) {
        unsigned a[4];
        operand(a, 16 * m, 16 * step);
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
          const uint2 q = queries(n, step);
          mma_16x8x16<typename F::product_t>(scores[m][n], a, q.x, q.y);
        }
      }
  } else {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int load = 0; load < F::kTileColumns / 32; ++load)
#pragma unroll
      for (int m = 0; m < F::kKeyTiles; ++m) {
        unsigned codes[2][4];  // of keys lane / 4 and lane / 4 + 8
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * m + 8 * half + lane / 4;
          const unsigned at = Swizzle<F::kTileColumns>::offset(row, chunk_of_lane(lane % 4, load));
          *reinterpret_cast<uint4*>(codes[half]) = *reinterpret_cast<const uint4*>(keys + at);
        }
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          unsigned upper[kPairsOfWord];
          unsigned lower[kPairsOfWord];
          spread_codes<false>(upper, codes[0][word]);
          spread_codes<false>(lower, codes[1][word]);
          const unsigned a[4] = {upper[0], lower[0], upper[1], lower[1]};
#pragma unroll
          for (int n = 0; n < QUERY_TILES; ++n) {
            const uint2 q = queries(n, 4 * load + word);
            mma_16x8x16<typename F::product_t>(scores[m][n], a, q.x, q.y);
          }
        }
      }
  }
}

// out += V^T P^T of a warp's keys.
template <typename F>
CUKIT_DEVICE void multiply_values(Outputs& out, const Probabilities<F>& p,
                                  const unsigned char* values) {
  const LeftKM<F::kTileColumns> operand(shared_address(values), 0, 0);
#pragma unroll
  for (int m = 0; m < F::kKeyTiles; ++m)
#pragma unroll
    for (int column = 0; column < F::kTileColumns; column += 16) {
      constexpr int kTiles = F::kCode == 0 ? 1 : kPairsOfWord;  // tiles of output columns
      unsigned loaded[4];
      operand(loaded, 16 * m, column);
      unsigned a[kTiles][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (F::kCode == 0) {
          a[0][i] = loaded[i];
        } else {
          unsigned pairs[kPairsOfWord];
          spread_codes<true>(pairs, loaded[i]);
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) a[tile][i] = without_bias(pairs[tile]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
          mma_16x8x16<typename F::product_t>(out[column / 16 * kTiles + tile][n], a[tile],
                                             p[m][n][0], p[m][n][1]);
        }
    }
}

#if CODE == 3
// int4: out += V^T P^T of STEP keys. `zeros`: zero points, as in ValueFactors. The contributions of
// the codes' bias and of the zero points, which are the same for all columns, are the initial
// accumulators of each step, so that `out` holds no large sums that cancel.
CUKIT_DEVICE void multiply_group_values(Outputs& out, const Probabilities<CacheForm>& p,
                                        const unsigned (&zeros)[CacheForm::kKeyTiles][2],
                                        const unsigned char* values) {
  using F = CacheForm;
  float start[QUERY_TILES][4] = {};
#pragma unroll
  for (int m = 0; m < F::kKeyTiles; ++m) {
    const unsigned a[4] = {kMinusBias, offset_of_zeros(zeros[m][0]), kMinusBias,
                           offset_of_zeros(zeros[m][1])};
#pragma unroll
    for (int n = 0; n < QUERY_TILES; ++n) {
      mma_16x8x16<__half>(start[n], a, p[m][n][0], p[m][n][1]);
    }
  }
  const LeftKM<F::kTileColumns> operand(shared_address(values), 0, 0);
#pragma unroll
  for (int column = 0; column < F::kTileColumns; column += 16) {
    float sums[4][QUERY_TILES][4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[tile][n][i] = fmaf(start[n][2 + i % 2], tile % 2 ? 16.0f : 1.0f, start[n][i % 2]);
        }
#pragma unroll
    for (int m = 0; m < F::kKeyTiles; ++m) {
      unsigned loaded[4];
      operand(loaded, 16 * m, column);
      unsigned a[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        unsigned pairs[4];
        spread_codes<true>(pairs, loaded[i]);
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) a[tile][i] = pairs[tile];
      }
#pragma unroll
      for (int tile = 0; tile < 4; ++tile)
#pragma unroll
        for (int n = 0; n < QUERY_TILES; ++n) {
          mma_16x8x16<__half>(sums[tile][n], a[tile], p[m][n][0], p[m][n][1]);
        }
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile)
#pragma unroll
      for (int n = 0; n < QUERY_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[column / 4 + tile][n][i] += sums[tile][n][i];
  }
}
#endif

// Stores a lane's outputs of query tile `n` (eight rows) to `rows`, in column order. `pitch`:
// floats between rows; `factors`: of the lane's two rows. Adds: adds to the contents of `rows`;
// 16-bit forms only.
template <typename F, bool Adds = false>
CUKIT_DEVICE void store_columns(float* rows, int pitch, const Outputs& out, int n,
                                const float (&factors)[2]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float* row = rows + (lane % 4 * 2 + i) * pitch;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int e = 2 * half + i;
      if constexpr (F::kCode == 0) {
#pragma unroll
        for (int c = 0; c < kDimSteps; ++c) {
          float& to = row[16 * c + 8 * half + lane / 4];
          to = Adds ? fmaf(out[c][n][e], factors[i], to) : out[c][n][e] * factors[i];
        }
      } else if constexpr (F::kCode == 3) {
        const float sixteenth = factors[i] / 16;
#pragma unroll
        for (int c = 0; c < kDimSteps; c += 4) {
          *reinterpret_cast<float4*>(row + 16 * c + 4 * (8 * half + lane / 4)) =
              make_float4(out[c][n][e] * factors[i], out[c + 1][n][e] * sixteenth,
                          out[c + 2][n][e] * factors[i], out[c + 3][n][e] * sixteenth);
        }
      } else {
#pragma unroll
        for (int c = 0; c < kDimSteps; c += 2) {
          *reinterpret_cast<float2*>(row + 16 * c + 2 * (8 * half + lane / 4)) =
              make_float2(out[c][n][e] * factors[i], out[c + 1][n][e] * factors[i]);
        }
      }
    }
  }
}

}  // namespace cukit::paged
