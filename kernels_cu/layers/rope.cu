// Rotary position embedding of queries and keys in one launch, and its gradient.
//
//   pair (a, b) at position p:   a' = a cos[p] - b sin[p]     b' = b cos[p] + a sin[p]
//
// INVERSE rotates by the opposite angle, which is the gradient. Pairs are (x[i], x[i + HALF]), or
// (x[2i], x[2i + 1]) if INTERLEAVED, with HALF = HALF_VECS * VEC = rotary_dim / 2; elements of a head
// from 2 HALF on are copied. A position out of range yields NaN.
// Paper: Su et al., "RoFormer", arXiv:2104.09864.
// Mapping: the heads of q followed by those of k are the heads of a token. A head is split over
//   LANES = HALF_VECS + COPY_VECS threads. A rotating lane holds VEC pairs in two accesses HALF
//   elements apart, each contiguous over the lanes (adjacent elements if INTERLEAVED and VEC is 1);
//   a copying lane holds one access. Threads are numbered (token, head group, lane); a thread of
//   group g processes the HEADS_PER_THREAD heads g, g + GROUPS, ... with the same angles and issues
//   the loads of all heads first.
// Macros: DTYPE float32|float16|bfloat16; THREADS; VEC (VEC * sizeof(DTYPE) <= 16); HALF_VECS;
//   COPY_VECS (head_dim - rotary_dim) / VEC, or 0 in place; HEAD_DIM; HEADS_Q; HEADS_K;
//   HEADS_PER_THREAD; INTERLEAVED 0|1; INVERSE 0|1; POSITIONS 0: none, positions are 0, 1,
//   2, ... | 1: [seq_len] | 2: [batch, seq_len]; ID int32|int64, the type of the positions; INDEX
//   uint32|uint64, which must hold the number of threads.
// Strides and base addresses must be multiples of VEC elements. No shared memory. Minimum
// architecture: sm_80.
// Computes in float; deterministic. Reference: cukit/reference/rope.py.
#include "common/platform.cuh"
#include "common/index.cuh"
#include "common/types.cuh"
#include "layers/parameters.cuh"

namespace {

using T = cukit::element_t;

constexpr int kLanes = HALF_VECS + COPY_VECS;
constexpr int kHeads = HEADS_Q + HEADS_K;
constexpr int kGroups = (kHeads + HEADS_PER_THREAD - 1) / HEADS_PER_THREAD;
constexpr int kHalf = HALF_VECS * VEC;
constexpr int kResidentThreads = 512;  // per SM: allows 128 registers per thread

using Strides = cukit::TokenStrides;

// Element offset of head `head` of one tensor.
CUKIT_DEVICE long long offset_of(const Strides& strides, int batch, int index, int head) {
  return batch * strides.batch + index * strides.token + head * strides.head;
}

// Loads N floats of a table row, in accesses of up to 16 bytes.
template <int N>
CUKIT_DEVICE void load_floats(float* into, const float* from) {
  constexpr int kChunk = N < 4 ? N : 4;
#pragma unroll
  for (int j = 0; j < N; j += kChunk) {
    cukit::Vec<float, kChunk> chunk;
    cukit::load<cukit::Cache::Kept>(chunk, from + j);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) into[j + i] = chunk[i];
  }
}

// Interleaved pairs: an access holds VEC / 2 of them; with VEC 1 a pair takes two accesses.
constexpr bool kPairsInAccess = INTERLEAVED && VEC > 1;
constexpr bool kPairOfAccesses = INTERLEAVED && VEC == 1;

// Loads the cosines or sines of the pairs of a rotating lane.
CUKIT_DEVICE void load_angles(float (&into)[VEC], const float* row, int lane) {
  if constexpr (kPairsInAccess) {
    load_floats<VEC / 2>(into, row + lane * (VEC / 2));
    load_floats<VEC / 2>(into + VEC / 2, row + kHalf / 2 + lane * (VEC / 2));
  } else {
    load_floats<VEC>(into, row + lane * VEC);
  }
}

// Indices of the j-th pair within the two accesses of a lane.
CUKIT_DEVICE constexpr int first_of(int j) { return INTERLEAVED ? 2 * j : j; }
CUKIT_DEVICE constexpr int second_of(int j) { return INTERLEAVED ? 2 * j + 1 : VEC + j; }

}  // namespace

extern "C" __global__ void
__launch_bounds__(THREADS, kResidentThreads / THREADS) rope(
    const T* __restrict__ q,                       // [batch, seq_len, HEADS_Q, HEAD_DIM], strided
    const T* __restrict__ k,                       // [batch, seq_len, HEADS_K, HEAD_DIM], strided
    const float* __restrict__ cos,                 // [max_positions, kHalf]
    const float* __restrict__ sin,                 // [max_positions, kHalf]
    const cukit::id_t* __restrict__ position_ids,  // see POSITIONS
    T* __restrict__ q_out,                         // as q, with its own strides; or q itself
    T* __restrict__ k_out,                         // as k, with its own strides; or k itself
    const cukit::RopeParameters params) {
  const cukit::index_t item = static_cast<cukit::index_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int lane = item % kLanes;
  const int group = item / kLanes % kGroups;
  const cukit::index_t token = item / (kLanes * kGroups);
  if (token >= params.num_tokens) return;
  const int batch = static_cast<int>(token) / params.seq_len;
  const int index = static_cast<int>(token) - batch * params.seq_len;

  const bool rotates = lane < HALF_VECS;
  // Offsets of the lane's accesses within a head; a copying lane uses only the first.
  const int first = rotates ? lane * (kPairOfAccesses ? 2 : VEC) : kHalf + lane * VEC;
  const int second = kPairOfAccesses ? first + 1 : first + kHalf;

  cukit::Vec<T, VEC> pairs[HEADS_PER_THREAD][2];
#pragma unroll
  for (int i = 0; i < HEADS_PER_THREAD; ++i) {
    const int head = group + i * kGroups;
    if (head >= kHeads) continue;
    const T* from = head < HEADS_Q ? q + offset_of(params.q, batch, index, head)
                                   : k + offset_of(params.k, batch, index, head - HEADS_Q);
    cukit::load<cukit::Cache::Kept>(pairs[i][0], from + first);
    if (rotates) cukit::load<cukit::Cache::Kept>(pairs[i][1], from + second);
  }

  float cosines[VEC], sines[VEC];
  if (rotates) {
    long long position = index;
    if constexpr (POSITIONS == 1) position = position_ids[index];
    if constexpr (POSITIONS == 2) position = position_ids[token];
    if (position >= 0 && position < params.max_positions) {
      load_angles(cosines, cos + position * kHalf, lane);
      load_angles(sines, sin + position * kHalf, lane);
    } else {
#pragma unroll
      for (int j = 0; j < VEC; ++j) cosines[j] = sines[j] = __int_as_float(0x7fffffff);
    }
  }

#pragma unroll
  for (int i = 0; i < HEADS_PER_THREAD; ++i) {
    const int head = group + i * kGroups;
    if (head >= kHeads) continue;
    T* to = head < HEADS_Q ? q_out + offset_of(params.q_out, batch, index, head)
                           : k_out + offset_of(params.k_out, batch, index, head - HEADS_Q);
    if (rotates) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        T& at_a = pairs[i][first_of(j) / VEC][first_of(j) % VEC];
        T& at_b = pairs[i][second_of(j) / VEC][second_of(j) % VEC];
        const float a = cukit::to_float(at_a), b = cukit::to_float(at_b);
        const float sine = INVERSE ? -sines[j] : sines[j];
        at_a = cukit::from_float<T>(a * cosines[j] - b * sine);
        at_b = cukit::from_float<T>(b * cosines[j] + a * sine);
      }
      cukit::store(to + second, pairs[i][1]);
    }
    cukit::store(to + first, pairs[i][0]);
  }
}
