// Products of matrices, from the plain triple loop to tensor cores.
#include <cublas_v2.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>
#include <stdint.h>

using namespace nvcuda;

#define BLOCK_SIZE 16

typedef struct {
  int width, height, stride;
  float* elements;
} Matrix;

__global__ void matmul_naive(int M, int N, int K, float alpha, const float* A, const float* B, float beta, float* C) {
  const uint x = blockIdx.x * blockDim.x + threadIdx.x;
  const uint y = blockIdx.y * blockDim.y + threadIdx.y;
  if (x < M && y < N) {
    float tmp = 0.0;
    for (int i = 0; i < K; ++i) tmp += A[x * K + i] * B[i * N + y];
    C[x * N + y] = alpha * tmp + beta * C[x * N + y];
  }
}

__device__ float GetElement(const Matrix A, int row, int col) { return A.elements[row * A.stride + col]; }
__device__ Matrix GetSubMatrix(Matrix A, int row, int col) {
  Matrix Asub;
  Asub.width = Asub.height = BLOCK_SIZE;
  Asub.stride = A.stride;
  Asub.elements = &A.elements[A.stride * BLOCK_SIZE * row + BLOCK_SIZE * col];
  return Asub;
}

__global__ void matmul_tiled(float* C, const float* A, const float* B, int wA, int wB) {
  int bx = blockIdx.x, by = blockIdx.y, tx = threadIdx.x, ty = threadIdx.y;
  int aBegin = wA * BLOCK_SIZE * by, aEnd = aBegin + wA - 1, bBegin = BLOCK_SIZE * bx;
  float Csub = 0;
  for (int a = aBegin, b = bBegin; a <= aEnd; a += BLOCK_SIZE, b += BLOCK_SIZE * wB) {
    __shared__ float As[BLOCK_SIZE][BLOCK_SIZE];
    __shared__ float Bs[BLOCK_SIZE][BLOCK_SIZE];
    As[ty][tx] = A[a + wA * ty + tx];
    Bs[ty][tx] = B[b + wB * ty + tx];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BLOCK_SIZE; ++k) Csub += As[ty][k] * Bs[k][tx];
    __syncthreads();
  }
  C[wB * BLOCK_SIZE * by + BLOCK_SIZE * bx + wB * ty + tx] = Csub;
}

// The matrices are structs that are passed by value.
__global__ void matmul_struct(Matrix A, Matrix B, Matrix C) {
  Matrix Csub = GetSubMatrix(C, blockIdx.y, blockIdx.x);
  float value = 0;
  int row = threadIdx.y, col = threadIdx.x;
  for (int m = 0; m < A.width / BLOCK_SIZE; ++m) {
    Matrix Asub = GetSubMatrix(A, blockIdx.y, m), Bsub = GetSubMatrix(B, m, blockIdx.x);
    __shared__ float As[BLOCK_SIZE][BLOCK_SIZE], Bs[BLOCK_SIZE][BLOCK_SIZE];
    As[row][col] = GetElement(Asub, row, col);
    Bs[row][col] = GetElement(Bsub, row, col);
    __syncthreads();
    for (int e = 0; e < BLOCK_SIZE; ++e) value += As[row][e] * Bs[e][col];
    __syncthreads();
  }
  Csub.elements[row * Csub.stride + col] = value;
}

template <const int BM, const int BN, const int BK, const int TM>
__global__ void __launch_bounds__(BM* BN / TM) matmul_blocktile(int M, int N, int K, const float* A, const float* B, float* C) {
  const uint cRow = blockIdx.y, cCol = blockIdx.x;
  const int threadCol = threadIdx.x % BN, threadRow = threadIdx.x / BN;
  __shared__ float As[BM * BK];
  __shared__ float Bs[BK * BN];
  A += cRow * BM * K;
  B += cCol * BN;
  C += cRow * BM * N + cCol * BN;
  const uint innerColA = threadIdx.x % BK, innerRowA = threadIdx.x / BK;
  const uint innerColB = threadIdx.x % BN, innerRowB = threadIdx.x / BN;
  float threadResults[TM] = {0.0};
  for (uint bkIdx = 0; bkIdx < K; bkIdx += BK) {
    As[innerRowA * BK + innerColA] = A[innerRowA * K + innerColA];
    Bs[innerRowB * BN + innerColB] = B[innerRowB * N + innerColB];
    __syncthreads();
    A += BK;
    B += BK * N;
    for (uint dotIdx = 0; dotIdx < BK; ++dotIdx) {
      float tmpB = Bs[dotIdx * BN + threadCol];
      for (uint resIdx = 0; resIdx < TM; ++resIdx) threadResults[resIdx] += As[(threadRow * TM + resIdx) * BK + dotIdx] * tmpB;
    }
    __syncthreads();
  }
  for (uint resIdx = 0; resIdx < TM; ++resIdx) C[(threadRow * TM + resIdx) * N + threadCol] = threadResults[resIdx];
}

__global__ void matmul_vectorized(const float* A, const float* B, float* C, int M, int N, int K) {
  __shared__ float As[8][32], Bs[8][32];
  int tid = threadIdx.x, r = tid / 2, q = tid % 2;
  float acc[4][4] = {};
  for (int k0 = 0; k0 < K; k0 += 8) {
    float4 a = reinterpret_cast<const float4*>(&A[(blockIdx.y * 32 + r) * K + k0 + 4 * q])[0];
    As[4 * q + 0][r] = a.x, As[4 * q + 1][r] = a.y, As[4 * q + 2][r] = a.z, As[4 * q + 3][r] = a.w;
    *reinterpret_cast<float4*>(&Bs[tid / 8][tid % 8 * 4]) = *reinterpret_cast<const float4*>(&B[(k0 + tid / 8) * N + blockIdx.x * 32 + tid % 8 * 4]);
    __syncthreads();
    for (int k = 0; k < 8; ++k)
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) acc[i][j] += As[k][tid / 8 * 4 + i] * Bs[k][tid % 8 * 4 + j];
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i)
    reinterpret_cast<float4*>(&C[(blockIdx.y * 32 + tid / 8 * 4 + i) * N + blockIdx.x * 32 + tid % 8 * 4])[0] =
        make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
}

__global__ void gemv(const float* a, const float* x, float* y, int M, int K) {
  int tx = threadIdx.x, ty = threadIdx.y, m = blockIdx.x * blockDim.y + ty;
  if (m < M) {
    float sum = 0.0f;
    for (int k = tx; k < K; k += 32) sum += a[m * K + k] * x[k];
    for (int s = 16; s >= 1; s >>= 1) sum += __shfl_xor_sync(0xffffffff, sum, s);
    if (tx == 0) y[m] = sum;
  }
}

__global__ void wmma_half(const half* a, const half* b, float* c, int M, int N, int K) {
  int warpM = (blockIdx.x * blockDim.x + threadIdx.x) / warpSize, warpN = blockIdx.y * blockDim.y + threadIdx.y;
  wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a_frag;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> b_frag;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc_frag;
  wmma::fill_fragment(acc_frag, 0.0f);
  for (int i = 0; i < K; i += 16) {
    if (warpM * 16 < M && warpN * 16 < N) {
      wmma::load_matrix_sync(a_frag, a + warpM * 16 * K + i, K);
      wmma::load_matrix_sync(b_frag, b + warpN * 16 * K + i, K);
      wmma::mma_sync(acc_frag, a_frag, b_frag, acc_frag);
    }
  }
  for (int i = 0; i < acc_frag.num_elements; i++) acc_frag.x[i] = 2.0f * acc_frag.x[i];
  wmma::store_matrix_sync(c + warpM * 16 * N + warpN * 16, acc_frag, N, wmma::mem_row_major);
}

__global__ void wmma_int8(const signed char* a, const signed char* b, int* c, int K) {
  __shared__ __align__(128) signed char tile[2][256];
  wmma::fragment<wmma::matrix_a, 16, 16, 16, signed char, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, signed char, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, int> acc;
  wmma::fill_fragment(acc, 0);
  for (int k = 0; k < K; k += 16) {
    for (int i = threadIdx.x; i < 256; i += 32) {
      tile[0][i] = a[i / 16 * K + k + i % 16];
      tile[1][i] = b[(k + i / 16) * 16 + i % 16];
    }
    __syncwarp();
    wmma::load_matrix_sync(fa, tile[0], 16);
    wmma::load_matrix_sync(fb, tile[1], 16);
    wmma::mma_sync(acc, fa, fb, acc);
    __syncwarp();
  }
  wmma::store_matrix_sync(c, acc, 16, wmma::mem_row_major);
}

__global__ void dot_int8(const int8_t* a, const int8_t* b, int* c, int n, int k4) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n * n) return;
  const int* x = reinterpret_cast<const int*>(a) + i / n * k4;
  const int* y = reinterpret_cast<const int*>(b) + i % n * k4;
  int acc = 0;
  for (int k = 0; k < k4; ++k) acc = __dp4a(x[k], y[k], acc);
  c[i] = acc;
}

void run_cublas(cublasHandle_t handle, int M, int N, int K, float* A, float* B, float* C) {
  float alpha = 1.0f, beta = 0.0f;
  cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, N, M, K, &alpha, B, N, A, K, &beta, C, N);
  dim3 gridDim((M + 31) / 32, (N + 31) / 32), blockDim(32, 32);
  matmul_naive<<<gridDim, blockDim>>>(M, N, K, alpha, A, B, beta, C);
}
