// Parameter structs of the graph memory kernels.
//
// cukit/core/parameters.py parses these definitions; each compilation asserts that the layouts
// agree.
#pragma once

namespace cukit {

// group_maxima, rescore_groups
struct RetrieveParameters {
  int num_queries, num_rows, dim;
  int num_groups;  // groups of 32 rows
  int k;
};

// select_top
struct SelectParameters {
  int count;  // entries per row
  int parts;  // parts per row, one block each
  int k;
};

// diffuse_step; edge_gradient without `first` and `memory_weight`
struct DiffuseParameters {
  int num_rows, dim;
  int first;  // first column
  float transition_weight, memory_weight;
};

// link_writes, memory_write, memory_write_backward
struct WriteParameters {
  int num_rows, num_writes, dim;
};

}  // namespace cukit
