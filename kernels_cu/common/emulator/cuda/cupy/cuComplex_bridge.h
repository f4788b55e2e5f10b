// Replaces CuPy's header: the functions of cuComplex.h for `complex<T>`, to which CuPy's
// `translate_cucomplex=True` translates the types of cuComplex.h.
#pragma once

#include <cupy/complex.cuh>

#define CU_COMPLEX_H_  // CUDA's own header would define the same functions

#define CUKIT_CUCOMPLEX(suffix, T)                                                             \
  inline T cuCreal##suffix(const complex<T>& x) { return x.real(); }                           \
  inline T cuCimag##suffix(const complex<T>& x) { return x.imag(); }                           \
  inline T cuCabs##suffix(const complex<T>& x) { return abs(x); }                              \
  inline complex<T> cuConj##suffix(const complex<T>& x) { return conj(x); }                    \
  inline complex<T> cuCadd##suffix(const complex<T>& x, const complex<T>& y) { return x + y; } \
  inline complex<T> cuCsub##suffix(const complex<T>& x, const complex<T>& y) { return x - y; } \
  inline complex<T> cuCmul##suffix(const complex<T>& x, const complex<T>& y) { return x * y; } \
  inline complex<T> cuCdiv##suffix(const complex<T>& x, const complex<T>& y) { return x / y; } \
  inline complex<T> cuCfma##suffix(const complex<T>& x, const complex<T>& y, const complex<T>& z) { \
    return x * y + z;                                                                          \
  }
CUKIT_CUCOMPLEX(, double)
CUKIT_CUCOMPLEX(f, float)
#undef CUKIT_CUCOMPLEX
inline complex<float> cuCadd(const complex<float>& x, const complex<float>& y) { return x + y; }
inline complex<double> make_cuDoubleComplex(double x, double y) { return {x, y}; }
inline complex<float> make_cuFloatComplex(float x, float y) { return {x, y}; }
inline complex<float> make_cuComplex(float x, float y) { return {x, y}; }
inline complex<float> cuComplexDoubleToFloat(const complex<double>& x) {
  return {static_cast<float>(x.real()), static_cast<float>(x.imag())};
}
inline complex<double> cuComplexFloatToDouble(const complex<float>& x) { return {x.real(), x.imag()}; }
