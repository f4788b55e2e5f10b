// A row of logits distributed over the threads of a block or of a cluster of blocks, and the sum of
// its exponentials.
//
// Rows need not be aligned, but accesses are: full vectors are distributed over the threads of all
// blocks, and the other elements, fewer than 2 VEC, one each over the first threads of block 0:
//
//   row  [ head: < VEC elements | vectors of VEC elements ... | tail: < VEC elements ]
//                               ^ aligned
//
// Macros: DTYPE, VEC, THREADS, CLUSTER 1|2|4|8 (above 1: sm_90), CACHED: each thread keeps its
//   first CACHED vectors in shared memory for the second sweep, and reads the others again.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/cache_policy.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/min_max_packed.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/shared_address.cuh"
#include "common/ptx/store_global.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace cukit {

// Below the exponent of any realistic logit: the reference of a row without mass.
constexpr float kNoMass = -1e30f;

// A row's mass, sum_v 2^(scale z_v), stored as sum * 2^reference, and a moment of it, sum_v
// 2^(scale z_v) w_v, stored likewise. The reference is an integer, so that changing it is exact,
// and no exponent exceeds it by more than kSlack.
struct Mass {
  // With this slack the reference changes once or twice per sweep, and sums of terms up to 2^kSlack
  // do not overflow for any vocabulary.
  static constexpr float kSlack = 24.0f;

  float reference = kNoMass;
  float sum = 0.0f;
  float moment = 0.0f;

  // Raises the reference for logits up to `top`, if necessary.
  CUKIT_DEVICE void cover(float top, float scale) {
    if (exponent(top, scale) > kSlack) {
      const float needed = ceilf(top * scale);
      const float shrink = exp2f(reference - needed);
      sum *= shrink;
      moment *= shrink;
      reference = needed;
    }
  }

  CUKIT_DEVICE float exponent(float z, float scale) const { return fmaf(z, scale, -reference); }

  // 2^(scale z - reference) of a logit within the reference's slack.
  CUKIT_DEVICE float term(float z, float scale) const { return exp2f(exponent(z, scale)); }
};

template <int Lanes = kWarpSize>
CUKIT_DEVICE Mass warp_merge(const Mass& mass) {
  Mass merged;
  merged.reference = warp_reduce<Max, Lanes>(mass.reference);
  const float shrink = exp2f(mass.reference - merged.reference);
  merged.sum = warp_reduce<Sum, Lanes>(mass.sum * shrink);
  merged.moment = warp_reduce<Sum, Lanes>(mass.moment * shrink);
  return merged;
}

// log2 of a row's mass divided by the term of one logit, 2^(scale logit), e.g. the target's.
CUKIT_DEVICE float log2_mass_over(const Mass& mass, float logit, float scale) {
  return fmaf(-logit, scale, mass.reference) + log2f(mass.sum);
}

// The part of a row that a block and a thread process. Vectors are numbered within the block;
// thread t has t + k * THREADS, k < count, in every sweep: its vectors in shared memory need no
// barrier.
struct RowSlice {
  long long base;     // of the row, in elements
  int first_column;   // of this thread's first vector
  int count;          // vectors of this thread
  int scalar_column;  // this thread's element outside the vectors, or -1
  int block_begin, block_end;  // columns of the block's vectors
  int tail;                    // the first column after all vectors
  int rank;                    // of the block

  CUKIT_DEVICE RowSlice(long long row, long long row_stride, int columns, int rank)
      : base(row * row_stride), rank(rank) {
    const int misaligned = static_cast<int>(base % VEC);
    const int head = min(columns, misaligned == 0 ? 0 : VEC - misaligned);
    const int row_vecs = (columns - head) / VEC;
    const int share = (row_vecs + CLUSTER - 1) / CLUSTER;
    const int first_vec = rank * share;
    const int num_vecs = max(0, min(share, row_vecs - first_vec));
    const int thread = static_cast<int>(threadIdx.x);
    first_column = head + (first_vec + thread) * VEC;
    count = (num_vecs - thread + THREADS - 1) / THREADS;
    const int scalars = columns - row_vecs * VEC;
    scalar_column = rank > 0 || thread >= scalars ? -1
                    : thread < head               ? thread
                                                  : columns - scalars + thread;
    block_begin = head + first_vec * VEC;
    block_end = block_begin + num_vecs * VEC;
    tail = head + row_vecs * VEC;
  }

  // Whether a thread of this block owns a column.
  CUKIT_DEVICE bool block_owns(int column) const {
    if (rank == 0) return column < block_end || column >= tail;
    return column >= block_begin && column < block_end;
  }

  // Whether this thread owns a column.
  CUKIT_DEVICE bool owns(int column) const {
    const int offset = column - first_column;
    return column == scalar_column || (offset >= 0 && offset % (THREADS * VEC) < VEC &&
                                       offset / (THREADS * VEC) < count);
  }

  CUKIT_DEVICE int column(int k) const { return first_column + k * (THREADS * VEC); }

  CUKIT_DEVICE void read(Vec<element_t, VEC>& into, const element_t* tensor, int k) const {
    load<Cache::Kept>(into, tensor + base + column(k));
  }

  // Issues the copy of a vector to `slot` in shared memory, for this thread alone.
  CUKIT_DEVICE void copy(Vec<element_t, VEC>* slot, const element_t* tensor, int k) const {
    if constexpr (sizeof(*slot) == 16) {
      cp_async_16_policy(shared_address(slot), tensor + base + column(k), create_policy_evict_last());
    } else {
      read(*slot, tensor, k);
    }
  }

  CUKIT_DEVICE void read_again(Vec<element_t, VEC>& into, const element_t* tensor, int k) const {
    load<Cache::Streaming>(into, tensor + base + column(k));
  }

  CUKIT_DEVICE void write(element_t* tensor, int k, const Vec<element_t, VEC>& from) const {
    element_t* to = tensor + base + column(k);
    if constexpr (sizeof(from) == 16) {
      store_global_16(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&from));
    } else {
      store(to, from);
    }
  }

  CUKIT_DEVICE void clear(element_t* tensor) const {
    Vec<element_t, VEC> zeros;
#pragma unroll
    for (int j = 0; j < VEC; ++j) zeros[j] = from_float<element_t>(0.0f);
    for (int k = 0; k < count; ++k) write(tensor, k, zeros);
    if (scalar_column >= 0) tensor[base + scalar_column] = zeros[0];
  }
};

// Vectors first, first + 1, ... of a thread; `count`, possibly more than a batch, remain from
// `first` on.
struct Batch {
  int first;
  int count;
  CUKIT_DEVICE bool has(int i) const { return i == 0 || i < count; }
};

// Calls `body` with batches of up to N of the vectors begin .. end - 1, in order.
template <int N, typename Body>
CUKIT_DEVICE void forwards(int begin, int end, const Body& body) {
#pragma unroll 1
  for (int k = begin; k < end; k += N) body(Batch{k, end - k});
}

// The same batches of the vectors 0 .. end - 1 from the last to the first: the vectors read last
// are the most likely to be in L2.
template <int N, typename Body>
CUKIT_DEVICE void backwards(int end, const Body& body) {
#pragma unroll 1
  for (int k = (end - 1) / N * N; k >= 0 && end > 0; k -= N) body(Batch{k, end - k});
}

// Copies vectors 0 .. count - 1 to shared memory, kAhead batches of N ahead of `body`, which reads
// them there. copy(k) issues the copy of vector k.
template <int N, int kAhead, typename Copy, typename Body>
CUKIT_DEVICE void copied_forwards(int count, const Copy& copy, const Body& body) {
  const auto start_batch = [&](int first) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (first + i < count) copy(first + i);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int ahead = 0; ahead < kAhead; ++ahead) start_batch(ahead * N);
  forwards<N>(0, count, [&](const Batch& batch) {
    start_batch(batch.first + kAhead * N);
    cp_async_wait<kAhead>();
    body(batch);
  });
}

CUKIT_DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }

// The factor of a row's gradient; both pointers may be null.
CUKIT_DEVICE float upstream_scale(const float* grad_loss, long long index, const float* normalizer) {
  const float scale = grad_loss != nullptr ? grad_loss[index] : 1.0f;
  return normalizer != nullptr ? scale / *normalizer : scale;
}

struct Largest {
  CUKIT_DEVICE static float of(float a, float b) { return fmaxf(a, b); }
  template <typename T>
  CUKIT_DEVICE static unsigned of_packed(unsigned a, unsigned b) { return max_packed<T>(a, b); }
};

struct Smallest {
  CUKIT_DEVICE static float of(float a, float b) { return fminf(a, b); }
  template <typename T>
  CUKIT_DEVICE static unsigned of_packed(unsigned a, unsigned b) { return min_packed<T>(a, b); }
};

// The largest or smallest of N vectors' elements.
template <typename Extreme, typename T, int VecSize, int N>
CUKIT_DEVICE float extreme(const Vec<T, VecSize> (&vectors)[N]) {
  if constexpr (sizeof(T) == 2 && VecSize % 2 == 0) {
    constexpr int kPairs = VecSize / 2;
    unsigned found = reinterpret_cast<const unsigned*>(&vectors[0])[0];
#pragma unroll
    for (int i = 1; i < N * kPairs; ++i) {
      const unsigned pair = reinterpret_cast<const unsigned*>(&vectors[i / kPairs])[i % kPairs];
      found = Extreme::template of_packed<T>(found, pair);
    }
    float pair[2];
    unpack<T>(pair, found);
    return Extreme::of(pair[0], pair[1]);
  } else {
    float found = to_float(vectors[0][0]);
#pragma unroll
    for (int i = 1; i < N * VecSize; ++i) {
      found = Extreme::of(found, to_float(vectors[i / VecSize][i % VecSize]));
    }
    return found;
  }
}

// Merges over the warps of a block and the blocks of a cluster. Each block writes its results to
// the shared memory of all blocks of its cluster; each exchange has its own slot, used once.
template <int Masses>
class RowExchange {
 public:
  struct Shared {
    float references[Masses][32];
    float sums[Masses][32];
    float moments[Masses][32];
    float cluster_references[Masses][CLUSTER];
    float cluster_sums[Masses][CLUSTER];
    float cluster_moments[Masses][CLUSTER];
    float losses[CLUSTER];
    float scratch[THREADS / kWarpSize];
  };

  // Remote shared memory may be accessed only once its block is running: the constructor arrives,
  // and merge() or skip_merge() waits.
  CUKIT_DEVICE RowExchange(Shared& shared, int rank) : shared_(shared), rank_(rank) {
    if constexpr (CLUSTER > 1) cluster_arrive();
  }

  // Returns the masses of the full row to every thread. Call once, by all threads.
  CUKIT_DEVICE void merge(Mass (&masses)[Masses]) {
    constexpr int kWarps = THREADS / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int i = 0; i < Masses; ++i) masses[i] = warp_merge(masses[i]);
    if constexpr (kWarps > 1) {
#pragma unroll
      for (int i = 0; i < Masses; ++i) {
        if (lane == 0) {
          shared_.references[i][warp] = masses[i].reference;
          shared_.sums[i][warp] = masses[i].sum;
          shared_.moments[i][warp] = masses[i].moment;
        }
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < Masses; ++i) {
        masses[i].reference = lane < kWarps ? shared_.references[i][lane] : kNoMass;
        masses[i].sum = lane < kWarps ? shared_.sums[i][lane] : 0.0f;
        masses[i].moment = lane < kWarps ? shared_.moments[i][lane] : 0.0f;
        masses[i] = warp_merge(masses[i]);
      }
    }
    if constexpr (CLUSTER > 1) {
      cluster_wait();
      if (threadIdx.x < CLUSTER) {
#pragma unroll
        for (int i = 0; i < Masses; ++i) {
          store_remote(&shared_.cluster_references[i][rank_], threadIdx.x, masses[i].reference);
          store_remote(&shared_.cluster_sums[i][rank_], threadIdx.x, masses[i].sum);
          store_remote(&shared_.cluster_moments[i][rank_], threadIdx.x, masses[i].moment);
        }
      }
      cluster_arrive();
      cluster_wait();
#pragma unroll
      for (int i = 0; i < Masses; ++i) {
        masses[i].reference = lane < CLUSTER ? shared_.cluster_references[i][lane] : kNoMass;
        masses[i].sum = lane < CLUSTER ? shared_.cluster_sums[i][lane] : 0.0f;
        masses[i].moment = lane < CLUSTER ? shared_.cluster_moments[i][lane] : 0.0f;
        masses[i] = warp_merge(masses[i]);
      }
    }
  }

  // Replaces merge() if sum() is the only exchange. Called by all threads.
  CUKIT_DEVICE void skip_merge() {
    if constexpr (CLUSTER > 1) cluster_wait();
  }

  // Sum of a value over all threads of the row, for thread 0 of block 0. Call once.
  CUKIT_DEVICE float sum(float value) {
    value = block_reduce<Sum, THREADS>(value, shared_.scratch);
    if constexpr (CLUSTER > 1) {
      if (threadIdx.x == 0) store_remote(&shared_.losses[rank_], 0, value);
      cluster_arrive();
      cluster_wait();
      if (rank_ == 0) {  // only block 0 receives the sums
        value = 0.0f;
#pragma unroll
        for (int i = 0; i < CLUSTER; ++i) value += shared_.losses[i];
      }
    }
    return value;
  }

 private:
  Shared& shared_;
  int rank_;
};

}  // namespace cukit
