// The tile and head of each block of a one-dimensional grid.
#pragma once

#include "common/platform.cuh"

namespace cukit {

struct HeadTile {
  int head;  // 0 .. heads - 1
  int tile;  // 0 .. tiles - 1
};

// Rasterisation groups of `group_heads` heads: tile 0 of each of the group's heads, then tile 1 and
// so on. With group_heads = 1, heads follow one another. If the keys and values of a group's heads
// fit in L2, they stay there. If the caller numbers tiles by descending work, the blocks of a group
// finish at about the same time.
CUKIT_DEVICE HeadTile head_tile(int block, int heads, int tiles, int group_heads) {
  const int first_head = block / (tiles * group_heads) * group_heads;
  const int within = block - first_head * tiles;
  const int width = min(group_heads, heads - first_head);
  return {first_head + within % width, within / width};
}

}  // namespace cukit
