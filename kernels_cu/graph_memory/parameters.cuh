// What the kernels of graph memories take by value, beside their arrays.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
#pragma once

namespace cukit {

// group_maxima, rescore_groups
struct RetrieveParameters {
  int num_queries, num_rows, dim;
  int num_groups;  // of 32 rows
  int k;
};

// select_top
struct SelectParameters {
  int count;  // of a row
  int parts;  // of a row, one block each
  int k;
};

// diffuse_step
struct DiffuseParameters {
  int num_rows, dim;
  int first;  // column
  float keep, inject;
};

// link_writes, memory_write, memory_write_backward
struct WriteParameters {
  int num_rows, num_writes, dim;
};

}  // namespace cukit
