// Asynchronous copies: primitives, pipelines, barriers.
#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/pipeline>
#include <cuda_pipeline.h>

namespace cg = cooperative_groups;

__global__ void primitive_pipeline(const float4* in, float4* out, int tiles) {
  __shared__ float4 buffer[2][64];
  for (int stage = 0; stage < 2 && stage < tiles; ++stage) {
    __pipeline_memcpy_async(&buffer[stage][threadIdx.x], &in[stage * 64 + threadIdx.x], sizeof(float4));
    __pipeline_commit();
  }
  for (int t = 0; t < tiles; ++t) {
    if (t + 1 < tiles) __pipeline_wait_prior(1);
    else __pipeline_wait_prior(0);
    __syncthreads();
    float4 v = buffer[t % 2][63 - threadIdx.x];
    out[t * 64 + threadIdx.x] = make_float4(v.x + 1, v.y, v.z, v.w);
    __syncthreads();
    if (t + 2 < tiles) {
      __pipeline_memcpy_async(&buffer[t % 2][threadIdx.x], &in[(t + 2) * 64 + threadIdx.x], sizeof(float4));
      __pipeline_commit();
    }
  }
}

__global__ void block_pipeline(const int* in, int* out, int batches) {
  constexpr size_t stages = 2;
  extern __shared__ int shared[];
  auto block = cg::this_thread_block();
  size_t shared_offset[stages] = {0, block.size()};
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope::thread_scope_block, stages> shared_state;
  auto pipeline = cuda::make_pipeline(block, &shared_state);
  for (size_t compute = 0, fetch = 0; compute < batches; ++compute) {
    for (; fetch < batches && fetch < compute + stages; ++fetch) {
      pipeline.producer_acquire();
      cuda::memcpy_async(block, shared + shared_offset[fetch % 2], in + fetch * block.size(), sizeof(int) * block.size(), pipeline);
      pipeline.producer_commit();
    }
    pipeline.consumer_wait();
    int* batch = shared + shared_offset[compute % 2];
    out[compute * block.size() + threadIdx.x] = batch[(threadIdx.x + 1) % block.size()];
    pipeline.consumer_release();
  }
}

__global__ void thread_pipeline(const float* in, float* out) {
  __shared__ float s[128];
  auto pipe = cuda::make_pipeline();
  pipe.producer_acquire();
  cuda::memcpy_async(&s[threadIdx.x], &in[threadIdx.x], cuda::aligned_size_t<4>(sizeof(float)), pipe);
  pipe.producer_commit();
  pipe.consumer_wait();
  out[threadIdx.x] = 2 * s[threadIdx.x];
  pipe.consumer_release();
}

__global__ void split_barrier(const int* in, int* out, int steps) {
  using barrier = cuda::barrier<cuda::thread_scope_block>;
  __shared__ barrier bar;
  __shared__ int values[64];
  auto block = cg::this_thread_block();
  if (block.thread_rank() == 0) init(&bar, block.size());
  block.sync();
  int sum = 0;
  for (int s = 0; s < steps; ++s) {
    values[threadIdx.x] = in[s * 64 + threadIdx.x];
    barrier::arrival_token token = bar.arrive();
    int own = in[s * 64 + threadIdx.x];
    bar.wait(std::move(token));
    sum += own - values[63 - threadIdx.x];
    bar.arrive_and_wait();
  }
  out[threadIdx.x] = sum;
}

// Warp 0 produces, warp 1 consumes, through two buffers with a pair of barriers each.
__global__ void producer_consumer(const float* in, float* out, int tiles) {
  using barrier = cuda::barrier<cuda::thread_scope_block>;
  __shared__ barrier full[2], empty[2];
  __shared__ float buffer[2][32];
  if (threadIdx.x < 2) {
    init(&full[threadIdx.x], blockDim.x);
    init(&empty[threadIdx.x], blockDim.x);
  }
  __syncthreads();
  int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    for (int t = 0; t < tiles; ++t) {
      empty[t % 2].arrive_and_wait();
      buffer[t % 2][lane] = in[t * 32 + lane];
      full[t % 2].arrive();
    }
  } else {
    empty[0].arrive();
    empty[1].arrive();
    for (int t = 0; t < tiles; ++t) {
      full[t % 2].arrive_and_wait();
      out[t * 32 + lane] = buffer[t % 2][31 - lane] * 3;
      empty[t % 2].arrive();
    }
  }
}
