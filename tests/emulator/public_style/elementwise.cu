// One thread per element, or per few elements.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

#define CUDA_KERNEL_LOOP(i, n) \
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += blockDim.x * gridDim.x)
#define FLOAT4(value) (reinterpret_cast<float4*>(&(value))[0])
#define HALF2(value) (reinterpret_cast<half2*>(&(value))[0])

__global__ void vector_add(const float* A, const float* B, float* C, int numElements) {
  int i = blockDim.x * blockIdx.x + threadIdx.x;
  if (i < numElements) C[i] = A[i] + B[i] + 0.0f;
}

__global__ void saxpy(int n, float a, const float* __restrict__ x, float* __restrict__ y) {
  CUDA_KERNEL_LOOP(i, n) y[i] = a * x[i] + y[i];
}

__global__ void copy_float4(float* x, float* y, int N) {
  int idx = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (idx < N) {
    float4 r = FLOAT4(x[idx]);
    FLOAT4(y[idx]) = make_float4(r.x, r.y, r.z, r.w);
  }
}

__global__ void add_half2(half* a, half* b, half* c, int N) {
  int idx = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (idx < N) {
    half2 ra = HALF2(a[idx]), rb = HALF2(b[idx]), rc;
    rc.x = __hadd(ra.x, rb.x);
    rc.y = __hadd(ra.y, rb.y);
    HALF2(c[idx]) = rc;
  }
}

__global__ void scale_bf16(__nv_bfloat16* x, float s, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = __float2bfloat16(__bfloat162float(x[i]) * s);
}

__global__ void relu(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = fmaxf(0.0f, x[i]);
}

__global__ void gelu(const float* x, float* y, int n) {
  CUDA_KERNEL_LOOP(i, n) {
    float v = x[i], cube = 0.044715f * v * v * v;
    y[i] = 0.5f * v * (1.0f + tanhf(0.7978845608f * (v + cube)));
  }
}

__global__ void sigmoid(const float* x, float* y, int n) {
  CUDA_KERNEL_LOOP(i, n) {
    float v = fminf(fmaxf(x[i], -88.3762626647949f), 88.3762626647949f);
    y[i] = 1.0f / (1.0f + expf(-v));
  }
}

__global__ void swiglu(const half* gate, const half* up, half* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float g = __half2float(gate[i]);
  out[i] = __float2half(g / (1.0f + __expf(-g)) * __half2float(up[i]));
}

__global__ void complex_multiply(const float2* a, const float2* b, float2* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = make_float2(a[i].x * b[i].x - a[i].y * b[i].y, a[i].x * b[i].y + a[i].y * b[i].x);
}

__global__ void quantize_int8(const float* x, int8_t* q, float scale, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) q[i] = (int8_t)max(-127, min(127, __float2int_rn(x[i] / scale)));
}

__global__ void unpack_int4(const uint32_t* packed, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    uint32_t word = packed[i];
#pragma unroll
    for (int j = 0; j < 8; j++) out[8 * i + j] = (float)((int)((word >> (4 * j)) & 0xF) - 8);
  }
}

__global__ void mandelbrot(int* out, int width, int height, int limit) {
  int px = blockIdx.x * blockDim.x + threadIdx.x, py = blockIdx.y * blockDim.y + threadIdx.y;
  if (px >= width || py >= height) return;
  double cr = -2.0 + 3.0 * px / width, ci = -1.0 + 2.0 * py / height, zr = 0, zi = 0;
  int n = 0;
  while (zr * zr + zi * zi < 4.0 && n < limit) {
    double t = zr * zr - zi * zi + cr;
    zi = 2 * zr * zi + ci;
    zr = t;
    n++;
  }
  out[py * width + px] = n;
}

__global__ void gray(const uchar3* rgb, unsigned char* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    uchar3 p = rgb[i];
    out[i] = (unsigned char)((77 * p.x + 150 * p.y + 29 * p.z) >> 8);
  }
}

__global__ void adamw(float* p, const float* g, float* m, float* v, float lr, float beta1, float beta2,
                      float eps, float decay, int step, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  m[i] = beta1 * m[i] + (1 - beta1) * g[i];
  v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
  float mh = m[i] / (1 - powf(beta1, (float)step)), vh = v[i] / (1 - powf(beta2, (float)step));
  p[i] -= lr * (mh / (sqrtf(vh) + eps) + decay * p[i]);
}

__global__ void nan_to_num(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = isnan(x[i]) ? 0.0f : isinf(x[i]) ? (x[i] > 0 ? FLT_MAX : -FLT_MAX) : x[i];
}

__global__ void bit_tricks(const unsigned int* x, int* out, int n) {
  int i = __umul24(blockIdx.x, blockDim.x) + threadIdx.x;
  if (i < n)
    out[i] = __popc(x[i]) + 100 * __clz(x[i]) + 10000 * __ffs(x[i]) + (__brev(x[i]) & 1) +
             __mul24((int)(x[i] & 7), -3) + __byte_perm(x[i], 0, 0x4440) + (int)__umulhi(x[i], 1u << 4);
}
