// Parameter structs of the sampling kernels.
//
// cukit/core/parameters.py parses these definitions; each compilation asserts that the layouts agree.
#pragma once

namespace cukit {

// sample. Options of all requests; an array of per-request values, if given, overrides an option.
struct SampleParameters {
  unsigned long long seed;  // of request 0; request r has seed + r
  unsigned long long step;  // of the first row of each request; every further row adds 1
  int num_rows, vocab_size;
  int capacity;             // maximum tokens in the list of candidates
  int logprobs;             // 1: log-probability of the drawn token
  int top_n;                // number of most likely tokens listed with log-probabilities
  int rows_per_request;     // rows that share a request's options: 1, or draft tokens + 1
  float temperature, top_p, min_p;
  float repetition_penalty, presence_penalty, frequency_penalty;
  int top_k;                // 0: no limit
};

// count_tokens
struct CountParameters {
  int vocab_size, length;
  int chunk;  // tokens of the vocabulary per block
};

// collect_drafts
struct CollectParameters {
  int num_requests, num_drafts;
};

}  // namespace cukit
