// Multi-head latent attention over a cache of FP8 latents, for Hopper (wgmma, TMA): computes the
// same as mla_attention_sm90.cu, from codes in place of 16-bit latents (mla_codes.cuh).
//
// Papers: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434 (section 2.1.2); Shah et al.,
//   "FlashAttention-3", arXiv:2407.08608 (warp specialisation, softmax overlaps wgmmas).
// Mapping: both products are transposed, so that the decoded latents are operand A of wgmma, which
//   may be in registers:
//
//     scores^T [64 keys, heads] = C Q^T,    outputs^T [512, heads] = C^T P^T
//
//   Shared memory holds only the codes; decoded latents are only in registers. A block processes
//   its share of the batch (mla_work.cuh) in pieces. A piece is a tile of up to HEADS rows (heads
//   of queries) and a range of pages of 64 keys. Four warpgroups:
//     - producer: one thread copies pages, a quarter (16 tokens, all their bytes) per copy, to a
//       ring of SLOTS slots, and loads the queries.
//     - scores: converts the queries (for the first piece together with the outputs warpgroups),
//       computes the scores of a page, row maxima and exponentials, and stores the exponentials
//       (the weights) to one of two buffers. Warp w decodes quarter w.
//     - outputs, two warpgroups: group g accumulates output columns 256 g .. 256 g + 255.
//   A slot is released as soon as its codes are in registers.
//   Weights: a key's latents are decoded in its own unit 2^e, and the weights include the unit:
//   exp2(score + e - max), where max is at most 8 below the maximum of score + e over a tile's
//   pages so far (online_softmax.cuh). Weights are therefore at most 2^8 for any scales. Row sums
//   add weights times 2^-e.
//   Keys are ordered within a warp's rows, and columns within the k steps, so that the scores
//   warpgroup loads 16 bytes of codes at a time without bank conflicts.
//   Rows of a page beyond the last key may hold arbitrary data: their scores are masked, and their
//   codes are replaced by zeros. A piece that does not cover its request is stored to `partial`,
//   and mla_merge.cu merges the pieces.
// Shared memory, dynamic: queries (HEADS x 576) | weights of two pages (64 x HEADS each) | slots.
// Tensor map: q as [batch, seq_q * heads_q, 576], boxes [1, HEADS, 64].
// Macros: DTYPE bfloat16; HEADS 16|32|64; SLOTS; SCORE_REGISTERS per thread of the scores
//   warpgroup; TEAM blocks that share pages, a divisor of the grid and of the number of tiles of a
//   request; CAUSAL 0|1; THREADS 512.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order that depends on the
//   lengths and the grid.
// Reference: cukit/reference/mla_attention.py.
#include "attention/mla_codes.cuh"
#include "attention/mla_work.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_group.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/scores/score_options.cuh"
#include "common/softmax/online_softmax.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"

namespace {

using namespace cukit::mla;

using Latent = __half;  // operand type of latents, their queries and weights

constexpr int kProducerRegisters = 24;
using Block = cukit::WarpSpecialized<3, kProducerRegisters>;
constexpr int kOutputRegisters =
    (4 * Block::kStartRegisters - kProducerRegisters - SCORE_REGISTERS) / 2 / 8 * 8;

constexpr cukit::OperandSwizzle kWeightSwizzle = HEADS == 64   ? cukit::OperandSwizzle::Bytes128
                                                 : HEADS == 32 ? cukit::OperandSwizzle::Bytes64
                                                               : cukit::OperandSwizzle::Bytes32;
using QueryTile = cukit::SharedTile<T, HEADS, kWidth>;
using WeightTile = cukit::SharedTile<Latent, kPage, HEADS, kWeightSwizzle>;

constexpr int kQuarters = cukit::kWarpgroupWarps;  // of a page
constexpr int kSlotBytes = kPage / kQuarters * kCodedBytes;
constexpr int kScoreBarrier = 1;
constexpr int kConsumerBarrier = 2;
constexpr int kOutputGroups = 2;
constexpr int kOutputWarps = kOutputGroups * cukit::kWarpgroupWarps;
constexpr int kGroupColumns = kLatent / kOutputGroups;
constexpr int kOutputTiles = kGroupColumns / cukit::kWarpgroupRows;  // of wgmma, per group
constexpr int kLaneColumns = 2 * kOutputTiles;
constexpr int kHeadPairs = HEADS / 8;  // of a lane: heads 8 n + 2 (lane % 4) and + 1

static_assert(THREADS == Block::kThreads, "one producer, one scores and two outputs warpgroups");
static_assert(HEADS == 16 || HEADS == 32 || HEADS == 64, "supported numbers of rows per tile");
static_assert(SLOTS >= 2 * kQuarters, "slots for the page of the scores and the page of the outputs");
static_assert(kLaneColumns == 8, "a lane's columns are contiguous");

using SlotState = cukit::PipelineState<SLOTS>;

struct Barriers {
  cukit::Pipeline<SLOTS> slots;
  cukit::Pipeline<1> queries;
  cukit::Pipeline<2> weights;
  cukit::Pipeline<1> totals;

  CUKIT_DEVICE void init() {
    slots.init(1 + kOutputWarps);
    queries.init(cukit::kWarpgroupWarps);
    weights.init(kOutputWarps, cukit::kWarpgroupWarps);
    totals.init(kOutputWarps);
  }
};

struct Tiles {
  unsigned char* queries;
  unsigned char* weights;
  unsigned char* slots;

  CUKIT_DEVICE explicit Tiles(unsigned char* shared)
      : queries(shared),
        weights(queries + QueryTile::kBytes),
        slots(weights + 2 * WeightTile::kBytes) {}

  CUKIT_DEVICE unsigned char* slot(const SlotState& at) const {
    return slots + at.index * kSlotBytes;
  }
};

struct Arrays {
  const unsigned char* cache;  // [blocks, 64, 656]
  T* out;                      // [batch, seq_q, heads_q, 512]
  float* lse;                  // [batch, heads_q, seq_q] or null
  const int* block_table;      // [batch, table_row]
  const int* seq_lens;         // [batch]
  Partial partial;
};

// Data that the warps exchange through shared memory.
struct Exchange {
  ParkedShare shares[THREADS / cukit::kWarpSize];
  int share_units;  // units (pages) per team
  // Passed to the outputs warpgroups with each of the two buffers of weights:
  int grown[2];          // whether the outputs must be rescaled
  alignas(16) float shrink[2][HEADS];
  alignas(16) __half ratios[2][kScaleGroups][kPage];
  // Exchanged among the scores warps:
  // One copy per warp, heads in the order of the lanes that hold them: lane % 4 == 0, then 1, 2, 3.
  alignas(16) float maxima[cukit::kWarpgroupWarps][HEADS];
  int votes[2][cukit::kWarpgroupWarps];
  unsigned query_tops[Block::kConsumerWarps];  // bits of each warp's largest query element
  Statistics totals[HEADS];  // of a piece
};

// Converts the queries of a piece, and returns their unit. Called by the scores warps and, for a
// block's first piece, also by the outputs warps, which are idle at that time.
CUKIT_DEVICE int convert_queries(unsigned char* tile, Exchange& exchange, bool first) {
  using Queries = CodedQueries<QueryTile>;
  const int warps = first ? Block::kConsumerWarps : cukit::kWarpgroupWarps;
  const int threads = warps * cukit::kWarpSize;
  const int barrier = first ? kConsumerBarrier : kScoreBarrier;
  const int thread = static_cast<int>(threadIdx.x) - cukit::kWarpgroupThreads;
  const unsigned own =
      __reduce_max_sync(cukit::kFullMask, Queries::largest(tile, thread, threads));
  if (thread % cukit::kWarpSize == 0) exchange.query_tops[thread / cukit::kWarpSize] = own;
  cukit::named_sync(barrier, threads);
  unsigned top = 0;
#pragma unroll
  for (int warp = 0; warp < Block::kConsumerWarps; ++warp) {
    if (warp < warps) top = max(top, exchange.query_tops[warp]);
  }
  const int unit = Queries::unit(top);
  Queries::convert(tile, thread, threads, unit);
  cukit::fence_proxy_async();
  cukit::named_sync(barrier, threads);
  return unit;
}

namespace producer {

// One warp; its first lane issues the copies.
CUKIT_DEVICE void run(Barriers& barriers, const Tiles& tiles, ParkedShare& parked,
                      const cukit::TensorMap* q, const Arrays& arrays,
                      const cukit::LatentParameters& params) {
  const bool starts = threadIdx.x == 0;
  const int member = blockIdx.x % TEAM;
  SlotState at;
  const auto load_queries = [&](const Piece& piece) {
    const cukit::PipelineState<1> state = parked.piece_state();
    barriers.queries.acquire(state);
    QueryTile::load(tiles.queries, q, barriers.queries.expect(state, QueryTile::kBytes), 0,
                    {piece.place.b, (piece.place.problem * TEAM + member) * kRows}, kWidth);
  };
  bool first_piece = true;
  for (Share share = parked.share(); !share.done(); parked.advance(share, arrays.seq_lens, params)) {
    const Piece piece = share.piece();
    // Queries of later pieces are loaded after the piece's first page: until then the queries of
    // the previous piece are in use.
    if (starts && first_piece) load_queries(piece);
    const int* const row =
        arrays.block_table + static_cast<long long>(piece.place.b) * params.table_row;
    // A request of length 0 has one page, for which block 0 is loaded.
    const int pages = min(piece.end, (piece.place.request.seq_kv + kPage - 1) / kPage);
    const auto block_of = [&](int page) { return page < pages ? row[page] : 0; };
    int block = block_of(piece.begin);
    int next = block_of(piece.begin + 1);
#pragma unroll 1
    for (int page = piece.begin; starts && page < piece.end; ++page) {
      const int after = block_of(page + 2);  // loaded early to hide its latency
      const unsigned char* from = arrays.cache + block * params.cache_block;
#pragma unroll 1
      for (int quarter = 0; quarter < kQuarters; ++quarter, from += kSlotBytes) {
        barriers.slots.acquire(at);
        cukit::bulk_load(tiles.slot(at), from, kSlotBytes, barriers.slots.expect(at, kSlotBytes));
        at.advance();
      }
      if (page == piece.begin && !first_piece) load_queries(piece);
      block = next;
      next = after;
    }
    first_piece = false;
  }
}

}  // namespace producer

namespace scores {

using Scores = float[HEADS / 2];

constexpr int kChunks = kLatent / QueryTile::kPartColumns;
constexpr int kChunkSteps = QueryTile::kPartColumns / 16;

CUKIT_DEVICE int warp() { return threadIdx.x / cukit::kWarpSize % cukit::kWarpgroupWarps; }
CUKIT_DEVICE void sync() { cukit::named_sync(kScoreBarrier, cukit::kWarpgroupThreads); }

// The key, within a quarter, of a lane's first row; the key of its second row is 8 further.
// Neighbouring rows are four keys apart, half a period of the shared-memory banks.
CUKIT_DEVICE int key_of_row(int row) { return row / 2 + 4 * (row % 2); }

CUKIT_DEVICE void run(Barriers& barriers, const Tiles& tiles, Exchange& exchange,
                      const Arrays& arrays, const cukit::LatentParameters& params) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int own_warp = cukit::warp_uniform(warp());
  const int own_key = own_warp * (kPage / kQuarters) + key_of_row(lane / 4);
  const int member = blockIdx.x % TEAM;
  ParkedShare& parked = exchange.shares[threadIdx.x / cukit::kWarpSize];
  float2* const maxima =
      reinterpret_cast<float2*>(exchange.maxima[own_warp]) + lane % 4 * kHeadPairs;
  const unsigned long long q_first = cukit::uniform_descriptor(QueryTile::k_major(tiles.queries));

  // Scratch space in a buffer of weights that the outputs warpgroups do not use: a float2 for each
  // warp, pair of heads n and lane % 4.
  const auto scratch = [&](const cukit::PipelineState<2>& buffer) {
    return reinterpret_cast<float2*>(tiles.weights + buffer.index * WeightTile::kBytes) + lane % 4;
  };

  SlotState at;
  at.index = own_warp;
  bool first_piece = true;
  cukit::PipelineState<2> weights;
  for (Share share = parked.share(); !share.done(); parked.advance(share, arrays.seq_lens, params)) {
    const Piece piece = share.piece();
    const Rows rows(piece.place.b, piece.place.problem * TEAM + member, params);
    const int seq_kv = piece.place.request.seq_kv;
    const auto visible_end = [&](int query) {
      return cukit::visible_keys(query, seq_kv - params.seq_q, seq_kv, params.settings).end;
    };
    const int visible_to_all = visible_end(0);
    float sum[2 * kHeadPairs];
#pragma unroll
    for (float& each : sum) each = 0.0f;
    if (lane < 4) {
#pragma unroll
      for (int n = 0; n < kHeadPairs; ++n) maxima[n] = make_float2(0.0f, 0.0f);
    }
    __syncwarp();

    barriers.queries.wait(parked.piece_state());
    const int query_unit = convert_queries(tiles.queries, exchange, first_piece);
    first_piece = false;
    const float query_factor = power_of_two(query_unit) * params.scale_log2;

#pragma unroll 1
    for (int page = piece.begin; page < piece.end; ++page) {
      const int first_key = page * kPage;
      barriers.slots.wait(at);
      const unsigned char* const token = tiles.slot(at) + key_of_row(lane / 4) * kCodedBytes;
      KeyScales key[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        key[half].load(token + half * 8 * kCodedBytes, first_key + own_key + 8 * half < seq_kv);
      }

      Scores acc;
      unsigned a[2][kChunkSteps][4];
      uint4 codes[2];    // of the next chunk
      uint4 rope[2][2];  // rotated columns
      const auto load_codes = [&](int chunk) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          codes[half] = *reinterpret_cast<const uint4*>(
              token + half * 8 * kCodedBytes + chunk * QueryTile::kPartColumns + lane % 4 * 16);
        }
      };
      load_codes(0);
#pragma unroll
      for (int chunk = 0; chunk <= kChunks; ++chunk) {
        unsigned(&operand)[kChunkSteps][4] = a[chunk % 2];
        if (chunk < kChunks) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const unsigned ratio =
                key[half].scale_pair(chunk * QueryTile::kPartColumns / kScaleColumns);
            const unsigned words[4] = {codes[half].x, codes[half].y, codes[half].z, codes[half].w};
#pragma unroll
            for (int i = 0; i < kChunkSteps; ++i) {
              unsigned pairs[2];
              cukit::unpack_e4m3(pairs, words[i]);
              operand[i][half] = multiply_pairs<Latent>(pairs[0], ratio);
              operand[i][half + 2] = multiply_pairs<Latent>(pairs[1], ratio);
            }
          }
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const unsigned inverse = key[half].inverse_pair();
#pragma unroll
            for (int j = 0; j < kChunkSteps / 2; ++j) {
              const uint4 four = rope[half][j];
              operand[2 * j][half] = multiply_pairs<T>(four.x, inverse);
              operand[2 * j][half + 2] = multiply_pairs<T>(four.y, inverse);
              operand[2 * j + 1][half] = multiply_pairs<T>(four.z, inverse);
              operand[2 * j + 1][half + 2] = multiply_pairs<T>(four.w, inverse);
            }
          }
          __syncwarp();
          barriers.slots.release(at);
        }
        if (chunk + 1 < kChunks) {
          load_codes(chunk + 1);
        } else if (chunk < kChunks) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < kChunkSteps / 2; ++j) {
              rope[half][j] = *reinterpret_cast<const uint4*>(
                  token + half * 8 * kCodedBytes + kRopeByte + j * 64 + lane % 4 * 16);
            }
        }
        cukit::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kChunkSteps; ++i) {
          const unsigned long long b = q_first + QueryTile::k_step(chunk * kChunkSteps + i);
          if (chunk < kChunks) {
            cukit::wgmma<Latent, HEADS>(acc, operand[i], b, chunk + i > 0);
          } else {
            cukit::wgmma<T, HEADS>(acc, operand[i], b, true);
          }
        }
        cukit::wgmma_commit();
        if (chunk < kChunks) cukit::wgmma_wait<1>(acc);
      }
      at.index += kQuarters;
      if (at.index >= SLOTS) {
        at.index -= SLOTS;
        at.phase ^= 1;
      }
      cukit::wgmma_wait<0>(acc);

      // score + e - max, in log2 units.
#pragma unroll
      for (int n = 0; n < kHeadPairs; n += 2) {
        const float4 four = *reinterpret_cast<const float4*>(&maxima[n]);
        const float max[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int half = i / 2 % 2;
          const float factor = query_factor * key[half].unit();
          float& score = acc[4 * n + i];
          score = fmaf(score, factor, key[half].unit_log2() - max[i / 4 * 2 + i % 2]);
        }
      }
      if (first_key + kPage > visible_to_all) {
#pragma unroll
        for (int n = 0; n < kHeadPairs; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int limit =
                visible_end(rows.query(8 * n + cukit::accumulator_column() + i, params));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (first_key + own_key + 8 * half >= limit) {
                acc[4 * n + 2 * half + i] = -cukit::infinity();
              }
            }
          }
      }
      // Maxima are exact after the first page; later all of them are updated if one has grown by
      // more than kLazyGrowth.
      bool renew = page == piece.begin;
      if (!renew) {
        float tops[4] = {acc[0], acc[1], acc[2], acc[3]};  // independent chains
#pragma unroll
        for (int i = 4; i < HEADS / 2; ++i) tops[i % 4] = fmaxf(tops[i % 4], acc[i]);
        const float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
        const bool grown = __any_sync(cukit::kFullMask, top > cukit::kLazyGrowth);
        int(&votes)[cukit::kWarpgroupWarps] = exchange.votes[page % 2];
        if (lane == 0) votes[own_warp] = grown;
        sync();
        renew = (votes[0] | votes[1] | votes[2] | votes[3]) != 0;
      }
      barriers.weights.acquire(weights);
      const bool rescales = renew && page > piece.begin;
      if (renew) {
        // Exchanges each warp's maxima through the buffer that the weights will overwrite.
        float2* const tops = scratch(weights);
#pragma unroll
        for (int n = 0; n < kHeadPairs; ++n) {
          float2 top = make_float2(fmaxf(acc[4 * n], acc[4 * n + 2]),
                                   fmaxf(acc[4 * n + 1], acc[4 * n + 3]));
#pragma unroll
          for (int distance = 4; distance < cukit::kWarpSize; distance *= 2) {
            top.x = fmaxf(top.x, __shfl_xor_sync(cukit::kFullMask, top.x, distance));
            top.y = fmaxf(top.y, __shfl_xor_sync(cukit::kFullMask, top.y, distance));
          }
          if (lane < 4) tops[own_warp * HEADS / 2 + 4 * n] = top;
        }
        sync();
        const float least = page == piece.begin ? -cukit::infinity() : 0.0f;
#pragma unroll
        for (int n = 0; n < kHeadPairs; ++n) {
          float growth[2] = {least, least};
#pragma unroll
          for (int each = 0; each < cukit::kWarpgroupWarps; ++each) {
            const float2 top = tops[each * HEADS / 2 + 4 * n];
            growth[0] = fmaxf(growth[0], top.x);
            growth[1] = fmaxf(growth[1], top.y);
          }
          float shrink[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (growth[i] == -cukit::infinity()) growth[i] = 0.0f;  // no key is visible
            shrink[i] = exp2f(-growth[i]);
            sum[2 * n + i] *= shrink[i];
            acc[4 * n + i] -= growth[i];
            acc[4 * n + 2 + i] -= growth[i];
          }
          __syncwarp();
          if (lane < 4) {
            const float2 max = maxima[n];
            maxima[n] = make_float2(max.x + growth[0], max.y + growth[1]);
            if (own_warp == 0) {
              reinterpret_cast<float2*>(exchange.shrink[weights.index])[4 * n + lane] =
                  make_float2(shrink[0], shrink[1]);
            }
          }
        }
        sync();
      }
      if (own_warp == 0 && lane == 0) exchange.grown[weights.index] = rescales;

      __half(&ratios)[kScaleGroups][kPage] = exchange.ratios[weights.index];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ratios[lane % 4][own_key + 8 * half] = key[half].scale(lane % 4);
      }
#pragma unroll
      for (int n = 0; n < kHeadPairs; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[4 * n + i] = exp2f(acc[4 * n + i]);
          sum[2 * n + i % 2] = fmaf(acc[4 * n + i], key[i / 2].inverse(), sum[2 * n + i % 2]);
        }
      const unsigned tile =
          cukit::shared_address(tiles.weights) + weights.index * WeightTile::kBytes;
      const int row = own_warp * (kPage / kQuarters) + lane / 8 % 2 * 8 + key_of_row(lane % 8);
#pragma unroll
      for (int n = 0; n < kHeadPairs; n += 2) {
        unsigned pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const two = &acc[4 * n + 2 * i];
          pairs[i] = cukit::pack<Latent>(two[0], two[1]);
        }
        cukit::stmatrix_x4(WeightTile::address(tile, row, n + lane / 16), pairs);
      }
      cukit::fence_proxy_async();
      __syncwarp();
      if (lane == 0) barriers.weights.commit(weights);
      weights.advance();
    }
    barriers.queries.release(parked.piece_state());

    // Exchanges the warps' sums through the next buffer of weights.
    barriers.weights.acquire(weights);
    float2* const sums = scratch(weights);
#pragma unroll
    for (int n = 0; n < kHeadPairs; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& total = sum[2 * n + i];
#pragma unroll
        for (int distance = 4; distance < cukit::kWarpSize; distance *= 2) {
          total += __shfl_xor_sync(cukit::kFullMask, total, distance);
        }
      }
      if (lane < 4) sums[own_warp * HEADS / 2 + 4 * n] = make_float2(sum[2 * n], sum[2 * n + 1]);
    }
    sync();
    const cukit::PipelineState<1> piece_state = parked.piece_state();
    barriers.totals.acquire(piece_state);
    if (own_warp == 0 && lane < 4) {
#pragma unroll
      for (int n = 0; n < kHeadPairs; ++n) {
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int each = 0; each < cukit::kWarpgroupWarps; ++each) {
          total.x += sums[each * HEADS / 2 + 4 * n].x;
          total.y += sums[each * HEADS / 2 + 4 * n].y;
        }
        const float2 max = maxima[n];
        Statistics* const to = &exchange.totals[8 * n + 2 * lane];
        to[0] = {total.x == 0.0f ? -cukit::infinity() : max.x, total.x};
        to[1] = {total.y == 0.0f ? -cukit::infinity() : max.y, total.y};
      }
    }
    __syncwarp();
    if (own_warp == 0 && lane == 0) barriers.totals.commit(piece_state);
  }
}

}  // namespace scores

namespace outputs {

using Outputs = float[kOutputTiles][HEADS / 2];

// Waits for all wgmmas.
CUKIT_DEVICE void finish(Outputs& out) {
#pragma unroll
  for (int tile = 0; tile < kOutputTiles; ++tile) cukit::wgmma_wait<0>(out[tile]);
}

CUKIT_DEVICE void run(Barriers& barriers, const Tiles& tiles, Exchange& exchange,
                      const Arrays& arrays, const cukit::LatentParameters& params) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int own_warp = cukit::warp_uniform(threadIdx.x / cukit::kWarpSize) - 2 * kQuarters;
  // Output columns are assigned to the rows of the wgmmas so that a lane's columns are contiguous.
  const int column = own_warp * (kLatent / kOutputWarps) + lane / 4 * kLaneColumns;
  const int scale_group = own_warp * (kLatent / kOutputWarps) / kScaleColumns;
  const int own_key = lane % 4 * 2;  // in a quarter; also own_key + 1, + 8 and + 9
  const int member = blockIdx.x % TEAM;
  ParkedShare& parked = exchange.shares[threadIdx.x / cukit::kWarpSize];
  const unsigned long long w_first =
      cukit::uniform_descriptor(WeightTile::mn_major(tiles.weights));
  barriers.queries.wait(parked.piece_state());
  convert_queries(tiles.queries, exchange, true);

  SlotState at;
  cukit::PipelineState<2> weights;
  for (Share share = parked.share(); !share.done(); parked.advance(share, arrays.seq_lens, params)) {
    Outputs out;
#pragma unroll
    for (int tile = 0; tile < kOutputTiles; ++tile)
#pragma unroll
      for (int i = 0; i < HEADS / 2; ++i) out[tile][i] = 0.0f;
    int left;  // pages of the piece
    int keys;  // from the first key of the current page to the end of the request
    {
      const Piece piece = share.piece();
      left = piece.end - piece.begin;
      keys = piece.place.request.seq_kv - piece.begin * kPage;
    }
    uint2 codes[4];  // of the next quarter
    const auto load_codes = [&](int quarter, int keys_left) {
      barriers.slots.wait(at);
      const unsigned char* const from = tiles.slot(at) + own_key * kCodedBytes + column;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = i / 2 * 8 + i % 2;
        codes[i] = *reinterpret_cast<const uint2*>(from + key * kCodedBytes);
      }
      if (keys_left < kPage) {
        const int first_key = quarter * (kPage / kQuarters) + own_key;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (first_key + i / 2 * 8 + i % 2 >= keys_left) codes[i] = make_uint2(0, 0);
        }
      }
      __syncwarp();
      barriers.slots.release(at);
      at.advance();
    };
    load_codes(0, keys);
#pragma unroll 1
    for (; left > 0; --left, keys -= kPage) {
      barriers.weights.wait(weights);
      if (cukit::warp_uniform(exchange.grown[weights.index]) != 0) {
        const float2* const shrink =
            reinterpret_cast<const float2*>(exchange.shrink[weights.index]) + lane % 4;
#pragma unroll
        for (int n = 0; n < kHeadPairs; ++n) {
          const float2 by = shrink[4 * n];
#pragma unroll
          for (int tile = 0; tile < kOutputTiles; ++tile) {
            out[tile][4 * n] *= by.x;
            out[tile][4 * n + 1] *= by.y;
            out[tile][4 * n + 2] *= by.x;
            out[tile][4 * n + 3] *= by.y;
          }
        }
      }
      const unsigned long long w =
          w_first + static_cast<unsigned>(cukit::warp_uniform(weights.index)) * WeightTile::kStage;
      unsigned a[2][kOutputTiles / 2][4];
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter) {
        const int first_key = quarter * (kPage / kQuarters) + own_key;
        const unsigned* const ratios = reinterpret_cast<const unsigned*>(
            &exchange.ratios[weights.index][scale_group][first_key]);
        const unsigned pair_ratios[2] = {ratios[0], ratios[4]};
        // Columns 4 part .. 4 part + 3 of a lane.
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          unsigned(&operand)[kOutputTiles / 2][4] = a[part];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const unsigned low = part == 0 ? codes[2 * i].x : codes[2 * i].y;
            const unsigned high = part == 0 ? codes[2 * i + 1].x : codes[2 * i + 1].y;
#pragma unroll
            for (int tile = 0; tile < kOutputTiles / 2; ++tile) {
              const unsigned both = cukit::permute_bytes(low, high, tile == 0 ? 0x5140 : 0x7362);
              unsigned pairs[2];
              cukit::unpack_e4m3(pairs, both);
              operand[tile][2 * i] = multiply_pairs<Latent>(pairs[0], pair_ratios[i]);
              operand[tile][2 * i + 1] = multiply_pairs<Latent>(pairs[1], pair_ratios[i]);
            }
          }
          if (part == 1) {
            if (quarter + 1 < kQuarters) {
              load_codes(quarter + 1, keys);
            } else if (left > 1) {
              load_codes(0, keys - kPage);
            }
          }
          cukit::wgmma_fence();
#pragma unroll
          for (int tile = 0; tile < kOutputTiles / 2; ++tile) {
            cukit::wgmma<Latent, HEADS, true>(out[part * (kOutputTiles / 2) + tile], operand[tile],
                                              w + WeightTile::mn_step(quarter), true);
          }
          cukit::wgmma_commit();
          cukit::wgmma_wait<1>();
        }
      }
      finish(out);
      __syncwarp();
      barriers.weights.release(weights);
      weights.advance();
    }

    const Share own_share = parked.share();
    const Piece done = own_share.piece();
    const Rows rows(done.place.b, done.place.problem * TEAM + member, params);
    const int first_unit = own_share.index - done.place.unit;  // of the problem
    const cukit::PieceSlots slots(first_unit, done.place.request.units, exchange.share_units);
    const long long slot =
        slots.slot(static_cast<int>(blockIdx.x) / TEAM - slots.first_team, member);
    if (done.complete) {
      barriers.totals.wait(parked.piece_state());
      T* const first = arrays.out + rows.index(0, params) * kLatent + column;
      float inverses[2];  // of the sums of rows `lane` and `lane` + 32
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float sum = exchange.totals[min(lane + i * cukit::kWarpSize, HEADS - 1)].sum;
        inverses[i] = sum == 0.0f ? 0.0f : 1.0f / sum;
      }
#pragma unroll
      for (int n = 0; n < kHeadPairs; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = 8 * n + cukit::accumulator_column() + i;
          const float by = __shfl_sync(cukit::kFullMask, inverses[n / 4], row % cukit::kWarpSize);
          if (row >= rows.count) continue;
          float values[kLaneColumns];
#pragma unroll
          for (int j = 0; j < kLaneColumns; ++j) values[j] = out[j / 2][4 * n + j % 2 * 2 + i] * by;
          cukit::Vec<T, kLaneColumns> result;
          cukit::from_floats(result, values);
          cukit::store(first + row * kLatent, result);
        }
    } else {
      // In the order that mla_merge.cu expects with FRAGMENT_ROWS.
      float4* const first = reinterpret_cast<float4*>(arrays.partial.out(slot)) +
                            own_warp * (kHeadPairs * kOutputTiles * cukit::kWarpSize) + lane;
#pragma unroll
      for (int n = 0; n < kHeadPairs; ++n)
#pragma unroll
        for (int tile = 0; tile < kOutputTiles; ++tile) {
          const float* const four = &out[tile][4 * n];
          first[(n * kOutputTiles + tile) * cukit::kWarpSize] =
              make_float4(four[0], four[1], four[2], four[3]);
        }
      barriers.totals.wait(parked.piece_state());
    }
    if (own_warp == 0) {
#pragma unroll 1
      for (int row = lane; row < HEADS; row += cukit::kWarpSize) {
        const Statistics total = exchange.totals[row];
        if (!done.complete) {
          arrays.partial.statistics(slot)[row] = total;
        } else if (row < rows.count && arrays.lse != nullptr) {
          arrays.lse[rows.statistic(row, params)] = log_sum(total);
        }
      }
    }
    __syncwarp();
    barriers.totals.release(parked.piece_state());
  }
}

}  // namespace outputs

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_attention_float8_sm90(
    const __grid_constant__ cukit::TensorMap q, const unsigned char* __restrict__ cache,
    T* __restrict__ out, float* __restrict__ lse, const int* __restrict__ block_table,
    const int* __restrict__ seq_lens,
    float* __restrict__ partial,  // Partial: two slots per block
    const __grid_constant__ cukit::LatentParameters params) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Barriers barriers;
  __shared__ Exchange exchange;
  const Tiles tiles(shared);
  const Arrays arrays{cache, out, lse, block_table, seq_lens, {partial}};
  cukit::release_next_grid();
  if (threadIdx.x == 0) cukit::prefetch_tensor_map(&q);
  Block::prepare([&] { barriers.init(); });

  const Division division(seq_lens, params, gridDim.x / TEAM);
  const int first = static_cast<int>(blockIdx.x) / TEAM * division.share;
  if (first >= division.total) return;
  ParkedShare& parked = exchange.shares[threadIdx.x / cukit::kWarpSize];
  parked.park(Share{Place::find(first, seq_lens, params), first,
                    min(division.total, first + division.share)},
              0);
  if (threadIdx.x == 0) exchange.share_units = division.share;
  __syncthreads();
  if (threadIdx.x < cukit::kWarpgroupThreads) {
    cukit::give_registers<kProducerRegisters>();
    if (threadIdx.x < cukit::kWarpSize) producer::run(barriers, tiles, parked, &q, arrays, params);
  } else if (threadIdx.x < 2 * cukit::kWarpgroupThreads) {
    if constexpr (SCORE_REGISTERS > Block::kStartRegisters) {
      cukit::take_registers<SCORE_REGISTERS>();
    } else {
      cukit::give_registers<SCORE_REGISTERS>();
    }
    scores::run(barriers, tiles, exchange, arrays, params);
  } else {
    cukit::take_registers<kOutputRegisters>();
    outputs::run(barriers, tiles, exchange, arrays, params);
  }
}
