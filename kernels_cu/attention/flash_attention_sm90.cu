// Exact attention, forward, on Hopper's own units: out = softmax(scale * Q K^T + mask) V and its
// row-wise log-sum-exp, without the score matrix ever leaving the chip.
//
// Papers: Dao, "FlashAttention-2", arXiv:2307.08691; Shah et al., "FlashAttention-3",
//   arXiv:2407.08608 (warpgroups in turns, the next scores multiplied during this tile's softmax).
// Mapping: a block walks over tiles of 64 * CONSUMERS queries of a head. A thread of its first
//   warpgroup asks the copy engine for Q, K and V; each of the others owns 64 queries, with their
//   outputs, maxima and sums in registers, and takes the keys in tiles of TILE_N, last tile first.
//   A warpgroup has the scores of the next tile and the output of this one multiplied in one
//   go, and renews maxima and exponentials while the output's product runs; warpgroups issue their
//   products in turns, so that one's exponentials run beside the others' products.
// Order of work: head after head. Blocks take every gridDim-th tile; causal ones take pairs of tiles
//   of a head, the first with the last and so on: as many keys in each pair.
// Causal masks are aligned bottom right: key j is visible to query i iff j <= seq_kv - seq_q + i.
//   A query that sees no key gets out = 0 and lse = -infinity.
// Shared memory: (QUERY_STAGES * 64 * CONSUMERS + 2 * STAGES * TILE_N) * HEAD_DIM * 2 bytes, dynamic:
//   Q stages | K stages | V stages, each in parts of 64 columns, rows of 128 swizzled bytes. Static:
//   two barriers a stage.
// Tensor maps: Q, K, V as [batch, seq, heads, head_dim] with boxes [1, tile, 1, 64], swizzled by 128
//   bytes; rows and columns beyond the tensor read as zero.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|128|256 width of the tiles; PADDED 0|1 head_dim is
//   smaller than HEAD_DIM; CONSUMERS 2|3|4; TILE_N multiple of 16; STAGES 2..; QUERY_STAGES 1..;
//   THREADS = 128 * (CONSUMERS + 1); BLOCKS_PER_SM; CAUSAL 0|1.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/online_softmax.cuh"
#include "attention/query_tiles.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/pack.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/quad.cuh"
#include "common/ring.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"

namespace {

using T = cukit::element_t;

constexpr int kGroupThreads = 128;
constexpr int kGroupRows = 64;
constexpr int kTileM = CONSUMERS * kGroupRows;
constexpr int kParts = HEAD_DIM / 64;
constexpr int kRowBytes = 128;  // of a part
constexpr int kQueryPart = kTileM * kRowBytes;
constexpr int kKeyPart = TILE_N * kRowBytes;
constexpr int kQueryBytes = kParts * kQueryPart;
constexpr int kKeyBytes = kParts * kKeyPart;
constexpr int kConsumerWarps = CONSUMERS * kGroupThreads / cukit::kWarpSize;
// Registers of a thread: at the start alike for all, then as many as the producer leaves.
constexpr int kStartRegisters = 65536 / (THREADS * BLOCKS_PER_SM) / 8 * 8;
constexpr int kProducerRegisters = HEAD_DIM == 256 ? 24 : 32;
constexpr int kConsumerRegisters =
    (kStartRegisters * (CONSUMERS + 1) - kProducerRegisters) / CONSUMERS / 8 * 8;
constexpr float kLn2 = 0.6931471805599453f;

constexpr int kTurn = 1;  // first of the named barriers for the warpgroups' turns

static_assert(THREADS == (CONSUMERS + 1) * kGroupThreads, "a producer and the consumers");
static_assert(STAGES >= 2, "a warpgroup waits for the next values before it releases the last");
static_assert(kQueryPart % 1024 == 0 && kKeyPart % 1024 == 0, "whole periods of the swizzle");

struct Rings {
  cukit::Ring<QUERY_STAGES> q;
  cukit::Ring<STAGES> k;
  cukit::Ring<STAGES> v;
};

CUKIT_DEVICE bool next_tile(cukit::QueryTile& work, const cukit::QueryProblem& problem, int& turn) {
  return cukit::find_work<kTileM, TILE_N, CAUSAL>(work, problem, turn);
}

namespace producer {

template <int Stages>
CUKIT_DEVICE void load(cukit::Ring<Stages>& ring, cukit::Cursor<Stages>& at, unsigned char* tiles,
                       int part_bytes, const cukit::TensorMap* map, int row, int head, int b) {
  cukit::Mbarrier* full = &ring.full[at.stage];
  cukit::mbarrier_wait(&ring.empty[at.stage], at.parity ^ 1);
  cukit::mbarrier_arrive_expect(full, kParts * part_bytes);
  unsigned char* tile = tiles + at.stage * kParts * part_bytes;
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
    cukit::tma_load_4d(tile + part * part_bytes, map, full, part * 64, head, row, b);
  }
  at.advance();
}

CUKIT_DEVICE void run(Rings& rings, unsigned char* q_tiles, unsigned char* k_tiles,
                      unsigned char* v_tiles, const cukit::TensorMap* q, const cukit::TensorMap* k,
                      const cukit::TensorMap* v, const cukit::QueryProblem& problem) {
  cukit::Cursor<QUERY_STAGES> q_at;
  cukit::Cursor<STAGES> k_at;
  cukit::Cursor<STAGES> v_at;
  cukit::QueryTile work{};
  for (int turn = 0; next_tile(work, problem, turn);) {
    const int b = work.batch_head / problem.heads_q;
    const int q_head = work.batch_head % problem.heads_q;
    const int head = q_head / problem.group;
    const auto load_keys = [&](int tile) {
      load(rings.k, k_at, k_tiles, kKeyPart, k, tile * TILE_N, head, b);
    };
    const auto load_values = [&](int tile) {
      load(rings.v, v_at, v_tiles, kKeyPart, v, tile * TILE_N, head, b);
    };
    const int last = work.kv_tiles - 1;
    load_keys(last);
    load(rings.q, q_at, q_tiles, kQueryPart, q, work.first_row, q_head, b);
#pragma unroll 1
    for (int tile = last; tile > 0; --tile) {
      load_keys(tile - 1);
      load_values(tile);
    }
    load_values(0);
  }
}

}  // namespace producer

namespace consumer {

using Scores = float[TILE_N / 2];
using Outputs = float[HEAD_DIM / 2];
using Probabilities = unsigned[TILE_N / 16][4];

// Row-major operands, contiguous along the inner extent: Q and K.
CUKIT_DEVICE unsigned long long inner_descriptor(const unsigned char* tile) {
  return cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, 16, 8 * kRowBytes);
}

// V: contiguous along the columns of the product.
CUKIT_DEVICE unsigned long long outer_descriptor(const unsigned char* tile) {
  return cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, kKeyPart, 8 * kRowBytes);
}

// scores = Q K^T, started
CUKIT_DEVICE void multiply_keys(Scores& scores, unsigned long long q, unsigned long long k) {
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; ++step) {
    const int within = step % 4 * 32;
    cukit::wgmma<T, TILE_N>(scores, q + (step / 4 * kQueryPart + within) / 16,
                            k + (step / 4 * kKeyPart + within) / 16, step > 0);
  }
  cukit::wgmma_commit();
}

// out += P V, started
CUKIT_DEVICE void multiply_values(Outputs& out, const Probabilities& p, unsigned long long v) {
#pragma unroll
  for (int step = 0; step < TILE_N / 16; ++step) {
    cukit::wgmma<T, HEAD_DIM, true>(out, p[step], v + step * 16 * kRowBytes / 16, true);
  }
  cukit::wgmma_commit();
}

CUKIT_DEVICE void take_turn(int group) { cukit::named_sync(kTurn + group, 2 * kGroupThreads); }

CUKIT_DEVICE void pass_turn(int group) {
  const int next = group + 1 == CONSUMERS ? 0 : group + 1;
  cukit::named_arrive(kTurn + next, 2 * kGroupThreads);
}

// What the results of a tile of queries are written with.
struct Results {
  T* out;
  float* lse;
  long long out_batch, out_row, out_head;
  int heads_q, seq_q, head_dim;
  float scale_log2;
};

// Divides by the sums and writes the warp's sixteen rows: a quad 64 bytes of two rows at a time.
CUKIT_DEVICE void finish(const Outputs& sums, const cukit::SoftmaxRows& rows, const Results& to,
                         int batch_head, int first_row) {
  const int quad_lane = threadIdx.x % 4;
  T* const head = to.out + batch_head / to.heads_q * to.out_batch +
                  batch_head % to.heads_q * to.out_head;
  float* const lse = to.lse + static_cast<long long>(batch_head) * to.seq_q;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 1);
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 2);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int row = first_row + 8 * half;
    const bool exists = row < to.seq_q;
    if (quad_lane == 0 && exists) {
      lse[row] =
          sum == 0.0f ? -cukit::infinity() : (rows.max[half] * to.scale_log2 + log2f(sum)) * kLn2;
    }
    T* const out = head + row * to.out_row;
#pragma unroll
    for (int four = 0; four < HEAD_DIM / 32; ++four) {
      unsigned chunk[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* pair = &sums[4 * (4 * four + n) + 2 * half];
        chunk[n] = cukit::pack<T>(pair[0] * inverse, pair[1] * inverse);
      }
      cukit::transpose_quad(chunk);
      const int column = 32 * four + 8 * quad_lane;
      if (exists && (!PADDED || column < to.head_dim)) {
        *reinterpret_cast<uint4*>(out + column) = make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
      }
    }
  }
}

CUKIT_DEVICE void run(Rings& rings, const unsigned char* q_tiles, const unsigned char* k_tiles,
                      const unsigned char* v_tiles, const Results& results,
                      const cukit::QueryProblem& problem) {
  const int group = cukit::warp_uniform(threadIdx.x / kGroupThreads) - 1;
  const int lane_row = threadIdx.x % kGroupThreads / cukit::kWarpSize * 16 +
                       threadIdx.x % cukit::kWarpSize / 4 + group * kGroupRows;
  const float scale_log2 = results.scale_log2;
  const unsigned long long q_first = inner_descriptor(q_tiles + group * kGroupRows * kRowBytes);
  const unsigned long long k_first = inner_descriptor(k_tiles);
  const unsigned long long v_first = outer_descriptor(v_tiles);
  cukit::Cursor<QUERY_STAGES> q_at;
  cukit::Cursor<STAGES> k_at;
  cukit::Cursor<STAGES> v_at;
  if (group == CONSUMERS - 1) pass_turn(group);

  Outputs sums;
  Scores scores;
  Probabilities p;
  cukit::SoftmaxRows rows;
  cukit::QueryTile work{};
  unsigned long long q;

  const auto values = [&] { return v_first + v_at.stage * (kKeyBytes / 16); };
  const auto start_scores = [&] {
    cukit::mbarrier_wait(&rings.k.full[k_at.stage], k_at.parity);
    take_turn(group);
    cukit::wgmma_fence();
    multiply_keys(scores, q, k_first + k_at.stage * (kKeyBytes / 16));
  };
  // The scores of a tile have come.
  const auto receive_scores = [&](int tile, int unmasked_tiles) {
    cukit::release(rings.k, k_at);
    k_at.advance();
    if (tile == 0) {
      cukit::release(rings.q, q_at);
      q_at.advance();
    }
    if (tile >= unmasked_tiles) {
      const int first = tile * TILE_N;
      cukit::mask_scores<CAUSAL>(scores, problem.seq_kv - first, work.past - first + lane_row);
    }
  };

  for (int turn = 0; next_tile(work, problem, turn); turn = cukit::warp_uniform(turn)) {
    float shrink[2];
    const int unmasked_tiles = cukit::warp_uniform(work.unmasked_tiles);
    int tile = cukit::warp_uniform(work.kv_tiles) - 1;
    cukit::mbarrier_wait(&rings.q.full[q_at.stage], q_at.parity);
    q = q_first + q_at.stage * (kQueryBytes / 16);
    start_scores();
    pass_turn(group);
    cukit::wgmma_wait<0>(scores);
    receive_scores(tile, unmasked_tiles);
    rows.reset();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = 0.0f;
    cukit::renew_maxima(rows, shrink, scores, scale_log2);
    cukit::exponentiate(rows, scores, scale_log2);
    cukit::mbarrier_wait(&rings.v.full[v_at.stage], v_at.parity);
    cukit::pack_probabilities<T>(p, scores);

    while (--tile >= 0) {
      start_scores();
      multiply_values(sums, p, values());
      pass_turn(group);
      cukit::wgmma_wait<1>(scores);
      receive_scores(tile, unmasked_tiles);
      const bool outgrown = cukit::renew_maxima(rows, shrink, scores, scale_log2);
      cukit::exponentiate(rows, scores, scale_log2);
      const cukit::Cursor<STAGES> v_done = v_at;
      v_at.advance();
      // Keeps the exponentials before the wait: they have the product to run beside.
      const float exponentials = fminf(rows.sum[0], rows.sum[1]);
      cukit::mbarrier_wait(&rings.v.full[v_at.stage],
                           cukit::ordered_after(v_at.parity, exponentials));
      cukit::wgmma_wait<0>(sums);
      cukit::release(rings.v, v_done);
      if (outgrown) cukit::rescale(sums, shrink);
      cukit::pack_probabilities<T>(p, scores);
    }

    cukit::wgmma_fence();
    multiply_values(sums, p, values());
    cukit::wgmma_wait<0>(sums);
    cukit::release(rings.v, v_at);
    v_at.advance();
    finish(sums, rows, results, work.batch_head, work.first_row + lane_row);
  }
  if (group == 0) take_turn(group);  // the last one was passed on to it
}

}  // namespace consumer

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_attention_sm90(
    const __grid_constant__ cukit::TensorMap q,  // [batch, seq_q, heads_q, head_dim]
    const __grid_constant__ cukit::TensorMap k,  // [batch, seq_kv, heads_q / group, head_dim]
    const __grid_constant__ cukit::TensorMap v,  // as k
    T* __restrict__ out,                         // as q
    float* __restrict__ lse,                     // [batch, heads_q, seq_q]
    long long out_batch, long long out_row, long long out_head,  // strides in elements
    int batch, int heads_q, int group, int seq_q, int seq_kv, int head_dim,
    float scale_log2) {  // scale * log2(e)
  __shared__ Rings rings;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  unsigned char* const q_tiles = shared;
  unsigned char* const k_tiles = q_tiles + QUERY_STAGES * kQueryBytes;
  unsigned char* const v_tiles = k_tiles + STAGES * kKeyBytes;
  const cukit::QueryProblem problem{batch * heads_q, heads_q, group, seq_q, seq_kv};

  if (threadIdx.x == 0) {
    rings.q.init(kConsumerWarps);
    rings.k.init(kConsumerWarps);
    rings.v.init(kConsumerWarps);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < kGroupThreads) {
    cukit::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) producer::run(rings, q_tiles, k_tiles, v_tiles, &q, &k, &v, problem);
  } else {
    cukit::take_registers<kConsumerRegisters>();
    const consumer::Results results{out,     lse,   out_batch, out_row,   out_head,
                                    heads_q, seq_q, head_dim,  scale_log2};
    consumer::run(rings, q_tiles, k_tiles, v_tiles, results, problem);
  }
}
