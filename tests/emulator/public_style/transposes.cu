// Transposes, permutations, gathers and scatters.
#include <cuda_runtime.h>

const int TILE_DIM = 32;
const int BLOCK_ROWS = 8;

__global__ void transpose_naive(float* odata, const float* idata, int width, int height) {
  int x = blockIdx.x * TILE_DIM + threadIdx.x;
  int y = blockIdx.y * TILE_DIM + threadIdx.y;
  for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS)
    if (x < width && y + j < height) odata[x * height + (y + j)] = idata[(y + j) * width + x];
}

__global__ void transpose_padded(float* odata, const float* idata, int width, int height) {
  __shared__ float tile[TILE_DIM][TILE_DIM + 1];
  int x = blockIdx.x * TILE_DIM + threadIdx.x;
  int y = blockIdx.y * TILE_DIM + threadIdx.y;
  for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS)
    if (x < width && y + j < height) tile[threadIdx.y + j][threadIdx.x] = idata[(y + j) * width + x];
  __syncthreads();
  x = blockIdx.y * TILE_DIM + threadIdx.x;
  y = blockIdx.x * TILE_DIM + threadIdx.y;
  for (int j = 0; j < TILE_DIM; j += BLOCK_ROWS)
    if (x < height && y + j < width) odata[(y + j) * height + x] = tile[threadIdx.x][threadIdx.y + j];
}

__global__ void transpose_swizzled(float* odata, const float* idata, int n) {
  __shared__ float tile[TILE_DIM * TILE_DIM];
  int x = blockIdx.x * TILE_DIM + threadIdx.x;
  for (int r = threadIdx.y; r < TILE_DIM; r += BLOCK_ROWS)
    tile[r * TILE_DIM + (threadIdx.x ^ r)] = idata[(blockIdx.y * TILE_DIM + r) * n + x];
  __syncthreads();
  for (int r = threadIdx.y; r < TILE_DIM; r += BLOCK_ROWS)
    odata[(blockIdx.x * TILE_DIM + r) * n + blockIdx.y * TILE_DIM + threadIdx.x] =
        tile[threadIdx.x * TILE_DIM + (r ^ threadIdx.x)];
}

// (B, T, H, D) to (B, H, T, D)
__global__ void permute_heads(float* out, const float* in, int B, int T, int H, int D) {
  int d = threadIdx.x, h = threadIdx.y, t = blockIdx.x, b = blockIdx.y;
  out[((b * H + h) * T + t) * D + d] = in[((b * T + t) * H + h) * D + d];
}

__global__ void static_reverse(int* d, int n) {
  __shared__ int s[64];
  int t = threadIdx.x;
  s[t] = d[t];
  __syncthreads();
  d[t] = s[n - t - 1];
}

__global__ void dynamic_reverse(int* d, int n) {
  extern __shared__ int s[];
  int t = threadIdx.x;
  int tr = n - t - 1;
  s[t] = d[t];
  __syncthreads();
  d[t] = s[tr];
}

__global__ void gather_rows(const float* __restrict__ table, const int* __restrict__ ids, float* out, int dim) {
  const float4* row = reinterpret_cast<const float4*>(table + (size_t)__ldg(&ids[blockIdx.x]) * dim);
  float4* to = reinterpret_cast<float4*>(out + (size_t)blockIdx.x * dim);
  for (int i = threadIdx.x; i < dim / 4; i += blockDim.x) to[i] = __ldg(row + i);
}

__global__ void scatter_add(float* table, const int* ids, const float* rows, int dim) {
  for (int i = threadIdx.x; i < dim; i += blockDim.x) atomicAdd(&table[ids[blockIdx.x] * dim + i], rows[blockIdx.x * dim + i]);
}
