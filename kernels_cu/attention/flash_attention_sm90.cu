// Exact attention, forward, on Hopper's own units: out = softmax(scale * Q K^T + mask) V and its
// row-wise log-sum-exp, without the score matrix ever leaving the chip.
//
// Papers: Dao, "FlashAttention-2", arXiv:2307.08691; Shah et al., "FlashAttention-3",
//   arXiv:2407.08608 (warpgroups in turns, the next scores multiplied during this tile's softmax).
// Mapping: a block, alone on its SM, takes tiles of 64 * CONSUMERS queries of a head. A thread of its
//   first warpgroup asks the copy engine for Q, K and V; each of the others owns 64 queries, with
//   their outputs, maxima and sums in registers, and takes the keys in tiles of TILE_N, last tile
//   first. A warpgroup has the scores of the next tile and the output of this one multiplied in one
//   go, and renews maxima and exponentials while the output's product runs; warpgroups issue their
//   products in turns, so that one's exponentials run beside the others' products.
// Order of work: see block_order.cuh. Where there are fewer blocks than tiles they take every
//   gridDim-th one, causal ones there and back, so that each gets long tiles and short ones.
// Causal masks are aligned bottom right: key j is visible to query i iff j <= seq_kv - seq_q + i.
//   A query that sees no key gets out = 0 and lse = -infinity.
// Shared memory: (QUERY_STAGES * 64 * CONSUMERS + 2 * STAGES * TILE_N) * HEAD_DIM * 2 bytes, dynamic:
//   Q stages | K stages | V stages, each in parts of 64 columns, rows of 128 swizzled bytes. Results
//   leave through the queries' place. Static: two barriers a stage.
// Tensor maps: Q, K, V as [batch, seq, heads, head_dim] with boxes [1, tile, 1, 64], swizzled by 128
//   bytes; rows and columns beyond the tensor read as zero.
// Macros: DTYPE float16|bfloat16; HEAD_DIM 64|128|256 width of the tiles; PADDED 0|1 head_dim is
//   smaller than HEAD_DIM; CONSUMERS 2|3; TILE_N multiple of 16; STAGES, QUERY_STAGES 1..;
//   THREADS = 128 * (CONSUMERS + 1); CAUSAL 0|1.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/block_order.cuh"
#include "attention/online_softmax.cuh"
#include "common/platform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/ring.cuh"
#include "common/types.cuh"

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
constexpr int kProducerRegisters = CONSUMERS == 2 ? 24 : 32;
constexpr int kConsumerRegisters = CONSUMERS == 2 ? 240 : 160;
constexpr float kLn2 = 0.6931471805599453f;

// Named barriers: turns of the warpgroups, then meetings of one warpgroup.
constexpr int kTurn = 1;
constexpr int kMeeting = kTurn + CONSUMERS;

static_assert(THREADS == (CONSUMERS + 1) * kGroupThreads, "a producer and the consumers");
static_assert(STAGES >= 2, "a warpgroup waits for the next values before it releases the last");
static_assert(kQueryPart % 1024 == 0 && kKeyPart % 1024 == 0, "whole periods of the swizzle");

struct Rings {
  cukit::Ring<QUERY_STAGES> q;
  cukit::Ring<STAGES> k;
  cukit::Ring<STAGES> v;
};

struct Problem {
  int batch_heads, heads_q, group, seq_q, seq_kv, section;
};

// One tile of queries of one head.
struct Work {
  int batch_head, b, head, first_row;
  int past;            // keys that the first query sees, not counting the ends of the sequence
  int kv_tiles;        // that some query of the tile sees
  int unmasked_tiles;  // the first ones: every query sees all of them
};

// The block's next piece of work, its `round`-th; false when there is none.
CUKIT_DEVICE bool find_work(Work& work, const Problem& problem, int round) {
  const int tiles = (problem.seq_q + kTileM - 1) / kTileM;
  const int blocks = gridDim.x;
  const int block = blockIdx.x;
  const int index = round * blocks + (CAUSAL && round % 2 != 0 ? blocks - 1 - block : block);
  if (index >= problem.batch_heads * tiles) return false;
  const cukit::HeadTile place = cukit::head_tile(index, problem.batch_heads, tiles, problem.section);
  // Causal: the last queries see the most keys, so they go first.
  const int tile = CAUSAL ? tiles - 1 - place.tile : place.tile;
  work.batch_head = place.head;
  work.b = place.head / problem.heads_q;
  work.head = place.head % problem.heads_q;
  work.first_row = tile * kTileM;
  work.past = problem.seq_kv - problem.seq_q + work.first_row + 1;
  const int last = min(kTileM, problem.seq_q - work.first_row) - 1;
  const int most = CAUSAL ? min(problem.seq_kv, work.past + last) : problem.seq_kv;
  const int least = CAUSAL ? max(0, min(problem.seq_kv, work.past)) : problem.seq_kv;
  work.kv_tiles = (max(0, most) + TILE_N - 1) / TILE_N;
  work.unmasked_tiles = least / TILE_N;
  return true;
}

namespace producer {

template <int Stages>
CUKIT_DEVICE void load(cukit::Ring<Stages>& ring, cukit::Cursor<Stages>& at,
                       unsigned char* tiles, int part_bytes, const cukit::TensorMap* map, int row,
                       int head, int b) {
  cukit::Mbarrier* full = &ring.full[at.stage];
  cukit::mbarrier_wait(&ring.empty[at.stage], at.parity ^ 1);
  cukit::mbarrier_arrive_expect(full, kParts * part_bytes);
  unsigned char* tile = tiles + at.stage * kParts * part_bytes;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    cukit::tma_load_4d(tile + part * part_bytes, map, full, part * 64, head, row, b);
  }
  at.advance();
}

CUKIT_DEVICE void run(Rings& rings, unsigned char* q_tiles, unsigned char* k_tiles,
                      unsigned char* v_tiles, const cukit::TensorMap* q, const cukit::TensorMap* k,
                      const cukit::TensorMap* v, const Problem& problem) {
  cukit::Cursor<QUERY_STAGES> q_at;
  cukit::Cursor<STAGES> k_at;
  cukit::Cursor<STAGES> v_at;
  Work work;
  for (int round = 0; find_work(work, problem, round); ++round) {
    const int head = work.head / problem.group;
    const auto load_keys = [&](int tile) {
      load(rings.k, k_at, k_tiles, kKeyPart, k, tile * TILE_N, head, work.b);
    };
    const auto load_values = [&](int tile) {
      load(rings.v, v_at, v_tiles, kKeyPart, v, tile * TILE_N, head, work.b);
    };
    const int last = work.kv_tiles - 1;
    if (last >= 0) load_keys(last);
    load(rings.q, q_at, q_tiles, kQueryPart, q, work.first_row, work.head, work.b);
    for (int tile = last; tile > 0; --tile) {
      load_keys(tile - 1);
      load_values(tile);
    }
    if (last >= 0) load_values(0);
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

// The warp has read a stage.
template <int Stages>
CUKIT_DEVICE void release(cukit::Ring<Stages>& ring, const cukit::Cursor<Stages>& at) {
  if (threadIdx.x % cukit::kWarpSize == 0) cukit::mbarrier_arrive(&ring.empty[at.stage]);
}

CUKIT_DEVICE void take_turn(int group) { cukit::named_sync(kTurn + group, 2 * kGroupThreads); }

CUKIT_DEVICE void pass_turn(int group) {
  const int next = group + 1 == CONSUMERS ? 0 : group + 1;
  cukit::named_arrive(kTurn + next, 2 * kGroupThreads);
}

// Divides by the sums, writes lse, and out through the warpgroup's rows of the queries' tile.
CUKIT_DEVICE void finish(Outputs& out, const cukit::SoftmaxRows& rows, unsigned char* q_rows,
                         float scale_log2, T* to, long long row_stride, float* lse, int rows_left,
                         int head_dim) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int warp_row = threadIdx.x % kGroupThreads / cukit::kWarpSize * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = rows.sum[half];
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 1);
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 2);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int row = warp_row + half * 8 + lane / 4;
    if (lane % 4 == 0 && row < rows_left) {
      lse[row] =
          sum == 0.0f ? -cukit::infinity() : (rows.max[half] * scale_log2 + log2f(sum)) * kLn2;
    }
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      out[4 * n + 2 * half] *= inverse;
      out[4 * n + 2 * half + 1] *= inverse;
    }
  }
  unsigned char* const warp_rows = q_rows + warp_row * kRowBytes;
  const unsigned address = cukit::shared_address(warp_rows) + lane % 16 * kRowBytes;
#pragma unroll
  for (int pair = 0; pair < HEAD_DIM / 16; ++pair) {
    const float* d = &out[8 * pair];
    const unsigned packed[4] = {cukit::pack<T>(d[0], d[1]), cukit::pack<T>(d[2], d[3]),
                                cukit::pack<T>(d[4], d[5]), cukit::pack<T>(d[6], d[7])};
    const int chunk = pair % 4 * 2 + lane / 16;
    cukit::stmatrix_x4(address + pair / 4 * kQueryPart + ((chunk ^ lane % 8) << 4), packed);
  }
  __syncwarp();
  constexpr int kChunks = HEAD_DIM / 8;
#pragma unroll
  for (int i = 0; i < 16 * kChunks / cukit::kWarpSize; ++i) {
    const int index = i * cukit::kWarpSize + lane;
    const int row = index / kChunks;
    const int chunk = index % kChunks;
    if (warp_row + row < rows_left && (!PADDED || chunk * 8 < head_dim)) {
      const unsigned char* from =
          warp_rows + chunk / 8 * kQueryPart + row * kRowBytes + ((chunk % 8 ^ row % 8) << 4);
      *reinterpret_cast<uint4*>(to + (warp_row + row) * row_stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(from);
    }
  }
}

CUKIT_DEVICE void run(Rings& rings, unsigned char* q_tiles, const unsigned char* k_tiles,
                      const unsigned char* v_tiles, T* out, float* lse, long long out_batch,
                      long long out_row, long long out_head, const Problem& problem, int head_dim,
                      float scale_log2) {
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads - 1;
  const int lane_row = threadIdx.x % kGroupThreads / cukit::kWarpSize * 16 +
                       threadIdx.x % cukit::kWarpSize / 4 + group * kGroupRows;
  unsigned char* const q_rows = q_tiles + group * kGroupRows * kRowBytes;
  const unsigned long long q_first = inner_descriptor(q_rows);
  const unsigned long long k_first = inner_descriptor(k_tiles);
  const unsigned long long v_first = outer_descriptor(v_tiles);
  cukit::Cursor<QUERY_STAGES> q_at;
  cukit::Cursor<STAGES> k_at;
  cukit::Cursor<STAGES> v_at;
  if (group == CONSUMERS - 1) pass_turn(group);

  Work work;
  for (int round = 0; find_work(work, problem, round); ++round) {
    Outputs sums;
    Scores scores;
    Probabilities p;
    cukit::SoftmaxRows rows;
    float shrink[2];
    rows.reset();
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) sums[i] = 0.0f;

    const unsigned long long q = q_first + q_at.stage * (kQueryBytes / 16);
    const auto keys = [&] { return k_first + k_at.stage * (kKeyBytes / 16); };
    const auto values = [&] { return v_first + v_at.stage * (kKeyBytes / 16); };
    const auto mask = [&](int tile) {
      if (tile < work.unmasked_tiles) return;
      const int first = tile * TILE_N;
      cukit::mask_scores<CAUSAL>(scores, problem.seq_kv - first, work.past - first + lane_row);
    };

    cukit::mbarrier_wait(&rings.q.full[q_at.stage], q_at.parity);
    int tile = work.kv_tiles - 1;
    if (tile >= 0) {
      cukit::mbarrier_wait(&rings.k.full[k_at.stage], k_at.parity);
      take_turn(group);
      cukit::wgmma_fence();
      multiply_keys(scores, q, keys());
      pass_turn(group);
      cukit::wgmma_wait<0>(scores);
      release(rings.k, k_at);
      k_at.advance();
      mask(tile);
      cukit::renew_maxima(rows, shrink, scores, scale_log2);
      cukit::exponentiate(rows, scores, scale_log2);
      cukit::mbarrier_wait(&rings.v.full[v_at.stage], v_at.parity);
      cukit::pack_probabilities<T>(p, scores);
      while (--tile >= 0) {
        cukit::mbarrier_wait(&rings.k.full[k_at.stage], k_at.parity);
        take_turn(group);
        cukit::wgmma_fence();
        multiply_keys(scores, q, keys());
        multiply_values(sums, p, values());
        pass_turn(group);
        cukit::wgmma_wait<1>(scores);
        release(rings.k, k_at);
        k_at.advance();
        mask(tile);
        const bool outgrown = cukit::renew_maxima(rows, shrink, scores, scale_log2);
        cukit::exponentiate(rows, scores, scale_log2);
        const cukit::Cursor<STAGES> v_done = v_at;
        v_at.advance();
        // Keeps the exponentials before the wait: they have the product to run beside.
        const float exponentials = fminf(rows.sum[0], rows.sum[1]);
        cukit::mbarrier_wait(&rings.v.full[v_at.stage],
                             cukit::ordered_after(v_at.parity, exponentials));
        cukit::wgmma_wait<0>(sums);
        release(rings.v, v_done);
        if (outgrown) cukit::rescale(sums, shrink);
        cukit::pack_probabilities<T>(p, scores);
      }
      cukit::wgmma_fence();
      multiply_values(sums, p, values());
      cukit::wgmma_wait<0>(sums);
      release(rings.v, v_at);
      v_at.advance();
    }

    // All warps of the group are through with its queries: their place takes the results.
    cukit::named_sync(kMeeting + group, kGroupThreads);
    const int first_row = work.first_row + group * kGroupRows;
    finish(sums, rows, q_rows + q_at.stage * kQueryBytes, scale_log2,
           out + work.b * out_batch + work.head * out_head + first_row * out_row, out_row,
           lse + static_cast<long long>(work.batch_head) * problem.seq_q + first_row,
           problem.seq_q - first_row, head_dim);
    cukit::fence_proxy_async();  // the copy engine writes there next
    __syncwarp();
    release(rings.q, q_at);
    q_at.advance();
  }
  if (group == 0) take_turn(group);  // the last one was passed on to it
}

}  // namespace consumer

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_attention_sm90(
    const __grid_constant__ cukit::TensorMap q,  // [batch, seq_q, heads_q, head_dim]
    const __grid_constant__ cukit::TensorMap k,  // [batch, seq_kv, heads_q / group, head_dim]
    const __grid_constant__ cukit::TensorMap v,  // as k
    T* __restrict__ out,                         // as q
    float* __restrict__ lse,                     // [batch, heads_q, seq_q]
    long long out_batch, long long out_row, long long out_head,  // strides in elements
    int batch, int heads_q, int group, int seq_q, int seq_kv, int head_dim, int section,
    float scale_log2) {  // scale * log2(e)
  __shared__ Rings rings;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  unsigned char* const q_tiles = shared;
  unsigned char* const k_tiles = q_tiles + QUERY_STAGES * kQueryBytes;
  unsigned char* const v_tiles = k_tiles + STAGES * kKeyBytes;
  const Problem problem{batch * heads_q, heads_q, group, seq_q, seq_kv, section};

  if (threadIdx.x == 0) {
    const auto start = [](auto& ring) {
      for (auto& barrier : ring.full) cukit::mbarrier_init(&barrier, 1);
      for (auto& barrier : ring.empty) cukit::mbarrier_init(&barrier, kConsumerWarps);
    };
    start(rings.q);
    start(rings.k);
    start(rings.v);
    cukit::fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x < kGroupThreads) {
    cukit::give_registers<kProducerRegisters>();
    if (threadIdx.x == 0) producer::run(rings, q_tiles, k_tiles, v_tiles, &q, &k, &v, problem);
  } else {
    cukit::take_registers<kConsumerRegisters>();
    consumer::run(rings, q_tiles, k_tiles, v_tiles, out, lse, out_batch, out_row, out_head, problem,
                  head_dim, scale_log2);
  }
}
