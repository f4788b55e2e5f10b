// Exact attention of float8 (e4m3) inputs, forward, on Hopper's own units:
//   out = v_descale * softmax(scale * q_descale * k_descale * Q K^T + mask) V
// and its row-wise log-sum-exp, without the score matrix ever leaving the chip.
//
// Papers: Shah et al., "FlashAttention-3", arXiv:2407.08608; DeepSeek-AI, "DeepSeek-V3 Technical
//   Report", arXiv:2412.19437 (sums of float8 products kept in float outside the tensor core).
// Mapping: as flash_attention_sm90.cu: a warpgroup that copies, CONSUMERS that own 64 queries each
//   and take the keys in tiles of TILE_N, last tile first, the scores of the next tile multiplied
//   together with the output of this one.
// Probabilities: rounded to e4m3 (fp8_probabilities.cuh), HALVES to float16, which costs the second
//   product its double rate; their sums are of the unrounded ones.
// Precision: Hopper adds float8 products with about 14 bits. After KEPT_TILES tiles a warpgroup
//   adds its output in float to what it keeps in shared memory, as bfloat16, and begins anew.
// Values: transposed in slabs or widened to float16 (fp8_values.cuh). PREPARES 0: by
//   flash_attention_fp8_values before; 1: by the four copying warps, tile by tile.
// Order of work, masks: as flash_attention_sm90.cu.
// Shared memory, dynamic: Q stages | K stages | V stages | PREPARES: V as it comes, two stages |
//   KEPT_TILES: HEAD_DIM / 2 bfloat16 of every consumer, and its two maxima. Q, K in parts of at
//   most 128 columns, rows swizzled. Static: two barriers a stage.
// Tensor maps: bytes [batch, seq, heads, head_dim], boxes [1, tile, 1, min(HEAD_DIM, 128)],
//   swizzled by their rows; rows and columns beyond the tensor read as zero.
// Macros: DTYPE float16|bfloat16 of out; HEAD_DIM 64|128|256; PADDED 0|1 head_dim is smaller;
//   CONSUMERS 2|3; TILE_N multiple of 32; STAGES 2..; QUERY_STAGES 1..; KEPT_TILES 1.., 0 never;
//   HALVES 0|1; PREPARES 0|1; THREADS = 128 * (CONSUMERS + 1); CAUSAL 0|1.
// Architecture: sm_90 (sm_90a) only. Sums in a fixed order: deterministic.
// Reference: cukit/reference/attention.py, of the decoded inputs.
#include "attention/fp8_copies.cuh"
#include "attention/fp8_probabilities.cuh"
#include "attention/query_tiles.cuh"
#include "common/hopper/store.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/ring.cuh"
#include "common/softmax/online_softmax.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"

namespace {

using T = cukit::element_t;

constexpr int kGroupThreads = 128;
constexpr int kGroupRows = 64;
constexpr int kTileM = CONSUMERS * kGroupRows;
constexpr int kConsumerThreads = CONSUMERS * kGroupThreads;
constexpr int kConsumerWarps = kConsumerThreads / cukit::kWarpSize;
// Registers of a thread: at the start alike for all, then as many as the producer leaves.
constexpr int kStartRegisters = 65536 / THREADS / 8 * 8;
constexpr int kProducerRegisters = PREPARES ? 56 : 24;
constexpr int kConsumerRegisters =
    (kStartRegisters * (CONSUMERS + 1) - kProducerRegisters) / CONSUMERS / 8 * 8;
constexpr float kLn2 = 0.6931471805599453f;
// Float16 has room for what float8 has not.
constexpr float kGrowth = HALVES ? cukit::kLazyGrowth : cukit::kFp8Growth;

static_assert(THREADS == (CONSUMERS + 1) * kGroupThreads, "a producer and the consumers");
static_assert(STAGES >= 2, "a warpgroup waits for the next values before it releases the last");

#if HALVES
using Values = cukit::HalfValues<TILE_N, HEAD_DIM>;
#else
using Values = cukit::Fp8Values<TILE_N, HEAD_DIM>;
#endif
using Copies = cukit::Fp8Copies<kTileM, TILE_N, Values, QUERY_STAGES, STAGES, CAUSAL>;
using Rings = Copies::Rings;
using Tiles = Copies::Tiles;

namespace consumer {

using Scores = float[TILE_N / 2];
using Outputs = float[HEAD_DIM / 2];
// Beside the next scores' product, if there are registers for both.
constexpr bool kKeepEarly = KEPT_TILES > 0 && HEAD_DIM < 256;
constexpr bool kKeepLate = KEPT_TILES > 0 && !kKeepEarly;
constexpr int kStepKeys = HALVES ? 16 : 32;  // of a product
using Probabilities = unsigned[TILE_N / kStepKeys][4];

// Q and K.
CUKIT_DEVICE unsigned long long row_descriptor(const unsigned char* tile) {
  constexpr auto kSwizzle =
      Copies::kRowBytes == 128 ? cukit::OperandSwizzle::Bytes128 : cukit::OperandSwizzle::Bytes64;
  return cukit::matrix_descriptor(tile, kSwizzle, 16, 8 * Copies::kRowBytes);
}

// V, as fp8_values.cuh has it.
CUKIT_DEVICE unsigned long long value_descriptor(const unsigned char* tile) {
#if HALVES
  return cukit::matrix_descriptor(tile, cukit::OperandSwizzle::Bytes128, Values::kHalfPartBytes,
                                  8 * Values::kHalfRowBytes);
#else
  return cukit::matrix_descriptor(tile, cukit::OperandSwizzle::None, Values::kSlabBytes, 8 * 16);
#endif
}

// scores = Q K^T, started
CUKIT_DEVICE void multiply_keys(Scores& scores, unsigned long long q, unsigned long long k) {
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 32; ++step) {
    constexpr int kSteps = Copies::kRowBytes / 32;
    const int within = step % kSteps * 32;
    cukit::wgmma_e4m3<TILE_N>(scores, q + (step / kSteps * Copies::kQueryPart + within) / 16,
                              k + (step / kSteps * Copies::kKeyPart + within) / 16, step > 0);
  }
  cukit::wgmma_commit();
}

// out += P V, started
CUKIT_DEVICE void multiply_values(Outputs& out, const Probabilities& p, unsigned long long v) {
#pragma unroll
  for (int step = 0; step < TILE_N / kStepKeys; ++step) {
#if HALVES
    cukit::wgmma<__half, HEAD_DIM, true>(out, p[step], v + step * 16 * Values::kHalfRowBytes / 16,
                                         true);
#else
    cukit::wgmma_e4m3<HEAD_DIM>(out, p[step], v + step * 2 * Values::kSlabBytes / 16, true);
#endif
  }
  cukit::wgmma_commit();
}

// A factor for each batch and key head, or 1.
struct Descale {
  const float* factors;
  int batch, head;  // strides

  CUKIT_DEVICE float of(int b, int kv_head) const {
    return factors == nullptr ? 1.0f : factors[b * batch + kv_head * head];
  }
};

// What the results of a tile of queries are made and written with.
struct Results {
  T* out;
  float* lse;
  long long out_batch, out_row, out_head;
  int head_dim;
  float scale_log2;
  Descale q, k, v;
};

CUKIT_DEVICE bool renew(cukit::SoftmaxRows& rows, float (&shrink)[2], const Scores& scores,
                        float scale_log2) {
  return cukit::renew_maxima<TILE_N / 2, HEAD_DIM >= 128>(rows, shrink, scores, scale_log2,
                                                          kGrowth);
}

CUKIT_DEVICE void pack(Probabilities& p, const Scores& scores) {
#if HALVES
  cukit::pack_probabilities<__half>(p, scores);
#else
  cukit::pack_probabilities_fp8(p, scores);
#endif
}

// Divides by the sums and writes the warp's sixteen rows.
CUKIT_DEVICE void finish(const Outputs& sums, const cukit::SoftmaxRows& rows, const Results& to,
                         const cukit::QueryProblem& problem, int batch_head, int first_row,
                         float scale_log2, float descale) {
  float* const lse = to.lse + static_cast<long long>(batch_head) * problem.seq_q;
  T* const head = to.out + batch_head / problem.heads_q * to.out_batch +
                  batch_head % problem.heads_q * to.out_head;
  cukit::ResultRows<T> results{
      {}, {}, head + first_row * to.out_row, to.out_row, to.head_dim};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 1);
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 2);
    const int row = first_row + 8 * half;
    results.factor[half] = sum == 0.0f ? 0.0f : descale / sum;
    results.exists[half] = row < problem.seq_q;
    if (threadIdx.x % 4 == 0 && results.exists[half]) {
      const float top = fmaf(rows.max[half], scale_log2, -cukit::kFp8Offset);
      lse[row] = sum == 0.0f ? -cukit::infinity() : (top + log2f(sum)) * kLn2;
    }
  }
  cukit::write_rows<PADDED>(sums, results);
}

CUKIT_DEVICE void run(Rings& rings, const Tiles& tiles, unsigned char* kept_bytes,
                      const Results& results, const cukit::QueryProblem& problem) {
  const int group = cukit::warp_uniform(threadIdx.x / kGroupThreads) - 1;
  const int lane_row = threadIdx.x % kGroupThreads / cukit::kWarpSize * 16 +
                       threadIdx.x % cukit::kWarpSize / 4 + group * kGroupRows;
  const unsigned long long q_first =
      row_descriptor(tiles.q + group * kGroupRows * Copies::kRowBytes);
  const unsigned long long k_first = row_descriptor(tiles.k);
  const unsigned long long v_first = value_descriptor(tiles.v);
  cukit::Cursor<QUERY_STAGES> q_at;
  cukit::Cursor<STAGES> k_at;
  cukit::Cursor<STAGES> v_at;

  Outputs sums;
  Scores scores;
  Probabilities p;
  cukit::SoftmaxRows rows;
  cukit::QueryTile work{};
  unsigned long long q;
  cukit::KeptOutputs<HEAD_DIM / 2, kConsumerThreads> kept(kept_bytes, threadIdx.x - kGroupThreads);

  const auto values = [&] { return v_first + v_at.stage * (Values::kBytes / 16); };
  const auto start_scores = [&] {
    cukit::mbarrier_wait(&rings.k.full[k_at.stage], k_at.parity);
    cukit::wgmma_fence();
    multiply_keys(scores, q, k_first + k_at.stage * (Copies::kKeyBytes / 16));
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

  for (int turn = 0; Copies::next_tile(work, problem, turn); turn = cukit::warp_uniform(turn)) {
    float shrink[2];
    const int b = work.batch_head / problem.heads_q;
    const int kv_head = work.batch_head % problem.heads_q / problem.group;
    const float scale_log2 =
        results.scale_log2 * results.q.of(b, kv_head) * results.k.of(b, kv_head);
    const int unmasked_tiles = cukit::warp_uniform(work.unmasked_tiles);
    int tile = cukit::warp_uniform(work.kv_tiles) - 1;
    int until_kept = KEPT_TILES;
    kept.any = false;
    cukit::mbarrier_wait(&rings.q.full[q_at.stage], q_at.parity);
    q = q_first + q_at.stage * (Copies::kQueryBytes / 16);
    start_scores();
    cukit::wgmma_wait<0>(scores);
    receive_scores(tile, unmasked_tiles);
    rows.reset();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = 0.0f;
    renew(rows, shrink, scores, scale_log2);
    cukit::exponentiate_fp8(rows, scores, scale_log2);
    cukit::mbarrier_wait(&rings.v.full[v_at.stage], v_at.parity);
    pack(p, scores);

    const auto keep = [&] {
      if (--until_kept > 0) return;
      until_kept = KEPT_TILES;
      kept.take(sums, rows, scale_log2);
    };
    while (--tile >= 0) {
      start_scores();
      if constexpr (kKeepEarly) {
        keep();
        cukit::wgmma_fence();
      }
      multiply_values(sums, p, values());
      cukit::wgmma_wait<1>(scores);
      receive_scores(tile, unmasked_tiles);
      const bool outgrown =
          renew(rows, shrink, scores, scale_log2);
      cukit::exponentiate_fp8(rows, scores, scale_log2);
      const cukit::Cursor<STAGES> v_done = v_at;
      v_at.advance();
      cukit::mbarrier_wait(&rings.v.full[v_at.stage], v_at.parity);
      cukit::wgmma_wait<0>(sums);
      cukit::release(rings.v, v_done);
      if (outgrown) cukit::rescale(sums, shrink);
      if constexpr (kKeepLate) keep();
      pack(p, scores);
    }

    cukit::wgmma_fence();
    multiply_values(sums, p, values());
    cukit::wgmma_wait<0>(sums);
    cukit::release(rings.v, v_at);
    v_at.advance();
    if (KEPT_TILES > 0 && kept.any) kept.add_to(sums, rows, scale_log2);
    finish(sums, rows, results, problem, work.batch_head, work.first_row + lane_row, scale_log2,
           results.v.of(b, kv_head));
  }
}

}  // namespace consumer

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_attention_fp8_sm90(
    const __grid_constant__ cukit::TensorMap q,  // [batch, seq_q, heads_q, head_dim]
    const __grid_constant__ cukit::TensorMap k,  // [batch, seq_kv, heads_q / group, head_dim]
    const __grid_constant__ cukit::TensorMap v,  // as k; PREPARES alone reads it
    const unsigned char* __restrict__ slabs,     // of flash_attention_fp8_values, for the others
    T* __restrict__ out,                         // as q
    float* __restrict__ lse,                     // [batch, heads_q, seq_q]
    const float* __restrict__ q_descale, const float* __restrict__ k_descale,
    const float* __restrict__ v_descale,  // of a batch and a key head; null: 1
    long long out_batch, long long out_row, long long out_head,  // strides in elements
    int q_descale_batch, int q_descale_head, int k_descale_batch, int k_descale_head,
    int v_descale_batch, int v_descale_head,  // strides
    int batch, int heads_q, int group, int seq_q, int seq_kv, int head_dim,
    float scale_log2) {  // scale * log2(e)
  __shared__ Rings rings;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  Tiles tiles;
  tiles.q = shared;
  tiles.k = tiles.q + QUERY_STAGES * Copies::kQueryBytes;
  tiles.v = tiles.k + STAGES * Copies::kKeyBytes;
  tiles.raw = tiles.v + STAGES * Values::kBytes;
  unsigned char* const kept = tiles.raw + (PREPARES ? Copies::kRawStages * Copies::kKeyBytes : 0);
  const cukit::QueryProblem problem{batch * heads_q, heads_q, group, seq_q, seq_kv};

  if (threadIdx.x == 0) {
    rings.q.init(kConsumerWarps);
    rings.k.init(kConsumerWarps);
    rings.v.init(kConsumerWarps, PREPARES ? Copies::kWarps : 1);
    rings.raw.init(Copies::kWarps);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < kGroupThreads) {
    cukit::give_registers<kProducerRegisters>();
    const Copies copies{rings, tiles, &q, &k, problem};
    if constexpr (PREPARES) {
      copies.run(&v);
    } else if (threadIdx.x == 0) {
      copies.run(slabs);
    }
  } else {
    cukit::take_registers<kConsumerRegisters>();
    const consumer::Results results{
        out,        lse,
        out_batch,  out_row,
        out_head,   head_dim,
        scale_log2, {q_descale, q_descale_batch, q_descale_head},
        {k_descale, k_descale_batch, k_descale_head},
        {v_descale, v_descale_batch, v_descale_head}};
    consumer::run(rings, tiles, kept, results, problem);
  }
}
