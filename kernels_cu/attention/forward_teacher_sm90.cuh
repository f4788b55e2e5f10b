// The second model of flash_attention_sm90 with TEACHER: the divergence of the attention
// distributions from a teacher's, in the same pass over the scores (equation: kl_rows.cuh).
//
// For each tile of keys a consumer issues the teacher's Q K^T before the student's. The teacher's
// exponentials overlap the student's Q K^T and P V. The teacher's keys have a stage of their own
// for each stage of K, and the same pipeline state. Without TEACHER, all functions do nothing.
//
// Macros: those of flash_attention_sm90.cu.
#pragma once

#include "attention/forward_pipelines_sm90.cuh"
#include "common/platform.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/scores/score_options.cuh"
#include "common/softmax/online_softmax.cuh"
#include "common/warp_uniform.cuh"
#if TEACHER
#include "attention/kl_rows.cuh"
#endif

namespace {

namespace consumer {

#if TEACHER

static_assert(!FLOAT8 && !PAGED && !BLOCK_SPARSE && !MASK && !SINKS && !cukit::kScoresModified,
              "a teacher has no options but causal masks, windows and VARLEN");

struct TeacherArguments {
  cukit::KlRowArrays rows;
  float scale_log2;  // of the teacher's scores
};

class Teacher {
 public:
  // `first`: the uniform descriptor of tiles.q. The descriptors of the other K-major tiles differ
  // from it by constants, and take no registers.
  CUKIT_DEVICE Teacher(Pipelines& pipelines, const Tiles& tiles, const TeacherArguments& arguments,
                       unsigned long long first)
      : pipeline_(pipelines.teacher),
        arguments_(arguments),
        q_first_(first + (tiles.second_q - tiles.q) / 16),
        k_first_(first + (tiles.teacher - tiles.q) / 16) {}

  // Starts 64 queries, in stage `q_stage`. `row`: the index of the lane's first row in the arrays
  // of row statistics; `rows_left`: the number of rows from there to the sequence's end.
  CUKIT_DEVICE void start(int q_stage, long long row, int rows_left, float scale_log2) {
    q_ = q_first_ + q_stage * SecondQueryTile::kStage;
    rows_ = cukit::KlRows(arguments_.rows, row, rows_left, arguments_.scale_log2, scale_log2);
  }

  CUKIT_DEVICE void wait(const KeyState& state) { pipeline_.wait(state); }

  // Issues the products of a tile of keys.
  CUKIT_DEVICE void multiply(const KeyState& state) {
    const unsigned long long k = k_first_ + state.index * TeacherKeyTile::kStage;
#pragma unroll
    for (int step = 0; step < TeacherKeyTile::kSteps; ++step) {
      cukit::wgmma<T, TILE_N>(products_, q_ + SecondQueryTile::k_step(step),
                              k + TeacherKeyTile::k_step(step), step > 0);
    }
    cukit::wgmma_commit();
  }

  // Waits for the products, after which `Pending` groups of wgmmas were issued, and turns them into
  // weights. unmasked: no key is masked; otherwise apply_mask(products) sets masked ones to
  // -infinity.
  template <int Pending, typename ApplyMask>
  CUKIT_DEVICE void receive(const KeyState& state, bool unmasked, const ApplyMask& apply_mask) {
    cukit::wgmma_wait<Pending>(products_);
    pipeline_.release(state);
    if (!unmasked) {
      apply_mask(products_);
      cukit::make_finite(products_);
    }
    rows_.add_teacher(products_);
  }

  // Adds the weights times the student's scores. unmasked: no score is -infinity.
  template <int N>
  CUKIT_DEVICE void add_cross(const float (&scores)[N], bool unmasked) {
    if (unmasked) {
      rows_.add_cross(products_, scores);
    } else {
      rows_.add_cross<true>(products_, scores);
    }
  }

  // Does not advance the state, which the pipeline of K shares.
  CUKIT_DEVICE void skip(KeyState state) { pipeline_.skip(state); }

  // Stores the rows; `row` and `rows_left` as in start().
  CUKIT_DEVICE void finish(const cukit::SoftmaxRows& student, long long row, int rows_left) {
    rows_.take_student(student);
    rows_.finish(arguments_.rows, row, rows_left);
  }

 private:
  cukit::Pipeline<STAGES>& pipeline_;
  const TeacherArguments& arguments_;
  unsigned long long q_first_, k_first_, q_;
  float products_[TILE_N / 2];
  cukit::KlRows rows_;
};

#else

struct TeacherArguments {};

struct Teacher {
  CUKIT_DEVICE Teacher(const Pipelines&, const Tiles&, const TeacherArguments&,
                       unsigned long long) {}
  CUKIT_DEVICE void start(int, long long, int, float) {}
  CUKIT_DEVICE void wait(const KeyState&) {}
  CUKIT_DEVICE void multiply(const KeyState&) {}
  template <int Pending, typename ApplyMask>
  CUKIT_DEVICE void receive(const KeyState&, bool, const ApplyMask&) {}
  template <int N>
  CUKIT_DEVICE void add_cross(const float (&)[N], bool) {}
  CUKIT_DEVICE void skip(const KeyState&) {}
  CUKIT_DEVICE void finish(const cukit::SoftmaxRows&, long long, int) {}
};

#endif

}  // namespace consumer

}  // namespace
