// Building blocks of the gated scan: a block's share of the work, a chunk's decays, a warp's rows of a state.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/pack.cuh"
#include "common/quad.cuh"
#include "common/tile.cuh"
#include "common/types.cuh"
#include "sequence/parameters.cuh"

namespace cukit {

constexpr int kChunk = 64;        // tokens
constexpr int kHeadColumns = 64;  // columns of head_dim per block
constexpr float kMinLogDecay = -104.0f;  // natural logarithm; exp(-104) is 0 in float
constexpr float kZeroExponent = -150.0f;  // 2^x is 0 in float for x <= this

// The work of a block: chunks [first, end) of the sequence that starts at token `begin`.
// Grid: (segment, column tile, sequence * heads + head of the launch).
struct ScanWork {
  int segment, column, columns, sequence, local_head, head, group;
  int length, first, end;
  long long begin;

  CUKIT_DEVICE ScanWork(const ScanParameters& p, const int* cu_seqlens, int first_segment) {
    segment = static_cast<int>(blockIdx.x) + first_segment;
    column = static_cast<int>(blockIdx.y) * kHeadColumns;
    columns = min(p.head_dim - column, kHeadColumns);
    sequence = static_cast<int>(blockIdx.z) / p.heads;
    local_head = static_cast<int>(blockIdx.z) % p.heads;
    head = p.first_head + local_head;
    group = CHANNELS ? local_head : head / (p.num_heads / p.num_groups);
    begin = cu_seqlens == nullptr ? static_cast<long long>(sequence) * p.seq_len
                                  : cu_seqlens[sequence];
    length = cu_seqlens == nullptr ? p.seq_len : cu_seqlens[sequence + 1] - cu_seqlens[sequence];
    const int chunks = (length + kChunk - 1) / kChunk;
    const int share = (chunks + p.segments - 1) / p.segments;
    first = min(segment * share, chunks);
    end = min(first + share, chunks);
  }

  // Index of this sequence's state in [num_sequences, num_heads].
  CUKIT_DEVICE long long whole_place(const ScanParameters& p) const {
    return static_cast<long long>(sequence) * p.num_heads + head;
  }

  // Index of this segment's state in [num_sequences, segments, heads]; with one segment, of the
  // sequence's state in [num_sequences, num_heads].
  CUKIT_DEVICE long long place(const ScanParameters& p) const {
    if (p.segments == 1) return whole_place(p);
    return (static_cast<long long>(sequence) * p.segments + segment) * p.heads + local_head;
  }

  // Index of a chunk's state in [slots, heads]. Slots of different sequences do not overlap, because
  // floor(a + b) + 1 >= floor(a) + ceil(b).
  CUKIT_DEVICE long long chunk_place(const ScanParameters& p, int chunk) const {
    return (begin / kChunk + sequence + chunk) * p.heads + local_head;
  }
};

// A log decay in base 2, clamped.
CUKIT_DEVICE float clamped_decay(float l) {
  return (l != l ? l : fmaxf(fminf(l, 0.0f), kMinLogDecay)) * kLog2E;
}

// Whether the forward leaves this log decay unclamped.
CUKIT_DEVICE bool has_gradient(float l) { return !(l > 0.0f || l < kMinLogDecay); }

// Loads the log decays of tokens 2 l and 2 l + 1 of a chunk into lane l, clamped and in base 2.
// `log_decay` points to the first log decay of the sequence and head.
CUKIT_DEVICE void read_decays(float (&own)[2], const float* log_decay, int num_heads, int chunk,
                              int length) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = chunk * kChunk + 2 * static_cast<int>(threadIdx.x % kWarpSize) + i;
    const float l = token < length ? log_decay[static_cast<long long>(token) * num_heads] : 0.0f;
    own[i] = clamped_decay(l);
  }
}

// Prefix sums of the log decays of a chunk, computed by one warp.
struct ChunkDecays {
  float* cumsum;  // [kChunk], log2

  // Lane l passes the decays of tokens 2 l and 2 l + 1.
  CUKIT_DEVICE void scan(const float (&own)[2]) const {
    const int lane = threadIdx.x % kWarpSize;
    float sum = own[0] + own[1];
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const float other = __shfl_up_sync(kFullMask, sum, distance);
      if (lane >= distance) sum += other;
    }
    __syncwarp();
    cumsum[2 * lane] = sum - own[1];
    cumsum[2 * lane + 1] = sum;
    __syncwarp();
  }

  CUKIT_DEVICE float last() const { return cumsum[kChunk - 1]; }
};

// The chunk in slot blockIdx.x, in the order of ScanWork::chunk_place, and head blockIdx.y of the
// launch. Grid: (slots, heads). In an unused slot, `rows` is 0.
struct ChunkSlot {
  int local_head, head, group, sequence, rows;
  long long token;  // first of the chunk
  long long place;  // in [slots, heads]

  CUKIT_DEVICE ChunkSlot(const ScanParameters& p, const int* cu_seqlens)
      : local_head(static_cast<int>(blockIdx.y)),
        head(p.first_head + local_head),
        group(head / (p.num_heads / p.num_groups)) {
    const int slot = static_cast<int>(blockIdx.x);
    const auto begin = [&](int at) {
      return cu_seqlens == nullptr ? static_cast<long long>(at) * p.seq_len : cu_seqlens[at];
    };
    int low = 0, high = p.num_sequences - 1;  // the last sequence whose first slot is not above `slot`
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (begin(middle) / kChunk + middle <= slot) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    sequence = low;
    const long long first = begin(low);
    token = first + (slot - (first / kChunk + low)) * static_cast<long long>(kChunk);
    rows = static_cast<int>(max(min(begin(low + 1) - token, static_cast<long long>(kChunk)), 0LL));
    place = static_cast<long long>(slot) * p.heads + local_head;
  }
};

// Writes the gradients of a chunk's log decays, computed by one warp as a prefix sum: `first` for
// token 0, and for token t + 1 the gradient of token t plus change(t). Writes 0 where the forward
// clamps the log decay. Lane l passes the changes of tokens 2 l and 2 l + 1. `grads` points to the
// first gradient of the sequence, head and column tile.
CUKIT_DEVICE void write_decay_gradients(float* grads, const float (&change)[2], float first,
                                        const float* log_decay, int token, int length, int num_heads,
                                        int tiles) {
  const int lane = threadIdx.x % kWarpSize;
  float cumsum = change[0] + change[1];
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const float other = __shfl_up_sync(kFullMask, cumsum, distance);
    if (lane >= distance) cumsum += other;
  }
  const float before = __shfl_up_sync(kFullMask, cumsum, 1);
  float grad = first + (lane > 0 ? before : 0.0f);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const long long row = token + 2 * lane + i;
    if (row < length) {
      grads[row * num_heads * tiles] = has_gradient(log_decay[row * num_heads]) ? grad : 0.0f;
    }
    grad += change[i];
  }
}

// Rounds and stores a warp's accumulators: MT x 16 rows from `first_row` on, NT x 8 columns from
// `first_column` on.
template <bool Padded, typename T, int MT, int NT>
CUKIT_DEVICE void store_rows(T* to, long long stride, const float (&acc)[MT][NT][4], int first_row,
                             int rows, int first_column, int columns) {
  static_assert(NT % 4 == 0, "a quad stores 32 columns of a row");
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * m + 8 * half + lane / 4;
#pragma unroll
      for (int four = 0; four < NT / 4; ++four) {
        unsigned chunk[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float* pair = &acc[m][4 * four + n][2 * half];
          chunk[n] = pack<T>(pair[0], pair[1]);
        }
        transpose_quad(chunk);
        const int column = first_column + 32 * four + 8 * (lane % 4);
        if (row < rows && (!Padded || column < columns)) {
          *reinterpret_cast<uint4*>(to + row * stride + column) =
              make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
        }
      }
    }
}

// Scales the rows of a chunk's values by factor(row), from tile `values` to tile `to`, [kChunk][kHeadColumns].
template <typename T, int Threads, typename Factor>
CUKIT_DEVICE void scale_values(unsigned char* to, const unsigned char* values, const Factor& factor) {
  constexpr int kChunks = kHeadColumns / 8;
#pragma unroll
  for (int i = 0; i < kChunk * kChunks / Threads; ++i) {
    const int index = i * Threads + static_cast<int>(threadIdx.x);
    const int row = index / kChunks;
    const unsigned at = Swizzle<kHeadColumns>::offset(row, index % kChunks);
    const uint4 read = *reinterpret_cast<const uint4*>(values + at);
    unsigned words[4] = {read.x, read.y, read.z, read.w};
    const float by = factor(row);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float pair[2];
      unpack<T>(pair, words[w]);
      words[w] = pack<T>(pair[0] * by, pair[1] * by);
    }
    *reinterpret_cast<uint4*>(to + at) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Starts asynchronous copies of a chunk's rows of up to Columns columns, stored in parts of 64 columns.
template <int Columns, int Threads, bool Padded, typename T>
CUKIT_DEVICE void start_parts(unsigned at, const T* from, long long stride, int rows, int columns) {
#pragma unroll
  for (int part = 0; part < Columns / 64; ++part) {
    TileCopy<kChunk, 64, Threads, Padded>::start(at + part * kChunk * 128, from + part * 64, stride, rows,
                                                 columns - part * 64);
  }
}

// The part of a state that a warp holds, in the accumulator layout of mma.sync,
// [kTiles][kColumnTiles][4], or of wgmma, [kTiles][4 kColumnTiles]: 16 of every 64 rows, all
// columns of the block. With two groups of four warps, each group holds 64 of 128 rows, or, if the
// state has 64 rows, 32 of its 64 columns.
template <int StateTile, int Groups = 1>
struct StateRows {
  static constexpr int kRowGroups = StateTile / 64 < Groups ? 1 : Groups;
  static constexpr int kColumnGroups = Groups / kRowGroups;
  static constexpr int kTiles = StateTile / 64 / kRowGroups;
  static constexpr int kColumnTiles = kHeadColumns / 8 / kColumnGroups;
  static_assert(StateTile % 64 == 0, "16 rows for each of four warps");

  int row, column;  // of this lane's first value

  CUKIT_DEVICE StateRows()
      : row(16 * (static_cast<int>(threadIdx.x / kWarpSize) % (4 * kRowGroups)) +
            static_cast<int>(threadIdx.x % kWarpSize) / 4),
        column(2 * static_cast<int>(threadIdx.x % 4) +
               (kColumnGroups == 1 ? 0 : static_cast<int>(threadIdx.x) / (4 * kWarpSize) * (8 * kColumnTiles))) {}

  CUKIT_DEVICE static float& value(float (&values)[kColumnTiles][4], int n, int i) { return values[n][i]; }
  CUKIT_DEVICE static float& value(float (&values)[4 * kColumnTiles], int n, int i) {
    return values[4 * n + i];
  }

  // Calls body(value, offset) for each value within the state [state_dim, head_dim].
  template <typename Values, typename Body>
  CUKIT_DEVICE void each(Values& values, const ScanParameters& p, int first_column,
                         const Body& body) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at_row = row + 64 * m + 8 * (i / 2);
          const int at = first_column + 8 * n + column + i % 2;
          if (at_row < p.state_dim && at < p.head_dim) {
            body(value(values[m], n, i), at_row * p.head_dim + at);
          }
        }
  }

  // Scales the values by the factors of their rows. Then adds the products of the values and a tile
  // [StateTile][kHeadColumns] in shared memory to one sum per row.
  template <typename T, typename Values, typename Factors>
  CUKIT_DEVICE void scale_and_dot(Values& values, float (&sums)[kTiles][2], const Factors& factors,
                                  const unsigned char* tile) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float pair[2];
          const int first = 8 * n + column;
          const unsigned at =
              Swizzle<kHeadColumns>::offset(row + 64 * m + 8 * half, first / 8) + 2 * (first % 8);
          unpack<T>(pair, *reinterpret_cast<const unsigned*>(tile + at));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& own = value(values[m], n, 2 * half + i);
            own *= factors.at(m, half);
            sums[m][half] = fmaf(own, pair[i], sums[m][half]);
          }
        }
  }

  // Rounds the values to T and stores them in a tile [StateTile][kHeadColumns] in shared memory.
  template <typename T, typename Values>
  CUKIT_DEVICE void round(unsigned char* tile, Values& values) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned char* to =
              tile + Swizzle<kHeadColumns>::offset(row + 64 * m + 8 * half, n + column / 8);
          *reinterpret_cast<unsigned*>(to + 2 * (column % 8)) =
              pack<T>(value(values[m], n, 2 * half), value(values[m], n, 2 * half + 1));
        }
  }
};

// Sums of log decays, in base 2: with PerRow one for each row of the state that a lane holds, else
// one for all rows.
template <typename Rows, bool PerRow>
struct StateDecay {
  static constexpr int kTiles = PerRow ? Rows::kTiles : 1;
  static constexpr int kHalves = PerRow ? 2 : 1;
  float sums[kTiles][kHalves] = {};

  CUKIT_DEVICE float at(int m, int half) const { return PerRow ? sums[m][half] : sums[0][0]; }

  // Reads the sums of the rows of a state; `from` points to the sum of the first row.
  CUKIT_DEVICE void read(const float* from, const Rows& rows, int state_dim) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int row = rows.row + 64 * m + 8 * half;
        sums[m][half] = row < state_dim ? from[row] : 0.0f;
      }
  }

  CUKIT_DEVICE void write(float* to, const Rows& rows, int state_dim) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int row = rows.row + 64 * m + 8 * half;
        if (rows.column == 0 && row < state_dim) to[row] = sums[m][half];
      }
  }

  CUKIT_DEVICE void add(const StateDecay& other) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) sums[m][half] += other.sums[m][half];
  }

  CUKIT_DEVICE StateDecay factors() const {
    StateDecay result;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) result.sums[m][half] = exp2f(sums[m][half]);
    return result;
  }

  // Whether all factors are 0. Called by all threads of the block; all get the same result.
  CUKIT_DEVICE bool all_zero() const {
    if constexpr (!PerRow) return sums[0][0] <= kZeroExponent;
    bool zero = true;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) zero = zero && sums[m][half] <= kZeroExponent;
    return __syncthreads_and(zero);
  }
};

// Loads a 16 x 16 block of a chunk's scores [kChunk][kChunk] from global memory, as a left operand
// of mma.sync or wgmma. `from` points to the first element of the block.
template <typename T>
CUKIT_DEVICE void load_scores(unsigned (&r)[4], const T* from) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const T* at = from + (lane / 4 + 8 * (i % 2)) * kChunk + 8 * (i / 2) + 2 * (lane % 4);
    r[i] = *reinterpret_cast<const unsigned*>(at);
  }
}

}  // namespace cukit
