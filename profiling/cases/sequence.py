"""Cases of `cukit.sequence`: scans of prompts and single steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cukit import sequence
from cukit.reference import sequence as reference
from profiling import peers
from profiling.case import Call, Case, PeerMissing, Workload, itemsize
from profiling.data import normal

FAMILY = "sequence"
DTYPE = "bfloat16"


def cases(small: bool = False) -> list[Case]:
    """[sequences, tokens, heads, groups, head_dim, state_dim]: keys for each head (gated linear
    attention) and for all heads (Mamba-2), many short sequences and one long."""
    if small:
        shapes, steps = [(2, 100, 2, 1, 16, 24)], [(2, 2, 1, 16, 24)]
    else:
        shapes = [
            (1, 8192, 32, 32, 64, 64),
            (1, 8192, 32, 32, 64, 128),
            (1, 65536, 32, 32, 64, 64),
            (1, 65536, 32, 32, 64, 128),
            (1, 65536, 128, 1, 64, 128),
            (1, 65536, 8, 8, 64, 128),
            (8, 8192, 8, 8, 64, 128),
        ]
        steps = [(256, 32, 1, 64, 128)]
    return [
        *(scan_case(*shape) for shape in shapes),
        *(step_case(*shape) for shape in steps),
        *primitive_cases(1000 if small else 1 << 24),
    ]


def _name(*shape: int) -> str:
    batch, tokens, heads, groups, head_dim, state_dim = shape
    return f"{batch}x{tokens}, {heads} heads of {head_dim}, {groups} states of {state_dim}"


def scan_case(
    batch: int, seq_len: int, num_heads: int, num_groups: int, head_dim: int, state_dim: int
) -> Case:
    """Forward, with the state behind it; beside flash-linear-attention's Triton kernels."""

    def build() -> Workload:
        x = normal((batch, seq_len, num_heads, head_dim), DTYPE)
        keys = (batch, seq_len, num_groups, state_dim)
        b, c = normal(keys, DTYPE, state_dim**-0.5), normal(keys, DTYPE)
        decay = -abs(normal((batch, seq_len, num_heads), "float32", 0.1))

        def ours() -> Any:
            scan = sequence.gated_scan(x, b, c, decay)
            return scan.y, scan.final_state

        def theirs() -> Call:
            module = peers.optional("fla.ops.simple_gla")
            each = num_heads // num_groups

            def function(x: Any, b: Any, c: Any, decay: Any) -> Any:
                return module.chunk_simple_gla(
                    q=c, k=b, v=x, g=decay, scale=1.0, output_final_state=True
                )

            if each > 1:
                raise PeerMissing("chunk_simple_gla: keys for each head")
            return peers.forward(function, x, b, c, decay)

        def expected() -> Any:
            scan = reference.gated_scan(x, b, c, decay, chunk=256)
            return scan.y, scan.final_state

        arms: dict[str, Callable[[], Call]] = {"cukit": lambda: ours, "fla": theirs}
        return Workload(arms, expected)

    shape = (batch, seq_len, num_heads, num_groups, head_dim, state_dim)
    tokens = batch * seq_len
    moved = tokens * 2 * (num_heads * head_dim + num_groups * state_dim) * itemsize(DTYPE)
    moved += tokens * num_heads * itemsize("float32")
    # Within a chunk scores and their products, half of them masked; reading and updating the state.
    flops = 2.0 * tokens * num_heads * (32 * (state_dim + head_dim) + 2 * state_dim * head_dim)
    return Case(FAMILY, "gated_scan", _name(*shape), DTYPE, build, flops=flops, bytes=moved)


def step_case(batch: int, num_heads: int, num_groups: int, head_dim: int, state_dim: int) -> Case:
    """A token of each sequence: the states are read and written."""

    def build() -> Workload:
        x, decay = (
            normal((batch, num_heads, head_dim), DTYPE),
            normal((batch, num_heads), "float32"),
        )
        b, c = (normal((batch, num_groups, state_dim), DTYPE) for _ in range(2))
        decay = -abs(decay)
        start = normal((batch, num_heads, state_dim, head_dim), "float32")
        state = start.copy()
        still = decay * 0  # so that a state read again and again stays what it is
        nothing = b * 0

        def ours() -> Any:
            return sequence.gated_scan_step(state, x, nothing, c, still)

        return Workload(
            {"cukit": lambda: ours},
            partial(reference.gated_scan_step, start.copy(), x, nothing, c, still),
        )

    shape = f"{batch}, {num_heads} heads of {head_dim}, {num_groups} states of {state_dim}"
    moved = 2 * batch * num_heads * head_dim * state_dim * itemsize("float32")
    return Case(FAMILY, "gated_scan_step", shape, DTYPE, build, bytes=moved)


def primitive_cases(size: int) -> list[Case]:
    """Thin calls of CuPy, beside torch's."""
    ours: dict[str, Callable[..., Any]] = {
        "parallel_scan": sequence.parallel_scan,
        "parallel_sort": sequence.parallel_sort,
        "strided_reduction": sequence.strided_reduction,
        "histogram": partial(sequence.histogram, bins=256, low=-4.0, high=4.0),
    }
    theirs: dict[str, Callable[[Any, Any], Any]] = {
        "parallel_scan": lambda torch, x: torch.cumsum(x, 0),
        "parallel_sort": lambda torch, x: torch.sort(x, stable=True).values,
        "strided_reduction": lambda torch, x: torch.sum(x),
        "histogram": lambda torch, x: torch.histc(x, 256, -4.0, 4.0),
    }
    return [_primitive_case(name, ours[name], theirs[name], size) for name in ours]


def _primitive_case(
    name: str, function: Callable[..., Any], theirs: Callable[[Any, Any], Any], size: int
) -> Case:
    def build() -> Workload:
        x = normal((size,), "float32")

        def torch_arm() -> Call:
            return peers.forward(partial(theirs, peers.torch()), x)

        arms: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(function, x),
            "torch": torch_arm,
        }
        return Workload(arms, partial(function, x.astype("float64")))

    moved = size * itemsize("float32") * (2 if name in ("parallel_scan", "parallel_sort") else 1)
    return Case(FAMILY, name, f"{size}", "float32", build, bytes=moved)
