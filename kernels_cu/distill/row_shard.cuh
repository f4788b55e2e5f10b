// Rows of logits whose columns are sharded over processes: the statistics of a shard, and their
// merge over all shards.
//
// After each sum over whole rows the kernel is launched again; between launches, processes exchange
// a few floats per row:
//
//   PHASE 1  the masses of the shard                -> states [rows, kStateFloats], all-gathered
//   PHASE 2  loss and slopes of the shard, for divergences whose gradient needs their sum
//                                                   -> sums [rows, 2], all-reduced
//   PHASE 3  the gradient of the shard, and the shard's part of the losses
//
// PHASE 0 is a kernel over whole rows. Every process merges the shards in rank order, so the merged
// statistics are bitwise equal on all processes.
//
// Macros: PHASE 0..3.
#pragma once

#include "common/platform.cuh"
#include "common/vocabulary_row.cuh"
#include "distill/parameters.cuh"

namespace cukit {

// reference, sum and moment of the student's mass and of the teacher's; reference and sum of the
// student's without temperature; the target's logit, 0 in shards without it; the lowest elements of
// student and teacher, used only by the shard's own process; one unused.
constexpr int kStateFloats = 12;

// The mass of the columns of two shards.
CUKIT_DEVICE Mass merged(const Mass& a, const Mass& b) {
  Mass both;
  both.reference = fmaxf(a.reference, b.reference);
  const float of_a = exp2f(a.reference - both.reference);
  const float of_b = exp2f(b.reference - both.reference);
  both.sum = fmaf(a.sum, of_a, b.sum * of_b);
  both.moment = fmaf(a.moment, of_a, b.moment * of_b);
  return both;
}

struct RowState {
  Mass student, teacher, plain;
  float target_logit = 0.0f;
  float lowest_student = 0.0f, lowest_teacher = 0.0f;

  CUKIT_DEVICE void write(float* states, long long row) const {
    float* to = states + row * kStateFloats;
    to[0] = student.reference;
    to[1] = student.sum;
    to[2] = student.moment;
    to[3] = teacher.reference;
    to[4] = teacher.sum;
    to[5] = teacher.moment;
    to[6] = plain.reference;
    to[7] = plain.sum;
    to[8] = target_logit;
    to[9] = lowest_student;
    to[10] = lowest_teacher;
    to[11] = 0.0f;
  }

  // The state of the whole row: masses and target logit over all shards, lowest elements of this
  // process's shard.
  CUKIT_DEVICE static RowState read(const float* gathered, long long row, const RowShard& shard) {
    RowState whole;
    for (int rank = 0; rank < shard.size; ++rank) {
      const float* from = gathered + (rank * shard.rows + row) * kStateFloats;
      Mass student, teacher, plain;
      student.reference = from[0];
      student.sum = from[1];
      student.moment = from[2];
      teacher.reference = from[3];
      teacher.sum = from[4];
      teacher.moment = from[5];
      plain.reference = from[6];
      plain.sum = from[7];
      whole.student = merged(whole.student, student);
      whole.teacher = merged(whole.teacher, teacher);
      whole.plain = merged(whole.plain, plain);
      whole.target_logit += from[8];
      if (rank == shard.rank) {
        whole.lowest_student = from[9];
        whole.lowest_teacher = from[10];
      }
    }
    return whole;
  }
};

// A mass through which `RowExchange::merge` computes the minimum of a value.
CUKIT_DEVICE Mass lowest_as_mass(float value) {
  Mass carrier;
  carrier.reference = -value;
  return carrier;
}

}  // namespace cukit
