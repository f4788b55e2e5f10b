// Groups of rows, each with its own matrix, and their tiles.
//
// Groups are contiguous (offsets[groups + 1]), or each has a capacity of `longest` rows and group g
// uses the first counts[g] of its rows. Offsets and counts are read only on the device.
//
//   Ragged     product                                     groups are along
//   M          x[rows, k]  times  weights[g][n, k]         rows of a and of the result
//   N          weights[g][m, k]  times  x[rows, k]         rows of b, columns of the product
//   K          grad[rows, m]^T  times  x[rows, n]          k, for a result [g][m, n]
#pragma once

#include "common/platform.cuh"
#include "common/reduce.cuh"

namespace cukit {

enum class Ragged { M, N, K };

// Where the rows of the groups are stored.
struct Groups {
  const int* ends;  // offsets[groups + 1], or counts[groups] if fixed_capacity
  int longest;
  bool fixed_capacity;

  CUKIT_DEVICE int length(int group) const {
    return fixed_capacity ? min(ends[group], longest) : ends[group + 1] - ends[group];
  }
  CUKIT_DEVICE int first_row(int group) const {
    return fixed_capacity ? group * longest : ends[group];
  }
};

// Fills starts[groups + 1] with the first tile of each group and the total number of tiles, for
// tiles of `extent` rows. Called by all lanes of one warp; at most MostGroups groups.
template <int MostGroups>
CUKIT_DEVICE void count_tiles(int* starts, const Groups& rows, int groups, int extent) {
  constexpr int kPerLane = (MostGroups + kWarpSize - 1) / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  int tiles[kPerLane];
  int sum = 0;
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int group = lane * kPerLane + j;
    tiles[j] = group < groups ? (rows.length(group) + extent - 1) / extent : 0;
    sum += tiles[j];
  }
  int before = warp_sum_before(sum);
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int group = lane * kPerLane + j;
    if (group <= groups) starts[group] = before;
    before += tiles[j];
  }
  if (lane == kWarpSize - 1 && groups == MostGroups) starts[groups] = before;
}

// The group that contains tile `at`: the last group that starts at or before it. An empty group
// starts at the same tile as the next one.
CUKIT_DEVICE int group_of_tile(const int* starts, int groups, int at) {
  int low = 0, high = groups;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle] <= at ? low : high) = middle;
  }
  return low;
}

}  // namespace cukit
