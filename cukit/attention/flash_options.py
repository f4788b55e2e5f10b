"""The options of attention: what the user says, and what of it plans and kernels take."""

from __future__ import annotations

import math
import operator
from functools import lru_cache
from typing import Any, NamedTuple

from cukit.core.arrays import Array, namespace
from cukit.core.parameters import parameter_structs
from cukit.core.scalars import check_flag, check_number
from cukit.errors import ConfigError

Window = tuple[int | None, int | None]
"""Keys that a query sees to its left and to its right, besides the one opposite; None is all."""

_EVERYTHING = 1 << 29  # wider than any sequence, far from the end of int32
_LOG2_E = 1.0 / math.log(2.0)
_MOST_SETTINGS = 256  # kept: most do not depend on lengths
_MATRIX_AXES = ("batch", "head", "row", "column")
_NO_STRIDES = (0,) * len(_MATRIX_AXES)
PARAMETERS = "attention/parameters.cuh"
"""Where the structs are defined that attention's kernels take by value."""
NO_TEACHER = {"teacher_group": 1, "teacher_scale_log2": 0.0}
"""What kernels that serve attention and the divergence of two models take of the second model."""


class ScoreOptions(NamedTuple):
    """Options that are plain values: hashable, a part of what a launch is remembered by."""

    causal: bool
    window_size: Window | None
    softcap: float | None
    scale: float | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None

    @property
    def left(self) -> int | None:
        """Keys to the left that a query sees; None is all of them."""
        return self.window_size[0] if self.window_size else None

    @property
    def right(self) -> int | None:
        """Keys to the right that a query sees; None is all of them."""
        return 0 if self.causal else self.window_size[1] if self.window_size else None

    @property
    def visible(self) -> tuple[bool, Window | None]:
        """Causal or not, and the window that is left to test: a right side of 0 is causal."""
        causal = self.right == 0
        bounded = self.left is not None or (self.right is not None and not causal)
        return causal, (self.left, self.right) if bounded else None

    def check(self, op: str) -> None:
        """Raises ConfigError naming the option."""
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{op}: {name} must be positive and finite, got {value}")
        window = self.window_size
        if window is not None and (
            len(window) != 2 or any(side is not None and side < 0 for side in window)
        ):
            raise ConfigError(
                f"{op}: window_size must be (left, right), each None or at least 0, got {window}"
            )

    def factor(self, head_dim: int) -> float:
        """The factor of the scores."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else float(self.scale)


class ScoreArrays(NamedTuple):
    """Options that are arrays, in the order in which every kernel takes them."""

    alibi_slopes: Array | None
    sinks: Array | None
    bias: Array | None
    mask: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_kv: Array | None

    @property
    def varlen(self) -> bool:
        """Whether the sequences lie one behind the other."""
        return self.cu_seqlens_q is not None or self.cu_seqlens_kv is not None


def score_options(
    op: str,
    causal: bool,
    window_size: Window | None,
    softcap: float | None,
    scale: float | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
) -> ScoreOptions:
    """The values of a call, in types that compare and hash alike."""
    check_flag(op, "causal", causal)
    for name, value in (("softcap", softcap), ("scale", scale)):
        if value is not None:
            check_number(op, name, value)
    try:
        return ScoreOptions(
            bool(causal),
            None if window_size is None else tuple(_integer(side) for side in window_size),  # type: ignore[arg-type]
            None if softcap is None else float(softcap),
            None if scale is None else float(scale),
            _integer(max_seqlen_q),
            _integer(max_seqlen_kv),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{op}: window_size must be a pair of integers or None, softcap and scale numbers, "
            f"max_seqlen_q and max_seqlen_kv integers: {error}"
        ) from None


def _integer(value: Any) -> int | None:
    return None if value is None else operator.index(value)


def score_settings(
    q: Array, options: ScoreOptions, arrays: ScoreArrays, shape: tuple[int, int, int, int]
) -> Any:
    """The `ScoreSettings` of a call, for the parameters of its kernels.

    shape: batch, heads_q, seq_q, seq_kv, to which bias and mask are broadcast.
    """
    slopes = arrays.alibi_slopes
    settings = _settings(
        options._replace(max_seqlen_q=None, max_seqlen_kv=None) if arrays.varlen else options,
        q.shape[-1],
        slopes.shape[1] if slopes is not None and slopes.ndim == 2 else 0,
        _matrix_strides(arrays.bias, shape),
        _matrix_strides(arrays.mask, shape),
    )
    if not arrays.varlen:
        return settings
    return parameter_structs(PARAMETERS)["ScoreSettings"].changed(settings, total_q=q.shape[0])


def _matrix_strides(matrix: Array | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, of a matrix broadcast to `shape`."""
    if matrix is None:
        return _NO_STRIDES
    steps = namespace(matrix).broadcast_to(matrix, shape).strides
    return tuple(step // matrix.itemsize for step in steps)


@lru_cache(maxsize=_MOST_SETTINGS)
def _settings(
    options: ScoreOptions,
    head_dim: int,
    alibi_batch: int,
    bias: tuple[int, ...],
    mask: tuple[int, ...],
) -> Any:
    inner = outer = 0.0
    if options.softcap is not None:
        # tanh(x) = 1 - 2 / (1 + 2^(2 log2(e) x))
        inner = 2.0 * _LOG2_E * options.factor(head_dim) / options.softcap
        outer = _LOG2_E * options.softcap
    return parameter_structs(PARAMETERS)["ScoreSettings"].pack(
        **{f"bias_{axis}": step for axis, step in zip(_MATRIX_AXES, bias, strict=True)},
        **{f"mask_{axis}": step for axis, step in zip(_MATRIX_AXES, mask, strict=True)},
        window_left=_bound(options.left),
        window_right=_bound(options.right),
        alibi_batch=alibi_batch,
        total_q=0,
        cap_inner=inner,
        cap_outer=outer,
    )


def _bound(side: int | None) -> int:
    return _EVERYTHING if side is None else min(side, _EVERYTHING)


def scales_of(q: Array, options: ScoreOptions) -> tuple[float, float]:
    """The factor of the scores, and the same for powers of two."""
    factor = options.factor(q.shape[-1])
    return factor, factor * _LOG2_E


def refuse_dropout(op: str, dropout: float) -> None:
    """Dropout inside attention is not built: its mask would have to be drawn again, bit by bit, in
    the backward."""
    if not (isinstance(dropout, (int, float)) and dropout == 0):
        raise ConfigError(
            f"{op}: dropout is out of scope, got dropout={dropout}; "
            "drop parts of the output or of the residual instead"
        )
