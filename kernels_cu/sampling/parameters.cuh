// What the kernels that sample tokens take by value, beside their arrays.
//
// cukit/core/parameters.py reads these definitions; each compilation asserts that both agree.
#pragma once

namespace cukit {

// sample. Options that are the same for all rows; an array of options takes the place of each.
struct SampleParameters {
  unsigned long long seed;  // of row 0; row r has seed + r
  unsigned long long step;
  int num_rows, vocab_size;
  int iterations;           // vectors of a thread
  int logprobs;             // 1: log-probability of the token drawn
  int top_n;                // tokens listed with their log-probabilities
  int rows_per_request;     // rows that share a request's options: 1, or draft tokens + 1
  float temperature, top_p, min_p;
  float repetition_penalty, presence_penalty, frequency_penalty;
  int top_k;                // 0: all
};

// count_tokens
struct CountParameters {
  int vocab_size, length;
  int chunk;  // tokens of the vocabulary that a block counts
};

// collect_drafts
struct CollectParameters {
  int num_requests, num_drafts;
};

}  // namespace cukit
