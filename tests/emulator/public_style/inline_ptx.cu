// Inline PTX.
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

__device__ __forceinline__ unsigned lane_id() {
  unsigned ret;
  asm volatile("mov.u32 %0, %laneid;" : "=r"(ret));
  return ret;
}

__device__ __forceinline__ uint32_t cast_smem_ptr_to_uint(void const* const ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}

#define CP_ASYNC_CG(dst, src, Bytes) \
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2;\n" ::"r"(dst), "l"(src), "n"(Bytes))
#define CP_ASYNC_COMMIT_GROUP() asm volatile("cp.async.commit_group;\n" ::)
#define CP_ASYNC_WAIT_GROUP(N) asm volatile("cp.async.wait_group %0;\n" ::"n"(N))
#define LDMATRIX_X4(R0, R1, R2, R3, addr)                                               \
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"     \
               : "=r"(R0), "=r"(R1), "=r"(R2), "=r"(R3)                                 \
               : "r"(addr))
#define LDMATRIX_X2_T(R0, R1, addr)                                             \
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" \
               : "=r"(R0), "=r"(R1)                                             \
               : "r"(addr))

__global__ void special_registers(unsigned* out) {
  unsigned tid, warp, mask;
  asm("mov.u32 %0, %%tid.x;" : "=r"(tid));
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
  asm volatile("" ::: "memory");
  out[tid] = lane_id() + 100 * warp + 10000 * __popc(mask);
}

__global__ void bit_fields(const unsigned* in, unsigned* out) {
  unsigned x = in[threadIdx.x], field, wide, three, moved;
  int sign;
  asm("bfe.u32 %0, %1, %2, %3;" : "=r"(field) : "r"(x), "r"(4), "r"(8));
  asm("bfe.s32 %0, %1, 28, 4;" : "=r"(sign) : "r"((int)x));
  asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(wide) : "r"(x & 15), "r"(0u), "r"(8), "r"(4));
  asm("lop3.b32 %0, %1, %2, %3, 0x96;" : "=r"(three) : "r"(x), "r"(x << 3), "r"(x >> 5));
  asm("prmt.b32 %0, %1, %2, 0x0123;" : "=r"(moved) : "r"(x), "r"(0));
  out[threadIdx.x] = field + (unsigned)sign * 31 + wide + three * 7 + moved;
}

__global__ void arithmetic(const float* a, const float* b, float* out) {
  int i = threadIdx.x;
  float r, e, m;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a[i]), "f"(b[i]), "f"(1.5f));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a[i]));
  asm("{\n\t.reg .pred p;\n\tsetp.gt.f32 p, %1, %2;\n\tselp.f32 %0, %1, %2, p;\n\t}" : "=f"(m) : "f"(a[i]), "f"(b[i]));
  asm("add.f32 %0, %0, 0f3F800000;" : "+f"(m));
  out[i] = r + e + m;
}

__global__ void multiply_wide(const unsigned* a, const unsigned* b, unsigned long long* out, unsigned* carry) {
  int i = threadIdx.x;
  unsigned long long product;
  unsigned low, high;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a[i]), "r"(b[i]));
  asm("mov.b64 {%0, %1}, %2;" : "=r"(low), "=r"(high) : "l"(product));
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(carry[i]) : "r"(low), "r"(3u), "r"(high));
  out[i] = product;
}

__global__ void memory_instructions(const float4* in, float4* out, int* counter) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(in + threadIdx.x));
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(out + threadIdx.x), "f"(v.w), "f"(v.z), "f"(v.y), "f"(v.x) : "memory");
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(1) : "memory");
  int old;
  asm volatile("atom.global.max.s32 %0, [%1], %2;" : "=r"(old) : "l"(counter + 1), "r"((int)threadIdx.x));
}

__global__ void shared_instructions(const int* in, int* out) {
  __shared__ int buffer[32];
  unsigned at = cast_smem_ptr_to_uint(&buffer[threadIdx.x]);
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(at), "r"(in[threadIdx.x]));
  asm volatile("bar.warp.sync 0xffffffff;");
  unsigned base = cast_smem_ptr_to_uint(buffer);
  int v, w;
  asm volatile("ld.shared.s32 %0, [%1+4];" : "=r"(v) : "r"(base + 4 * ((threadIdx.x + 30) % 31)));
  asm volatile("shfl.sync.bfly.b32 %0, %1, 1, 0x1f, 0xffffffff;" : "=r"(w) : "r"(v));
  asm volatile("bar.sync 0;");
  out[threadIdx.x] = v * 100 + w;
}

__global__ void convert_pairs(const float2* in, unsigned* out, int* rounded) {
  float2 v = in[threadIdx.x];
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out[threadIdx.x]) : "f"(v.y), "f"(v.x));
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(rounded[threadIdx.x]) : "f"(v.x));
}

// A 16x8 tile with cp.async, ldmatrix and mma.sync.
__global__ void tensor_core_tile(const half* A, const half* B, float* C) {
  __shared__ alignas(128) half sA[16][16];
  __shared__ alignas(128) half sB[16][8];
  int lane = threadIdx.x;
  CP_ASYNC_CG(cast_smem_ptr_to_uint(&sA[lane / 2][lane % 2 * 8]), A + lane * 8, 16);
  if (lane < 16) CP_ASYNC_CG(cast_smem_ptr_to_uint(&sB[lane][0]), B + lane * 8, 16);
  CP_ASYNC_COMMIT_GROUP();
  CP_ASYNC_WAIT_GROUP(0);
  __syncwarp();
  uint32_t a[4], b[2];
  LDMATRIX_X4(a[0], a[1], a[2], a[3], cast_smem_ptr_to_uint(&sA[lane % 16][lane / 16 * 8]));
  LDMATRIX_X2_T(b[0], b[1], cast_smem_ptr_to_uint(&sB[lane % 16][0]));
  float c[4] = {0, 0, 0, 0};
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,  %1,  %2,  %3},  "
      "{%4,  %5,  %6,  %7},  "
      "{%8,  %9},  "
      "{%10, %11, %12, %13};\n"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  int row = lane / 4, col = lane % 4 * 2;
  C[row * 8 + col] = c[0], C[row * 8 + col + 1] = c[1];
  C[(row + 8) * 8 + col] = c[2], C[(row + 8) * 8 + col + 1] = c[3];
}

__global__ void mbarrier_wait_loop(const int* in, int* out) {
  __shared__ uint64_t bar;
  __shared__ int data[32];
  uint32_t b = cast_smem_ptr_to_uint(&bar);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(32));
  __syncwarp();
  data[threadIdx.x] = in[threadIdx.x];
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
  asm volatile(
      "{\n"
      ".reg .pred P1;\n"
      "LAB_WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], %1;\n"
      "@P1 bra DONE;\n"
      "bra LAB_WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(b), "r"(0));
  out[threadIdx.x] = data[31 - threadIdx.x];
}

__global__ void release_acquire(int* flag, int* data, int* out) {
  if (blockIdx.x == 0) {
    data[threadIdx.x] = 5 * threadIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
  } else {
    int seen = 0;
    if (threadIdx.x == 0)
      while (!seen) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    __syncthreads();
    out[threadIdx.x] = data[threadIdx.x];
  }
}
