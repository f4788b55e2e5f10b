// Sorting, merging and selection.
#include <cuda_runtime.h>

__device__ inline void comparator(int& keyA, int& keyB, unsigned int dir) {
  if ((keyA > keyB) == dir) {
    int t = keyA;
    keyA = keyB;
    keyB = t;
  }
}

__global__ void bitonic_shared(int* keys, unsigned int n) {
  extern __shared__ int s_key[];
  s_key[threadIdx.x] = keys[threadIdx.x];
  s_key[threadIdx.x + n / 2] = keys[threadIdx.x + n / 2];
  for (unsigned int size = 2; size <= n; size <<= 1) {
    unsigned int ddd = size == n || (threadIdx.x & (size / 2)) == 0;
    for (unsigned int stride = size / 2; stride > 0; stride >>= 1) {
      __syncthreads();
      unsigned int pos = 2 * threadIdx.x - (threadIdx.x & (stride - 1));
      comparator(s_key[pos], s_key[pos + stride], ddd);
    }
  }
  __syncthreads();
  keys[threadIdx.x] = s_key[threadIdx.x];
  keys[threadIdx.x + n / 2] = s_key[threadIdx.x + n / 2];
}

__global__ void odd_even_sort(float* data, int n) {
  for (int phase = 0; phase < n; ++phase) {
    int i = 2 * threadIdx.x + (phase & 1);
    if (i + 1 < n && data[i] > data[i + 1]) {
      float t = data[i];
      data[i] = data[i + 1];
      data[i + 1] = t;
    }
    __syncthreads();
  }
}

__global__ void rank_sort(const float* in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int rank = 0;
  for (int j = 0; j < n; ++j) rank += in[j] < in[i] || (in[j] == in[i] && j < i);
  out[rank] = in[i];
}

// A block sorts 128 values by their lowest `bits` bits, splitting by one bit at a time.
__global__ void radix_split(unsigned int* data, int bits) {
  __shared__ unsigned int values[128];
  __shared__ int sums[128];
  int t = threadIdx.x;
  values[t] = data[t];
  for (int b = 0; b < bits; ++b) {
    __syncthreads();
    unsigned int v = values[t];
    int zero = !((v >> b) & 1);
    sums[t] = zero;
    __syncthreads();
    for (int d = 1; d < 128; d <<= 1) {
      int add = t >= d ? sums[t - d] : 0;
      __syncthreads();
      sums[t] += add;
      __syncthreads();
    }
    int zeros = sums[127], before = sums[t] - zero;
    values[zero ? before : zeros + t - before] = v;
  }
  __syncthreads();
  data[t] = values[t];
}

__device__ int lower_bound(const int* data, int n, int key, bool or_equal) {
  int lo = 0, hi = n;
  while (lo < hi) {
    int mid = (lo + hi) >> 1;
    if (data[mid] < key || (or_equal && data[mid] == key)) lo = mid + 1;
    else hi = mid;
  }
  return lo;
}

__global__ void merge_by_rank(const int* a, int na, const int* b, int nb, int* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < na) out[i + lower_bound(b, nb, a[i], false)] = a[i];
  if (i < nb) out[i + lower_bound(a, na, b[i], true)] = b[i];
}

template <int K>
__global__ void top_k(const float* x, float* values, int* indices, int n) {
  float best[K];
  int at[K];
#pragma unroll
  for (int k = 0; k < K; ++k) best[k] = -1e30f, at[k] = -1;
  const float* row = x + blockIdx.x * n;
  for (int i = threadIdx.x; i < n; i += 32) {
    float v = row[i];
    int p = i;
#pragma unroll
    for (int k = 0; k < K; ++k)
      if (v > best[k]) {
        float tv = best[k];
        int tp = at[k];
        best[k] = v, at[k] = p, v = tv, p = tp;
      }
  }
  for (int k = 0; k < K; ++k) {
    float v = best[0];
    int lane = threadIdx.x;
    for (int o = 16; o; o >>= 1) {
      float ov = __shfl_xor_sync(~0u, v, o);
      int ol = __shfl_xor_sync(~0u, lane, o);
      if (ov > v || (ov == v && ol < lane)) v = ov, lane = ol;
    }
    int index = __shfl_sync(~0u, at[0], lane);
    if (threadIdx.x == 0) values[blockIdx.x * K + k] = v, indices[blockIdx.x * K + k] = index;
    if (threadIdx.x == lane) {
#pragma unroll
      for (int j = 0; j + 1 < K; ++j) best[j] = best[j + 1], at[j] = at[j + 1];
      best[K - 1] = -1e30f;
    }
  }
}
