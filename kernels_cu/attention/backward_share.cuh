// A consumer's share of a tile in the Hopper backward for heads of more than 128 columns: its columns of
// dK, dV and dQ, and where its operands lie in shared memory.
#pragma once

#include "attention/backward_scores.cuh"
#include "attention/backward_sums.cuh"
#include "common/platform.cuh"
#include "common/ptx/opaque.cuh"

namespace cukit::backward {

constexpr int kScoreTiles = 4;  // two stages of P, two of dS
constexpr int kColumns = 128;   // of the first warpgroup's share; the second has the others
// Narrower tiles leave room for dQ; wider ones stage it in the tile of dO that has just been read, which
// the adders then pass on to the producer.
constexpr bool kOwnStaging = HEAD_DIM == 192;
constexpr int kGradOutReaders = kOwnStaging ? Block::kConsumerWarps : kAdders;
// Named barriers, two each, as the first warpgroup is ahead by one: P is in shared memory; dS is, and
// P is no longer read; and one for each warpgroup's own threads.
constexpr int kProbabilities = 1;
constexpr int kDerivatives = 3;
constexpr int kOwn = 5;

static_assert(TILE_N == 64 && TILE_M == 64, "one product of 64 rows each way");
static_assert(HEAD_DIM == 192 || HEAD_DIM == 256, "one or two parts for the second warpgroup");
static_assert(STAGES == 2, "as many as of P and of dS");

// Of `columns`, those from `first` on, `most` at most.
CUKIT_DEVICE constexpr int columns_from(int columns, int first, int most) {
  const int left = columns - first;
  return left < 0 ? 0 : left < most ? left : most;
}

// Of `columns`, those that are the warpgroup's.
CUKIT_DEVICE constexpr int share_of(int columns, int group) {
  return columns_from(columns, group * kColumns, kColumns);
}

// Where tiles lie from the first of K on, in bytes.
constexpr int kValuesAt = KeyTile::kBytes;
constexpr int kQueriesAt = kValuesAt + KeyTile::kBytes;
constexpr int kGradOutAt = kQueriesAt + STAGES * QueryTile::kBytes;
constexpr int kProbabilitiesAt = kGradOutAt + STAGES * QueryTile::kBytes;
constexpr int kDerivativesAt = kProbabilitiesAt + 2 * ScoreTile::kBytes;

// What both warpgroups know of their share. Descriptors are sums of `first` and constants: there are
// no registers to keep them in.
struct Share {
  int group, warp, lane_column;
  unsigned long long first;  // K-major, of all tiles

  CUKIT_DEVICE Share(const Tiles& tiles, int group)
      : group(group),
        warp(threadIdx.x % kWarpgroupThreads / kWarpSize),
        lane_column(accumulator_column()),
        first(KeyTile::k_major(tiles.k)) {}

  // The same, of which the compiler derives nothing ahead of time: it would have to spill it.
  CUKIT_DEVICE Share rederived() const {
    Share share = *this;
    const unsigned low = opaque(static_cast<unsigned>(first));
    share.first = (first >> 32 << 32) + low;
    return share;
  }

  CUKIT_DEVICE unsigned long long k_major(int at) const { return first + at / 16; }

  // MN-major: another distance between the parts.
  CUKIT_DEVICE unsigned long long mn_major(int at, int part) const {
    return first + at / 16 + (static_cast<unsigned long long>(part - 1) << 16);
  }

  // P or dS of a stage, keys as rows.
  CUKIT_DEVICE unsigned long long scores(int at, int stage) const {
    return k_major(at) + stage * ScoreTile::kStage;
  }

  // The share's columns of a stage of Q or dO.
  CUKIT_DEVICE unsigned long long columns(int at, int stage) const {
    return mn_major(at, QueryTile::kPart) +
           (stage * QueryTile::kStage + group * (2 * QueryTile::kPart));
  }

  // dS of a stage, queries as rows; a part of the share's columns of K.
  CUKIT_DEVICE unsigned long long queries(int stage) const {
    return mn_major(kDerivativesAt, ScoreTile::kPart) + stage * ScoreTile::kStage;
  }
  CUKIT_DEVICE unsigned long long keys(int part) const {
    return mn_major(part * KeyTile::kPartBytes, KeyTile::kPart) + group * (2 * KeyTile::kPart);
  }

  // Where a part of the warp's share of dQ is staged.
  CUKIT_DEVICE unsigned char* staging(const Tiles& tiles, int stage, int part) const {
    if constexpr (kOwnStaging) {
      return tiles.dq + (group == 0 ? 2 * warp + part : 8 + warp) * kPieceBytes;
    } else {
      return tiles.grad_out + stage * QueryTile::kBytes + (group * 4 + warp) * kPieceBytes;
    }
  }

  // The phase of its sum changes with every tile, as the stage does.
  CUKIT_DEVICE PipelineState<kAdders> sum(const PipelineState<STAGES>& at) const {
    return {group, static_cast<unsigned>(at.index)};
  }
};

}  // namespace cukit::backward
