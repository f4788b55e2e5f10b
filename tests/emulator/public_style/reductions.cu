// Sums, maxima and moments, as in tutorials and samples, with a main function.
#include <cuda_runtime.h>
#include <device_launch_parameters.h>

#include <cstdio>
#include <vector>

#define CHECK(call)                                                      \
  do {                                                                   \
    cudaError_t status = (call);                                         \
    if (status != cudaSuccess) {                                         \
      fprintf(stderr, "%s\n", cudaGetErrorString(status));               \
      exit(1);                                                           \
    }                                                                    \
  } while (0)
#define WARP_SIZE 32
#define FULL_MASK 0xffffffff

__global__ void sum_interleaved(const float* in, float* out, int n) {
  extern __shared__ float sdata[];
  unsigned int tid = threadIdx.x;
  unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
  sdata[tid] = i < n ? in[i] : 0;
  __syncthreads();
  for (unsigned int s = 1; s < blockDim.x; s *= 2) {
    if (tid % (2 * s) == 0) sdata[tid] += sdata[tid + s];
    __syncthreads();
  }
  if (tid == 0) out[blockIdx.x] = sdata[0];
}

__global__ void sum_strided(const float* in, float* out, int n) {
  extern __shared__ float sdata[];
  unsigned int tid = threadIdx.x, i = blockIdx.x * blockDim.x + threadIdx.x;
  sdata[tid] = i < n ? in[i] : 0;
  __syncthreads();
  for (unsigned int s = 1; s < blockDim.x; s *= 2) {
    int index = 2 * s * tid;
    if (index < blockDim.x) sdata[index] += sdata[index + s];
    __syncthreads();
  }
  if (!tid) out[blockIdx.x] = sdata[0];
}

__global__ void sum_sequential(float* in, float* out, int n) {
  extern __shared__ float sdata[];
  unsigned int tid = threadIdx.x, i = blockIdx.x * (blockDim.x * 2) + threadIdx.x;
  float mySum = (i < n) ? in[i] : 0;
  if (i + blockDim.x < n) mySum += in[i + blockDim.x];
  sdata[tid] = mySum;
  __syncthreads();
  for (unsigned int s = blockDim.x / 2; s > 0; s >>= 1) {
    if (tid < s) sdata[tid] = mySum = mySum + sdata[tid + s];
    __syncthreads();
  }
  if (tid == 0) out[blockIdx.x] = mySum;
}

template <class T, unsigned int blockSize>
__global__ void sum_unrolled(T* in, T* out, unsigned int n) {
  __shared__ T sdata[blockSize];
  unsigned int tid = threadIdx.x, i = blockIdx.x * blockSize + tid;
  T sum = 0;
  while (i < n) sum += in[i], i += blockSize * gridDim.x;
  sdata[tid] = sum;
  __syncthreads();
  if (blockSize >= 256) { if (tid < 128) sdata[tid] += sdata[tid + 128]; __syncthreads(); }
  if (blockSize >= 128) { if (tid < 64) sdata[tid] += sdata[tid + 64]; __syncthreads(); }
  if (tid < 32) {
    sum = sdata[tid] + sdata[tid + 32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(FULL_MASK, sum, offset);
  }
  if (tid == 0) out[blockIdx.x] = sum;
}

__inline__ __device__ float warpReduceSum(float val) {
  for (int offset = warpSize / 2; offset > 0; offset /= 2) val += __shfl_down_sync(FULL_MASK, val, offset);
  return val;
}

__inline__ __device__ float blockReduceSum(float val) {
  static __shared__ float shared[32];
  int lane = threadIdx.x % warpSize;
  int wid = threadIdx.x / warpSize;
  val = warpReduceSum(val);
  if (lane == 0) shared[wid] = val;
  __syncthreads();
  val = (threadIdx.x < blockDim.x / warpSize) ? shared[lane] : 0;
  if (wid == 0) val = warpReduceSum(val);
  return val;
}

__global__ void sum_shuffle(const float* in, float* out, int N) {
  float sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < N; i += blockDim.x * gridDim.x) sum += in[i];
  sum = blockReduceSum(sum);
  if (threadIdx.x == 0) atomicAdd(out, sum);
}

__device__ float atomicMaxFloat(float* addr, float value) {
  int* as_int = (int*)addr;
  int old = *(volatile int*)as_int, assumed;
  do {
    assumed = old;
    old = atomicCAS(as_int, assumed, __float_as_int(fmaxf(value, __int_as_float(assumed))));
  } while (assumed != old);
  return __int_as_float(old);
}

__global__ void max_of(const float* in, float* out, int n) {
  __shared__ float block_max;
  if (threadIdx.x == 0) block_max = -INFINITY;
  __syncthreads();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) atomicMaxFloat(&block_max, in[i]);
  __syncthreads();
  if (threadIdx.x == 0) atomicMaxFloat(out, block_max);
}

__global__ void arg_max(const float* __restrict__ in, int* __restrict__ index, int cols) {
  extern __shared__ unsigned char smem[];
  float* values = reinterpret_cast<float*>(smem);
  int* places = reinterpret_cast<int*>(values + blockDim.x);
  const float* row = in + (size_t)blockIdx.x * cols;
  float best = -FLT_MAX;
  int at = -1;
  for (int i = threadIdx.x; i < cols; i += blockDim.x)
    if (row[i] > best) best = row[i], at = i;
  values[threadIdx.x] = best;
  places[threadIdx.x] = at;
  __syncthreads();
  for (int s = blockDim.x >> 1; s; s >>= 1) {
    if (threadIdx.x < s && values[threadIdx.x + s] > values[threadIdx.x]) {
      values[threadIdx.x] = values[threadIdx.x + s];
      places[threadIdx.x] = places[threadIdx.x + s];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) index[blockIdx.x] = places[0];
}

__global__ void dot_product(const float* a, const float* b, float* out, int n) {
  const int tid = blockDim.x * blockIdx.x + threadIdx.x;
  float temp = tid < n ? a[tid] * b[tid] : 0.f;
  __shared__ float cache[8];
#pragma unroll
  for (int m = 16; m >= 1; m >>= 1) temp += __shfl_xor_sync(FULL_MASK, temp, m, WARP_SIZE);
  if ((threadIdx.x & 31) == 0) cache[threadIdx.x >> 5] = temp;
  __syncthreads();
  if (threadIdx.x < 8) {
    temp = threadIdx.x < blockDim.x / 32 ? cache[threadIdx.x] : 0.f;
    for (int m = 4; m >= 1; m /= 2) temp += __shfl_xor_sync(0xff, temp, m, 8);
    if (threadIdx.x == 0) atomicAdd(out, temp);
  }
}

// One warp per row: mean and variance in one pass.
__global__ void welford(const float* in, float* mean_out, float* var_out, int rows, int cols) {
  int row = blockIdx.x * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  float mean = 0, m2 = 0, count = 0;
  for (int c = threadIdx.x; c < cols; c += 32) {
    float x = in[row * cols + c], delta = x - mean;
    count += 1;
    mean += delta / count;
    m2 += delta * (x - mean);
  }
  for (int offset = 16; offset; offset >>= 1) {
    float b_mean = __shfl_down_sync(FULL_MASK, mean, offset);
    float b_m2 = __shfl_down_sync(FULL_MASK, m2, offset);
    float b_count = __shfl_down_sync(FULL_MASK, count, offset);
    float total = count + b_count;
    if (total > 0) {
      float delta = b_mean - mean;
      mean += delta * b_count / total;
      m2 += b_m2 + delta * delta * count * b_count / total;
      count = total;
    }
  }
  if (threadIdx.x == 0) mean_out[row] = mean, var_out[row] = m2 / count;
}

__global__ void any_negative(const int* in, int* flag, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int found = __syncthreads_or(i < n && in[i] < 0);
  if (threadIdx.x == 0 && found) atomicOr(flag, 1);
}

__global__ void count_even(const int* in, unsigned int* count, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  unsigned int ballot = __ballot_sync(FULL_MASK, i < n && (in[i] & 1) == 0);
  if ((threadIdx.x & 31) == 0) atomicAdd(count, __popc(ballot));
}

int main(int argc, char** argv) {
  int n = argc > 1 ? atoi(argv[1]) : 1 << 20;
  std::vector<float> host(n, 1.0f);
  float *d_in, *d_out;
  CHECK(cudaMalloc(&d_in, n * sizeof(float)));
  CHECK(cudaMalloc(&d_out, sizeof(float)));
  CHECK(cudaMemcpy(d_in, host.data(), n * sizeof(float), cudaMemcpyHostToDevice));
  dim3 grid((n + 255) / 256), block(256);
  sum_interleaved<<<grid, block, 256 * sizeof(float)>>>(d_in, d_out, n);
  sum_unrolled<float, 256><<<grid, block>>>(d_in, d_out, n);
  CHECK(cudaDeviceSynchronize());
  printf("done\n");
  return 0;
}
