// CUB's primitives, cuRAND's generators, CUDA's atomics.
#include <cub/block/block_load.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <cub/cub.cuh>
#include <cuda/atomic>
#include <cuda/std/cstdint>
#include <curand_kernel.h>

template <int BLOCK_THREADS, int ITEMS>
__global__ void cub_sum(const int* d_in, int* d_out) {
  typedef cub::BlockReduce<int, BLOCK_THREADS> BlockReduceT;
  __shared__ typename BlockReduceT::TempStorage temp_storage;
  int data[ITEMS];
  cub::LoadDirectStriped<BLOCK_THREADS>(threadIdx.x, d_in, data);
  int aggregate = BlockReduceT(temp_storage).Sum(data);
  if (threadIdx.x == 0) *d_out = aggregate;
}

template <int BLOCK_THREADS, int ITEMS>
__global__ void cub_scan(const int* d_in, int* d_out) {
  using Load = cub::BlockLoad<int, BLOCK_THREADS, ITEMS, cub::BLOCK_LOAD_WARP_TRANSPOSE>;
  using Store = cub::BlockStore<int, BLOCK_THREADS, ITEMS, cub::BLOCK_STORE_WARP_TRANSPOSE>;
  using Scan = cub::BlockScan<int, BLOCK_THREADS>;
  __shared__ union TempStorage {
    typename Load::TempStorage load;
    typename Store::TempStorage store;
    typename Scan::TempStorage scan;
  } temp;
  int data[ITEMS];
  Load(temp.load).Load(d_in, data);
  __syncthreads();
  int aggregate;
  Scan(temp.scan).ExclusiveSum(data, data, aggregate);
  __syncthreads();
  Store(temp.store).Store(d_out, data);
  if (threadIdx.x == 0) d_out[BLOCK_THREADS * ITEMS] = aggregate;
}

__global__ void cub_sort(unsigned int* keys, int* values) {
  typedef cub::BlockRadixSort<unsigned int, 64, 2, int> BlockRadixSort;
  __shared__ typename BlockRadixSort::TempStorage temp_storage;
  unsigned int k[2];
  int v[2];
  for (int i = 0; i < 2; ++i) k[i] = keys[2 * threadIdx.x + i], v[i] = values[2 * threadIdx.x + i];
  BlockRadixSort(temp_storage).Sort(k, v);
  for (int i = 0; i < 2; ++i) keys[2 * threadIdx.x + i] = k[i], values[2 * threadIdx.x + i] = v[i];
}

__global__ void cub_warp(const float* in, float* max_out, float* scan_out) {
  typedef cub::WarpReduce<float> WarpReduce;
  typedef cub::WarpScan<float> WarpScan;
  __shared__ typename WarpReduce::TempStorage reduce_storage[4];
  __shared__ typename WarpScan::TempStorage scan_storage[4];
  int warp = threadIdx.x / 32;
  float x = in[threadIdx.x], m = WarpReduce(reduce_storage[warp]).Reduce(x, cub::Max());
  if (threadIdx.x % 32 == 0) max_out[warp] = m;
  WarpScan(scan_storage[warp]).InclusiveSum(x, x);
  scan_out[threadIdx.x] = x;
}

__global__ void setup_states(curandState* states, unsigned long long seed) {
  int id = threadIdx.x + blockIdx.x * blockDim.x;
  curand_init(seed, id, 0, &states[id]);
}

__global__ void uniform_numbers(curandState* states, float* out, unsigned int* raw, int each) {
  int id = threadIdx.x + blockIdx.x * blockDim.x;
  curandState local = states[id];
  for (int i = 0; i < each; ++i) {
    raw[id * each + i] = curand(&local);
    out[id * each + i] = curand_uniform(&local);
  }
  states[id] = local;
}

__global__ void philox_numbers(unsigned int* raw, float* normal, unsigned long long seed, unsigned long long offset) {
  curandStatePhilox4_32_10_t state;
  curand_init(seed, threadIdx.x, offset, &state);
  uint4 four = curand4(&state);
  raw[4 * threadIdx.x] = four.x, raw[4 * threadIdx.x + 1] = four.y;
  raw[4 * threadIdx.x + 2] = four.z, raw[4 * threadIdx.x + 3] = four.w;
  normal[threadIdx.x] = curand_normal(&state);
}

__global__ void estimate_pi(unsigned int* inside, int samples) {
  curandStateXORWOW_t state;
  curand_init(1234, blockIdx.x * blockDim.x + threadIdx.x, 0, &state);
  unsigned int count = 0;
  for (int i = 0; i < samples; ++i) {
    float x = curand_uniform(&state), y = curand_uniform(&state);
    if (x * x + y * y <= 1.0f) count++;
  }
  atomicAdd(inside, count);
}

__global__ void device_atomics(int* counter, cuda::std::uint32_t* maximum) {
  cuda::atomic_ref<int, cuda::thread_scope_device> c(*counter);
  c.fetch_add(2, cuda::std::memory_order_relaxed);
  cuda::atomic_ref<cuda::std::uint32_t, cuda::thread_scope_block> m(*maximum);
  m.fetch_max(threadIdx.x * 7u % 61u, cuda::std::memory_order_relaxed);
}
