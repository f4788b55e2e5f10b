// Histograms.
#include <cuda_runtime.h>

#define BINS 64

__global__ void histogram_global(const unsigned char* in, unsigned int* bins, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[in[i] % BINS], 1u);
}

__global__ void histogram_shared(const unsigned char* in, unsigned int* bins, int n) {
  __shared__ unsigned int local[BINS];
  for (int b = threadIdx.x; b < BINS; b += blockDim.x) local[b] = 0u;
  __syncthreads();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicAdd(&(local[in[i] % BINS]), 1);
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += blockDim.x)
    if (local[b] > 0) atomicAdd(&bins[b], local[b]);
}

__global__ void histogram_warps(const unsigned char* in, unsigned int* bins, int n) {
  extern __shared__ unsigned int warps[];
  unsigned int* mine = warps + (threadIdx.x / 32) * BINS;
  for (int b = threadIdx.x % 32; b < BINS; b += 32) mine[b] = 0;
  __syncwarp();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(mine + in[i] % BINS, 1);
  __syncthreads();
  for (int b = threadIdx.x; b < BINS; b += blockDim.x) {
    unsigned int sum = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) sum += warps[w * BINS + b];
    atomicAdd(&bins[b], sum);
  }
}

__global__ void histogram_match(const unsigned char* in, unsigned int* bins, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned int bin = i < n ? in[i] % BINS : BINS;
  unsigned int peers = __match_any_sync(0xffffffff, bin);
  if (bin < BINS && (threadIdx.x & 31) == __ffs(peers) - 1) atomicAdd(&bins[bin], __popc(peers));
}

__global__ void expert_counts(const int* experts, int* counts, int* offsets, int tokens, int num_experts) {
  extern __shared__ int s[];
  for (int e = threadIdx.x; e < num_experts; e += blockDim.x) s[e] = 0;
  __syncthreads();
  for (int t = threadIdx.x; t < tokens; t += blockDim.x) atomicAdd(&s[experts[t]], 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int e = 0; e < num_experts; ++e) {
      counts[e] = s[e];
      offsets[e] = sum;
      sum += s[e];
    }
  }
}
