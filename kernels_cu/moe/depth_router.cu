// Mixture of depths: the tokens with the largest logits of each sequence.
//
//   indices = the `capacity` positions with the largest logits, ascending; of equal logits, the
//             first positions
//   weights = sigmoid(logits[indices])         slots[indices[i]] = i, -1 elsewhere
//
// Paper: Raposo et al., "Mixture-of-Depths", arXiv:2404.02258.
// Mapping: one block per sequence. Four passes over the logits find the key of the smallest chosen
//   logit, one byte each from the most significant down (radix select); one more pass writes the
//   chosen positions in order.
// NaN ranks below all numbers. Shared memory: 1 KiB + 8 bytes + 4 bytes per warp, static.
// Macros: DTYPE float32|float16|bfloat16; THREADS a multiple of 32, at least 256.
// Minimum architecture: sm_80. Deterministic. Reference: cukit/reference/depth.py.
#include "common/platform.cuh"
#include "common/types.cuh"

namespace {

using T = cukit::element_t;

constexpr int kBins = 256;
constexpr int kWarps = THREADS / cukit::kWarpSize;

static_assert(THREADS >= kBins, "one thread per bin");

// An order-preserving unsigned key. -0 and 0 have one key; the key of NaN is 0, below all others.
CUKIT_DEVICE unsigned logit_key(T logit) {
  const float value = cukit::to_float(logit) + 0.0f;
  if (value != value) return 0;
  const unsigned bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The number of threads before this one in the block with `flag` set; `total` counts all threads.
// Contains barriers.
CUKIT_DEVICE int count_before(bool flag, int* warp_counts, int* total) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp = threadIdx.x / cukit::kWarpSize;
  const unsigned flags = __ballot_sync(cukit::kFullMask, flag);
  if (lane == 0) warp_counts[warp] = __popc(flags);
  __syncthreads();
  int before = __popc(flags & ((1u << lane) - 1));
  *total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warp_counts[w];
    *total += warp_counts[w];
  }
  __syncthreads();
  return before;
}

struct Threshold {
  unsigned key;  // the smallest chosen key
  int equal;     // number of chosen tokens with exactly this key
};

// Called by all threads; `bins` and `found` are in shared memory.
CUKIT_DEVICE Threshold find_threshold(const T* logits, int seq_len, int capacity, int* bins,
                                      int (&found)[2]) {
  Threshold threshold{0, capacity};
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (threadIdx.x < kBins) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < seq_len; i += THREADS) {
      const unsigned key = logit_key(logits[i]);
      const bool excluded = shift < 24 && (key ^ threshold.key) >> (shift + 8) != 0;
      if (!excluded) atomicAdd(&bins[key >> shift & (kBins - 1)], 1);
    }
    __syncthreads();
    // The bin in which the count from the top reaches the number still to be chosen.
    if (threadIdx.x < kBins) {
      int larger = 0;
      for (int bin = threadIdx.x + 1; bin < kBins; ++bin) larger += bins[bin];
      if (larger < threshold.equal && larger + bins[threadIdx.x] >= threshold.equal) {
        found[0] = threadIdx.x;
        found[1] = threshold.equal - larger;
      }
    }
    __syncthreads();
    threshold.key |= static_cast<unsigned>(found[0]) << shift;
    threshold.equal = found[1];
  }
  return threshold;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) depth_router(
    const T* __restrict__ logits,  // [batch, seq_len]
    int* __restrict__ indices,     // [batch, capacity]
    int* __restrict__ slots,       // [batch, seq_len]
    float* __restrict__ weights,   // [batch, capacity]
    int seq_len, int capacity) {   // capacity: 1 to seq_len
  __shared__ int bins[kBins];
  __shared__ int found[2];
  __shared__ int warp_counts[kWarps];
  logits += static_cast<long long>(blockIdx.x) * seq_len;
  slots += static_cast<long long>(blockIdx.x) * seq_len;
  indices += static_cast<long long>(blockIdx.x) * capacity;
  weights += static_cast<long long>(blockIdx.x) * capacity;
  const Threshold threshold = find_threshold(logits, seq_len, capacity, bins, found);

  int chosen_before = 0, equal_before = 0;
  for (int begin = 0; begin < seq_len; begin += THREADS) {
    const int i = begin + static_cast<int>(threadIdx.x);
    const T logit = i < seq_len ? logits[i] : T{};
    const unsigned key = logit_key(logit);
    const bool equals = i < seq_len && key == threshold.key;
    int equal_here, chosen_here;
    const int rank = equal_before + count_before(equals, warp_counts, &equal_here);
    const bool chosen =
        i < seq_len && (key > threshold.key || (equals && rank < threshold.equal));
    const int slot = chosen_before + count_before(chosen, warp_counts, &chosen_here);
    if (i < seq_len) slots[i] = chosen ? slot : -1;
    if (chosen) {
      indices[slot] = i;
      weights[slot] = 1.0f / (1.0f + expf(-cukit::to_float(logit)));
    }
    equal_before += equal_here;
    chosen_before += chosen_here;
  }
}
