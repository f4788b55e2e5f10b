"""A student's attention and its divergence from a teacher's attention, in one pass (Hopper)."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cukit.attention.divergence._kl_plan import plan_attention_with_kl
from cukit.attention.divergence._kl_reduction import reduced
from cukit.attention.divergence.kl_pairs import (
    KlOptions,
    RowArrays,
    check_optional_scalar,
    check_pairs,
    head_map_of,
    mapped_teacher,
    problem_of_pairs,
    teacher_settings,
)
from cukit.attention.flash._arguments import (
    check_forward,
    check_kernel_layout,
    check_sequence_ends,
    fits_tensor_maps,
    lse_shape,
    problem_of,
)
from cukit.attention.flash._flash_launch_sm90 import MappedForward, MappedLaunch, encoder
from cukit.attention.flash._flash_tilings import BOX_COLUMNS, WARPGROUP_ROWS
from cukit.core.arrays import Array, adopt, empty, runs_kernel
from cukit.core.device import current_device
from cukit.core.kernel import launch_plan
from cukit.core.tensor_map import TensorMapCache

_OP = "distillation_attention"


class AttentionWithKl(NamedTuple):
    """The results of `attention_with_kl`."""

    out: Array
    loss: Array
    lse_t: Array
    lse_s: Array


def attention_with_kl(
    q_t: Array,
    k_t: Array,
    q_s: Array,
    k_s: Array,
    v_s: Array,
    options: KlOptions,
    arrays: RowArrays,
    head_map: Sequence[int] | None = None,
    normalizer: Any = None,
) -> AttentionWithKl | None:
    """flash_attention of the student and attention_kl of both models at a temperature of 1, in one
    kernel. Returns None on the CPU, before any argument is checked, and where no kernel covers the
    call.

    arrays: lse_s must be None. The other arguments, errors and numerics are those of
    distillation_attention, the caller.
    """
    q_t, k_t, q_s, k_s, v_s, *given = adopt(_OP, q_t, k_t, q_s, k_s, v_s, *arrays)
    arrays = RowArrays(*given)
    on_host = normalizer is None or isinstance(normalizer, numbers.Real)
    if not on_host:
        (normalizer,) = adopt(_OP, normalizer)
    if not runs_kernel(_OP, q_t, k_t, q_s, k_s, v_s, *arrays, None if on_host else normalizer):
        return None
    check_pairs(_OP, q_t, k_t, q_s, k_s, arrays, options)
    check_optional_scalar(_OP, "normalizer", normalizer)
    student = options.student(q_s.shape[-1])
    check_forward(_OP, q_s, k_s, v_s, None, student, arrays.scores)
    q_t, k_t = mapped_teacher(q_t, k_t, head_map_of(_OP, head_map, q_t.shape[-2], q_s.shape[-2]))
    launch = _prepare(q_s, k_s, v_s, q_t, k_t, options, *arrays)
    if launch is None:
        return None
    if arrays.varlen:
        check_sequence_ends(_OP, q_s, k_s, student, arrays.scores)
    out, shape = empty(q_s, (*q_s.shape[:-1], v_s.shape[-1])), lse_shape(q_s)
    lse_s, kl = empty(q_s, shape, np.float32), empty(q_s, shape, np.float32)
    known = arrays.lse_t
    lse_t = empty(q_s, shape, np.float32) if known is None else known
    launch((q_s, k_s, v_s, out, lse_s), (q_t, k_t), (known, kl, lse_t), arrays)
    return AttentionWithKl(out, reduced(kl, options, arrays, normalizer), lse_t, lse_s)


class _Pass:
    """A launch of `flash_attention_sm90` with a teacher, for arrays of the same shapes, strides and
    dtypes."""

    __slots__ = ("_forward", "_k", "_q")

    def __init__(self, forward: MappedLaunch, tile_n: int) -> None:
        self._forward = forward
        self._q, self._k = (
            TensorMapCache(encoder((1, rows, 1, BOX_COLUMNS))) for rows in (WARPGROUP_ROWS, tile_n)
        )

    def __call__(
        self,
        student: tuple[Array, ...],
        teacher: tuple[Array, Array],
        rows: tuple[Array | None, Array, Array],
        arrays: RowArrays,
    ) -> None:
        """Launches on the current stream.

        student: q, k, v, out and lse. rows: the teacher's lse or None, then the arrays to which the
        divergence and the teacher's lse are written.
        """
        maps = self._q(teacher[0]), self._k(teacher[1])
        self._forward(*student, *arrays.scores, more=(*maps, *rows))


@launch_plan
def _prepare(
    q_s: Array,
    k_s: Array,
    v_s: Array,
    q_t: Array,
    k_t: Array,
    options: KlOptions,
    *given: Array | None,
) -> _Pass | None:
    arrays = RowArrays(*given)
    check_kernel_layout(_OP, q_s=q_s, k_s=k_s, v_s=v_s, q_t=q_t, k_t=k_t)
    student = options.student(q_s.shape[-1])
    problem = problem_of(q_s, k_s, v_s, student, arrays.scores)
    if not fits_tensor_maps(q_s, k_s, v_s, q_t, k_t):
        return None
    known = arrays.lse_t is not None
    config = plan_attention_with_kl(problem, q_t.shape[-1], known, current_device())
    if config is None:
        return None
    teacher = teacher_settings(options, problem_of_pairs(k_t, q_s, k_s, options, arrays))
    forward = MappedForward(config)
    launch = forward.launch(q_s, k_s, v_s, None, student, arrays.scores, teacher=teacher)
    return _Pass(launch, config.tiling.tile_n)
