// Small complete programs: graphs, particles, sparse matrices, device variables, classes.
#include <cuda_runtime.h>

#include <iostream>
#include <memory>
#include <string>

#include "programs.h"

__constant__ float3 gravity;
__device__ unsigned int done_blocks = 0;
__device__ int node_count;
__managed__ int managed_total = 3;

namespace sim {
namespace {

class Particle {
 public:
  __host__ __device__ Particle(float4 p, float4 v) : position_(p), velocity_(v) {}
  __device__ void step(float dt) {
    velocity_.x += dt * gravity.x;
    velocity_.y += dt * gravity.y;
    velocity_.z += dt * gravity.z;
    position_ = position_ + dt * velocity_;
  }
  __device__ float4 position() const { return position_; }

 private:
  float4 position_, velocity_;
};

}  // namespace

__global__ void integrate(float4* positions, const float4* velocities, float dt, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  Particle p(positions[i], velocities[i]);
  p.step(dt);
  positions[i] = p.position();
}

}  // namespace sim

__global__ void n_body(const float4* p, float3* acc, int n) {
  extern __shared__ float4 shPosition[];
  float3 a = {0.0f, 0.0f, 0.0f};
  int gtid = blockIdx.x * blockDim.x + threadIdx.x;
  float4 my = p[gtid];
  for (int i = 0, tile = 0; i < n; i += blockDim.x, tile++) {
    shPosition[threadIdx.x] = p[tile * blockDim.x + threadIdx.x];
    __syncthreads();
    for (int j = 0; j < blockDim.x; j++) {
      float4 o = shPosition[j];
      float3 r = make_float3(o.x - my.x, o.y - my.y, o.z - my.z);
      float inv = rsqrtf(r.x * r.x + r.y * r.y + r.z * r.z + 1e-3f), s = o.w * inv * inv * inv;
      a.x += r.x * s, a.y += r.y * s, a.z += r.z * s;
    }
    __syncthreads();
  }
  acc[gtid] = a;
}

__global__ void spmv_scalar(int rows, const int* ptr, const int* col, const double* val, const double* x, double* y) {
  int row = blockDim.x * blockIdx.x + threadIdx.x;
  if (row < rows) {
    double dot = 0;
    for (int jj = ptr[row]; jj < ptr[row + 1]; jj++) dot += val[jj] * x[col[jj]];
    y[row] = dot;
  }
}

__global__ void spmv_vector(int rows, const int* ptr, const int* col, const double* val, const double* x, double* y) {
  int thread_id = blockDim.x * blockIdx.x + threadIdx.x, row = thread_id / 32, lane = thread_id & 31;
  double sum = 0;
  if (row < rows) {
    for (int jj = ptr[row] + lane; jj < ptr[row + 1]; jj += 32) sum += val[jj] * x[col[jj]];
  }
  for (int d = 16; d; d /= 2) sum += __shfl_down_sync(0xffffffff, sum, d);
  if (row < rows && lane == 0) y[row] = sum;
}

__global__ void bfs_level(const int* ptr, const int* adj, int* level, int depth, int n) {
  int v = blockIdx.x * blockDim.x + threadIdx.x;
  if (v >= n || level[v] != depth) return;
  for (int e = ptr[v]; e < ptr[v + 1]; ++e)
    if (atomicCAS(&level[adj[e]], -1, depth + 1) == -1) atomicAdd(&node_count, 1);
}

// The last block to finish adds the partial sums.
__global__ void last_block_sum(const float* in, volatile float* partial, float* out, int n) {
  __shared__ float s[64];
  __shared__ bool is_last;
  float sum = 0;
  for (int i = blockIdx.x * 64 + threadIdx.x; i < n; i += gridDim.x * 64) sum += in[i];
  s[threadIdx.x] = sum;
  __syncthreads();
  for (int d = 32; d; d >>= 1) {
    if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = s[0];
    __threadfence();
    unsigned int ticket = atomicInc(&done_blocks, gridDim.x);
    is_last = (ticket == gridDim.x - 1);
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) {
    float total = 0;
    for (int b = 0; b < gridDim.x; ++b) total += partial[b];
    *out = total;
    done_blocks = 0;
  }
}

__noinline__ __device__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

__global__ void recursion(int* out) { out[threadIdx.x] = fibonacci(threadIdx.x % 12) + managed_total; }

template <typename F>
__global__ void map_with(float* x, int n, F f) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = f(x[i]);
}

__global__ void pitched(float* base, size_t pitch, int width, int height) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x < width && y < height) ((float*)((char*)base + y * pitch))[x] += 1000.0f * y + x;
}

typedef float (*unary_t)(float);
__device__ float twice(float x) { return 2 * x; }
__device__ float squared(float x) { return x * x; }
__device__ unary_t table[2] = {twice, squared};

__global__ void function_table(float* x, const int* which) { x[threadIdx.x] = table[which[threadIdx.x]](x[threadIdx.x]); }

__global__ void nearest(const float2* points, const float2* centers, int* assignment, float2* sums, int* counts, int n, int k) {
  extern __shared__ float2 c[];
  if (threadIdx.x < k) c[threadIdx.x] = centers[threadIdx.x];
  __syncthreads();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float best = CUDART_INF_F;
  int at = 0;
  for (int j = 0; j < k; ++j) {
    float dx = points[i].x - c[j].x, dy = points[i].y - c[j].y, d = dx * dx + dy * dy;
    if (d < best) best = d, at = j;
  }
  assignment[i] = at;
  atomicAdd(&sums[at].x, points[i].x);
  atomicAdd(&sums[at].y, points[i].y);
  atomicAdd(&counts[at], 1);
}

int main(int argc, char** argv) {
  auto name = std::make_unique<std::string>("programs");
  float4* d = nullptr;
  cudaMalloc((void**)&d, 100 * sizeof(float4));
  sim::integrate<<<1, 100>>>(d, d, 0.1f, 100);
  std::cout << *name << std::endl;
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
