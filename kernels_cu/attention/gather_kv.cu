// Copies the keys and values of each request from the blocks of a cache to blocks of BLOCK
// consecutive keys, decoded to 16 bits, for kernels that read large blocks of 16-bit elements.
//
//   block b * tiles + i of k_out and v_out: keys i * BLOCK .. (i + 1) * BLOCK - 1 of request b
//   int8, float8: code * scale;  int4 (KIVI): (code - zero) * scale
//
// Keys before the window of the request's first query, and keys from the request's length on, are
// zeros. Blocks that would be all zeros, and blocks of requests with fewer than min_queries
// queries, are not written, nor are their entries in `blocks`.
// Mapping: a thread block copies, for all heads, kRows keys of one request or the values of these
//   keys; a thread copies chunks of eight columns, kUnroll of them at a time.
// Macros: DTYPE float16|bfloat16, of the outputs; FORMAT E4M3|INT8|INT4 of the cache, absent if its
//   elements are DTYPE; GROUP keys of int4 that share a channel's scale, else 0; RECENT 0|1 the
//   newest keys are in ring buffers; HEAD_DIM, VALUE_DIM multiples of 8; BLOCK; THREADS.
// Minimum architecture: sm_80. Deterministic.
// Reference: cukit/reference/paged_attention.py.
#include "attention/parameters.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#ifdef FORMAT
#include "common/quant/codes.cuh"
#endif

namespace {

using T = cukit::element_t;

constexpr int kRows = 16;
constexpr int kColumns = 8;  // of a thread: 16 bytes of outputs
constexpr int kUnroll = 4;
static_assert(BLOCK % kRows == 0, "the keys of a thread block belong to one block of the outputs");

#ifdef FORMAT
using Stored = cukit::detail::Word<kColumns / cukit::kCodesPerByte>::type;
using cache_t = unsigned char;
constexpr int kElements = kColumns / cukit::kCodesPerByte;  // storage elements of Stored
#else
using Stored = uint4;
using cache_t = T;
constexpr int kElements = kColumns;
#endif
#if GROUP
using factor_t = __half;
#else
using factor_t = float;
#endif

// The arrays of the keys or of the values.
struct Side {
  const cache_t* cache;
  const factor_t* scales;  // null: 1
  const factor_t* zeros;   // zero points of int4
  const T* recent;
  T* out;
  const cukit::HeadStrides& strides;
  const cukit::HeadStrides& factors;
  const cukit::HeadStrides& recent_strides;
};

// The range of keys visible to a request's queries, and the number of its keys that are in the
// cache.
struct Request {
  int b, begin, end, cached;
};

#ifdef FORMAT
CUKIT_DEVICE void decode(float (&x)[kColumns], const Stored& stored) {
#if GROUP
  cukit::decode_group(x, stored & 0xffffu);
  cukit::decode_group(x + 4, stored >> 16);
#else
  cukit::decode_group(x, stored.x);
  cukit::decode_group(x + 4, stored.y);
#endif
}
#endif

// Eight columns of a key, and their place in the cache.
template <bool Keys>
struct Item {
  int row, head, column;
  int block, block_row;  // block -1: not in the cache

  template <int Columns>
  CUKIT_DEVICE static Item of(int index, const Request& request, int first,
                              const int* table, const cukit::GatherParameters& params) {
    constexpr int kItems = Columns / kColumns;
    Item item;
    const int place = index / kItems;
    item.column = index % kItems * kColumns;
    item.row = place / params.heads;
    item.head = place % params.heads;
    item.block = -1;
    item.block_row = 0;
    const int key = first + item.row;
    if (item.row < kRows && key >= request.begin && key < min(request.end, request.cached)) {
      const int entry = key / params.block_size;
      item.block = table[entry];
      item.block_row = key - entry * params.block_size;
    }
    return item;
  }

  CUKIT_DEVICE Stored load(const Side& side) const {
    if (block < 0) return {};
    const long long at = cukit::offset_of(side.strides, block, block_row, head);
    return *reinterpret_cast<const Stored*>(side.cache + at + column / kColumns * kElements);
  }

  CUKIT_DEVICE cukit::Vec<T, kColumns> values(const Side& side, const Stored& stored) const {
#ifdef FORMAT
    float x[kColumns];
    decode(x, stored);
    multiply(x, side);
    cukit::Vec<T, kColumns> values;
    cukit::from_floats(values, x);
    return values;
#else
    return reinterpret_cast<const cukit::Vec<T, kColumns>&>(stored);
#endif
  }

 private:
  // Applies scales and zero points.
  CUKIT_DEVICE void multiply(float (&x)[kColumns], const Side& side) const {
#if GROUP
    if constexpr (Keys) {
      const long long at =
          cukit::offset_of(side.factors, block, block_row / GROUP, head) + column;
      cukit::Vec<factor_t, kColumns> scales, zeros;
      cukit::load(scales, side.scales + at);
      cukit::load(zeros, side.zeros + at);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        x[i] = (x[i] - cukit::to_float(zeros[i])) * cukit::to_float(scales[i]);
      }
      return;
    }
    const long long at = cukit::offset_of(side.factors, block, block_row, head);
    const float zero = cukit::to_float(side.zeros[at]);
    const float scale = cukit::to_float(side.scales[at]);
#else
    const float zero = 0.0f;
    const float scale =
        side.scales == nullptr
            ? 1.0f
            : side.scales[cukit::offset_of(side.factors, block, block_row, head)];
#endif
#pragma unroll
    for (int i = 0; i < kColumns; ++i) x[i] = (x[i] - zero) * scale;
  }
};

// Copies keys first .. first + kRows - 1.
template <int Columns, bool Keys>
CUKIT_DEVICE void copy(const Side& side, const Request& request, int first, const int* table,
                       const int* rings, const cukit::GatherParameters& params) {
  const int count = kRows * params.heads * (Columns / kColumns);
  T* const out =
      side.out + (1LL * request.b * params.tiles * BLOCK + first) * params.heads * Columns;
#pragma unroll 1
  for (int index = threadIdx.x; index < count; index += kUnroll * THREADS) {
    Item<Keys> items[kUnroll];
    Stored stored[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      items[u] =
          Item<Keys>::template of<Columns>(index + u * THREADS, request, first, table, params);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) stored[u] = items[u].load(side);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Item<Keys>& item = items[u];
      if (item.row >= kRows) continue;
      cukit::Vec<T, kColumns> values{};
      const int key = first + item.row;
      if (item.block >= 0) {
        values = item.values(side, stored[u]);
      } else if (RECENT && key >= request.cached && key >= request.begin && key < request.end) {
        const long long at = cukit::offset_of(side.recent_strides, rings[request.b],
                                              key % params.recent_rows, item.head);
        cukit::load(values, side.recent + at + item.column);
      }
      cukit::store(out + 1LL * (index + u * THREADS) * kColumns, values);
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) gather_kv(
    const cache_t* __restrict__ k_cache,    // [num_blocks, block_size, heads, HEAD_DIM], or codes
    const cache_t* __restrict__ v_cache,    // the same, [..., VALUE_DIM]
    const factor_t* __restrict__ k_scales,  // as in paged_attention.cu; null for 1
    const factor_t* __restrict__ v_scales,
    const factor_t* __restrict__ k_zeros,   // int4
    const factor_t* __restrict__ v_zeros,
    const int* __restrict__ block_table,    // [batch, max_blocks]
    const int* __restrict__ seq_lens,       // [batch]
    const int* __restrict__ cu_seqlens_q,   // [batch + 1], or null: seq_q queries per request
    const T* __restrict__ recent_k,         // RECENT: [num_rings, recent_rows, heads, HEAD_DIM]
    const T* __restrict__ recent_v,         // RECENT: the same, [..., VALUE_DIM]
    const int* __restrict__ rings,          // RECENT: [batch]
    const int* __restrict__ packed_lens,    // RECENT: [batch], keys in the cache
    T* __restrict__ k_out,                  // [batch * tiles, BLOCK, heads, HEAD_DIM]
    T* __restrict__ v_out,                  // the same, [..., VALUE_DIM]
    int* __restrict__ blocks,               // [batch, tiles]: the block table of the outputs
    const __grid_constant__ cukit::GatherParameters params) {
  constexpr int kParts = BLOCK / kRows;
  int index = blockIdx.x;
  const bool of_values = index % 2;
  index /= 2;
  const int tile = index / kParts % params.tiles;
  const int b = index / kParts / params.tiles;
  const int first = tile * BLOCK + index % kParts * kRows;

  Request request;
  request.b = b;
  request.end = min(seq_lens[b], params.max_keys);
  request.cached = request.end;
  if constexpr (RECENT) {
    request.cached = max(0, min(packed_lens[b], params.max_keys - params.recent_rows));
    request.end = min(request.end, request.cached + params.recent_rows);
  }
  const int queries =
      cu_seqlens_q == nullptr ? params.seq_q : cu_seqlens_q[b + 1] - cu_seqlens_q[b];
  if (queries < params.min_queries) return;
  request.begin = max(0, request.end - queries - params.window_left);
  if (tile * BLOCK >= request.end || (tile + 1) * BLOCK <= request.begin) return;

  const int* const table = block_table + 1LL * b * params.table_row;
  if (of_values) {
    const Side side{v_cache, v_scales, v_zeros, recent_v, v_out,
                    params.v, params.v_factors, params.recent_v};
    copy<VALUE_DIM, false>(side, request, first, table, rings, params);
  } else {
    if (threadIdx.x == 0 && first % BLOCK == 0) {
      blocks[b * params.tiles + tile] = b * params.tiles + tile;
    }
    const Side side{k_cache, k_scales, k_zeros, recent_k, k_out,
                    params.k, params.k_factors, params.recent_k};
    copy<HEAD_DIM, true>(side, request, first, table, rings, params);
  }
}
