// Products with a quantised weight on Hopper: x [tokens, k] times W [rows, k] of int4 or int8 codes.
//
//   out[m, n] = sum_k x[m, k] scale[n, k / GROUP] (code[n, k] - zero_point[n, k / GROUP]) + bias[n]
//
// Operands are swapped: out^T = W x^T, so that wgmma's 64 rows are rows of the weight and its columns
// are tokens, of which 16 are enough. The weight goes through registers (operand a) and is decoded on
// its way (gemm/weight_codes.cuh); x, of 16-bit elements or float8, comes from shared memory.
//
// Mapping: the blocks of a persistent grid walk over tiles of CONSUMERS * 64 rows x TOKENS tokens; the
//   tiles that do not go round are cut along k (StreamKTiles, common/hopper/tile_scheduler.cuh). A thread
//   of the first warpgroup loads a step of k, 128 columns: blocks of the packed weight by bulk copies, x
//   by TMA. Consumer warpgroup i has rows 64 i .. 64 i + 63 of the tile.
// Scales: a group's products are summed by the tensor cores from zero, then added to the accumulators
//   times the scale, in float. The next chunk of codes is decoded while products are in flight. With
//   FOLD a tile may have 256 tokens, since it needs no second set of sums.
// Shared memory, bytes: STAGES * (TOKENS * 128 * sizeof(x) + CONSUMERS * block bytes), dynamic: stages of
//   x, swizzled rows of 128 bytes | with MAPPED_OUT a piece of out, [kPieceTokens, 64] in such rows, for
//   each consumer | stages of the weight's blocks. Static: two barriers a stage, a word for each
//   consumer, tables of float8 numbers.
// Macros: those of gemm/weight_only.cuh, TOKENS a multiple of 16 up to 256 (of 32 beyond 128), CONSUMERS
//   2|4; MAPPED_OUT 0|1: out is stored by TMA, which asks for rows of a multiple of 16 bytes; STAGES 2..;
//   THREADS 128 * (CONSUMERS + 1).
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/weight_only.py.
#include "common/hopper/gemm.cuh"
#include "common/hopper/split_k.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"
#include "gemm/weight_only.cuh"

namespace {

// x in shared memory; float8 is bytes.
template <bool Float8>
struct ElementOf { using type = T; };
template <>
struct ElementOf<true> { using type = unsigned char; };

using TileX = cukit::SharedTile<ElementOf<FLOAT8>::type, TOKENS, cukit::kBlockColumns>;
#ifndef PRODUCER
#define PRODUCER 40
#endif
using Block = cukit::WarpSpecialized<CONSUMERS, PRODUCER>;
using Pipeline = cukit::Pipeline<STAGES>;
using State = cukit::PipelineState<STAGES>;

static_assert(THREADS == Block::kThreads, "a producer and its consumers");

// Tokens of a piece of out on its way through shared memory.
constexpr int kPieceTokens = TOKENS % 64 == 0 && TOKENS <= 128 ? 64 : TOKENS % 32 == 0 ? 32 : 16;
using Store = cukit::TransposedStore<T, TOKENS, kPieceTokens>;

// Shared memory: stages of x | pieces of out | stages of the weight.
constexpr int kPieces = STAGES * TileX::kBytes;
constexpr int kWeights = kPieces + (MAPPED_OUT ? CONSUMERS * Store::kBytes : 0);

struct Operands {
  static constexpr int kStageBytes = TileX::kBytes;
  static constexpr int kWeightBytes = CONSUMERS * Weight::kBytes;
  unsigned char* stages;  // the first
  const cukit::TensorMap* x;
  const unsigned char* weight;
  unsigned long long policy;  // of the weight's lines in L2
  int steps, pairs;

  CUKIT_DEVICE int bytes(const Tile&) const { return kStageBytes + kWeightBytes; }

  CUKIT_DEVICE void load(unsigned char* stage, cukit::Mbarrier* full, const Tile& tile,
                         int step) const {
    constexpr unsigned kPairBytes = 2 * Weight::kBytes;
    TileX::load(stage, x, full, step * cukit::kBlockColumns, tile.n * TOKENS);
    unsigned char* const to = stages + kWeights + (stage - stages) / kStageBytes * kWeightBytes;
#pragma unroll
    for (int i = 0; i < CONSUMERS / 2; ++i) {
      // Beyond the last rows: another pair, whose product is not stored.
      const unsigned pair = min(tile.m * (CONSUMERS / 2) + i, pairs - 1);
      const unsigned char* const from =
          weight + (pair * steps + step) * static_cast<unsigned long long>(kPairBytes);
      cukit::bulk_load_policy(to + i * kPairBytes, from, kPairBytes, full, policy);
    }
  }
};

#ifndef PIECES
#define PIECES 0
#endif
#ifndef TURNS
#define TURNS 0
#endif
#ifndef SPREAD
#define SPREAD 1
#endif

// Halves: the tokens are multiplied one half after the other.
template <bool Halves>
struct DecodedProduct {
  using Accumulators = Sums;
  const unsigned char* weight;  // this consumer's block in stage 0
  const unsigned char* tables;  // Codes::kTableBytes
  unsigned long long x;         // descriptor of stage 0

  CUKIT_DEVICE DecodedProduct(const unsigned char* stages, const unsigned char* tables, int group)
      : weight(stages + kWeights + group * Weight::kBytes),
        tables(tables),
        x(TileX::k_major(stages)) {}

  CUKIT_DEVICE void multiply(Sums& sums, Pipeline& pipeline, State& at, const Tile& tile) const {
    if constexpr (PIECES > 0) {
      multiply_pieces(sums, pipeline, at, tile);
    } else if constexpr (Halves) {
      multiply_halves(sums, pipeline, at, tile);
    } else {
      multiply_whole(sums, pipeline, at, tile);
    }
  }

 private:
  static constexpr int kPieces = PIECES > 0 ? PIECES : 1;
  static constexpr int kPieceColumns = TOKENS / kPieces;
  static constexpr int kGroupSteps = kChunkSteps * kGroupChunks;
  using Partial = float[kPieceColumns / 2];
  using GroupOperand = unsigned[kGroupSteps][4];

  // Waits until the other consumer has started its products.
  CUKIT_DEVICE static void take_turn() {
    if constexpr (TURNS) cukit::named_sync(8 + Block::consumer_group(), 256);
  }
  CUKIT_DEVICE static void pass_turn() {
    if constexpr (TURNS) cukit::named_arrive(8 + (1 - Block::consumer_group()), 256);
  }

  // Steps First .. First + Count - 1 of a group -> operand a.
  template <int Count>
  CUKIT_DEVICE static void decode_steps(GroupOperand& a, const unsigned char* block, int group,
                                        int first, const unsigned char* tables) {
    const Codes::Zeros zeros =
        Weight::zeros(Weight::zero_points(block, group, threadIdx.x % 128), tables);
    unsigned words[Count * Codes::kWords];
    Weight::load<Count>(words, block, group * kGroupSteps + first);
#pragma unroll
    for (int i = 0; i < Count; ++i) Codes::decode(a[first + i], &words[i * Codes::kWords], zeros);
  }

  // Starts the products of a piece; meanwhile the sums of the piece before are added up.
  CUKIT_DEVICE void run_piece(Sums& sums, Partial& into, Partial& previous,
                              float previous_upper, float previous_lower,
                              const GroupOperand& a, unsigned long long tokens, int group, int piece) const {
    take_turn();
    cukit::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kGroupSteps; ++i) {
      const int k = TileX::k_step(group * kGroupSteps + i) + TileX::rows(piece * kPieceColumns);
      product(into, a[i], tokens + k, i > 0);
    }
    cukit::wgmma_commit();
    pass_turn();
    cukit::wgmma_wait<1>(previous);
    const int to = (piece + kPieces - 1) % kPieces * (kPieceColumns / 2);
#pragma unroll
    for (int i = 0; i < kPieceColumns / 2; ++i) {
      sums[to + i] += (i / 2 % 2 ? previous_lower : previous_upper) * previous[i];
    }
  }

  // One group: products of all pieces; meanwhile the next group is decoded.
  CUKIT_DEVICE void run_group(Sums& sums, Partial (&partial)[2], int parity, float (&scale)[2],
                              const float (&previous_scale)[2], const GroupOperand& a,
                              GroupOperand& next, const unsigned char* block,
                              unsigned long long tokens, int group, const unsigned char* next_block,
                              int next_group, Pipeline& pipeline, const State& done,
                              bool releases) const {
    Weight::scales(scale, block, group);
    constexpr int kPart = kGroupSteps / SPREAD;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int into = (parity + piece) % 2;
      run_piece(sums, partial[into], partial[1 - into], piece == 0 ? previous_scale[0] : scale[0],
                piece == 0 ? previous_scale[1] : scale[1], a, tokens, group, piece);
      if (piece % (kPieces / SPREAD) == 0) {
        decode_steps<kPart>(next, next_block, next_group, piece / (kPieces / SPREAD) * kPart, tables);
      }
    }
    if (releases) release(pipeline, done);
  }

  CUKIT_DEVICE void multiply_pieces(Sums& sums, Pipeline& pipeline, State& at,
                                    const Tile& tile) const {
    Partial partial[2];
    GroupOperand even, odd;
    float even_scale[2], odd_scale[2] = {0.0f, 0.0f};
    State done = at;
    clear(sums);
#pragma unroll
    for (int i = 0; i < kPieceColumns / 2; ++i) partial[0][i] = partial[1][i] = 0.0f;
    if constexpr (TURNS) {
      if (Block::consumer_group() == 1) cukit::named_arrive(8, 256);
    }
    pipeline.wait(at);
    decode_steps<kGroupSteps>(even, weight + at.index * Operands::kWeightBytes, 0, 0, tables);
    constexpr int kFlip = kPieces == 1 ? 1 : 0;
    const int steps = tile.end_step - tile.first_step;
    static_assert(PIECES == 0 || Weight::kGroups == 1, "experiment");
    const auto block_at = [&](const State& s) { return weight + s.index * Operands::kWeightBytes; };
    const auto tokens_at = [&](const State& s) { return x + s.index * (Operands::kStageBytes / 16); };
    int step = 0;
    for (; step + 1 < steps; step += 2) {
      State second = at;
      second.advance();
      pipeline.wait(second);
      run_group(sums, partial, 0, even_scale, odd_scale, even, odd, block_at(at), tokens_at(at), 0,
                block_at(second), 0, pipeline, done, step > 0);
      done = at;
      State third = second;
      third.advance();
      if (step + 2 == steps) third = second;
      pipeline.wait(third);
      run_group(sums, partial, kFlip, odd_scale, even_scale, odd, even, block_at(second),
                tokens_at(second), 0, block_at(third), 0, pipeline, done, true);
      done = second;
      at = second;
      at.advance();
    }
    if (step < steps) {
      run_group(sums, partial, 0, even_scale, odd_scale, even, odd, block_at(at), tokens_at(at), 0,
                block_at(at), 0, pipeline, done, step > 0);
      done = at;
      at.advance();
      finish_pieces(sums, partial[kPieces == 1 ? 0 : 1], even_scale);
    } else {
      finish_pieces(sums, partial[1], odd_scale);
    }
    release(pipeline, done);
    if constexpr (TURNS) {
      if (Block::consumer_group() == 0) cukit::named_sync(8, 256);
    }
  }

  CUKIT_DEVICE static void finish_pieces(Sums& sums, Partial& last, const float (&scale)[2]) {
    cukit::wgmma_wait<0>(last);
    constexpr int kTo = (kPieces - 1) * (kPieceColumns / 2);
#pragma unroll
    for (int i = 0; i < kPieceColumns / 2; ++i) sums[kTo + i] += scale[i / 2 % 2] * last[i];
  }

  // A group is decoded once and multiplied by one half of the tokens, then by the other: there are no
  // registers for the sums of all tokens twice. Meanwhile the other consumer's products run.
  CUKIT_DEVICE void multiply_halves(Sums& sums, Pipeline& pipeline, State& at,
                                    const Tile& tile) const {
    constexpr int kHalf = TOKENS / 2;
    float group_sums[kHalf / 2];
    float scale[2];
    clear(sums);
    if constexpr (TURNS) {
      if (Block::consumer_group() == 1) cukit::named_arrive(8, 256);
    }
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      pipeline.wait(at);
      const unsigned char* const block = weight + at.index * Operands::kWeightBytes;
      const unsigned long long tokens = x + at.index * (Operands::kStageBytes / 16);
#pragma unroll
      for (int group = 0; group < Weight::kGroups; ++group) {
        Operand a[kGroupChunks];
#pragma unroll
        for (int i = 0; i < kGroupChunks; ++i) decode(a[i], block, group * kGroupChunks + i, tables);
        Weight::scales(scale, block, group);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          take_turn();
          cukit::wgmma_fence();
#pragma unroll
          for (int i = 0; i < kGroupSteps; ++i) {
            const int k = TileX::k_step(group * kGroupSteps + i) + TileX::rows(half * kHalf);
            product(group_sums, a[i / kChunkSteps][i % kChunkSteps], tokens + k, i > 0);
          }
          cukit::wgmma_commit();
          pass_turn();
          cukit::wgmma_wait<0>(group_sums);
#pragma unroll
          for (int i = 0; i < kHalf / 2; ++i) {
            sums[half * (kHalf / 2) + i] += scale[i / 2 % 2] * group_sums[i];
          }
        }
      }
      release(pipeline, at);
      at.advance();
    }
    if constexpr (TURNS) {
      if (Block::consumer_group() == 0) cukit::named_sync(8, 256);
    }
  }

  CUKIT_DEVICE void multiply_whole(Sums& sums, Pipeline& pipeline, State& at,
                                   const Tile& tile) const {
    Sums group_sums;  // of the group in flight
    Operand a[2];
    float scale[2];
    State done;
    clear(sums);
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      pipeline.wait(at);
      const unsigned char* const block = weight + at.index * Operands::kWeightBytes;
      const unsigned long long tokens = x + at.index * (Operands::kStageBytes / 16);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        decode(a[chunk % 2], block, chunk, tables);
        const bool begins = kSumsByGroup && chunk % kGroupChunks == 0;
        if (begins && (chunk > 0 || step > tile.first_step)) {
          cukit::wgmma_wait<0>(group_sums);
          if (chunk == 0) release(pipeline, done);
          add_scaled(sums, group_sums, scale);
        }
        if (begins) Weight::scales(scale, block, chunk / kGroupChunks);
        Sums& into = kSumsByGroup ? group_sums : sums;
        cukit::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kChunkSteps; ++i) {
          const int k = TileX::k_step(chunk * kChunkSteps + i);
          product(into, a[chunk % 2][i], tokens + k, !(begins && i == 0));
        }
        cukit::wgmma_commit();
        if (!(kSumsByGroup && kGroupChunks == 1)) {
          cukit::wgmma_wait<1>(into);
          if (!kSumsByGroup && chunk == 0 && step > tile.first_step) release(pipeline, done);
        }
      }
      done = at;
      at.advance();
    }
    if constexpr (kSumsByGroup) {
      cukit::wgmma_wait<0>(group_sums);
      add_scaled(sums, group_sums, scale);
    } else {
      cukit::wgmma_wait<0>(sums);
    }
    release(pipeline, done);
  }

  // Every lane has read its codes and scales by ordinary loads.
  CUKIT_DEVICE static void release(Pipeline& pipeline, const State& done) {
    __syncwarp();
    pipeline.release(done);
  }

  template <int N>
  CUKIT_DEVICE static void product(float (&into)[N], const unsigned (&a)[4],
                                   unsigned long long tokens, bool accumulate) {
    if constexpr (FLOAT8) {
      cukit::wgmma_e4m3<2 * N>(into, a, tokens, accumulate);
    } else {
      cukit::wgmma<T, 2 * N>(into, a, tokens, accumulate);
    }
  }
};

using Product = DecodedProduct<(kSumsByGroup && TOKENS > 128)>;

#if SPLITS > 1
using Schedule = cukit::DenseTiles<>;
struct SplitShape {
  static constexpr int kTileN = TOKENS;
  static constexpr int kRowTiles = 1;
  static constexpr int kConsumers = CONSUMERS;
};
using SplitSums = cukit::SplitSums<SplitShape, float, SPLITS>;

struct Results {
  Epilogue epilogue;
  float4* received;
  cukit::StageBarriers<1>* arrived;
  T* out;

  CUKIT_DEVICE void store(Sums& sums, const Tile& tile) const {
    SplitSums::Slice own;
    if (!SplitSums{received, arrived}.exchange(own, &sums, [] {})) return;
    const int token = SplitSums::first_column(tile) - tile.n * TOKENS;
    epilogue.finish(own[0], tile, token);
    epilogue.store(out, own[0], tile, token);
  }

  CUKIT_DEVICE void finish() const {}
};
#else
struct Results {
  Epilogue epilogue;
  const cukit::TensorMap* map;  // MAPPED_OUT: of out
  unsigned char* staging;       // MAPPED_OUT: Store::kBytes of this consumer's shared memory
  T* out;                       // [tokens, rows]

  CUKIT_DEVICE void store(Sums& sums, const Tile& tile) const {
    if (!epilogue.complete(sums, tile)) return;
    epilogue.finish(sums, tile);
    if constexpr (MAPPED_OUT) {
      const int row = epilogue.first_row(tile);
      if (row < epilogue.rows) {
        Store::store(sums, staging, map, row, tile.n * TOKENS, epilogue.rows, epilogue.tokens,
                     1 + epilogue.group);
      }
    } else {
      epilogue.store(out, sums, tile);
    }
  }

  CUKIT_DEVICE void finish() const {
    if constexpr (MAPPED_OUT) Store::finish();
  }
};
#endif

}  // namespace

extern "C" __global__ void CUKIT_CLUSTER_SHAPE __launch_bounds__(THREADS, 1) weight_only_sm90(
    const __grid_constant__ cukit::TensorMap x,    // [tokens, k]
    const __grid_constant__ cukit::TensorMap map,  // MAPPED_OUT: out, in boxes of a piece
    const unsigned char* __restrict__ weight,      // [ceil(rows / 128)][steps][2][block bytes]
    const Scale* __restrict__ scales,              // GROUP 0: [rows]
    const float* __restrict__ token_scales,        // FLOAT8: [tokens], or one
    const T* __restrict__ bias,                    // [rows] or null
    T* __restrict__ out,                           // [tokens, rows]
    float4* __restrict__ pieces, int* __restrict__ arrivals,
    const cukit::WeightOnlyParameters p) {
  __shared__ Pipeline pipeline;
  __shared__ int last[CONSUMERS];
  __shared__ __align__(16) unsigned char tables[Codes::kTableBytes ? Codes::kTableBytes : 16];
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  constexpr int kTileRows = CONSUMERS * cukit::kBlockRows;
#if SPLITS > 1
  __shared__ cukit::StageBarriers<1> arrived;
#endif
  const Schedule schedule{{(p.rows + kTileRows - 1) / kTileRows, (p.tokens + TOKENS - 1) / TOKENS,
                           p.group, p.steps, SPLITS}
#if SPLITS == 1
                          , p.whole_tiles
#endif
  };

#if FLOAT8
  Codes::prepare(tables, threadIdx.x, THREADS);
#endif
  Block::prepare([&] {
    pipeline.init(Block::kConsumerWarps);
#if SPLITS > 1
    arrived.init(1);
#endif
  });
  if constexpr (SPLITS > 1) cukit::cluster_arrive();
  Block::run(
      [&] {
        const int pairs = (p.rows + 2 * cukit::kBlockRows - 1) / (2 * cukit::kBlockRows);
        // A weight that is read once must not drive out of L2 what is read again.
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
        const int group = Block::consumer_group();
        const Product product(stages, tables, group);
        unsigned char* const staging = stages + kPieces + group * Store::kBytes;
#if SPLITS > 1
        const Results results{{bias, scales, token_scales, p.token_stride, nullptr, nullptr, nullptr,
                               p.tokens, p.rows, group},
                              reinterpret_cast<float4*>(stages + kWeights + STAGES * Operands::kWeightBytes),
                              &arrived, out};
#else
        const Results results{{schedule, bias, scales, token_scales, p.token_stride, pieces, arrivals,
                               last + group, p.tokens, p.rows, group},
                              &map,
                              staging,
                              out};
#endif
        cukit::consume(pipeline, schedule, product, results);
      });
}
