// Exact attention, forward, on Hopper's own units: out = softmax(scores) V and its row-wise
// log-sum-exp, without the score matrix ever leaving the chip. score_options.cuh says what scores
// are: scale * Q K^T, with whatever options it knows.
//
// Papers: Dao, "FlashAttention-2", arXiv:2307.08691; Shah et al., "FlashAttention-3",
//   arXiv:2407.08608 (warpgroups that copy, the next scores multiplied during this tile's softmax).
// Mapping: a block walks over tiles of 64 * CONSUMERS queries of a head (query_work.cuh). A thread of
//   its first warpgroup says which, and asks the copy engine for Q, K and V; each of the others owns
//   64 queries, with their outputs, maxima and sums in registers, and takes the keys in tiles of
//   TILE_N, last tile first. A warpgroup has the scores of the next tile and the output of this one
//   multiplied in one go, and renews maxima and exponentials while the output's product runs.
//   Nothing holds warpgroups together but the stages of K and V (each has queries of its own): with
//   enough of them they drift apart, and one's exponentials or stores run beside the others'
//   products; with TURNS they are kept apart. Tiles that a mask hides from all 64 queries of a warpgroup are left out.
// VARLEN: tiles reach into the next sequence. Its keys are hidden as others are; its values, which
//   may be NaN, are overwritten by zeros: a warp of the first warpgroup hands on every tile of V.
// PAGED: key j of sequence b is row j % block_size of block block_table[b][j / block_size] of a cache.
//   Two or three warps of the first warpgroup fetch tiles in turn, in boxes of PAGE_ROWS rows of a block
//   by TMA or, with PAGE_ROWS 0, row by row. Blocks without a visible key are not looked up: their rows
//   become zeros.
// BLOCK_SPARSE: keys come in the tiles that plan_blocks.cu listed for a tile of queries.
//   A query that sees no key gets out = 0 and lse = -infinity.
// FLOAT8: Q, K and V are e4m3, each with a factor for a batch and key head (forward_operands.cuh).
//   Probabilities are rounded to e4m3, or with PRECISE to float16; their sums are of the unrounded
//   ones. V is transposed, or with PRECISE widened to float16, by flash_attention_fp8_values before
//   or, with PREPARES, by three warps of the first warpgroup, tile by tile. The tensor core adds
//   float8 products with about 14 bits: after KEPT_TILES tiles a warpgroup adds its outputs to what it
//   keeps in shared memory (kept_sums.cuh).
// Shared memory, dynamic: Q stages, a tile of 64 queries for every consumer | K stages | PREPARES: two
//   stages of V as it comes | V stages | KEPT_TILES: VALUE_DIM / 2 bfloat16 and two maxima of every
//   consumer thread. Tiles lie in parts of one swizzle's width (shared_tile.cuh); V prepared for e4m3
//   as float8_values.cuh has it. Static: barriers, and what the producer says of every stage.
// Tensor maps: Q, K, V as [batch, seq, heads, columns] with boxes [1, rows, 1, part], rows 64 of Q and
//   TILE_N of K and V, parts of 64 columns (of eight bits 64 up to 64 columns, else 128), swizzled by
//   their bytes; rows and columns beyond the tensor read as zero.
// Macros: DTYPE float16|bfloat16; HEAD_DIM, VALUE_DIM multiples of 16 up to 256: columns of Q and K,
//   and of V, that are multiplied; VALUE_PADDED 0|1 V has fewer than VALUE_DIM; CONSUMERS 2|3|4;
//   TILE_N multiple of 16; STAGES 2..; QUERY_STAGES 1..; THREADS = 128 * (CONSUMERS + 1);
//   BLOCKS_PER_SM; those of score_options.cuh; BLOCK_SPARSE 0|1, then BLOCK_Q, BLOCK_KV queries and
//   keys of a block. PAGED 0|1, then PAGE_ROWS 0 or a multiple of 8 that divides TILE_N and the block
//   size. FLOAT8 0|1, then HEAD_DIM and TILE_N multiples of 32, PRECISE 0|1, PREPARES 0|1,
//   KEPT_TILES 1.., 0 never. TURNS 0|1.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/block_lists.cuh"
#include "attention/forward_pages_sm90.cuh"
#include "attention/forward_pipelines_sm90.cuh"
#include "attention/forward_producer_sm90.cuh"
#include "attention/forward_work_sm90.cuh"
#include "attention/kept_sums.cuh"
#include "attention/parameters.cuh"
#include "attention/query_work.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/scores/fragment_matrix.cuh"
#include "common/scores/fragment_scores.cuh"
#include "common/scores/score_options.cuh"
#include "common/softmax/online_softmax.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"

namespace {

namespace consumer {

// Tiles of keys hold whole blocks of a block mask, or lie within one.
constexpr bool kWholeBlocks =
    BLOCK_KV % 8 == 0 && (TILE_N % BLOCK_KV == 0 || BLOCK_KV % TILE_N == 0);

// Chunks of 32 columns reach beyond the last one of the output.
constexpr bool kGuarded = VALUE_PADDED || VALUE_DIM % 32 != 0;
constexpr float kLn2 = 0.6931471805599453f;

using Scores = float[TILE_N / 2];
using Outputs = float[VALUE_DIM / 2];
using Probabilities = Operands::Probabilities;

// scores = Q K^T, started
CUKIT_DEVICE void multiply_keys(Scores& scores, unsigned long long q, unsigned long long k) {
#pragma unroll
  for (int step = 0; step < KeyTile::kSteps; ++step) {
    Operands::multiply_keys(scores, q + QueryTile::k_step(step), k + KeyTile::k_step(step),
                            step > 0);
  }
  cukit::wgmma_commit();
}

// out += P V, started
CUKIT_DEVICE void multiply_values(Outputs& out, const Probabilities& p, unsigned long long v) {
#pragma unroll
  for (int step = 0; step < ValueTile::kRowSteps; ++step) {
    Operands::multiply_values(out, p[step], v + ValueTile::mn_step(step));
  }
  cukit::wgmma_commit();
}

// Where the results go.
struct Results {
  T* out;
  float* lse;
  cukit::HeadStrides strides;
  int heads_q, value_dim;
};

// Divides by the sums and writes the warp's sixteen rows; `row` is the lane's first.
CUKIT_DEVICE void finish(const Outputs& sums, const cukit::SoftmaxRows& softmax, float factor,
                         float descale, const Results& to, const QueryWork& work, int row,
                         const cukit::ScoreSettings& settings) {
  const cukit::Sequence& sequence = work.sequence;
  const long long first_statistic =
      cukit::row_statistics(work.b, work.head, to.heads_q, sequence, settings);
  cukit::ResultRows<T> rows;
  rows.first = to.out +
               cukit::offset_of(to.strides, VARLEN ? 0 : work.b, sequence.first_q + row, work.head);
  rows.row_stride = to.strides.row;
  rows.columns = to.value_dim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = softmax.sum[half];
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 1);
    sum += __shfl_xor_sync(cukit::kFullMask, sum, 2);
    rows.factor[half] = sum == 0.0f ? 0.0f : descale / sum;
    rows.exists[half] = row + 8 * half < sequence.seq_q;
    if (to.lse != nullptr && threadIdx.x % 4 == 0 && rows.exists[half]) {
      to.lse[first_statistic + row + 8 * half] =
          sum == 0.0f ? -cukit::infinity()
                      : (softmax.max[half] * factor + (log2f(sum) - Operands::kOffset)) * kLn2;
    }
  }
  cukit::write_rows<kGuarded>(sums, rows);
}

CUKIT_DEVICE bool renew(cukit::SoftmaxRows& rows, float (&shrink)[2], const Scores& scores,
                        float factor) {
  return cukit::renew_maxima<TILE_N / 2, Operands::kIntegerMaxima>(rows, shrink, scores, factor,
                                                                   Operands::kGrowth);
}

// TURNS: in each round of tiles of keys the consumers issue their products one after the other. Those
// that begin a tile of queries together would else multiply, and then compute exponentials, at the
// same time, until they have drifted apart: too long for the short rows of a causal mask.
class Turns {
 public:
  CUKIT_DEVICE explicit Turns(int group) : group_(group) {
    if (group_ == CONSUMERS - 1) pass();
  }

  CUKIT_DEVICE void take() const {
    if constexpr (TURNS) cukit::named_sync(kFirstBarrier + group_, kThreads);
  }
  CUKIT_DEVICE void pass() const {
    const int next = group_ + 1 == CONSUMERS ? 0 : group_ + 1;
    if constexpr (TURNS) cukit::named_arrive(kFirstBarrier + next, kThreads);
  }
  // Of a tile of keys that this consumer does not see.
  CUKIT_DEVICE void skip() const {
    take();
    pass();
  }
  // The last turn was passed to the first consumer.
  CUKIT_DEVICE void end() const {
    if (group_ == 0) take();
  }

 private:
  static constexpr int kFirstBarrier = 1;
  static constexpr int kThreads = 2 * cukit::kWarpgroupThreads;
  int group_;
};

// Whether outputs are kept outside the tensor core, and whether that and their rescaling happen beside
// the product of the next scores: if there are registers for both.
constexpr bool kKeeps = KEPT_TILES > 0;
constexpr bool kTendsEarly = kKeeps && VALUE_DIM < 256;

CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles, const Results& results,
                      const Arguments& arguments, const cukit::Descales& descales,
                      const cukit::ScoreSettings& settings, float scale) {
  const int own_group = Block::consumer_group();
  // Float8 and biases leave no register for it throughout the loop.
  const auto group = [&] { return FLOAT8 || BIAS ? Block::consumer_group() : own_group; };
  const int lane_row = cukit::accumulator_row();
  const int lane_column = cukit::accumulator_column();
  const unsigned long long q_first = cukit::uniform_descriptor(QueryTile::k_major(tiles.q));
  const unsigned long long k_first = cukit::uniform_descriptor(KeyTile::k_major(tiles.k));
  const unsigned long long v_first = cukit::uniform_descriptor(ValueTile::mn_major(tiles.v));
  QueryState q_at;
  KeyState k_at;
  KeyState v_at;

  Outputs sums;
  Scores scores;
  Probabilities p;
  cukit::SoftmaxRows rows;
  unsigned long long q;
  cukit::KeptSums<VALUE_DIM / 2, Block::kConsumerWarps * cukit::kWarpSize, KEPT_TILES> kept(
      tiles.kept);

  const auto values = [&] { return v_first + v_at.index * ValueTile::kStage; };
  Turns turns(own_group);
  const auto start_scores = [&] {
    const unsigned long long k = k_first + k_at.index * KeyTile::kStage;
    pipelines.k.wait(k_at);
    turns.take();
    cukit::wgmma_fence();
    multiply_keys(scores, q, k);
  };

  cukit::QueryTileScheduler<kTileM, TILE_N> queue(arguments.problem, arguments.plan, settings);
  QueryWork work{};
  int part = own_group;  // of a tile's queries
  while (next_work(work, pipelines, group(), q_at, queue)) {
    const int first_row = work.first_row + part * cukit::kWarpgroupRows;
    const int row = first_row + lane_row;
    const int causal_offset = work.sequence.seq_kv - work.sequence.seq_q;
    const float descale = descales.scores(work.b, work.head / arguments.group);
    const float scale_log2 = scale * descale;
    const float factor = cukit::exponent_factor(scale_log2);
#if FLOAT8 && SOFTCAP
    cukit::ScoreSettings score_settings = settings;
    score_settings.cap_inner *= descale;
#else
    const cukit::ScoreSettings& score_settings = settings;
#endif
    const cukit::TileRange seen = cukit::own_keys<TILE_N>(work, first_row, settings);
    const cukit::HeadScores head(arguments.arrays, settings, work.b, work.head, work.sequence);
    const int seq_kv = cukit::warp_uniform(head.seq_kv);
    const bool bias_aligned = BIAS && cukit::warp_uniform(cukit::rows_are_aligned(
                                          head.bias, settings.bias_row, settings.bias_column));
    const bool mask_aligned = MASK && cukit::warp_uniform(cukit::rows_are_aligned(
                                          head.mask, settings.mask_row, settings.mask_column));
    // In the order in which they come: V a tile behind K.
    for (int unseen = work.keys.end; unseen > seen.end; --unseen) {
      turns.skip();
      pipelines.k.skip(k_at);
      if (unseen < work.keys.end) pipelines.v.skip(v_at);
    }
    int tile = seen.end - 1;
    float shrink[2];
    q = q_first + (q_at.index * CONSUMERS + group()) * QueryTile::kStage;
    // The scores of a tile have come.
    const auto receive_scores = [&] {
      int first_key = tile * TILE_N;
      bool unmasked = seen.unmasked(tile);
#if BLOCK_SPARSE
      const int listed = cukit::warp_uniform(pipelines.listed[k_at.index]);
      __syncwarp();  // all lanes have read it before one of them releases the stage
      first_key = listed / 2 * TILE_N;
      unmasked = listed % 2 == 0;
#endif
      pipelines.k.release(k_at);
      k_at.advance();
      if (tile == seen.begin) {
        pipelines.q[group()].release(q_at);
        q_at.advance();
      }
      const cukit::FragmentPlace at{row, first_key + lane_column};
      const bool ends = first_key + TILE_N > seq_kv;
      if constexpr (cukit::kScoresModified) {
        if (BIAS && (ends || !bias_aligned)) {
          cukit::modify_scores<true>(scores, at, head, scale_log2, score_settings);
        } else {
          cukit::modify_scores<false>(scores, at, head, scale_log2, score_settings);
          if constexpr (BIAS) {
            cukit::add_rows(scores, head.bias, settings.bias_row, at, head.seq_q);
          }
        }
      }
      if (MASK && (ends || !mask_aligned)) {
        cukit::hide_scores(scores, at, [&](int i, int j) {
          return head.hidden(cukit::visible_keys(i, causal_offset, head.seq_kv, settings), i, j, settings);
        });
      } else if (!unmasked) {
        if constexpr (MASK) {
          cukit::hide_rows(scores, head.mask, settings.mask_row, at, head.seq_q);
        }
        cukit::hide_keys(scores, at, causal_offset, head.seq_kv, settings);
#if BLOCK_SPARSE
        const cukit::BlockMask blocks(arguments.blocks, work.head);
        if constexpr (kWholeBlocks) {
          blocks.hide_whole_blocks(scores, at);
        } else {
          cukit::hide_scores(scores, at, blocks);
        }
#endif
      }
    };
    start_scores();
    turns.pass();
    cukit::wgmma_wait<0>(scores);
    receive_scores();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      cukit::start_row(rows.max[half], rows.sum[half], arguments.arrays, work.head,
                       scale_log2, lane_column == 0, 1 << Operands::kOffset);
    }
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; ++i) sums[i] = 0.0f;
    kept.clear();
    renew(rows, shrink, scores, factor);
    cukit::exponentiate<Operands::kOffset>(rows, scores, factor);
    if (seen.end < work.keys.end) pipelines.v.skip(v_at);
    pipelines.v.wait(v_at);
    Operands::pack(p, scores);

    bool outgrown = Operands::kGrowth < 0.0f;
    const auto tend = [&](bool shrunk) {
      if (shrunk) cukit::rescale(sums, shrink);
      if (kKeeps && kept.due()) kept.take(sums, rows, factor);
      if (kTendsEarly) cukit::wgmma_fence();
    };
    while (--tile >= seen.begin) {
      start_scores();
      if constexpr (kTendsEarly) tend(outgrown);
      multiply_values(sums, p, values());
      turns.pass();
      cukit::wgmma_wait<1>(scores);
      receive_scores();
      outgrown = renew(rows, shrink, scores, factor);
      cukit::exponentiate<Operands::kOffset>(rows, scores, factor);
      const KeyState v_done = v_at;
      v_at.advance();
      if constexpr (FLOAT8) {
        pipelines.v.wait(v_at);
      } else {
        // Keeps the exponentials before the wait: they have the product to run beside. Float8 gains
        // where they may sink below it.
        pipelines.v.wait_after(v_at, fminf(rows.sum[0], rows.sum[1]));
      }
      cukit::wgmma_wait<0>(sums);
      pipelines.v.release(v_done);
      if constexpr (!kTendsEarly) tend(outgrown);
      Operands::pack(p, scores);
    }

    if (kTendsEarly && outgrown) cukit::rescale(sums, shrink);
    cukit::wgmma_fence();
    multiply_values(sums, p, values());
    cukit::wgmma_wait<0>(sums);
    pipelines.v.release(v_at);
    v_at.advance();
    for (int unseen = work.keys.begin; unseen < seen.begin; ++unseen) {
      turns.skip();
      pipelines.k.skip(k_at);
      pipelines.v.skip(v_at);
    }
    if (kKeeps && kept.any) kept.add_to(sums, rows, factor);
    // Float8 has no register for the row throughout the loop.
    const int result_row =
        FLOAT8 ? first_row + cukit::accumulator_row(cukit::opaque(threadIdx.x)) : row;
    finish(sums, rows, factor, descales.values(work.b, work.head / arguments.group), results, work,
           result_row, settings);
    part = part_of_next_tile(part);
  }
  turns.end();
}

}  // namespace consumer

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_attention_sm90(
    const __grid_constant__ cukit::TensorMap q,  // [batch, seq_q, heads_q, head_dim]
    // PAGED: of the cache, [blocks, block_size, ...]; unused with PAGE_ROWS 0
    const __grid_constant__ cukit::TensorMap k,  // [batch, seq_kv, heads_q / group, head_dim]
    const __grid_constant__ cukit::TensorMap v,  // [batch, seq_kv, heads_q / group, value_dim]
    T* __restrict__ out,                         // [batch, seq_q, heads_q, value_dim]
    float* __restrict__ lse,  // [batch, heads_q, seq_q]; VARLEN [heads_q, total_q]; null: not wanted
    const float* __restrict__ alibi_slopes,      // score_options.cuh, as all up to cu_seqlens_kv
    const float* __restrict__ sinks,             //
    const cukit::bias_t* __restrict__ bias,      //
    const unsigned char* __restrict__ mask,      //
    const int* __restrict__ cu_seqlens_q,        // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,       // [batch + 1]; PAGED: [batch] keys of each sequence
    int* __restrict__ plan,                      // VARLEN, PAGED, BLOCK_SPARSE: query_work.cuh
    const unsigned char* __restrict__ block_mask,  // BLOCK_SPARSE: block_lists.cuh
#if PAGED
    const int* __restrict__ block_table,  // [batch, table_row]
#endif
#if ROW_BY_ROW
    const T* __restrict__ k_cache,  // [blocks, block_size, heads_q / group, head_dim]
    const T* __restrict__ v_cache,  // the same, [..., value_dim]
#endif
#if FLOAT8
    const unsigned char* __restrict__ prepared,  // V of flash_attention_fp8_values, unless PREPARES
    const float* __restrict__ q_descale, const float* __restrict__ k_descale,
    const float* __restrict__ v_descale,  // of a batch and a key head; null: 1
#endif
#if PAGED
    const __grid_constant__ cukit::PagedKeys keys,
#endif
    const __grid_constant__ cukit::MappedForwardParameters params) {
  __shared__ Pipelines pipelines;
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  const Tiles tiles(shared);
  const Arguments arguments{{params.batch, params.heads_q, params.seq_q, params.seq_kv, cu_seqlens_q,
                             cu_seqlens_kv},
                            {plan, plan + 1, plan + 2 + params.batch},
                            {alibi_slopes, sinks, bias, mask},
                            {plan + 1, block_mask, params.mask_heads, params.seq_q, params.seq_kv},
                            params.group};

  Block::prepare([&] { pipelines.init(); });
  Block::run(
      [&] {
        if (threadIdx.x == 0) {
#if FLOAT8 && !PREPARES
          const producer::PreparedKeyValues key_values{
              {&k, &v, params.group, params.group}, prepared, params.float8.value_tiles};
#elif PAGED
          OrderState orders_at;
          const producer::PagedKeyValues key_values{pipelines, orders_at, params.settings};
#else
          const producer::MappedKeyValues key_values{&k, &v, params.group, params.group};
#endif
          producer::run(pipelines, tiles, &q, key_values, arguments, params.settings);
        }
#if CLEARED
        if (threadIdx.x / cukit::kWarpSize == 1) clearer::run(pipelines, tiles);
#endif
#if PAGED
        if (threadIdx.x / cukit::kWarpSize >= cukit::kWarpgroupWarps - kFetchers) {
#if ROW_BY_ROW
          const fetcher::Cache k_rows{nullptr, k_cache, keys.k, keys.head_dim};
          const fetcher::Cache v_rows{nullptr, v_cache, keys.v, params.value_dim};
#else
          const fetcher::Cache k_rows{&k, nullptr, keys.k, keys.head_dim};
          const fetcher::Cache v_rows{&v, nullptr, keys.v, params.value_dim};
#endif
          fetcher::run(pipelines, k_rows, v_rows, block_table, keys, params.group);
        }
#endif
#if PREPARES
        if (threadIdx.x >= cukit::kWarpSize) preparer::run(pipelines, tiles);
#endif
      },
      [&] {
        const consumer::Results results{out, lse, params.out, params.heads_q, params.value_dim};
#if FLOAT8
        const cukit::Descales descales{q_descale, k_descale, v_descale, params.float8};
#else
        const cukit::Descales descales{};
#endif
        consumer::run(pipelines, tiles, results, arguments, descales, params.settings,
                      params.scale_log2);
      });
}
