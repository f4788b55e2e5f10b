// Exact attention, forward, for Hopper (wgmma, TMA): out = softmax(scores) V and the row-wise
// log-sum-exp. The score matrix is never written to global memory. score_options.cuh defines the
// scores: scale * Q K^T and its options.
//
// Papers: Dao, "FlashAttention-2", arXiv:2307.08691; Shah et al., "FlashAttention-3",
//   arXiv:2407.08608 (warp specialisation; Q K^T of the next tile overlaps the softmax of this
//   one).
// Mapping: a block iterates over tiles of 64 * CONSUMERS queries of one head (query_work.cuh). The
//   first warpgroup is the producer: one of its threads issues the TMA loads of Q, K and V. Each
//   consumer warpgroup owns 64 queries, with their output accumulators, row maxima and row sums in
//   registers, and iterates over tiles of TILE_N keys, last tile first. It issues Q K^T of the next
//   tile together with P V of this one, and updates maxima and exponentials while P V runs.
//   Only the stages of K and V couple the consumers (Q has a pipeline for each consumer). With
//   enough stages the consumers drift apart, so that the exponentials or stores of one overlap the
//   wgmmas of another; PING_PONG enforces this offset. A consumer skips tiles that are masked for
//   all of its queries.
// VARLEN: the last tile of a sequence extends into the next sequence. The next sequence's keys are
//   masked; its values, which may be NaN, are overwritten with zeros by a warp of the producer
//   warpgroup before consumers read the tile.
// PAGED: key j of sequence b is row j % block_size of block block_table[b][j / block_size] of a
//   cache. Two or three warps of the producer warpgroup load alternate tiles, in boxes of PAGE_ROWS
//   rows of a block by TMA or, with PAGE_ROWS 0, row by row by cp.async. Blocks without a visible
//   key are not looked up: their rows are zeros.
// BLOCK_SPARSE: plan_blocks.cu lists the key tiles of each tile of queries.
// A query without a visible key gets out = 0 and lse = -infinity.
// FLOAT8: Q, K and V are e4m3, with one factor per batch and key head (forward_operands.cuh).
//   Probabilities are rounded to e4m3, or with PRECISE to float16; row sums use the unrounded
//   values. V is transposed, or with PRECISE widened to float16, beforehand by
//   flash_attention_fp8_values or, with PREPARES, tile by tile by three warps of the producer
//   warpgroup. The tensor cores accumulate FP8 products with about 14 bits: every
//   PROMOTION_INTERVAL tiles a consumer moves its accumulators to partial outputs in shared memory
//   (partial_outputs.cuh).
// TEACHER: also the divergence of these attention distributions from a teacher's, row by row
//   (forward_teacher_sm90.cuh), in the same pass over the scores. A consumer issues the teacher's
//   Q K^T before its own. No score options other than CAUSAL, WINDOW and VARLEN.
// Shared memory, dynamic: Q stages, a tile of 64 queries per consumer | K stages | PREPARES: two
//   stages of unprepared V | V stages | PROMOTION_INTERVAL: VALUE_DIM / 2 bfloat16 and two
//   maxima per consumer thread | TEACHER: its Q stages | its K stages. Tiles are stored in parts as
//   wide as the swizzle (shared_tile.cuh); V prepared for e4m3 as in float8_values.cuh. Static:
//   barriers, and per-stage data from the producer (work items, row counts, requests).
// Tensor maps: Q, K, V as [batch, seq, heads, columns] with boxes [1, rows, 1, part], rows 64 of Q
//   for Q and TILE_N for K and V, parts of 64 columns (FP8: 64 for heads of up to 64 columns, else
//   128), swizzled by the width of a part in bytes; rows and columns outside the tensor read as
//   zero.
// Macros: DTYPE float16|bfloat16; HEAD_DIM, VALUE_DIM multiples of 16 up to 256: multiplied columns
//   of Q and K, and of V; VALUE_PADDED 0|1 V has fewer than VALUE_DIM columns; CONSUMERS 2|3|4;
//   TILE_N multiple of 16; STAGES, at least 2; QUERY_STAGES, at least 1; THREADS = 128 * (CONSUMERS
//   + 1); BLOCKS_PER_SM; those of score_options.cuh; PING_PONG 0|1.
//   BLOCK_SPARSE 0|1; with 1: BLOCK_Q queries and BLOCK_KV keys of a block of the mask.
//   PAGED 0|1; with 1: PAGE_ROWS, 0 or a multiple of 8 that divides TILE_N and the block size.
//   FLOAT8 0|1; with 1: HEAD_DIM and TILE_N multiples of 32, PRECISE 0|1, PREPARES 0|1,
//   PROMOTION_INTERVAL (0: outputs stay in the accumulators).
//   TEACHER 0|1, default 0; with 1: TEACHER_DIM as HEAD_DIM, KNOWN_T 0|1, KNOWN_S 2, PRECISE 0
//   (kl_rows.cuh).
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/attention.py.
#include "attention/block_lists.cuh"
#include "attention/forward_pages_sm90.cuh"
#include "attention/forward_pipelines_sm90.cuh"
#include "attention/forward_producer_sm90.cuh"
#include "attention/forward_teacher_sm90.cuh"
#include "attention/forward_work_sm90.cuh"
#include "attention/parameters.cuh"
#include "attention/partial_outputs.cuh"
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

// Block masks: each tile of keys either covers complete mask blocks or is inside one.
constexpr bool kWholeBlocks =
    BLOCK_KV % 8 == 0 && (TILE_N % BLOCK_KV == 0 || BLOCK_KV % TILE_N == 0);

// The output's last chunk of 32 columns is partial: stores check the column.
constexpr bool kGuarded = VALUE_PADDED || VALUE_DIM % 32 != 0;
constexpr float kLn2 = 0.6931471805599453f;

using Scores = float[TILE_N / 2];
using Outputs = float[VALUE_DIM / 2];
using Probabilities = Operands::Probabilities;

// Issues scores = Q K^T.
CUKIT_DEVICE void multiply_keys(Scores& scores, unsigned long long q, unsigned long long k) {
#pragma unroll
  for (int step = 0; step < KeyTile::kSteps; ++step) {
    Operands::multiply_keys(scores, q + QueryTile::k_step(step), k + KeyTile::k_step(step),
                            step > 0);
  }
  cukit::wgmma_commit();
}

// Issues out += P V.
CUKIT_DEVICE void multiply_values(Outputs& out, const Probabilities& p, unsigned long long v) {
#pragma unroll
  for (int step = 0; step < ValueTile::kRowSteps; ++step) {
    Operands::multiply_values(out, p[step], v + ValueTile::mn_step(step));
  }
  cukit::wgmma_commit();
}

// ---- Scores ----

// Returns whether a maximum of the warp has grown enough for its rows to be rescaled by `shrink`.
CUKIT_DEVICE bool update_maxima(cukit::SoftmaxRows& softmax, float (&shrink)[2],
                                const Scores& scores, float factor) {
  return cukit::update_maxima<TILE_N / 2, Operands::kIntegerMaxima>(softmax, shrink, scores, factor,
                                                                   Operands::kGrowth);
}

struct KeyPlace {
  int first;      // the tile's first key
  bool unmasked;  // no key is masked for any query of the consumer
};

// ---- Results ----

// Destinations of the results.
struct Results {
  T* out;
  float* lse;
  cukit::HeadStrides strides;
  int heads_q, value_dim;
};

// Normalises the outputs and stores the warp's sixteen rows; `row` is the lane's first row.
CUKIT_DEVICE void finish(const Outputs& outputs, const cukit::SoftmaxRows& softmax, float factor,
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
  cukit::write_rows<kGuarded>(outputs, rows);
}

// PING_PONG: for each tile of keys the consumers issue their wgmmas one after the other. Consumers
// that start a tile of queries together would otherwise issue wgmmas, and then compute
// exponentials, at the same time until they have drifted apart, which takes too long for the short
// rows of a causal mask.
class IssueOrder {
 public:
  CUKIT_DEVICE explicit IssueOrder(int consumer) : consumer_(consumer) {
    if (consumer_ == CONSUMERS - 1) pass();
  }

  CUKIT_DEVICE void wait() const {
    if constexpr (PING_PONG) cukit::named_sync(kFirstBarrier + consumer_, kThreads);
  }
  CUKIT_DEVICE void pass() const {
    const int next = consumer_ + 1 == CONSUMERS ? 0 : consumer_ + 1;
    if constexpr (PING_PONG) cukit::named_arrive(kFirstBarrier + next, kThreads);
  }
  // For a tile of keys that this consumer skips.
  CUKIT_DEVICE void skip() const {
    wait();
    pass();
  }
  // Consumer 0 waits for the last pass, so that every arrival is matched by a wait.
  CUKIT_DEVICE void end() const {
    if (consumer_ == 0) wait();
  }

 private:
  static constexpr int kFirstBarrier = 1;
  static constexpr int kThreads = 2 * cukit::kWarpgroupThreads;
  int consumer_;
};

// Whether accumulators move to partial outputs, and whether the move and the rescaling overlap Q
// K^T of the next tile, for which a VALUE_DIM of 256 leaves no registers.
constexpr bool kPartialOutputs = PROMOTION_INTERVAL > 0;
constexpr bool kUpdatesEarly = kPartialOutputs && VALUE_DIM < 256;

CUKIT_DEVICE void run(Pipelines& pipelines, const Tiles& tiles, const Results& results,
                      const Arguments& arguments, const cukit::Descales& descales,
                      const TeacherArguments& teacher_arguments,
                      const cukit::ScoreSettings& settings, float scale) {
  const int first_index = Block::consumer_group();
  // The index of this warpgroup among the consumers. FP8, BIAS and TEACHER variants recompute it,
  // because they have no register to hold it throughout the loop.
  const auto index = [&] {
    return FLOAT8 || BIAS || TEACHER ? Block::consumer_group() : first_index;
  };
  const int lane_row = cukit::accumulator_row();
  const int lane_column = cukit::accumulator_column();
  const unsigned long long q_first = cukit::uniform_descriptor(QueryTile::k_major(tiles.q));
  const unsigned long long k_first = cukit::uniform_descriptor(KeyTile::k_major(tiles.k));
  const unsigned long long v_first = cukit::uniform_descriptor(ValueTile::mn_major(tiles.v));
  QueryState q_state;
  KeyState k_state;
  KeyState v_state;

  Outputs outputs;
  Scores scores;
  Probabilities p;
  cukit::SoftmaxRows softmax;
  unsigned long long q;
  cukit::PartialOutputs<VALUE_DIM / 2, Block::kConsumerWarps * cukit::kWarpSize, PROMOTION_INTERVAL>
      partial_outputs(tiles.partial_outputs);

  Teacher teacher(pipelines, tiles, teacher_arguments, q_first);
  IssueOrder order(first_index);
  // Pipeline states advance in release_keys (K and Q) and in the loop over key tiles (V); the other
  // lambdas only read them.
  const auto issue_scores = [&] {
    const unsigned long long k = k_first + k_state.index * KeyTile::kStage;
    teacher.wait(k_state);
    pipelines.k.wait(k_state);
    order.wait();
    cukit::wgmma_fence();
    teacher.multiply(k_state);
    multiply_keys(scores, q, k);
  };
  const auto issue_outputs = [&] {
    multiply_values(outputs, p, v_first + v_state.index * ValueTile::kStage);
  };

  cukit::QueryTileScheduler<kTileM, TILE_N> scheduler(arguments.problem, arguments.plan, settings);
  QueryWork work{};
  int part = first_index;  // index of this warpgroup's 64 queries in the tile
  while (next_work(work, pipelines, index(), q_state, scheduler)) {
    const int first_row = work.first_row + part * cukit::kWarpgroupRows;
    const int row = first_row + lane_row;
    const int causal_offset = work.sequence.seq_kv - work.sequence.seq_q;
    const float descale = descales.scores(work.b, work.head / arguments.gqa_group);
    const float scale_log2 = scale * descale;
    const float factor = cukit::exponent_factor(scale_log2);
#if FLOAT8 && SOFTCAP
    cukit::ScoreSettings score_settings = settings;
    score_settings.cap_inner *= descale;
#else
    const cukit::ScoreSettings& score_settings = settings;
#endif
    const cukit::TileRange visible = cukit::own_keys<TILE_N>(work, first_row, settings);
    const cukit::HeadScores head(arguments.arrays, settings, work.b, work.head, work.sequence);
    const int seq_kv = cukit::warp_uniform(head.seq_kv);
    const bool bias_aligned = BIAS && cukit::warp_uniform(cukit::rows_are_aligned(
                                          head.bias, settings.bias_row, settings.bias_column));
    const bool mask_aligned = MASK && cukit::warp_uniform(cukit::rows_are_aligned(
                                          head.mask, settings.mask_row, settings.mask_column));
    // Skips masked tiles in the order of the loads, in which V is one tile behind K.
    for (int masked = work.keys.end; masked > visible.end; --masked) {
      order.skip();
      teacher.skip(k_state);
      pipelines.k.skip(k_state);
      if (masked < work.keys.end) pipelines.v.skip(v_state);
    }
    int tile = visible.end - 1;
    float shrink[2];
    const int q_stage = q_state.index * CONSUMERS + index();
    q = q_first + q_stage * QueryTile::kStage;
    const auto first_statistic = [&] {
      return cukit::row_statistics(work.b, work.head, results.heads_q, work.sequence, settings);
    };
    teacher.start(q_stage, first_statistic() + row, work.sequence.seq_q - row, factor);
    // Turns the products of a tile of keys into scores; masked scores become -infinity.
    const auto apply_options = [&](const KeyPlace& keys) {
      const cukit::FragmentPlace at{row, keys.first + lane_column};
      const bool partial = keys.first + TILE_N > seq_kv;  // fewer than TILE_N keys
      if constexpr (cukit::kScoresModified) {
        if (BIAS && (partial || !bias_aligned)) {
          cukit::modify_scores<true>(scores, at, head, scale_log2, score_settings);
        } else {
          cukit::modify_scores<false>(scores, at, head, scale_log2, score_settings);
          if constexpr (BIAS) {
            cukit::add_rows(scores, head.bias, settings.bias_row, at, head.seq_q);
          }
        }
      }
      if (MASK && (partial || !mask_aligned)) {
        cukit::mask_scores(scores, at, [&](int i, int j) {
          return head.masked(cukit::visible_keys(i, causal_offset, head.seq_kv, settings), i, j,
                             settings);
        });
      } else if (!keys.unmasked) {
        if constexpr (MASK) {
          cukit::mask_rows(scores, head.mask, settings.mask_row, at, head.seq_q);
        }
        cukit::mask_keys(scores, at, causal_offset, head.seq_kv, settings);
#if BLOCK_SPARSE
        const cukit::BlockMask blocks(arguments.blocks, work.head);
        if constexpr (kWholeBlocks) {
          blocks.mask_whole_blocks(scores, at);
        } else {
          cukit::mask_scores(scores, at, blocks);
        }
#endif
      }
    };
    // Called once Q K^T of `tile` has completed: releases its stage of K and, after the last tile,
    // the stage of Q. Returns the tile's place; BLOCK_SPARSE reads it from pipelines.listed.
    const auto release_keys = [&] {
      KeyPlace place{tile * TILE_N, visible.unmasked(tile)};
#if BLOCK_SPARSE
      const int listed = cukit::warp_uniform(pipelines.listed[k_state.index]);
      __syncwarp();  // all lanes have read `listed` before one of them releases the stage
      place.first = listed / 2 * TILE_N;
      place.unmasked = listed % 2 == 0;
#endif
      pipelines.k.release(k_state);
      k_state.advance();
      if (tile == visible.begin) {
        pipelines.q[index()].release(q_state);
        q_state.advance();
      }
      return place;
    };

    const auto mask_teacher = [&](Scores& products) {
      cukit::mask_keys(products, {row, tile * TILE_N + lane_column}, causal_offset, seq_kv,
                       settings);
    };

    // First tile: scores and probabilities.
    issue_scores();
    order.pass();
    teacher.receive<1>(k_state, visible.unmasked(tile), mask_teacher);
    cukit::wgmma_wait<0>(scores);
    apply_options(release_keys());
    teacher.add_cross(scores, visible.unmasked(tile));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      cukit::start_row(softmax.max[half], softmax.sum[half], arguments.arrays, work.head,
                       scale_log2, lane_column == 0, 1 << Operands::kOffset);
    }
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 2; ++i) outputs[i] = 0.0f;
    partial_outputs.clear();
    update_maxima(softmax, shrink, scores, factor);
    cukit::exponentiate<Operands::kOffset>(softmax, scores, factor);
    if (visible.end < work.keys.end) pipelines.v.skip(v_state);
    pipelines.v.wait(v_state);
    Operands::pack(p, scores);

    bool grown = Operands::kGrowth < 0.0f;
    // Rescales the outputs if `rescale` is true; every PROMOTION_INTERVAL tiles moves them to the
    // partial outputs.
    const auto update_outputs = [&](bool rescale) {
      if (rescale) cukit::rescale(outputs, shrink);
      if (kPartialOutputs && partial_outputs.due()) {
        partial_outputs.take(outputs, softmax, factor);
      }
      if (kUpdatesEarly) cukit::wgmma_fence();
    };
    // An iteration computes the scores of `tile` and adds P V of the previous one to the outputs.
    while (--tile >= visible.begin) {
      issue_scores();
      if constexpr (kUpdatesEarly) update_outputs(grown);
      issue_outputs();
      order.pass();
      teacher.receive<2>(k_state, visible.unmasked(tile), mask_teacher);
      cukit::wgmma_wait<1>(scores);
      apply_options(release_keys());
      teacher.add_cross(scores, visible.unmasked(tile));
      grown = update_maxima(softmax, shrink, scores, factor);
      cukit::exponentiate<Operands::kOffset>(softmax, scores, factor);
      const KeyState v_read = v_state;
      v_state.advance();
      if constexpr (FLOAT8) {
        pipelines.v.wait(v_state);
      } else {
        // Keeps the exponentials above the wait, where they overlap P V. FP8 is faster if the
        // compiler may move them below the wait.
        pipelines.v.wait_after(v_state, fminf(softmax.sum[0], softmax.sum[1]));
      }
      cukit::wgmma_wait<0>(outputs);
      pipelines.v.release(v_read);
      if constexpr (!kUpdatesEarly) update_outputs(grown);
      Operands::pack(p, scores);
    }

    // Outputs of the last tile.
    if (kUpdatesEarly && grown) cukit::rescale(outputs, shrink);
    cukit::wgmma_fence();
    issue_outputs();
    cukit::wgmma_wait<0>(outputs);
    pipelines.v.release(v_state);
    v_state.advance();
    for (int masked = work.keys.begin; masked < visible.begin; ++masked) {
      order.skip();
      teacher.skip(k_state);
      pipelines.k.skip(k_state);
      pipelines.v.skip(v_state);
    }
    if (kPartialOutputs && partial_outputs.any) partial_outputs.add_to(outputs, softmax, factor);
    // FP8 and TEACHER recompute the row: they have no register to hold it throughout the loop.
    const int result_row =
        FLOAT8 || TEACHER ? first_row + cukit::accumulator_row(cukit::opaque(threadIdx.x)) : row;
    finish(outputs, softmax, factor, descales.values(work.b, work.head / arguments.gqa_group),
           results, work, result_row, settings);
    teacher.finish(softmax, first_statistic() + result_row, work.sequence.seq_q - result_row);
    part = part_of_next_tile(part);
  }
  order.end();
}

}  // namespace consumer

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) flash_attention_sm90(
    const __grid_constant__ cukit::TensorMap q,  // [batch, seq_q, heads_q, head_dim]
    // PAGED: k and v of the cache, [blocks, block_size, ...]; unused with PAGE_ROWS 0
    const __grid_constant__ cukit::TensorMap k,  // [batch, seq_kv, heads_q / group, head_dim]
    const __grid_constant__ cukit::TensorMap v,  // [batch, seq_kv, heads_q / group, value_dim]
    T* __restrict__ out,                         // [batch, seq_q, heads_q, value_dim]
    float* __restrict__ lse,  // [batch, heads_q, seq_q]; VARLEN [heads_q, total_q]; or null
    const float* __restrict__ alibi_slopes,      // ScoreArrays
    const float* __restrict__ sinks,             // ScoreArrays
    const cukit::bias_t* __restrict__ bias,      // ScoreArrays
    const unsigned char* __restrict__ mask,      // ScoreArrays
    const int* __restrict__ cu_seqlens_q,        // [batch + 1]
    const int* __restrict__ cu_seqlens_kv,       // [batch + 1]; PAGED: [batch], lengths
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
    const float* __restrict__ v_descale,  // one factor per batch and key head; null: 1
#endif
#if PAGED
    const __grid_constant__ cukit::PagedKeys keys,
#endif
#if TEACHER
    const __grid_constant__ cukit::TensorMap q_t,  // [batch, seq_q, heads_q, teacher_dim]
    const __grid_constant__ cukit::TensorMap k_t,  // [batch, seq_kv, heads_q / teacher_group, ...]
    const float* __restrict__ known_t,             // KlRowArrays, as the next two
    float* __restrict__ kl, float* __restrict__ lse_t,
    const __grid_constant__ cukit::TeacherParameters teacher,
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
          RequestState request_state;
          const producer::PagedKeyValues key_values{pipelines, request_state, params.settings};
#elif TEACHER
          const producer::MappedKeyValues key_values{&k,   &v, params.group, params.group,
                                                     &k_t, teacher.teacher_group};
#else
          const producer::MappedKeyValues key_values{&k, &v, params.group, params.group};
#endif
#if TEACHER
          producer::run(pipelines, tiles, &q, key_values, arguments, params.settings, &q_t);
#else
          producer::run(pipelines, tiles, &q, key_values, arguments, params.settings);
#endif
        }
#if ZERO_FILLED
        if (threadIdx.x / cukit::kWarpSize == 1) zero_filler::run(pipelines, tiles);
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
          fetcher::run(pipelines, tiles, k_rows, v_rows, block_table, keys, params.group);
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
#if TEACHER
        const consumer::TeacherArguments teacher_arguments{
            {known_t, nullptr, kl, lse_t, nullptr}, teacher.teacher_scale_log2};
#else
        const consumer::TeacherArguments teacher_arguments{};
#endif
        consumer::run(pipelines, tiles, results, arguments, descales, teacher_arguments,
                      params.settings, params.scale_log2);
      });
}
