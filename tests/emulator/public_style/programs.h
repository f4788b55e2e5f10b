// Vector operators in a separate header, as in CUDA's samples.
#pragma once

#ifdef __CUDACC__
#define HD __host__ __device__ __forceinline__
#else
#define HD inline
#endif

HD float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
HD float4 operator*(float s, float4 a) { return make_float4(s * a.x, s * a.y, s * a.z, s * a.w); }

struct Affine {
  float scale, shift;
  HD float operator()(float x) const { return scale * x + shift; }
};
