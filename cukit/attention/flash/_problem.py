"""The description of an attention call that plans depend on: shapes and the options in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cukit.attention.flash._flash_tilings import HEAD_WIDTHS, MAX_HEAD_DIM
from cukit.errors import ArrayShapeError

Window = tuple[int | None, int | None]
"""Visible keys left and right of a query's diagonal key, which is visible too; None: unbounded."""

FLOAT8 = "float8_e4m3"
"""The dtype of problems with FP8 inputs."""

FEATURES = frozenset({"window", "softcap", "alibi", "bias", "mask", "sinks", "varlen", "value_dim"})
"""Options beyond causal attention with equal head_dims; each selects kernel variants."""


@dataclass(frozen=True)
class AttentionProblem:
    """Attention calls, forward or backward, that share a plan."""

    batch: int
    seq_len_q: int
    """Exact, or rounded up (rounded_length) so that calls of similar lengths share a plan."""
    seq_len_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    dtype: str
    causal: bool
    value_dim: int | None = None
    """head_dim of v and out; None: the same as head_dim."""
    window: Window | None = None
    """Visible keys left and right of the diagonal; a causal problem has 0 on the right."""
    softcap: bool = False
    alibi: bool = False
    bias: str | None = None
    """Dtype of the bias; None: no bias."""
    mask: bool = False
    sinks: bool = False
    varlen: bool = False
    """Packed variable-length sequences, of at most seq_len_q and seq_len_kv."""
    out_dtype: str | None = None
    """Dtype of out, and of a bias that is not float32; None: the same as dtype."""
    precise: bool = False
    """FP8 inputs: keep the probabilities in FP16."""
    teacher_group: int | None = None
    """Attention KL only: query heads per KV head of the teacher, whose head_dim is value_dim."""

    def at_lengths(
        self, seq_len_q: int, seq_len_kv: int, batch: int | None = None
    ) -> AttentionProblem:
        """A copy with other lengths, several times faster than with `dataclasses.replace`.

        batch: None keeps the batch.
        """
        problem = object.__new__(AttentionProblem)
        fields = problem.__dict__
        fields.update(self.__dict__)  # cached properties too: they do not depend on lengths
        fields["seq_len_q"], fields["seq_len_kv"] = seq_len_q, seq_len_kv
        if batch is not None:
            fields["batch"] = batch
        return problem

    @property
    def result_dtype(self) -> str:
        """The dtype of out."""
        return self.dtype if self.out_dtype is None else self.out_dtype

    @property
    def float8(self) -> bool:
        """Whether q, k and v are FP8."""
        return self.dtype == FLOAT8

    @cached_property
    def features(self) -> frozenset[str]:
        """The members of FEATURES that this call uses."""
        used = {"value_dim"} if self.head_dim_v != self.head_dim else set()
        return frozenset(used | {name for name in FEATURES - {"value_dim"} if getattr(self, name)})

    @property
    def distills(self) -> bool:
        """Whether v and grad_out are the keys and queries of a teacher."""
        return self.teacher_group is not None

    @property
    def head_dim_v(self) -> int:
        """head_dim of v and out."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @cached_property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads_q // max(1, self.num_heads_kv)

    @property
    def width(self) -> int:
        """Tile width of q and k: the smallest that holds head_dim."""
        return width_for(self.head_dim)

    @property
    def value_width(self) -> int:
        """Tile width of v and out."""
        return width_for(self.head_dim_v)

    @property
    def register_limited(self) -> bool:
        """Whether kernels keep the row and column of a score in registers."""
        return bool(self.features & {"window", "alibi", "bias", "mask", "varlen"})

    @property
    def bounded(self) -> bool:
        """Whether the visible keys depend on the query's position."""
        return self.causal or self.window is not None


def rounded_length(length: int) -> int:
    """`length`, rounded up: to a multiple of 64 up to 1024, then to eight steps per power of two.

    Plans are cached by rounded lengths, so that decode steps and slightly longer sequences reuse
    them.
    """
    step = 64 if length <= 1024 else 1 << ((length - 1).bit_length() - 4)
    return ceil_div(length, step) * step


def width_for(head_dim: int, widths: Sequence[int] = HEAD_WIDTHS) -> int:
    """The smallest of `widths` that holds head_dim."""
    for width in widths:
        if head_dim <= width:
            return width
    raise ArrayShapeError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")


Defines = tuple[tuple[str, str | int | bool], ...]


def common_defines(
    problem: AttentionProblem, width: int | None = None, value_width: int | None = None
) -> Defines:
    """Macros of dtype and tile widths; widths default to the problem's."""
    width = width or problem.width
    value_width = value_width or problem.value_width
    defines: Defines = (
        ("DTYPE", problem.dtype),
        ("HEAD_DIM", width),
        ("PADDED", problem.head_dim != width),
    )
    if "value_dim" in problem.features:
        padded = problem.head_dim_v != value_width
        defines += (("VALUE_DIM", value_width), ("VALUE_PADDED", padded))
    if problem.distills:
        defines += (("DISTILL", True),)
    return defines


def feature_defines(problem: AttentionProblem) -> Defines:
    """Macros of the options in use (kernels_cu/common/scores/score_options.cuh)."""
    used = problem.features
    names = ("window", "softcap", "alibi", "mask", "sinks", "varlen")
    defines: Defines = tuple((name.upper(), True) for name in names if name in used)
    if problem.bias is not None:
        defines += (("BIAS", 1 if problem.bias == problem.result_dtype else 2),)
    return defines


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
