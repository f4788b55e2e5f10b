// Replaces CUDA's `nvcuda::wmma`: fragments of a warp's matrix product.
//
// The mapping of matrix elements to fragments is unspecified, as on the GPU; here element e of lane
// l, with E elements per fragment, is element l * E + e in row-major order.
#pragma once

#include "common/emulator/language.h"

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };
namespace precision {
struct tf32 {};
}  // namespace precision

namespace detail {

template <typename T>
struct Storage { using type = T; };
template <>
struct Storage<precision::tf32> { using type = float; };

template <typename Use, int M, int N, int K>
struct Shape;
template <int M, int N, int K>
struct Shape<matrix_a, M, N, K> { static constexpr int kRows = M, kColumns = K; };
template <int M, int N, int K>
struct Shape<matrix_b, M, N, K> { static constexpr int kRows = K, kColumns = N; };
template <int M, int N, int K>
struct Shape<accumulator, M, N, K> { static constexpr int kRows = M, kColumns = N; };

}  // namespace detail

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
  using element_type = T;
  using storage_element_type = typename detail::Storage<T>::type;
  using shape = detail::Shape<Use, M, N, K>;
  static constexpr int num_elements = shape::kRows * shape::kColumns / 32;
  static constexpr int num_storage_elements = num_elements;
  storage_element_type x[num_elements];
};

template <typename Fragment, typename T>
inline void fill_fragment(Fragment& fragment, const T& value) {
  for (auto& element : fragment.x) element = static_cast<typename Fragment::storage_element_type>(value);
}

namespace detail {

// Calls visit(element, address in memory) for each of the lane's elements.
template <typename Fragment, typename Visit>
inline void for_elements(Fragment& fragment, unsigned stride, bool by_rows, const Visit& visit) {
  constexpr int kColumns = Fragment::shape::kColumns;
  const int first = static_cast<int>(CUKIT_OF_SELF(lane)) * Fragment::num_elements;
  for (int e = 0; e < Fragment::num_elements; ++e) {
    const unsigned row = (first + e) / kColumns, column = (first + e) % kColumns;
    visit(fragment.x[e], by_rows ? row * stride + column : column * stride + row);
  }
}
template <typename T>
inline void check_places(const T* at, unsigned stride) {
  // The GPU requires 32-byte alignment, which NumPy arrays do not always have.
  ::cukit::emulator::check_alignment(at, 16, "a wmma tile");
  if (stride * sizeof(T) % 16 != 0) {
    ::cukit::emulator::trap("wmma: the leading dimension is not a multiple of 16 bytes");
  }
}

}  // namespace detail

template <typename Use, int M, int N, int K, typename T, typename Layout, typename P>
inline void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& to, const P* from, unsigned stride) {
  detail::check_places(from, stride);
  detail::for_elements(to, stride, ::std::is_same_v<Layout, row_major>,
                       [&](auto& element, unsigned place) { element = from[place]; });
  __syncwarp();
}
template <int M, int N, int K, typename T, typename P>
inline void load_matrix_sync(fragment<accumulator, M, N, K, T, void>& to, const P* from,
                             unsigned stride, layout_t layout) {
  detail::check_places(from, stride);
  detail::for_elements(to, stride, layout == mem_row_major,
                       [&](auto& element, unsigned place) { element = from[place]; });
  __syncwarp();
}
template <int M, int N, int K, typename T, typename P>
inline void store_matrix_sync(P* to, const fragment<accumulator, M, N, K, T, void>& from,
                              unsigned stride, layout_t layout) {
  detail::check_places(to, stride);
  detail::for_elements(from, stride, layout == mem_row_major,
                       [&](auto& element, unsigned place) { to[place] = element; });
  __syncwarp();
}

// Every lane assembles a and b from the fragments of all lanes and computes its own elements of d.
template <int M, int N, int K, typename A, typename LA, typename B, typename LB, typename C, typename D>
inline void mma_sync(fragment<accumulator, M, N, K, D, void>& d,
                     const fragment<matrix_a, M, N, K, A, LA>& a,
                     const fragment<matrix_b, M, N, K, B, LB>& b,
                     const fragment<accumulator, M, N, K, C, void>& c, bool = false) {
  using Sum = ::std::conditional_t<::std::is_integral_v<D>, int, float>;
  constexpr int kD = M * N / 32;
  typename detail::Storage<A>::type left[M * K];
  typename detail::Storage<B>::type right[K * N];
  ::cukit::emulator::exchange_in_warp(a.x, left, sizeof a.x, "wmma::mma_sync");
  ::cukit::emulator::exchange_in_warp(b.x, right, sizeof b.x, "wmma::mma_sync");
  const int first = static_cast<int>(CUKIT_OF_SELF(lane)) * kD;
  for (int e = 0; e < kD; ++e) {
    const int row = (first + e) / N, column = (first + e) % N;
    Sum sum = static_cast<Sum>(c.x[e]);
    for (int k = 0; k < K; ++k) {
      sum += static_cast<Sum>(left[row * K + k]) * static_cast<Sum>(right[k * N + column]);
    }
    d.x[e] = static_cast<D>(sum);
  }
}

inline float __float_to_tf32(float x) {
  return __uint_as_float(::cukit::emulator::ptx::to_tf32(x));
}

}  // namespace nvcuda::wmma
