// Row-wise transformer kernels.
#include <assert.h>
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>

namespace cg = cooperative_groups;

__global__ void softmax_row_per_thread(float* out, const float* inp, int N, int C) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < N) {
    const float* inp_row = inp + i * C;
    float* out_row = out + i * C;
    float maxval = -INFINITY;
    for (int j = 0; j < C; j++)
      if (inp_row[j] > maxval) maxval = inp_row[j];
    double sum = 0.0;
    for (int j = 0; j < C; j++) {
      out_row[j] = expf(inp_row[j] - maxval);
      sum += out_row[j];
    }
    for (int j = 0; j < C; j++) out_row[j] /= (float)sum;
  }
}

__global__ void softmax_shared(float* out, const float* inp, int C) {
  extern __shared__ float shared[];
  int idx = blockIdx.x, tid = threadIdx.x, block_size = blockDim.x;
  const float* x = inp + idx * C;
  float maxval = -INFINITY;
  for (int i = tid; i < C; i += block_size) maxval = fmaxf(maxval, x[i]);
  shared[tid] = maxval;
  __syncthreads();
  for (int stride = block_size / 2; stride >= 1; stride /= 2) {
    if (tid < stride) shared[tid] = fmaxf(shared[tid], shared[tid + stride]);
    __syncthreads();
  }
  float offset = shared[0];
  __syncthreads();
  for (int i = tid; i < C; i += block_size) out[idx * C + i] = expf(x[i] - offset);
  __syncthreads();
  x = out + idx * C;
  float sumval = 0.0f;
  for (int i = tid; i < C; i += block_size) sumval += x[i];
  shared[tid] = sumval;
  for (int stride = block_size / 2; stride >= 1; stride /= 2) {
    __syncthreads();
    if (tid < stride) shared[tid] += shared[tid + stride];
  }
  __syncthreads();
  float sum = shared[0];
  for (int i = tid; i < C; i += block_size) out[idx * C + i] = x[i] / sum;
}

struct __align__(8) SumMax {
  float maxval;
  float sum;
};

__device__ __forceinline__ SumMax merge(SumMax a, SumMax b) {
  bool a_bigger = (a.maxval > b.maxval);
  SumMax bigger = a_bigger ? a : b, smaller = a_bigger ? b : a;
  SumMax res;
  res.maxval = bigger.maxval;
  res.sum = bigger.sum + (smaller.maxval == -FLT_MAX ? 0.f : smaller.sum * expf(smaller.maxval - bigger.maxval));
  return res;
}

__global__ void softmax_online(float* out, const float* inp, int N, int C) {
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
  int idx = blockIdx.x * warp.meta_group_size() + warp.meta_group_rank();
  if (idx >= N) return;
  const float* x = inp + idx * C;
  SumMax sm_partial;
  sm_partial.maxval = -FLT_MAX;
  sm_partial.sum = 0.0f;
  for (int i = warp.thread_rank(); i < C; i += warp.size()) sm_partial = merge(sm_partial, {x[i], 1.0f});
  SumMax sm_total = cg::reduce(warp, sm_partial, merge);
  for (int i = warp.thread_rank(); i < C; i += warp.size()) __stcs(out + idx * C + i, expf(__ldcs(x + i) - sm_total.maxval) / sm_total.sum);
}

__global__ void layernorm_tile(float* __restrict__ out, const float* __restrict__ inp, const float* __restrict__ weight,
                               const float* __restrict__ bias, int N, int C) {
  cg::thread_block block = cg::this_thread_block();
  cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
  int idx = blockIdx.x * warp.meta_group_size() + warp.meta_group_rank();
  if (idx >= N) return;
  const float* x = inp + idx * C;
  float sum = 0.0f;
  for (int i = warp.thread_rank(); i < C; i += warp.size()) sum += x[i];
  sum = cg::reduce(warp, sum, cg::plus<float>{});
  float m = sum / C;
  sum = 0.0f;
  for (int i = warp.thread_rank(); i < C; i += warp.size()) {
    float diff = x[i] - m;
    sum += diff * diff;
  }
  sum = cg::reduce(warp, sum, cg::plus<float>{});
  float s = rsqrtf(sum / C + 1e-5f);
  for (int c = warp.thread_rank(); c < C; c += warp.size()) out[idx * C + c] = s * (x[c] - m) * weight[c] + bias[c];
}

template <int THREADS>
__global__ void layernorm_block(const half* x, half* y, const half* gamma, int cols) {
  static_assert(THREADS % 32 == 0, "whole warps");
  __shared__ float2 part[THREADS / 32];
  __shared__ float mean, rstd;
  float2 acc = make_float2(0.f, 0.f);
  for (int c = threadIdx.x; c < cols; c += THREADS) {
    float v = __half2float(x[blockIdx.x * cols + c]);
    acc.x += v;
    acc.y += v * v;
  }
  for (int o = 16; o; o >>= 1) {
    acc.x += __shfl_xor_sync(~0u, acc.x, o);
    acc.y += __shfl_xor_sync(~0u, acc.y, o);
  }
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = acc;
  __syncthreads();
  if (threadIdx.x == 0) {
    float2 t = {0, 0};
    for (auto& p : part) t.x += p.x, t.y += p.y;
    mean = t.x / cols;
    rstd = rsqrtf(t.y / cols - mean * mean + 1e-5f);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < cols; c += THREADS)
    y[blockIdx.x * cols + c] = __float2half((__half2float(x[blockIdx.x * cols + c]) - mean) * rstd * __half2float(gamma[c]));
}

__global__ void rmsnorm(float* o, const float* x, const float* weight, int size) {
  __shared__ float shared_ss;
  float ss = 0.0f;
  for (int i = threadIdx.x; i < size; i += blockDim.x) ss += x[i] * x[i];
  for (int mask = 16; mask > 0; mask >>= 1) ss += __shfl_down_sync(0xffffffff, ss, mask);
  __shared__ float warps[32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = ss;
  __syncthreads();
  if (threadIdx.x == 0) {
    ss = 0.f;
    for (int w = 0; w < blockDim.x / 32; ++w) ss += warps[w];
    shared_ss = 1.0f / sqrtf(ss / size + 1e-5f);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += blockDim.x) o[i] = weight[i] * (shared_ss * x[i]);
}

__global__ void cross_entropy(float* losses, const float* logits, const int* targets, int V) {
  const float* row = logits + (size_t)blockIdx.x * V;
  __shared__ float buf[64];
  assert(blockDim.x == 64);
  float mx = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < V; i += 64) mx = fmaxf(mx, row[i]);
  buf[threadIdx.x] = mx;
  __syncthreads();
  for (int s = 32; s; s >>= 1) {
    if (threadIdx.x < s) buf[threadIdx.x] = fmaxf(buf[threadIdx.x], buf[threadIdx.x + s]);
    __syncthreads();
  }
  mx = buf[0];
  __syncthreads();
  for (int i = threadIdx.x; i < V; i += 64) sum += __expf(row[i] - mx);
  buf[threadIdx.x] = sum;
  __syncthreads();
  for (int s = 32; s; s >>= 1) {
    if (threadIdx.x < s) buf[threadIdx.x] += buf[threadIdx.x + s];
    __syncthreads();
  }
  if (threadIdx.x == 0) losses[blockIdx.x] = logf(buf[0]) + mx - row[targets[blockIdx.x]];
}

__global__ void rope(float* q, const float2* freqs, int heads, int dim) {
  int pos = blockIdx.x, h = threadIdx.y, i = threadIdx.x;
  float2* pair = reinterpret_cast<float2*>(q + (pos * heads + h) * dim) + i;
  float2 v = *pair, f = freqs[pos * dim / 2 + i];
  *pair = make_float2(v.x * f.x - v.y * f.y, v.x * f.y + v.y * f.x);
}

// One block per query, scores in dynamic shared memory.
__global__ void attention(const float* Q, const float* K, const float* V, float* O, int T, int D) {
  extern __shared__ float smem[];
  float* scores = smem;
  float* query = smem + T;
  int t = blockIdx.x;
  if (threadIdx.x < D) query[threadIdx.x] = Q[t * D + threadIdx.x];
  __syncthreads();
  for (int k = threadIdx.x; k <= t; k += blockDim.x) {
    float s = 0;
    for (int d = 0; d < D; ++d) s += query[d] * K[k * D + d];
    scores[k] = s * rsqrtf((float)D);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float mx = -INFINITY, sum = 0;
    for (int k = 0; k <= t; ++k) mx = fmaxf(mx, scores[k]);
    for (int k = 0; k <= t; ++k) sum += scores[k] = expf(scores[k] - mx);
    for (int k = 0; k <= t; ++k) scores[k] /= sum;
  }
  __syncthreads();
  if (threadIdx.x < D) {
    float o = 0;
    for (int k = 0; k <= t; ++k) o += scores[k] * V[k * D + threadIdx.x];
    O[t * D + threadIdx.x] = o;
  }
}

void launch_softmax(float* out, const float* inp, int N, int C, int block_size, cudaStream_t stream) {
  softmax_shared<<<N, block_size, block_size * sizeof(float), stream>>>(out, inp, C);
  cudaGetLastError();
}
