// A row of logits, shared out over the threads of a block or of a cluster of blocks, and the sum of
// its exponentials.
//
// Rows begin anywhere, accesses are aligned: vector i covers the columns
//   i * VEC - shift .. i * VEC - shift + VEC - 1,   shift = (row * row_stride) % VEC,
// and the first and last may reach past the row. Columns outside read as -inf and are not written.
//
// Macros: DTYPE, VEC, THREADS, CLUSTER 1|2|4|8 (above 1: sm_90), CACHED 0|1.
#pragma once

#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/store_global.cuh"
#include "common/reduce.cuh"
#include "common/types.cuh"

namespace cukit {

// A row that is read twice finds the second time what gradients and spent logits have not pushed out
// of L2.
constexpr Cache kFirst = Cache::Kept;
constexpr Cache kLast = CACHED ? Cache::Cached : Cache::Streaming;
// Exponents that no real logit reaches: where the maximum of a row without any mass stays.
constexpr float kNoMass = -1e30f;

// A row's mass, sum_v 2^(scale z_v), held as sum * 2^reference. The reference is an integer at or
// just above the largest exponent, so that moving it to another one rounds nothing.
struct Mass {
  float reference = kNoMass;
  float sum = 0.0f;

  template <int N>
  CUKIT_DEVICE void add(const float (&z)[N], float scale) {
    float top = z[0];
#pragma unroll
    for (int j = 1; j < N; ++j) top = fmaxf(top, z[j]);
    const float needed = ceilf(top * scale);
    if (needed > reference) {
      sum *= exp2f(reference - needed);
      reference = needed;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) sum += exp2f(fmaf(z[j], scale, -reference));
  }
};

template <int Lanes = kWarpSize>
CUKIT_DEVICE Mass warp_merge(Mass mass) {
  Mass merged;
  merged.reference = warp_reduce<Max, Lanes>(mass.reference);
  merged.sum = warp_reduce<Sum, Lanes>(mass.sum * exp2f(mass.reference - merged.reference));
  return merged;
}

// Logarithm (base 2) of a row's mass over the mass of one exponent, e.g. of the target.
CUKIT_DEVICE float log2_mass_over(const Mass& mass, float logit, float scale) {
  return fmaf(-logit, scale, mass.reference) + log2f(mass.sum);
}

// Where this block stands in its row.
struct RowSlice {
  long long base;  // of the row, in elements
  int columns;
  int shift;
  int first_vec;  // vectors first_vec .. first_vec + num_vecs - 1 belong to this block
  int num_vecs;

  CUKIT_DEVICE RowSlice(long long row, long long row_stride, int columns, int rank)
      : base(row * row_stride), columns(columns) {
    shift = static_cast<int>(base % VEC);
    const int row_vecs = (columns + shift + VEC - 1) / VEC;
    const int share = (row_vecs + CLUSTER - 1) / CLUSTER;
    first_vec = rank * share;
    num_vecs = max(0, min(share, row_vecs - first_vec));
  }

  // Column of the first element of this block's vector `vec`.
  CUKIT_DEVICE int column(int vec) const { return (first_vec + vec) * VEC - shift; }
  CUKIT_DEVICE bool whole(int column) const { return column >= 0 && column + VEC <= columns; }

  template <Cache cache>
  CUKIT_DEVICE void read(Vec<element_t, VEC>& into, const element_t* tensor, int column) const {
    if (whole(column)) {
      load<cache>(into, tensor + base + column);
      return;
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      const bool inside = column + j >= 0 && column + j < columns;
      into[j] = inside ? tensor[base + column + j] : from_float<element_t>(-infinity());
    }
  }

  CUKIT_DEVICE void write(element_t* tensor, int column, const Vec<element_t, VEC>& from) const {
    if (whole(column)) {
      element_t* to = tensor + base + column;
      if constexpr (sizeof(from) == 16 && kLast == Cache::Cached) {
        store_global_16(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(&from));
      } else {
        store<kLast>(to, from);
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      if (column + j >= 0 && column + j < columns) tensor[base + column + j] = from[j];
    }
  }

  // Vectors threadIdx.x + k * THREADS, k < count(), are this thread's in every sweep: what it keeps
  // in shared memory needs no barrier.
  CUKIT_DEVICE int count() const {
    return (num_vecs - static_cast<int>(threadIdx.x) + THREADS - 1) / THREADS;
  }

  CUKIT_DEVICE void clear(element_t* tensor) const {
    Vec<element_t, VEC> zeros;
#pragma unroll
    for (int j = 0; j < VEC; ++j) zeros[j] = from_float<element_t>(0.0f);
    for (int vec = threadIdx.x; vec < num_vecs; vec += THREADS) write(tensor, column(vec), zeros);
  }
};

CUKIT_DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }

// What a row's gradient is multiplied by; both pointers are optional.
CUKIT_DEVICE float upstream_scale(const float* grad_loss, long long index, const float* normalizer) {
  const float scale = grad_loss != nullptr ? grad_loss[index] : 1.0f;
  return normalizer != nullptr ? scale / *normalizer : scale;
}

template <typename T, int N>
CUKIT_DEVICE void to_floats(float (&into)[N], const Vec<T, N>& from) {
#pragma unroll
  for (int j = 0; j < N; ++j) into[j] = to_float(from[j]);
}

// A bfloat16 is the upper half of its float: one instruction each, where taking the halves apart
// first would cost another for every second one.
template <int N>
CUKIT_DEVICE void to_floats(float (&into)[N], const Vec<bfloat16, N>& from) {
  if constexpr (N % 2 == 0) {
    const unsigned* pairs = reinterpret_cast<const unsigned*>(&from);
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      into[j] = __uint_as_float(pairs[j / 2] << 16);
      into[j + 1] = __uint_as_float(pairs[j / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) into[j] = to_float(from[j]);
  }
}

// Rounded to nearest even; 16-bit elements two at a time.
template <typename T, int N>
CUKIT_DEVICE void from_floats(Vec<T, N>& into, const float (&from)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    unsigned* pairs = reinterpret_cast<unsigned*>(&into);
#pragma unroll
    for (int j = 0; j < N; j += 2) pairs[j / 2] = pack<T>(from[j], from[j + 1]);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) into[j] = from_float<T>(from[j]);
  }
}

// Merges over the warps of a block and the blocks of a cluster. A cluster's blocks push their
// results into each other's shared memory; each exchange has a slot of its own and is used once.
template <int Masses>
class RowExchange {
 public:
  struct Shared {
    float references[Masses][32];
    float sums[Masses][32];
    float cluster_references[Masses][CLUSTER];
    float cluster_sums[Masses][CLUSTER];
    float losses[CLUSTER];
    float scratch[THREADS / kWarpSize];
  };

  // Remote memory may be touched only once its block runs: begin() arrives, merge() waits.
  CUKIT_DEVICE RowExchange(Shared& shared, int rank) : shared_(shared), rank_(rank) {
    if constexpr (CLUSTER > 1) cluster_arrive();
  }

  // Every thread gets the masses of the whole row. To be called once, by all threads.
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
        }
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < Masses; ++i) {
        masses[i].reference = lane < kWarps ? shared_.references[i][lane] : kNoMass;
        masses[i].sum = lane < kWarps ? shared_.sums[i][lane] : 0.0f;
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
        }
      }
      cluster_arrive();
      cluster_wait();
#pragma unroll
      for (int i = 0; i < Masses; ++i) {
        masses[i].reference = lane < CLUSTER ? shared_.cluster_references[i][lane] : kNoMass;
        masses[i].sum = lane < CLUSTER ? shared_.cluster_sums[i][lane] : 0.0f;
        masses[i] = warp_merge(masses[i]);
      }
    }
  }

  // Sum of a value over all threads of the row, for thread 0 of block 0. To be called once.
  CUKIT_DEVICE float sum(float value) {
    value = block_reduce<Sum, THREADS>(value, shared_.scratch);
    if constexpr (CLUSTER > 1) {
      if (threadIdx.x == 0) store_remote(&shared_.losses[rank_], 0, value);
      cluster_arrive();
      cluster_wait();
      if (rank_ == 0) {  // nobody wrote the others' losses
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
