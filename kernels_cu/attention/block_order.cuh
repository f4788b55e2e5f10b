// Which tile of which head a block of a one-dimensional grid works on.
#pragma once

#include "common/platform.cuh"

namespace cukit {

struct HeadTile {
  int head;  // 0 .. heads - 1
  int tile;  // 0 .. tiles - 1
};

// Blocks take `section` heads together, tile by tile: all tiles 0 of the section's heads, then all
// tiles 1, and so on. section = 1 is head after head. A section whose keys and values fit in L2
// keeps them there, and where the plan puts the longest tiles first, its blocks end together.
CUKIT_DEVICE HeadTile head_tile(int block, int heads, int tiles, int section) {
  const int first_head = block / (tiles * section) * section;
  const int within = block - first_head * tiles;
  const int width = min(section, heads - first_head);
  return {first_head + within % width, within / width};
}

}  // namespace cukit
