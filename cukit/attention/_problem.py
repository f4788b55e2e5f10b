"""What a plan of attention needs to know of a call: shapes and the options in use, no addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cukit.attention._flash_tilings import HEAD_WIDTHS, MAX_HEAD_DIM
from cukit.errors import ArrayShapeError

Window = tuple[int | None, int | None]
"""Keys that a query sees to its left and to its right, besides the one opposite; None is all."""

FLOAT8 = "float8_e4m3"
"""The dtype of problems whose inputs have eight bits."""

FEATURES = frozenset({"window", "softcap", "alibi", "bias", "mask", "sinks", "varlen", "value_dim"})
"""What a kernel may have to know beyond causal attention with heads of one width."""


@dataclass(frozen=True)
class AttentionProblem:
    """Calls of attention, forward or backward, that run the same kernels."""

    batch: int
    seq_len_q: int
    """Of one call, or rounded up for all that round to the same (rounded_length)."""
    seq_len_kv: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    dtype: str
    causal: bool
    value_dim: int | None = None
    """Width of the heads of v and out; None: as head_dim."""
    window: Window | None = None
    """Keys to the left and to the right that a query sees; causal problems end at 0."""
    softcap: bool = False
    alibi: bool = False
    bias: str | None = None
    """Its dtype."""
    mask: bool = False
    sinks: bool = False
    varlen: bool = False
    """Sequences of any lengths up to seq_len_q and seq_len_kv, one behind the other."""
    out_dtype: str | None = None
    """Of out, and of a bias that is not float32; None: as dtype."""
    precise: bool = False
    """Probabilities of float8 inputs keep sixteen bits."""
    teacher_group: int | None = None
    """Of the divergence of two models' attention: query heads that share a key head of the teacher,
    whose heads are value_dim wide. None: of attention."""

    def at_lengths(self, seq_len_q: int, seq_len_kv: int) -> AttentionProblem:
        """The same with other lengths, ten times quicker than `replace`: for every new length."""
        problem = object.__new__(AttentionProblem)
        facts = problem.__dict__
        facts.update(self.__dict__)  # features too, which do not depend on lengths
        facts["seq_len_q"], facts["seq_len_kv"] = seq_len_q, seq_len_kv
        return problem

    @property
    def result_dtype(self) -> str:
        """The dtype of out."""
        return self.dtype if self.out_dtype is None else self.out_dtype

    @property
    def float8(self) -> bool:
        """Whether q, k and v have eight bits."""
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
        """Width of the heads of v and out."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads_q // max(1, self.num_heads_kv)

    @property
    def width(self) -> int:
        """Width of the tiles of q and k: the smallest that holds head_dim."""
        return width_for(self.head_dim)

    @property
    def value_width(self) -> int:
        """Width of the tiles of v and out."""
        return width_for(self.head_dim_v)

    @property
    def crowded(self) -> bool:
        """Whether kernels need registers for the row and the column of a score."""
        return bool(self.features & {"window", "alibi", "bias", "mask", "varlen"})

    @property
    def bounded(self) -> bool:
        """Whether a query's place decides which keys it sees."""
        return self.causal or self.window is not None


def rounded_length(length: int) -> int:
    """`length`, rounded up: to 64 up to 1024, above that to one of eight steps an octave.

    What depends on lengths and is slow to work out is worked out for these: a decode step, or
    sequences that are a little longer than the last, find it done.
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
    """Macros that all kernels with tiles of heads take; widths are the problem's where omitted."""
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
