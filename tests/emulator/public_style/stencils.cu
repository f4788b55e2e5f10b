// Neighbourhoods in one, two and three dimensions.
#include <cuda_runtime.h>

#define RADIUS 3
#define BLOCK_SIZE 64
#define MASK_WIDTH 5
#define TILE 12

__constant__ float mask[MASK_WIDTH * MASK_WIDTH];
static __constant__ float c_coef[RADIUS + 1] = {0.5f, 0.25f, 0.125f, 0.0625f};

__global__ void stencil_1d(int* in, int* out, int n) {
  __shared__ int temp[BLOCK_SIZE + 2 * RADIUS];
  int gindex = threadIdx.x + blockIdx.x * blockDim.x + RADIUS;
  int lindex = threadIdx.x + RADIUS;
  temp[lindex] = in[gindex];
  if (threadIdx.x < RADIUS) {
    temp[lindex - RADIUS] = in[gindex - RADIUS];
    temp[lindex + BLOCK_SIZE] = in[gindex + BLOCK_SIZE];
  }
  __syncthreads();
  int result = 0;
  for (int offset = -RADIUS; offset <= RADIUS; offset++) result += temp[lindex + offset];
  out[gindex - RADIUS] = result;
}

__global__ void derivative(const float* f, float* df, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = c_coef[0] * f[i];
  for (int r = 1; r <= RADIUS; ++r) sum += c_coef[r] * (f[(i + r) % n] - f[(i - r + n) % n]);
  df[i] = sum;
}

__global__ void convolution_2d(const float* in, float* out, int height, int width) {
  __shared__ float ds[TILE + MASK_WIDTH - 1][TILE + MASK_WIDTH - 1];
  int row_o = blockIdx.y * TILE + threadIdx.y, col_o = blockIdx.x * TILE + threadIdx.x;
  int row_i = row_o - MASK_WIDTH / 2, col_i = col_o - MASK_WIDTH / 2;
  if (row_i >= 0 && row_i < height && col_i >= 0 && col_i < width)
    ds[threadIdx.y][threadIdx.x] = in[row_i * width + col_i];
  else
    ds[threadIdx.y][threadIdx.x] = 0.0f;
  __syncthreads();
  if (threadIdx.y < TILE && threadIdx.x < TILE && row_o < height && col_o < width) {
    float sum = 0.0f;
    for (int i = 0; i < MASK_WIDTH; i++)
      for (int j = 0; j < MASK_WIDTH; j++) sum += mask[i * MASK_WIDTH + j] * ds[i + threadIdx.y][j + threadIdx.x];
    out[row_o * width + col_o] = sum;
  }
}

__global__ void jacobi(const double* __restrict__ u, double* __restrict__ next, int nx, int ny) {
  int ix = blockIdx.x * blockDim.x + threadIdx.x + 1, iy = blockIdx.y * blockDim.y + threadIdx.y + 1;
  if (ix < nx - 1 && iy < ny - 1)
    next[iy * nx + ix] = 0.25 * (u[iy * nx + ix + 1] + u[iy * nx + ix - 1] + u[(iy + 1) * nx + ix] + u[(iy - 1) * nx + ix]);
}

__global__ void heat_3d(const float* in, float* out, dim3 size, float k) {
  int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  int z = blockIdx.z * blockDim.z + threadIdx.z;
  if (x >= size.x || y >= size.y || z >= size.z) return;
  auto at = [&](int i, int j, int l) {
    i = min(max(i, 0), (int)size.x - 1), j = min(max(j, 0), (int)size.y - 1), l = min(max(l, 0), (int)size.z - 1);
    return in[(l * size.y + j) * size.x + i];
  };
  float c = at(x, y, z);
  out[(z * size.y + y) * size.x + x] = c + k * (at(x - 1, y, z) + at(x + 1, y, z) + at(x, y - 1, z) +
                                                at(x, y + 1, z) + at(x, y, z - 1) + at(x, y, z + 1) - 6 * c);
}

__global__ void life(const unsigned char* now, unsigned char* next, unsigned int width, unsigned int height) {
  for (unsigned int id = blockIdx.x * blockDim.x + threadIdx.x; id < width * height; id += blockDim.x * gridDim.x) {
    unsigned int x = id % width, y = id - x, size = width * height;
    unsigned int left = (x + width - 1) % width, right = (x + 1) % width;
    unsigned int up = (y + size - width) % size, down = (y + width) % size;
    unsigned int alive = now[left + up] + now[x + up] + now[right + up] + now[left + y] + now[right + y] +
                         now[left + down] + now[x + down] + now[right + down];
    next[x + y] = alive == 3 || (alive == 2 && now[x + y]) ? 1 : 0;
  }
}

__global__ void max_pool(const float* in, float* out, int channels, int h, int w) {
  int ow = w / 2, oh = h / 2, i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= channels * oh * ow) return;
  int x = i % ow, y = i / ow % oh, c = i / (ow * oh);
  const float* p = in + (c * h + 2 * y) * w + 2 * x;
  out[i] = fmaxf(fmaxf(p[0], p[1]), fmaxf(p[w], p[w + 1]));
}

__global__ void box_rows(const float* id, float* od, int w, int h, int r) {
  unsigned int y = blockIdx.x * blockDim.x + threadIdx.x;
  if (y >= h) return;
  id += y * w, od += y * w;
  float scale = 1.0f / (float)((r << 1) + 1), t = id[0] * r;
  for (int x = 0; x < r + 1; x++) t += id[x];
  od[0] = t * scale;
  for (int x = 1; x < w; x++) {
    t += id[min(x + r, w - 1)] - id[max(x - r - 1, 0)];
    od[x] = t * scale;
  }
}

__global__ void im2col(const float* im, float* col, int h, int w, int k) {
  int oh = h - k + 1, ow = w - k + 1, i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < oh * ow)
    for (int a = 0; a < k; ++a)
      for (int b = 0; b < k; ++b) col[(a * k + b) * oh * ow + i] = im[(i / ow + a) * w + i % ow + b];
}
