// Structs that attention kernels take by value.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
// seq_q, seq_kv: the length of all sequences or, with VARLEN, of the longest.
#pragma once

#include "common/scores/parameters.cuh"

namespace cukit {

// flash_attention_sm80
struct ForwardParameters {
  HeadStrides q, k, v, out;
  int batch, heads_q;
  int group;  // query heads that share a key head
  int seq_q, seq_kv;
  int head_dim, value_dim;
  int raster_group_heads;  // heads of a rasterisation group (block_order.cuh)
  float scale_log2;        // scale * log2(e)
  ScoreSettings settings;
};

// FP8 inputs of flash_attention_sm90: strides of the factors of q, k and v over batches and key
// heads, in elements, and the number of tiles of prepared values per key head.
struct Float8Settings {
  int q_batch, q_head, k_batch, k_head, v_batch, v_head;
  int value_tiles;
};

// flash_attention_sm90, whose inputs are tensor maps
struct MappedForwardParameters {
  HeadStrides out;
  int batch, heads_q;
  int group;  // query heads that share a key head
  int seq_q, seq_kv;
  int value_dim;
  int mask_heads;    // BLOCK_SPARSE: heads of block_mask, 1 or heads_q
  float scale_log2;  // scale * log2(e)
  ScoreSettings settings;
  Float8Settings float8;
};

// flash_attention_sm90 with TEACHER
struct TeacherParameters {
  int teacher_group;         // query heads that share a teacher's key head
  float teacher_scale_log2;  // of the teacher's scores
};

// flash_attention_sm90 with PAGED: layout of the cache. Strides over blocks of the cache, rows of a
// block and heads.
struct PagedKeys {
  HeadStrides k, v;
  int block_size, table_row;
  int head_dim;
};

// paged_attention. Strides of k, v and their scales: over blocks of the cache, rows of a block and
// heads.
struct PagedParameters {
  HeadStrides q, k, v, out;
  HeadStrides k_scales, v_scales;  // 0 along axes that share a scale
  HeadStrides recent_k, recent_v;  // RECENT: over ring buffers, rows of a ring buffer and heads
  int batch, heads_q, heads_kv;
  int group;      // query heads that share a key head
  int seq_q;      // of every request
  int problems;   // per request: key heads times tiles of query rows; PACKED: key heads
  int max_keys;   // capacity of a row of the block table plus, with RECENT, recent_rows
  int recent_rows;  // RECENT: rows of a ring buffer
  int block_size, table_row;
  int tile_blocks, tile_rows;  // keys of a tile: tile_blocks full blocks plus tile_rows
  int head_dim, value_dim;
  float scale_log2;  // scale * log2(e)
  ScoreSettings settings;
};

// gather_kv. Strides of caches, scales and ring buffers as in PagedParameters; of the scales and
// zero points of int4 keys over blocks, groups and heads.
struct GatherParameters {
  HeadStrides k, v, k_factors, v_factors, recent_k, recent_v;
  int heads;
  int seq_q;      // of every request, without cu_seqlens_q
  int max_keys;   // capacity of a row of the block table plus, with RECENT, recent_rows
  int recent_rows;
  int block_size, table_row;
  int tiles;        // blocks of a request's outputs
  int window_left;  // visible keys before the key at the first query's position
  int min_queries;  // requests with fewer queries are skipped
};

// append_kv. Strides of q, k, v and q_out: over tokens (row) and heads; of caches and their scales
// as in PagedParameters.
struct AppendParameters {
  HeadStrides q, k, v, q_out;
  HeadStrides k_cache, v_cache, k_scales, v_scales;
  int num_tokens;
  int num_blocks, block_size;
  int max_positions;  // rows of the cosine and sine tables
};

// pack_kv. Strides as in PagedParameters; of the factors of keys over blocks, groups and heads.
// Groups are numbered over all blocks.
struct PackParameters {
  HeadStrides k, v, k_cache, v_cache, k_factors, v_factors;
  int heads;
  int source_groups, source_block_groups;
  int target_groups, target_block_groups;
};

// mla_attention_sm90, mla_attention_float8_sm90 and mla_merge. A row is a head of a query.
struct LatentParameters {
  int batch, heads_q, seq_q;
  int problems;   // per request: tiles of rows
  int max_keys;   // capacity of the block table
  int table_row;
  long long cache_block;  // bytes from a block of the cache to the next
  float scale_log2;       // scale * log2(e)
  ScoreSettings settings;
};

// flash_attention_backward_sm90, whose inputs are tensor maps
struct MappedKeyParameters {
  int batch;
  int heads;   // key heads times splits
  int group;   // query heads of each of `heads`
  int splits;  // work items that share the keys of a tile, each with part of the query heads
  int seq_q, seq_kv;
  int rows_per_head;  // of the scratch arrays (scratch_rows.cuh)
  int head_dim, value_dim;
  int grad_k_row, grad_v_row;  // elements from one row of dK and dV to the next
  int table_rows;              // ROPE: rows of the tables per sequence, 0 if all share them
  int raster_group_heads;      // as in ForwardParameters
  float scale, scale_log2;
  int teacher_group;         // DISTILL: query heads that share a teacher's key head
  float teacher_scale_log2;  // DISTILL: of the teacher's scores
  ScoreSettings settings;
};

// flash_attention_backward_sm80
struct KeyGradientParameters {
  HeadStrides q, k, v, grad_out;
  MappedKeyParameters work;
};

// flash_attention_backward_prepare
struct RowStatisticsParameters {
  HeadStrides out, grad_out;
  int batch, heads_q;
  int seq_q;
  int rows_per_head;  // of the scratch arrays (scratch_rows.cuh)
  int total_q;        // VARLEN: rows of all sequences
  int value_dim;
};

// flash_attention_backward_finish
struct QuerySumParameters {
  int batch, heads_q;
  int seq_q;
  int rows_per_head;
  int head_dim;
  int grad_q_row;  // elements from one row of dQ to the next
  int table_rows;  // ROPE: as in MappedKeyParameters
  float scale;
};

// flash_attention_backward_query_sm80 and attention_kl_sm80
struct QueryGradientParameters {
  HeadStrides q, k, v, grad_out;
  int batch, heads_q, group;
  int seq_q, seq_kv;
  int rows_per_head;
  int head_dim, value_dim;
  int grad_q_row;          // as in QuerySumParameters
  int raster_group_heads;  // as in ForwardParameters
  float scale, scale_log2;
  int teacher_group;         // DISTILL: query heads that share a teacher's key head
  float teacher_scale_log2;  // DISTILL: of the teacher's scores
  ScoreSettings settings;
};

// attention_kl_backward_prepare
struct KlRowParameters {
  int batch, heads_q;
  int seq_q;
  int rows_per_head;  // of the scratch arrays (scratch_rows.cuh)
  int total_q;        // VARLEN: rows of all sequences
};

// attention_kl_sm90, whose inputs are tensor maps
struct MappedKlParameters {
  int batch, heads_q;
  int group, teacher_group;  // query heads that share a key head, or a teacher's key head
  int seq_q, seq_kv;
  float scale_log2, teacher_scale_log2;
  ScoreSettings settings;
};

// indexer_kl and the kernels of its gradients (indexer_work.cuh)
struct IndexerParameters {
  HeadStrides q_t, k_t, q_s, k_s;  // k_s has one head
  int batch, heads_t, heads_s;
  int group;  // teacher's heads that share a key head
  int seq_q, seq_kv;
  int teacher_dim, head_dim;
  int chunk_tiles;         // tiles of queries of a launch
  int spans, span_tiles;   // spans of keys, and tiles of keys in each (indexer_kl_sweep)
  int scratch_row;         // keys per row of the scratch arrays
  int top_k;               // SELECTED: indices per query
  int splits;              // indexer_kl_key_sm80: blocks per tile of keys; each has some heads
  float teacher_scale_log2, scale_log2;  // of teacher's and student's scores
  float grad_scale;        // factor of the gradients
  ScoreSettings settings;
};

// flash_attention_backward_query_sm90, whose inputs are tensor maps
struct MappedQueryParameters {
  int batch, heads_q, group;
  int seq_q, seq_kv;
  int rows_per_head;
  int head_dim;
  int grad_q_row;  // as in QuerySumParameters
  float scale, scale_log2;
  ScoreSettings settings;
};

}  // namespace cukit
