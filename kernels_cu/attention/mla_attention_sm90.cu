// Multi-head latent attention of few queries over a latent cache, for Hopper (wgmma, TMA), with the
// up-projections absorbed into queries and outputs. All heads share one key of 576 columns, of
// which the first 512 are also the value:
//
//   out = softmax(scale * (Q_latent C^T + Q_rope R^T) + mask) C,   where a cached row is [C, R]
//
// Papers: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434 (section 2.1.2); Shah et al.,
//   "FlashAttention-3", arXiv:2407.08608 (warp specialisation, softmax overlaps wgmmas).
// Mapping: a block processes its share of the batch (mla_work.cuh) in pieces: a tile of 64 rows
//   (heads of queries) and a range of pages of 64 keys. A page is stored in shared memory once and
//   is an operand of both products. A thread of the producer warpgroup issues the TMA loads. Each
//   of the two consumer warpgroups, g = 0 and 1, owns every second page. Consumer g
//     - accumulates output columns 256 g .. 256 g + 255 of all pages, and row sums of its pages;
//     - for its own page: computes the scores, the row maxima and the exponentials, stores the
//       exponentials as probabilities to shared memory for the other consumer, and multiplies them
//       by half g of the page;
//     - for the other consumer's page: multiplies that consumer's probabilities by half g. These
//       wgmmas are issued after those of the first EARLY sections of the scores of its own page,
//       and before the rest. Thus one consumer's wgmmas run while the other computes exponentials.
//   A page is loaded and released in three sections, of 256, 256 and 64 columns. The halves are
//   released once their warpgroups have multiplied the probabilities by them, the last section once
//   the scores are complete. PREFETCH:
//   the page after the one being loaded is prefetched to L2.
//   CLUSTER: each block of a pair multicasts half of a page's tokens to both: a page is read from
//   L2 once for two tiles of rows, whose blocks process the same pages.
//   Rows of a page beyond the last key may hold arbitrary data, and are overwritten with zeros
//   before they are multiplied as values. A piece that does not cover its request is stored to
//   `partial`, and mla_merge.cu merges the pieces.
// Shared memory, dynamic: queries (64 x 576, 72 KiB) | two pages (64 x 576 each) | probabilities
//   (64 x 64), all in parts of 64 columns with a swizzle of 128 bytes: 224 KiB. Static: barriers,
//   row maxima and sums that the consumers exchange.
// Tensor maps: q as [batch, seq_q * heads_q, 576] and the cache as [blocks, 64, 576]; boxes
//   [1, 64, 64], of the cache [1, 64 / CLUSTER, 64]. A block outside the cache reads as zeros.
// Macros: DTYPE float16|bfloat16; EARLY 1|2; PREFETCH 0|1; PRODUCER_REGISTERS; TEAM blocks that
//   share pages, a divisor of the grid and of the number of tiles of a request; CLUSTER 1|2, a
//   divisor of TEAM; CAUSAL 0|1; THREADS 384.
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order that depends on the
//   lengths and the grid.
// Reference: cukit/reference/mla_attention.py.
#include "attention/mla_work.cuh"
#include "common/hopper/pipeline.cuh"
#include "common/hopper/shared_tile.cuh"
#include "common/hopper/store.cuh"
#include "common/hopper/warp_specialized.cuh"
#include "common/platform.cuh"
#include "common/ptx/cluster.cuh"
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

using Block = cukit::WarpSpecialized<2, PRODUCER_REGISTERS>;
using QueryTile = cukit::SharedTile<T, kRows, kWidth>;
using PageTile = cukit::SharedTile<T, kPage, kWidth>;
using ProbabilityTile = cukit::SharedTile<T, kRows, kPage>;

constexpr int kStages = 2;  // one for each consumer's pages
constexpr int kHalf = kLatent / 2;
constexpr int kHalfParts = kHalf / PageTile::kPartColumns;
constexpr int kRopeSection = 2;
constexpr int kReaders = CLUSTER * cukit::kWarpgroupWarps;  // warps that release a section

static_assert(THREADS == Block::kThreads, "one producer warpgroup and two consumer warpgroups");
static_assert(TEAM % CLUSTER == 0, "the blocks of a cluster read the same pages");
static_assert(EARLY == 1 || EARLY == 2, "with three the compiler serialises the wgmmas");

// Parts of a page in a section. Sections 0 and 1 are the halves of the latent.
CUKIT_DEVICE constexpr int parts_of(int section) {
  return section == kRopeSection ? PageTile::kParts - 2 * kHalfParts : kHalfParts;
}

// Pipeline state of a page; `count`: the number of pages that the block processed before it.
CUKIT_DEVICE cukit::PipelineState<kStages> page_state(int count) {
  cukit::PipelineState<kStages> state;
  state.index = count % kStages;
  state.phase = count / kStages % 2;
  return state;
}

struct Barriers {
  cukit::Pipeline<kStages> sections[3];
  cukit::Pipeline<1> queries;

  CUKIT_DEVICE void init() {
    for (auto& section : sections) section.init(kReaders);
    queries.init(Block::kConsumerWarps);
  }
};

struct Tiles {
  unsigned char* queries;
  unsigned char* pages;
  unsigned char* probabilities;

  CUKIT_DEVICE explicit Tiles(unsigned char* shared)
      : queries(shared),
        pages(queries + QueryTile::kBytes),
        probabilities(pages + kStages * PageTile::kBytes) {}
};

struct Arrays {
  T* out;                  // [batch, seq_q, heads_q, 512]
  float* lse;              // [batch, heads_q, seq_q] or null
  const int* block_table;  // [batch, table_row]
  const int* seq_lens;     // [batch]
  Partial partial;
};

// Data that the warps exchange through shared memory.
struct Exchange {
  ParkedShare shares[THREADS / cukit::kWarpSize];
  int share_units;          // units (pages) per team
  float maxima[2][kRows];   // by the warpgroup that owns the page
  float sums[2][2][kRows];  // by the parity of a piece, then by warpgroup
};

namespace producer {

// The first token of a page that this block loads.
CUKIT_DEVICE int cluster_row() {
  return CLUSTER == 1 ? 0 : cukit::cluster_rank() * (kPage / CLUSTER);
}

// Issues the loads of a section, which starts at column `column` of the map.
CUKIT_DEVICE void load_section(Barriers& barriers, int section, int count, const Tiles& tiles,
                               const cukit::TensorMap* cache, int column, int block) {
  const cukit::PipelineState<kStages> state = page_state(count);
  const int parts = parts_of(section);
  unsigned char* const to =
      tiles.pages + state.index * PageTile::kBytes + section * kHalfParts * PageTile::kPartBytes;
  barriers.sections[section].acquire(state);
  cukit::Mbarrier* const full =
      barriers.sections[section].expect(state, parts * PageTile::kPartBytes);
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    unsigned char* const own = to + part * PageTile::kPartBytes;
    const int first_column = column + part * PageTile::kPartColumns;
    if constexpr (CLUSTER == 1) {
      cukit::tma_load_3d(own, cache, full, first_column, 0, block);
    } else {
      const int row = cluster_row();
      cukit::tma_load_3d_multicast(own + row * PageTile::kRowBytes, cache, full, first_column, row,
                                   block, (1 << CLUSTER) - 1);
    }
  }
}


// One warp; its first lane issues the TMA loads.
CUKIT_DEVICE void run(Barriers& barriers, const Tiles& tiles, Exchange& exchange,
                      const cukit::TensorMap* q, const cukit::TensorMap* cache, const Arrays& arrays,
                      const cukit::LatentParameters& params) {
  const bool starts = threadIdx.x == 0;
  const int member = blockIdx.x % TEAM;
  int count = 0;  // pages of the block so far
  ParkedShare& parked = exchange.shares[threadIdx.x / cukit::kWarpSize];
  for (Share share = parked.share(); !share.done(); parked.advance(share, arrays.seq_lens, params)) {
    const Piece piece = share.piece();
    const int* const row =
        arrays.block_table + static_cast<long long>(piece.place.b) * params.table_row;
    // 0 for pages beyond the piece, which are not loaded, and for the only page of a request of
    // length 0.
    const int pages = min(piece.end, (piece.place.request.seq_kv + kPage - 1) / kPage);
    const auto block_of = [&](int page) { return page < pages ? row[page] : 0; };
    int block = block_of(piece.begin);
    if (starts) {
      const cukit::PipelineState<1> q_state = parked.piece_state();
      barriers.queries.acquire(q_state);
      QueryTile::load(tiles.queries, q, barriers.queries.expect(q_state, QueryTile::kBytes), 0,
                      {piece.place.b, (piece.place.problem * TEAM + member) * kRows}, kWidth);
    }
    int next = block_of(piece.begin + 1);
#pragma unroll 1
    for (int page = piece.begin; page < piece.end; ++page, ++count) {
      const int after = block_of(page + 2);  // loaded early to hide its latency
      if (starts) {
        if (PREFETCH && page + 1 < piece.end) {
#pragma unroll 1
          for (int column = 0; column < kWidth; column += PageTile::kPartColumns) {
            cukit::tma_prefetch_3d(cache, column, cluster_row(), next);
          }
        }
        load_section(barriers, kRopeSection, count, tiles, cache, kLatent, block);
        const int half = count % kStages;  // the page's owner needs its own half first
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
          load_section(barriers, half ^ turn, count, tiles, cache, (half ^ turn) * kHalf, block);
        }
      }
      block = next;
      next = after;
    }
  }
}

}  // namespace producer

namespace consumer {

using Outputs = float[kHalf / 2];
using Scores = float[kPage / 2];
using Probabilities = unsigned[kPage / 16][4];

// Named barriers: of the warps of consumer `group` (kOwnBarrier + group), of both consumers, and
// for the hand-over of the probabilities of consumer `group` (kHandoverBarrier + group).
constexpr int kOwnBarrier = 1;
constexpr int kBothBarrier = 3;
constexpr int kHandoverBarrier = 4;
constexpr int kBothThreads = 2 * cukit::kWarpgroupThreads;

// scores (+)= Q K^T over the columns of a section.
template <int Parts>
CUKIT_DEVICE void multiply_keys(Scores& scores, unsigned long long q, unsigned long long k,
                                bool accumulate) {
#pragma unroll
  for (int step = 0; step < Parts * PageTile::kPartColumns / 16; ++step) {
    cukit::wgmma<T, kPage>(scores, q + QueryTile::k_step(step), k + PageTile::k_step(step),
                           accumulate || step > 0);
  }
}

// Rescales a lane's two rows to the new maxima `top`.
CUKIT_DEVICE void rescale_to_maxima(cukit::SoftmaxRows& rows, Outputs& out, const float (&top)[2],
                        float factor) {
  const bool grown = top[0] > rows.max[0] || top[1] > rows.max[1];
  if (!__any_sync(cukit::kFullMask, grown)) return;
  float shrink[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = top[half] == -cukit::infinity() ? 0.0f : top[half];
    shrink[half] = exp2f((rows.max[half] - base) * factor);
    rows.max[half] = top[half];
    rows.sum[half] *= shrink[half];
  }
  cukit::rescale(out, shrink);
}


// Zeroes the rows from `rows` on of a half page. Called by the half's warpgroup, after the scores
// are complete.
CUKIT_DEVICE void clear_rows(unsigned char* half, int rows, int group) {
  const int thread = threadIdx.x % cukit::kWarpgroupThreads;
#pragma unroll 1
  for (int part = 0; part < kHalfParts; ++part) {
    for (int byte = rows * PageTile::kRowBytes + 16 * thread; byte < PageTile::kPartBytes;
         byte += 16 * cukit::kWarpgroupThreads) {
      *reinterpret_cast<uint4*>(half + part * PageTile::kPartBytes + byte) = uint4{};
    }
  }
  cukit::fence_proxy_async();
  cukit::named_sync(kOwnBarrier + group, cukit::kWarpgroupThreads);
}

CUKIT_DEVICE void store_probabilities(unsigned char* tile, const Probabilities& p) {
  const int lane = threadIdx.x % cukit::kWarpSize;
  const int row = threadIdx.x % cukit::kWarpgroupThreads / cukit::kWarpSize * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kPage / 16; ++step) {
    cukit::stmatrix_x4(
        ProbabilityTile::address(cukit::shared_address(tile), row, 2 * step + lane / 16), p[step]);
  }
}

CUKIT_DEVICE void run(Barriers& barriers, const Tiles& tiles, Exchange& exchange,
                      const Arrays& arrays, const cukit::LatentParameters& params) {
  const int group = Block::consumer_group();
  const int other = group ^ 1;
  const int member = blockIdx.x % TEAM;
  const int lane_row = cukit::accumulator_row();
  const float factor = params.scale_log2;
  cukit::Pipeline<kStages>& own_half = barriers.sections[group];

  const unsigned long long q_first = cukit::uniform_descriptor(QueryTile::k_major(tiles.queries));
  const unsigned long long k_first = cukit::uniform_descriptor(
      PageTile::k_major(tiles.pages + group * PageTile::kBytes));
  const unsigned long long v_first = cukit::uniform_descriptor(
      PageTile::mn_major(tiles.pages + group * kHalfParts * PageTile::kPartBytes));
  const unsigned long long p_first =
      cukit::uniform_descriptor(ProbabilityTile::k_major(tiles.probabilities));

  int count = 0;  // pages of the block so far
  ParkedShare& parked = exchange.shares[threadIdx.x / cukit::kWarpSize];
  for (Share share = parked.share(); !share.done(); parked.advance(share, arrays.seq_lens, params)) {
    const Piece piece = share.piece();
    const int tile = piece.place.problem * TEAM + member;
    const Rows rows(piece.place.b, tile, params);
    const int seq_kv = piece.place.request.seq_kv;
    const int causal_offset = seq_kv - params.seq_q;
    const auto visible_end = [&](int query) {
      return cukit::visible_keys(query, causal_offset, seq_kv, params.settings).end;
    };
    const int limit[2] = {visible_end(rows.query(lane_row, params)),
                          visible_end(rows.query(lane_row + 8, params))};
    const int visible_to_all = visible_end(0);
    const int last = count + piece.end - piece.begin;
    const auto key_of = [&](int page) { return (page - count + piece.begin) * kPage; };

    Outputs out;
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) out[i] = 0.0f;
    cukit::SoftmaxRows softmax{{-cukit::infinity(), -cukit::infinity()}, {0.0f, 0.0f}};
    Scores scores;
    barriers.queries.wait(parked.piece_state());

    // The number of keys from a page's first row on. clear_beyond_end() zeroes the rows beyond them
    // in this warpgroup's half.
    const auto keys_of = [&](int page) { return seq_kv - key_of(page); };
    const auto clear_beyond_end = [&](int page, int stage) {
      if (keys_of(page) < kPage) {
        clear_rows(
            tiles.pages + stage * PageTile::kBytes + group * kHalfParts * PageTile::kPartBytes,
            max(0, keys_of(page)), group);
      }
    };
    const auto release_half = [&](int page) {
      if (keys_of(page) < kPage) {
        own_half.release_changed_to_cluster<CLUSTER>(page_state(page));
      } else {
        own_half.release_to_cluster<CLUSTER>(page_state(page));
      }
    };
    // Waits for a section of an own page, and issues its part of the scores.
    const auto multiply_section = [&](int page, int turn) {
      const int section = turn == 0 ? kRopeSection : group ^ (turn - 1);
      const unsigned offset = section * kHalfParts * PageTile::kPart;
      barriers.sections[section].wait(page_state(page));
      cukit::wgmma_fence();
      if (turn == 0) {
        multiply_keys<parts_of(kRopeSection)>(scores, q_first + offset, k_first + offset, false);
      } else {
        multiply_keys<kHalfParts>(scores, q_first + offset, k_first + offset, true);
      }
    };
    // Issues out += P V of the other consumer's page.
    const auto issue_other = [&](int page) {
      cukit::named_sync(kHandoverBarrier + other, kBothThreads);
      const float top[2] = {exchange.maxima[other][lane_row], exchange.maxima[other][lane_row + 8]};
      rescale_to_maxima(softmax, out, top, factor);
      clear_beyond_end(page, other);
      own_half.wait(page_state(page));
      cukit::wgmma_fence();
      const unsigned long long v = v_first + other * PageTile::kStage;
#pragma unroll
      for (int step = 0; step < PageTile::kRowSteps; ++step) {
        cukit::wgmma<T, kHalf, false, true>(out, p_first + ProbabilityTile::k_step(step),
                                            v + PageTile::mn_step(step), true);
      }
      cukit::wgmma_commit();
    };

    int page = count + ((count ^ group) & 1);  // the first page that this consumer owns
    for (; page < last; page += 2) {
      const bool follows = page > count;  // a page of the other consumer
#pragma unroll
      for (int turn = 0; turn < EARLY; ++turn) multiply_section(page, turn);
      cukit::wgmma_commit();
      if (follows) issue_other(page - 1);
#pragma unroll
      for (int turn = EARLY; turn < 3; ++turn) multiply_section(page, turn);
      cukit::wgmma_commit();
      cukit::wgmma_wait<1>(out);
      if (follows) release_half(page - 1);
      cukit::wgmma_wait<0>(scores);
      barriers.sections[kRopeSection].release_to_cluster<CLUSTER>(page_state(page));

      const int first_key = key_of(page);
      if (first_key + kPage > visible_to_all) {
        const int column = first_key + cukit::accumulator_column();
#pragma unroll
        for (int i = 0; i < kPage / 2; ++i) {
          if (column + 8 * (i / 4) + i % 2 >= limit[i / 2 % 2]) scores[i] = -cukit::infinity();
        }
      }
      float shrink[2];
      const bool grown = cukit::update_maxima(softmax, shrink, scores, factor);
      cukit::exponentiate(softmax, scores, factor);
      Probabilities p;
      cukit::pack_probabilities<T>(p, scores);
      // Waits until all warps of this consumer have multiplied the probabilities that the store
      // overwrites.
      cukit::named_sync(kOwnBarrier + group, cukit::kWarpgroupThreads);
      store_probabilities(tiles.probabilities, p);
      if (threadIdx.x % 4 == 0) {
        exchange.maxima[group][lane_row] = softmax.max[0];
        exchange.maxima[group][lane_row + 8] = softmax.max[1];
      }
      cukit::fence_proxy_async();
      cukit::named_arrive(kHandoverBarrier + group, kBothThreads);

      if (grown) cukit::rescale(out, shrink);
      clear_beyond_end(page, group);
      cukit::wgmma_fence();
      const unsigned long long v = v_first + group * PageTile::kStage;
#pragma unroll
      for (int step = 0; step < PageTile::kRowSteps; ++step) {
        cukit::wgmma<T, kHalf, true>(out, p[step], v + PageTile::mn_step(step), true);
      }
      cukit::wgmma_commit();
      cukit::wgmma_wait<0>(out);
      release_half(page);
    }
    barriers.queries.release(parked.piece_state());
    if (page == last) {
      issue_other(page - 1);
      cukit::wgmma_wait<0>(out);
      release_half(page - 1);
    }

    const Share own_share = parked.share();
    const Piece done = own_share.piece();

    // Both consumers have adopted the maxima of the last page, so their row sums are relative to
    // the same maxima.
    const unsigned parity = parked.piece_state().phase;
    Statistics total[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = softmax.sum[half];
      sum += __shfl_xor_sync(cukit::kFullMask, sum, 1);
      sum += __shfl_xor_sync(cukit::kFullMask, sum, 2);
      if (threadIdx.x % 4 == 0) exchange.sums[parity][group][lane_row + 8 * half] = sum;
    }
    cukit::named_sync(kBothBarrier, kBothThreads);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&sums)[2][kRows] = exchange.sums[parity];
      const int row = lane_row + 8 * half;
      total[half] = {softmax.max[half] * factor, sums[0][row] + sums[1][row]};
    }
    const Rows own(done.place.b, done.place.problem * TEAM + member, params);
    const bool states = group == 0 && threadIdx.x % 4 == 0;
    if (done.complete) {
      cukit::ResultRows<T> to;
      to.first = arrays.out + own.index(lane_row, params) * kLatent + group * kHalf;
      to.row_stride = kLatent;
      to.columns = kHalf;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row + 8 * half;
        to.factor[half] = total[half].sum == 0.0f ? 0.0f : 1.0f / total[half].sum;
        to.exists[half] = row < own.count;
        if (states && to.exists[half] && arrays.lse != nullptr) {
          arrays.lse[own.statistic(row, params)] = log_sum(total[half]);
        }
      }
      cukit::write_rows<false>(out, to);
    } else {
      const int first_unit = own_share.index - done.place.unit;  // of the problem
      const cukit::PieceSlots slots(first_unit, done.place.request.units, exchange.share_units);
      const long long slot =
          slots.slot(static_cast<int>(blockIdx.x) / TEAM - slots.first_team, member);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row + 8 * half;
        if (row >= own.count) continue;
        float* const to = arrays.partial.out(slot) + row * kLatent + group * kHalf;
#pragma unroll
        for (int n = 0; n < kHalf / 8; ++n) {
          *reinterpret_cast<float2*>(to + 8 * n + cukit::accumulator_column()) =
              make_float2(out[4 * n + 2 * half], out[4 * n + 2 * half + 1]);
        }
        if (states) arrays.partial.statistics(slot)[row] = total[half];
      }
    }
    count = last;
  }
}

}  // namespace consumer

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, 1) mla_attention_sm90(
    const __grid_constant__ cukit::TensorMap q, const __grid_constant__ cukit::TensorMap cache,
    T* __restrict__ out, float* __restrict__ lse, const int* __restrict__ block_table,
    const int* __restrict__ seq_lens,
    float* __restrict__ partial,  // Partial: two slots per block
    const __grid_constant__ cukit::LatentParameters params) {
  CUKIT_DYNAMIC_SHARED(unsigned char, shared);
  __shared__ Barriers barriers;
  __shared__ Exchange exchange;
  const Tiles tiles(shared);
  const Arrays arrays{out, lse, block_table, seq_lens, {partial}};
  cukit::release_next_grid();
  Block::prepare<CLUSTER>([&] { barriers.init(); });

  const int teams = gridDim.x / TEAM;
  const Division division(seq_lens, params, teams);
  const int first = static_cast<int>(blockIdx.x) / TEAM * division.share;
  if (first >= division.total) return;
  exchange.shares[threadIdx.x / cukit::kWarpSize].park(
      Share{Place::find(first, seq_lens, params), first,
            min(division.total, first + division.share)},
      0);
  if (threadIdx.x == 0) exchange.share_units = division.share;
  __syncthreads();
  Block::run(
      [&] {
        if (threadIdx.x < cukit::kWarpSize) {
          producer::run(barriers, tiles, exchange, &q, &cache, arrays, params);
        }
      },
      [&] {
        consumer::run(barriers, tiles, exchange, arrays, params);
      });
  if constexpr (CLUSTER > 1) {  // the other block may still write to this one's shared memory
    __syncwarp();
    cukit::cluster_arrive();
    cukit::cluster_wait();
  }
}
