// Products with a quantised weight on Hopper: x [tokens, k] times W [rows, k] of int4 or int8 codes.
//
//   out[m, n] = sum_k x[m, k] scale[n, k / GROUP] (code[n, k] - zero_point[n, k / GROUP]) + bias[n]
//
// Operands are swapped: out^T = W x^T, so that wgmma's 64 rows are rows of the weight and its columns
// are tokens, of which 16 are enough. The weight goes through registers (operand a) and is decoded on
// its way (gemm/weight_codes.cuh); x comes from shared memory.
//
// Mapping: the blocks of a persistent grid walk over tiles of CONSUMERS * 64 rows x TOKENS tokens; the
//   tiles that do not go round are cut along k (StreamKTiles, common/hopper/tile_scheduler.cuh). A thread
//   of the first warpgroup loads a step of k, 128 columns: blocks of the packed weight by bulk copies, x
//   by TMA. Consumer warpgroup i has rows 64 i .. 64 i + 63 of the tile.
// Scales: a group's products are summed by the tensor cores from zero, then added to the accumulators
//   times the scale, in float. The next chunk of codes is decoded while products are in flight.
// Pieces of a tile: each block writes its sums to `pieces` and counts itself; the last to arrive adds
//   all of them up in the order of k. No block waits for another.
// Shared memory, bytes: STAGES * round_up(TOKENS * 256 + CONSUMERS * block bytes, 1024), dynamic: stages
//   (x | blocks of the weight); with MAPPED_OUT, behind them, a piece of out, [kPieceTokens, 64] in rows
//   of 128 bytes, swizzled, for each consumer. Static: two barriers a stage, a word for each consumer.
// Macros: DTYPE float16|bfloat16 (x, bias, out); BITS 4|8; GROUP 32|64|128, or 0 for one scale a row;
//   ZERO_POINTS 0|1 (int4 with groups); SCALE float16|bfloat16|float32; TOKENS a multiple of 16 up to 128;
//   CONSUMERS 2|4; MAPPED_OUT 0|1: out is stored by TMA, which asks for rows of a multiple of 16 bytes;
//   STAGES 2..; THREADS 128 * (CONSUMERS + 1).
// Architecture: sm_90 (sm_90a) only. Accumulates in float in a fixed order: deterministic.
// Reference: cukit/reference/weight_only.py.
#include "common/hopper/gemm.cuh"
#include "common/platform.cuh"
#include "common/types.cuh"
#include "gemm/parameters.cuh"
#include "gemm/weight_codes.cuh"

namespace {

using cukit::bfloat16;
using cukit::float16;
using cukit::float32;
using T = cukit::element_t;
using Scale = SCALE;

template <int Bits>
struct CodesOf;
template <>
struct CodesOf<4> { using type = cukit::Int4Codes<T>; };
template <>
struct CodesOf<8> { using type = cukit::Int8Codes<T>; };

using Codes = CodesOf<BITS>::type;
using Weight = cukit::WeightBlock<Codes, Scale, GROUP, ZERO_POINTS>;
using TileX = cukit::SharedTile<T, TOKENS, cukit::kBlockColumns>;
using Block = cukit::WarpSpecialized<CONSUMERS, 40>;
using Schedule = cukit::StreamKTiles;
using Tile = cukit::StreamKTile;
using Pipeline = cukit::Pipeline<STAGES>;
using State = cukit::PipelineState<STAGES>;
using Sums = float[TOKENS / 2];

constexpr int kChunk = GROUP == 32 ? 32 : 64;  // columns that are decoded at a time
constexpr int kChunkSteps = kChunk / 16;
constexpr int kChunks = cukit::kBlockColumns / kChunk;
constexpr int kGroupChunks = GROUP ? GROUP / kChunk : kChunks;

static_assert(THREADS == Block::kThreads, "a producer and its consumers");

struct Operands {
  static constexpr int kLoadBytes = TileX::kBytes + CONSUMERS * Weight::kBytes;
  static constexpr int kStageBytes = (kLoadBytes + 1023) / 1024 * 1024;
  const cukit::TensorMap* x;
  const unsigned char* weight;
  int steps, pairs;

  CUKIT_DEVICE void load(unsigned char* stage, cukit::Mbarrier* full, const Tile& tile,
                         int step) const {
    constexpr unsigned kPairBytes = 2 * Weight::kBytes;
    TileX::load(stage, x, full, step * cukit::kBlockColumns, tile.n * TOKENS);
#pragma unroll
    for (int i = 0; i < CONSUMERS / 2; ++i) {
      // Beyond the last rows: another pair, whose product is not stored.
      const unsigned pair = min(tile.m * (CONSUMERS / 2) + i, pairs - 1);
      cukit::bulk_load(stage + TileX::kBytes + i * kPairBytes,
                       weight + (pair * steps + step) * static_cast<unsigned long long>(kPairBytes),
                       kPairBytes, full);
    }
  }
};

struct Product {
  using Accumulators = Sums;
  const unsigned char* weight;  // this consumer's block in stage 0
  unsigned long long x;         // descriptor of stage 0

  CUKIT_DEVICE Product(const unsigned char* stages, int group)
      : weight(stages + TileX::kBytes + group * Weight::kBytes), x(TileX::k_major(stages)) {}

  CUKIT_DEVICE void multiply(Sums& sums, Pipeline& pipeline, State& at, const Tile& tile) const {
    Sums group_sums;  // GROUP: of the group in flight
    unsigned a[2][kChunkSteps][4];
    float scale[2];
    State done;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
    for (int step = tile.first_step; step < tile.end_step; ++step) {
      pipeline.wait(at);
      const unsigned char* const block = weight + at.index * Operands::kStageBytes;
      const unsigned long long tokens = x + at.index * (Operands::kStageBytes / 16);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        decode(a[chunk % 2], block, chunk);
        const bool begins = GROUP && chunk % kGroupChunks == 0;
        if (begins && (chunk > 0 || step > tile.first_step)) {
          cukit::wgmma_wait<0>(group_sums);
          if (chunk == 0) pipeline.release(done);
          add_scaled(sums, group_sums, scale);
        }
        if (begins) Weight::scales(scale, block, chunk / kGroupChunks);
        Sums& into = GROUP ? group_sums : sums;
        cukit::wgmma_fence();
#pragma unroll
        for (int i = 0; i < kChunkSteps; ++i) {
          cukit::wgmma<T, TOKENS>(into, a[chunk % 2][i],
                                  tokens + TileX::k_step(chunk * kChunkSteps + i),
                                  !(begins && i == 0));
        }
        cukit::wgmma_commit();
        if (!(GROUP && kGroupChunks == 1)) {
          cukit::wgmma_wait<1>(into);
          if (!GROUP && chunk == 0 && step > tile.first_step) pipeline.release(done);
        }
      }
      done = at;
      at.advance();
    }
    if constexpr (GROUP != 0) {
      cukit::wgmma_wait<0>(group_sums);
      add_scaled(sums, group_sums, scale);
    } else {
      cukit::wgmma_wait<0>(sums);
    }
    pipeline.release(done);
  }

 private:
  CUKIT_DEVICE static void decode(unsigned (&a)[kChunkSteps][4], const unsigned char* block,
                                  int chunk) {
    unsigned words[kChunkSteps * Codes::kWords];
    Weight::load<kChunkSteps>(words, block, chunk * kChunkSteps);
    const cukit::RowPair zeros = Weight::zeros(block, GROUP ? chunk / kGroupChunks : 0);
#pragma unroll
    for (int i = 0; i < kChunkSteps; ++i) Codes::decode(a[i], &words[i * Codes::kWords], zeros);
  }

  CUKIT_DEVICE static void add_scaled(Sums& sums, const Sums& group_sums, const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] += scale[i / 2 % 2] * group_sums[i];
  }
};

// Tokens of a piece of out on its way through shared memory.
constexpr int kPieceTokens = TOKENS % 64 == 0 ? 64 : TOKENS % 32 == 0 ? 32 : 16;
using Store = cukit::TransposedStore<T, TOKENS, kPieceTokens, 1>;

struct Epilogue {
  Schedule schedule;
  const cukit::TensorMap* map;  // MAPPED_OUT: of out
  T* out;                       // [tokens, rows]
  const T* bias;                // [rows] or null
  const Scale* scales;          // GROUP 0: [rows]
  float4* pieces;  // [2 blocks][CONSUMERS][TOKENS / 8][128 threads]
  int* arrivals;   // [shared tiles][CONSUMERS], zeros; they are zeros again when the kernel ends
  int* last;               // shared memory, a word of this consumer
  unsigned char* staging;  // shared memory, MAPPED_OUT: Store::kBytes of this consumer
  int tokens, rows;
  int group;  // this consumer

  CUKIT_DEVICE void store(Sums& sums, const Tile& tile) const {
    if (schedule.in_pieces(tile) && !collect(sums, tile)) return;
    write(sums, tile);
  }

  CUKIT_DEVICE void finish() const {
    if constexpr (MAPPED_OUT) Store::finish();
  }

 private:
  CUKIT_DEVICE float4* piece(int block, int shared) const {
    return pieces + ((schedule.place(block, shared) * CONSUMERS + group) * (TOKENS / 8)) * 128 +
           threadIdx.x % 128;
  }

  // Adds the pieces of the tile up, in the block that is last to bring one; false in the others.
  CUKIT_DEVICE bool collect(Sums& sums, const Tile& tile) const {
    const int used = min((tokens - tile.n * TOKENS + 7) / 8, TOKENS / 8);  // eights of tokens
    float4* const own = piece(blockIdx.x, tile.shared);
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n) {
      if (n < used) {
        own[n * 128] = make_float4(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]);
      }
    }
    const int first = schedule.first_block(tile.shared);
    const int end = schedule.last_block(tile.shared) + 1;
    __threadfence();
    cukit::named_sync(1 + group, 128);
    if (threadIdx.x % 128 == 0) {
      int* const counter = arrivals + tile.shared * CONSUMERS + group;
      const bool is_last = atomicAdd(counter, 1) == end - first - 1;
      if (is_last) *counter = 0;
      *last = is_last;
    }
    cukit::named_sync(1 + group, 128);
    const bool is_last = *last;
    // Before the next tile's, every thread has read the word.
    if (!is_last) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sums[i] = 0.0f;
    for (int block = first; block < end; ++block) {
      const float4* const from = piece(block, tile.shared);
#pragma unroll
      for (int n = 0; n < TOKENS / 8; ++n) {
        if (n < used) {
          const float4 four = __ldcg(from + n * 128);
          sums[4 * n] += four.x;
          sums[4 * n + 1] += four.y;
          sums[4 * n + 2] += four.z;
          sums[4 * n + 3] += four.w;
        }
      }
    }
    return true;
  }

  CUKIT_DEVICE void write(Sums& sums, const Tile& tile) const {
    const int group_row = (tile.m * CONSUMERS + group) * cukit::kBlockRows;
    const int first_row = group_row + cukit::accumulator_row();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 8 * half;
      const float offset = bias && row < rows ? cukit::to_float(bias[row]) : 0.0f;
      const float scale = GROUP || row >= rows ? 1.0f : cukit::to_float(scales[row]);
#pragma unroll
      for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& sum = sums[4 * n + 2 * half + i];
          sum = GROUP ? sum + offset : sum * scale + offset;
        }
    }
    if constexpr (MAPPED_OUT) {
      if (group_row < rows) {
        Store::store(sums, staging, map, group_row, tile.n * TOKENS, rows, tokens, 1 + group);
      }
    } else {
      write_singly(sums, tile, first_row);
    }
  }

  CUKIT_DEVICE void write_singly(const Sums& sums, const Tile& tile, int first_row) const {
    const int first_token = tile.n * TOKENS + cukit::accumulator_column();
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int row = first_row + i / 2 % 2 * 8;
      const int token = first_token + i / 4 * 8 + i % 2;
      if (row < rows && token < tokens) {
        out[static_cast<long long>(token) * rows + row] = cukit::from_float<T>(sums[i]);
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) weight_only_sm90(
    const __grid_constant__ cukit::TensorMap x,    // [tokens, k]
    const __grid_constant__ cukit::TensorMap map,  // MAPPED_OUT: out, in boxes of a piece
    const unsigned char* __restrict__ weight,    // [ceil(rows / 128)][steps][2][block bytes]
    const Scale* __restrict__ scales,            // GROUP 0: [rows]
    const T* __restrict__ bias,                  // [rows] or null
    T* __restrict__ out,                         // [tokens, rows]
    float4* __restrict__ pieces, int* __restrict__ arrivals,
    const cukit::WeightOnlyParameters p) {
  __shared__ Pipeline pipeline;
  __shared__ int last[CONSUMERS];
  CUKIT_DYNAMIC_SHARED(unsigned char, stages);
  constexpr int kTileRows = CONSUMERS * cukit::kBlockRows;
  const Schedule schedule{{(p.rows + kTileRows - 1) / kTileRows, (p.tokens + TOKENS - 1) / TOKENS,
                           p.group, p.steps, 1},
                          p.whole_tiles};

  Block::prepare([&] { pipeline.init(Block::kConsumerWarps); });
  Block::run(
      [&] {
        const int pairs = (p.rows + 2 * cukit::kBlockRows - 1) / (2 * cukit::kBlockRows);
        const Operands operands{&x, weight, p.steps, pairs};
        if (threadIdx.x == 0) cukit::produce(pipeline, stages, schedule, operands);
      },
      [&] {
        const int group = Block::consumer_group();
        const Product product(stages, group);
        unsigned char* const staging =
            stages + STAGES * Operands::kStageBytes + group * Store::kBytes;
        const Epilogue epilogue{schedule, &map,         out,     bias,     scales, pieces,
                                arrivals, last + group, staging, p.tokens, p.rows, group};
        cukit::consume(pipeline, schedule, product, epilogue);
      });
}
