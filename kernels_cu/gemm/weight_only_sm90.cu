// Products with a quantised weight on Hopper: x [tokens, k] times W [rows, k] of int4 or int8
// codes.
//
//   out[m, n] = sum_k x[m, k] scale[n, k / GROUP] (code[n, k] - zero_point[n, k / GROUP]) + bias[n]
//
// Operands are swapped: out^T = W x^T, so that wgmma's 64 rows are rows of the weight and its
// columns are tokens, which can be as few as 16. The weight is decoded to registers as operand a
// (gemm/weight_codes.cuh); x, of 16-bit elements or float8, is read from shared memory.
//
// Mapping: a persistent grid computes tiles of CONSUMERS * 64 rows x TOKENS tokens; the tiles of an
//   incomplete last round are split along k (StreamKTiles, common/tile_scheduler.cuh). A
//   thread of the first warpgroup loads k steps of 128 columns: blocks of the packed weight by bulk
//   copies, x by TMA. Consumer warpgroup i has rows 64 i .. 64 i + 63 of the tile.
// SPLITS > 1: the blocks of a cluster split the k steps of one tile and add their accumulators
//   through distributed shared memory (common/hopper/split_k.cuh); one tile per cluster, and
//   `whole_tiles` counts blocks.
// Scales: the tensor cores sum a group's products from zero; the sums are multiplied by the scale
//   and added to the accumulators in float. FOLD 1 and GROUP 0 need no second set of accumulators,
//   so a tile may have 256 tokens; otherwise a tile of more than 128 tokens is multiplied in two
//   halves.
// Shared memory, bytes: STAGES * (TOKENS * 128 * sizeof(x) + CONSUMERS * block bytes), dynamic:
//   stages of x, swizzled rows of 128 bytes | with MAPPED_OUT a store buffer [kPieceTokens, 64] for
//   each consumer, also in swizzled rows of 128 bytes | stages of the weight's blocks | with
//   SPLITS > 1 the received accumulators. Static: two barriers per stage, one for the exchange, a
//   word per consumer, the float8 tables.
// Macros: those of gemm/weight_only.cuh, TOKENS a multiple of 16 up to 256 (without FOLD, of 32
//   above 128), CONSUMERS 2|4; SPLITS 1|2|4, CLUSTER the same; MAPPED_OUT 0|1 (0 if SPLITS > 1):
//   out is stored by TMA, which requires rows of a multiple of 16 bytes; STAGES 2..; THREADS 128 *
//   (CONSUMERS + 1).
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/weight_only.py.
#include "common/hopper/gemm.cuh"
#include "common/hopper/split_k.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"
#include "gemm/parameters.cuh"
#include "gemm/weight_only.cuh"

namespace {

// The element type of x in shared memory; float8 is loaded as bytes.
template <bool Float8>
struct ElementOf { using type = T; };
template <>
struct ElementOf<true> { using type = unsigned char; };

using TileX = cukit::SharedTile<ElementOf<FLOAT8>::type, TOKENS, cukit::kBlockColumns>;
using Block = cukit::WarpSpecialized<CONSUMERS, 40>;
using Pipeline = cukit::Pipeline<STAGES>;
using State = cukit::PipelineState<STAGES>;

static_assert(THREADS == Block::kThreads, "a producer and its consumers");

// Tokens that one TMA store writes.
constexpr int kPieceTokens = TOKENS % 64 == 0 && TOKENS <= 128 ? 64 : TOKENS % 32 == 0 ? 32 : 16;
using Store = cukit::TransposedStore<T, TOKENS, kPieceTokens>;

// Shared memory: stages of x | store buffers | stages of the weight.
constexpr int kPieces = STAGES * TileX::kBytes;
constexpr int kWeights = kPieces + (MAPPED_OUT ? CONSUMERS * Store::kBytes : 0);

struct Operands {
  static constexpr int kStageBytes = TileX::kBytes;
  static constexpr int kWeightBytes = CONSUMERS * Weight::kBytes;
  unsigned char* stages;  // start of the stages
  const cukit::TensorMap* x;
  const unsigned char* weight;
  unsigned long long policy;  // L2 cache policy of the weight
  int steps, pairs;

  CUKIT_DEVICE int bytes(const Tile&) const { return kStageBytes + kWeightBytes; }

  CUKIT_DEVICE void load(unsigned char* stage, cukit::Mbarrier* full, const Tile& tile,
                         int step) const {
    constexpr unsigned kPairBytes = 2 * Weight::kBytes;
    TileX::load(stage, x, full, step * cukit::kBlockColumns, tile.n * TOKENS);
    unsigned char* const to = stages + kWeights + (stage - stages) / kStageBytes * kWeightBytes;
#pragma unroll
    for (int i = 0; i < CONSUMERS / 2; ++i) {
      // Beyond the last rows the last pair is loaded again; its product is not stored.
      const unsigned pair = min(tile.m * (CONSUMERS / 2) + i, pairs - 1);
      const unsigned char* const from =
          weight + (pair * steps + step) * static_cast<unsigned long long>(kPairBytes);
      cukit::bulk_load_policy(to + i * kPairBytes, from, kPairBytes, full, policy);
    }
  }
};

// A consumer's operands in a stage: its block of the weight, and the descriptor of x.
struct StageOperands {
  const unsigned char* weight;  // in stage 0
  const unsigned char* tables;  // Codes::kTableBytes
  unsigned long long x;         // of stage 0

  CUKIT_DEVICE StageOperands(const unsigned char* stages, const unsigned char* tables, int consumer)
      : weight(stages + kWeights + consumer * Weight::kBytes),
        tables(tables),
        x(TileX::k_major(stages)) {}

  CUKIT_DEVICE const unsigned char* block(const State& at) const {
    return weight + at.index * Operands::kWeightBytes;
  }
  CUKIT_DEVICE unsigned long long tokens(const State& at) const {
    return x + cukit::warp_uniform(at.index) * (Operands::kStageBytes / 16);
  }
};

// All lanes read codes and scales by ordinary loads, so the warp synchronises before the release.
CUKIT_DEVICE void release(Pipeline& pipeline, const State& done) {
  __syncwarp();
  pipeline.release(done);
}

template <int N>
CUKIT_DEVICE void product(float (&into)[N], const unsigned (&a)[4], unsigned long long tokens,
                          bool accumulate) {
  if constexpr (FLOAT8) {
    cukit::wgmma_e4m3<2 * N>(into, a, tokens, accumulate);
  } else {
    cukit::wgmma<T, 2 * N>(into, a, tokens, accumulate);
  }
}

// Decodes a chunk while the previous one is multiplied. A group's accumulators are scaled and added
// before the wgmmas of the next group are issued.
struct DecodedProduct {
  using Accumulators = TileAccumulators;
  StageOperands operands;

  CUKIT_DEVICE void multiply(TileAccumulators& acc, Pipeline& pipeline, State& at,
                             const Tile& tile) const {
    TileAccumulators group_acc;  // of the group in flight
    Operand a[2];
    float scale[2];
    State done;
    clear(acc);
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      pipeline.wait(at);
      const unsigned char* const block = operands.block(at);
      const unsigned long long tokens = operands.tokens(at);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        decode(a[chunk % 2], block, chunk, operands.tables);
        const bool begins = kScaleByGroup && chunk % kGroupChunks == 0;
        if (begins && (chunk > 0 || step > tile.first_step)) {
          cukit::wgmma_wait<0>(group_acc);
          if (chunk == 0) release(pipeline, done);
          add_scaled(acc, group_acc, scale);
        }
        if (begins) Weight::scales(scale, block, chunk / kGroupChunks);
        TileAccumulators& into = kScaleByGroup ? group_acc : acc;
        cukit::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kChunkSteps; ++i) {
          const int k = TileX::k_step(chunk * kChunkSteps + i);
          product(into, a[chunk % 2][i], tokens + k, !(begins && i == 0));
        }
        cukit::wgmma_commit();
        if (!(kScaleByGroup && kGroupChunks == 1)) {
          cukit::wgmma_wait<1>(into);
          if (!kScaleByGroup && chunk == 0 && step > tile.first_step) release(pipeline, done);
        }
      }
      done = at;
      at.advance();
    }
    if constexpr (kScaleByGroup) {
      cukit::wgmma_wait<0>(group_acc);
      add_scaled(acc, group_acc, scale);
    } else {
      cukit::wgmma_wait<0>(acc);
    }
    release(pipeline, done);
  }
};

// Decodes a group once and multiplies it by one half of the tokens, then by the other: registers
// cannot hold two sets of accumulators for all tokens. The next group's codes are loaded in the
// meantime.
template <int Tokens>
struct HalvesProduct {
  using Accumulators = TileAccumulators;
  StageOperands operands;

  CUKIT_DEVICE void multiply(TileAccumulators& acc, Pipeline& pipeline, State& at,
                             const Tile& tile) const {
    float group_acc[kHalf / 2];
    float scale[2];
    Loaded loaded;
    Place here{at, 0};
    clear(acc);
    pipeline.wait(here.at);
    load(loaded, here);
    for (int left = (tile.end_step - tile.first_step) * Weight::kGroups; left > 0; --left) {
      Place ahead = here;  // after the last group, the same one is loaded again and not used
      if (left > 1 && ++ahead.group == Weight::kGroups) {
        ahead.at.advance();
        ahead.group = 0;
      }
      unsigned a[kGroupSteps][4];
      const Codes::Zeros zeros = Weight::zeros(loaded.zero_points, operands.tables);
#pragma unroll
      for (int i = 0; i < kGroupSteps; ++i) {
        Codes::decode(a[i], &loaded.words[i * Codes::kWords], zeros);
      }
      Weight::scales(scale, operands.block(here.at), here.group);
      const unsigned long long tokens =
          operands.tokens(here.at) + here.group * TileX::k_step(kGroupSteps);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1) pipeline.wait(ahead.at);
        cukit::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kGroupSteps; ++i) {
          product(group_acc, a[i], tokens + TileX::k_step(i) + TileX::rows(half * kHalf), i > 0);
        }
        cukit::wgmma_commit();
        if (half == 1) load(loaded, ahead);
        cukit::wgmma_wait<0>(group_acc);
#pragma unroll
        for (int i = 0; i < kHalf / 2; ++i) {
          acc[half * (kHalf / 2) + i] += scale[i / 2 % 2] * group_acc[i];
        }
      }
      if (left == 1 || ahead.group == 0) release(pipeline, here.at);
      at = here.at;
      here = ahead;
    }
    at.advance();
  }

 private:
  static constexpr int kHalf = Tokens / 2;
  static constexpr int kGroupSteps = kChunkSteps * kGroupChunks;

  struct Place {
    State at;
    int group;
  };

  // The codes and zero points of a group.
  struct Loaded {
    unsigned words[kGroupSteps * Codes::kWords];
    unsigned zero_points;
  };

  CUKIT_DEVICE void load(Loaded& to, const Place& place) const {
    const unsigned char* const block = operands.block(place.at);
    to.zero_points = Weight::zero_points(block, place.group, threadIdx.x % 128);
    Weight::load<kGroupSteps>(to.words, block, place.group * kGroupSteps);
  }
};

template <bool Halves>
struct ProductOf { using type = DecodedProduct; };
template <>
struct ProductOf<true> { using type = HalvesProduct<TOKENS>; };
using Product = ProductOf<(kScaleByGroup && TOKENS > 128)>::type;

// Stores a tile that this block computed alone or that is split along k over several blocks.
struct Results {
  Epilogue epilogue;
  StreamKFixup shared;
  const cukit::TensorMap* map;  // MAPPED_OUT: of out
  unsigned char* staging;       // MAPPED_OUT: Store::kBytes of this consumer's shared memory
  T* out;                       // [tokens, rows]

  CUKIT_DEVICE void store(TileAccumulators& acc, const Tile& tile) const {
    if (!shared.complete(acc, tile)) return;
    const int row = first_row(tile, shared.consumer);
    const int token = tile.n * TOKENS;
    epilogue.finish(acc, row, token);
    if constexpr (MAPPED_OUT) {
      if (row < epilogue.rows) {
        Store::store(acc, staging, map, row, token, epilogue.rows, epilogue.tokens,
                     1 + shared.consumer);
      }
    } else {
      epilogue.store(out, acc, row, token);
    }
  }

  CUKIT_DEVICE void finish() const {
    if constexpr (MAPPED_OUT) Store::finish();
  }
};

// Stores a tile whose k steps are split over the blocks of a cluster: each block stores a slice of
// the tile's tokens.
struct SplitResults {
  struct Shape {
    static constexpr int kTileN = TOKENS;
    static constexpr int kRowTiles = 1;
    static constexpr int kConsumers = CONSUMERS;
  };
  using Split = cukit::SplitSums<Shape, float, SPLITS>;

  Epilogue epilogue;
  Split split;
  T* out;  // [tokens, rows]
  int consumer;

  CUKIT_DEVICE void store(TileAccumulators& acc, const Tile& tile) const {
    typename Split::Slice own;
    if (!split.exchange(own, &acc, [] {})) return;
    const int row = first_row(tile, consumer);
    const int token = tile.n * TOKENS + cukit::cluster_rank() * Split::kSliceColumns;
    epilogue.finish(own[0], row, token);
    epilogue.store(out, own[0], row, token);
  }

  CUKIT_DEVICE void finish() const {}
};

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, 1) weight_only_sm90(
    const __grid_constant__ cukit::TensorMap x,    // [tokens, k]
    const __grid_constant__ cukit::TensorMap map,  // MAPPED_OUT: out, in boxes [kPieceTokens, 64]
    const unsigned char* __restrict__ weight,      // [ceil(rows / 128)][steps][2][block bytes]
    const Scale* __restrict__ scales,              // GROUP 0: [rows]
    const float* __restrict__ token_scales,        // FLOAT8: [tokens] or [1]
    const T* __restrict__ bias,                    // [rows] or null
    T* __restrict__ out,                           // [tokens, rows]
    float4* __restrict__ pieces, int* __restrict__ arrivals,
    const cukit::WeightOnlyParameters p) {
  __shared__ Pipeline pipeline;
  __shared__ cukit::StageBarriers<1> arrived;
  __shared__ int last[CONSUMERS];
  __shared__ __align__(16) unsigned char tables[Codes::kTableBytes ? Codes::kTableBytes : 16];
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  constexpr int kTileRows = CONSUMERS * cukit::kBlockRows;
  const Schedule schedule{{(p.rows + kTileRows - 1) / kTileRows, (p.tokens + TOKENS - 1) / TOKENS,
                           p.raster_group, p.steps, SPLITS},
                          p.whole_tiles};

#if FLOAT8
  Codes::prepare(tables, threadIdx.x, THREADS);
#endif
  Block::prepare([&] {
    pipeline.init(Block::kConsumerWarps);
    arrived.init(1);
  });
  if constexpr (SPLITS > 1) cukit::cluster_arrive();  // the exchange waits for the other blocks
  Block::run(
      [&] {
        const int pairs = (p.rows + 2 * cukit::kBlockRows - 1) / (2 * cukit::kBlockRows);
        // A weight that is read only once should not evict reused data from L2.
        const Operands operands{stages, &x, weight,
                                p.tokens <= TOKENS ? cukit::create_policy_evict_first()
                                                   : cukit::create_policy_evict_normal(),
                                p.steps, pairs};
        if (threadIdx.x == 0) {
          cukit::prefetch_tensor_map(&x);
          cukit::produce(pipeline, stages, schedule, operands);
        }
        if constexpr (SPLITS > 1) {
          __syncwarp();
          cukit::cluster_wait();
        }
      },
      [&] {
        const int consumer = Block::consumer_group();
        const Product product{{stages, tables, consumer}};
        const Epilogue epilogue{bias, scales, token_scales, p.token_stride, p.tokens, p.rows};
        if constexpr (SPLITS > 1) {
          float4* const received =
              reinterpret_cast<float4*>(stages + kWeights + STAGES * Operands::kWeightBytes);
          const SplitResults results{epilogue, {received, &arrived}, out, consumer};
          cukit::consume(pipeline, schedule, product, results);
        } else {
          const Results results{epilogue,
                                {schedule, pieces, arrivals, last + consumer, p.tokens, consumer},
                                &map,
                                stages + kPieces + consumer * Store::kBytes,
                                out};
          cukit::consume(pipeline, schedule, product, results);
        }
      });
}
