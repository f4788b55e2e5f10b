"""Cases of `cukit.sequence`: gated scans, causal convolutions, one-token steps, primitives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from cukit import sequence
from cukit.reference import convolution as reference_conv
from cukit.reference import sequence as reference
from profiling import peers
from profiling.case import Call, Case, PeerMissing, Workload, itemsize
from profiling.data import normal

FAMILY = "sequence"
DTYPE = "bfloat16"


def cases(small: bool = False) -> list[Case]:
    """All cases of the family.

    shapes: [sequences, tokens, heads, groups, head_dim, state_dim] of scans with a decay per head:
    one sequence or eight shorter ones, with keys per head (gated linear attention) or shared by all
    heads (Mamba-2). channels: the same with a decay per channel of the state.
    """
    if small:
        shapes, steps = [(2, 100, 2, 1, 16, 24)], [(2, 2, 1, 16, 24)]
        channels = shapes
        convs = [(2, 30, 16)]
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
        channels = [(1, 8192, 32, 32, 64, 128), (1, 65536, 32, 32, 64, 128)]
        steps = [(256, 32, 1, 64, 128)]
        convs = [(8, 8192, 4096)]
    return [
        *(scan_case(*shape) for shape in shapes),
        *(backward_case(*shape) for shape in shapes),
        *(make(*shape, channels=True) for shape in channels for make in (scan_case, backward_case)),
        *(step_case(*shape) for shape in steps),
        *(conv_case(*shape, backward) for shape in convs for backward in (False, True)),
        *(conv_step_case(batch, channels) for batch, _, channels in convs),
        *primitive_cases(1000 if small else 1 << 24),
    ]


def _name(*shape: int, channels: bool = False) -> str:
    batch, tokens, heads, groups, head_dim, state_dim = shape
    decays = ", a decay per channel" if channels else ""
    return f"{batch}x{tokens}, {heads} heads of {head_dim}, {groups} states of {state_dim}{decays}"


class _Inputs(NamedTuple):
    x: Any
    b: Any
    c: Any
    decay: Any


def _inputs(
    batch: int,
    seq_len: int,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    state_dim: int,
    *,
    channels: bool = False,
) -> _Inputs:
    """Random arguments. The logarithmic decays average -0.08 per token and are at most -0.04,
    because `_MambaScan` divides x by them."""
    keys = (batch, seq_len, num_groups, state_dim)
    decays = (batch, seq_len, num_heads, *((state_dim,) if channels else ()))
    return _Inputs(
        normal((batch, seq_len, num_heads, head_dim), DTYPE),
        normal(keys, DTYPE, state_dim**-0.5),
        normal(keys, DTYPE),
        -0.04 - abs(normal(decays, "float32", 0.05)),
    )


def _chunk_gla(num_heads: int, num_groups: int, final: bool, channels: bool) -> Callable[..., Any]:
    """Return flash-linear-attention's chunked scan as a function of x, b, c and decay."""
    name = "gla" if channels else "simple_gla"
    chunked = getattr(peers.optional(f"fla.ops.{name}"), f"chunk_{name}")
    if num_heads != num_groups:
        raise PeerMissing(f"chunk_{name} requires keys per head")

    def function(x: Any, b: Any, c: Any, decay: Any) -> Any:
        outputs = chunked(q=c, k=b, v=x, g=decay, scale=1.0, output_final_state=final)
        return outputs if final else outputs[0]

    return function


class _MambaScan:
    """Mamba-2's chunked kernels: h_t = exp(a s_t) h_{t-1} + s_t b_t v_t^T with a scalar a per head.
    They compute `gated_scan` with a = -1, s = -decay and v = x / s."""

    def __init__(self, inputs: _Inputs, *, channels: bool) -> None:
        self._inputs = inputs
        self._channels = channels

    def _arguments(self) -> tuple[Any, ...]:
        """Return v, b, c and s."""
        x, b, c, decay = self._inputs
        return (x.astype("float32") / -decay[..., None]).astype(x.dtype), b, c, -decay

    def _function(self, final: bool) -> Callable[..., Any]:
        if self._channels:
            raise PeerMissing("mamba_chunk_scan_combined requires a decay per head")
        combined = peers.optional("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        decays = peers.to_torch(self._inputs.decay)
        rates = decays.new_full(decays.shape[2:], -1.0)

        def function(values: Any, b: Any, c: Any, steps: Any) -> Any:
            return combined(values, steps, rates, b, c, chunk_size=256, return_final_states=final)

        return function

    def forward(self) -> Call:
        return peers.forward(self._function(final=True), *self._arguments())

    def backward(self, grad_y: Any) -> Call:
        return peers.backward(self._function(final=False), self._arguments(), grad_y)

    @staticmethod
    def outputs(outputs: Any) -> Any:
        """Convert Mamba-2's outputs to those of `gated_scan`."""
        y, final_state = outputs
        return y, final_state.transpose(-1, -2).contiguous()

    def gradients(self, gradients: Any) -> Any:
        """Convert Mamba-2's gradients to those of `gated_scan`'s arguments.

        The gradient of a decay is the difference of two sums, each six times as large, and the
        first sum is computed from a gradient rounded to bfloat16.
        """
        of_values, of_b, of_c, of_steps = gradients
        values, _, _, steps = (peers.to_torch(array).float() for array in self._arguments())
        of_x = of_values.float() / steps[..., None]
        return of_x, of_b, of_c, (of_x * values).sum(-1) - of_steps


def scan_case(
    batch: int,
    seq_len: int,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    state_dim: int,
    *,
    channels: bool = False,
) -> Case:
    """Forward with final state; the peers are the Triton kernels of flash-linear-attention and of
    Mamba-2."""
    shape = (batch, seq_len, num_heads, num_groups, head_dim, state_dim)

    def build() -> Workload:
        inputs = _inputs(*shape, channels=channels)

        def ours() -> Any:
            scan = sequence.gated_scan(*inputs)
            return scan.y, scan.final_state

        def fla() -> Call:
            return peers.forward(_chunk_gla(num_heads, num_groups, True, channels), *inputs)

        def expected() -> Any:
            scan = reference.gated_scan(*inputs, chunk=256)
            return scan.y, scan.final_state

        mamba = _MambaScan(inputs, channels=channels)
        return Workload(
            {"cukit": lambda: ours, "fla": fla, "mamba": mamba.forward},
            expected,
            views={"mamba": mamba.outputs},
        )

    tokens = batch * seq_len
    moved = tokens * 2 * (num_heads * head_dim + num_groups * state_dim) * itemsize(DTYPE)
    moved += tokens * num_heads * (state_dim if channels else 1) * itemsize("float32")
    # Per token, in chunks of 64: scores and the product with them, half masked; two products with
    # the state.
    flops = 2.0 * tokens * num_heads * (32 * (state_dim + head_dim) + 2 * state_dim * head_dim)
    return Case(
        FAMILY,
        "gated_scan",
        _name(*shape, channels=channels),
        DTYPE,
        build,
        flops=flops,
        bytes=moved,
        measure_memory=True,
    )


def backward_case(
    batch: int,
    seq_len: int,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    state_dim: int,
    *,
    channels: bool = False,
) -> Case:
    """The backward alone; like the peers' backwards, it recomputes the states."""
    shape = (batch, seq_len, num_heads, num_groups, head_dim, state_dim)

    def build() -> Workload:
        inputs = _inputs(*shape, channels=channels)
        grad_y = normal(inputs.x.shape, DTYPE)

        def ours() -> Any:
            return tuple(sequence.gated_scan_backward(grad_y, *inputs)[:4])

        def fla() -> Call:
            function = _chunk_gla(num_heads, num_groups, False, channels)
            return peers.backward(function, inputs, grad_y)

        def expected() -> Any:
            return tuple(reference.gated_scan_backward(grad_y, *inputs, chunk=256)[:4])

        mamba = _MambaScan(inputs, channels=channels)
        return Workload(
            {"cukit": lambda: ours, "fla": fla, "mamba": partial(mamba.backward, grad_y)},
            expected,
            tolerance=1e-2 if channels else 2e-2,  # because of `_MambaScan.gradients`
            views={"mamba": mamba.gradients},
        )

    tokens = batch * seq_len
    values, keys = num_heads * head_dim, num_groups * state_dim
    moved = tokens * (3 * values + 4 * keys) * itemsize(DTYPE)
    moved += 2 * tokens * num_heads * (state_dim if channels else 1) * itemsize("float32")
    # Per token, in chunks of 64: scores, their gradients and three products with them, half masked;
    # five products with states.
    inner = 32 * (3 * state_dim + 2 * head_dim)
    flops = 2.0 * tokens * num_heads * (inner + 5 * state_dim * head_dim)
    return Case(
        FAMILY,
        "gated_scan_backward",
        _name(*shape, channels=channels),
        DTYPE,
        build,
        flops=flops,
        bytes=moved,
        measure_memory=True,
    )


def step_case(batch: int, num_heads: int, num_groups: int, head_dim: int, state_dim: int) -> Case:
    """One token per sequence. `bytes` counts one read and one write of the float32 states."""

    def build() -> Workload:
        x, decay = (
            normal((batch, num_heads, head_dim), DTYPE),
            normal((batch, num_heads), "float32"),
        )
        b, c = (normal((batch, num_groups, state_dim), DTYPE) for _ in range(2))
        decay = -abs(decay)
        start = normal((batch, num_heads, state_dim, head_dim), "float32")
        state = start.copy()
        # A zero decay and zero keys keep the state constant over repeated steps.
        no_decay, no_keys = decay * 0, b * 0

        def ours() -> Any:
            return sequence.gated_scan_step(state, x, no_keys, c, no_decay)

        return Workload(
            {"cukit": lambda: ours},
            partial(reference.gated_scan_step, start.copy(), x, no_keys, c, no_decay),
        )

    shape = f"{batch}, {num_heads} heads of {head_dim}, {num_groups} states of {state_dim}"
    moved = 2 * batch * num_heads * head_dim * state_dim * itemsize("float32")
    return Case(FAMILY, "gated_scan_step", shape, DTYPE, build, bytes=moved)


def conv_case(batch: int, seq_len: int, channels: int, backward: bool) -> Case:
    """Width 4 with bias and SiLU; the peers are flash-linear-attention's Triton kernel and
    torch's conv1d."""
    shape = (batch, seq_len, channels)

    def build() -> Workload:
        x, grad = normal(shape, DTYPE), normal(shape, DTYPE)
        weight, bias = normal((channels, 4), DTYPE), normal((channels,), DTYPE)
        arrays = (x, weight, bias)

        def ours() -> Any:
            if not backward:
                return sequence.causal_conv(*arrays)
            return tuple(sequence.causal_conv_backward(grad, *arrays)[:3])

        def timed(function: Callable[..., Any]) -> Call:
            if backward:
                return peers.backward(function, arrays, grad)
            return peers.forward(function, *arrays)

        def fla() -> Call:
            module = peers.optional("fla.modules.convolution")

            def function(x: Any, weight: Any, bias: Any) -> Any:
                return module.causal_conv1d(
                    x=x, weight=weight, bias=bias, activation="silu", backend="triton"
                )[0]

            return timed(function)

        def torch() -> Call:
            functional = peers.torch().nn.functional

            def function(x: Any, weight: Any, bias: Any) -> Any:
                z = functional.conv1d(
                    x.transpose(1, 2), weight[:, None], bias, padding=3, groups=channels
                )
                return functional.silu(z[..., :seq_len]).transpose(1, 2)

            return timed(function)

        def expected() -> Any:
            if not backward:
                return reference_conv.causal_conv(*arrays)
            return tuple(reference_conv.causal_conv_backward(grad, *arrays)[:3])

        return Workload({"cukit": lambda: ours, "fla": fla, "torch": torch}, expected)

    op = "causal_conv_backward" if backward else "causal_conv"
    moved = (3 if backward else 2) * batch * seq_len * channels * itemsize(DTYPE)
    name = f"{batch}x{seq_len}x{channels}, width 4, silu"
    return Case(FAMILY, op, name, DTYPE, build, bytes=moved)


def conv_step_case(batch: int, channels: int) -> Case:
    """One token for each of 32 * batch sequences. All rows of the state equal x, so that a step
    leaves it unchanged."""

    def build() -> Workload:
        x = normal((32 * batch, channels), DTYPE)
        weight, bias = normal((channels, 4), DTYPE), normal((channels,), DTYPE)
        state = x[:, None].repeat(3, axis=1)

        def ours() -> Any:
            return sequence.causal_conv_step(state, x, weight, bias)

        expected = partial(reference_conv.causal_conv_step, state.copy(), x, weight, bias)
        return Workload({"cukit": lambda: ours}, expected)

    moved = 8 * 32 * batch * channels * itemsize(DTYPE)
    name = f"{32 * batch}x{channels}, width 4, silu"
    return Case(FAMILY, "causal_conv_step", name, DTYPE, build, bytes=moved)


def primitive_cases(size: int) -> list[Case]:
    """Wrappers of CuPy; the peer is torch."""
    ours: dict[str, Callable[..., Any]] = {
        "parallel_scan": sequence.parallel_scan,
        "parallel_sort": sequence.parallel_sort,
        "strided_reduction": sequence.strided_reduction,
        "histogram": partial(sequence.histogram, bins=256, low=-4.0, high=4.0),
    }
    torch_functions: dict[str, Callable[[Any, Any], Any]] = {
        "parallel_scan": lambda torch, x: torch.cumsum(x, 0),
        "parallel_sort": lambda torch, x: torch.sort(x, stable=True).values,
        "strided_reduction": lambda torch, x: torch.sum(x),
        "histogram": lambda torch, x: torch.histc(x, 256, -4.0, 4.0),
    }
    return [_primitive_case(name, ours[name], torch_functions[name], size) for name in ours]


def _primitive_case(
    name: str, function: Callable[..., Any], torch_function: Callable[[Any, Any], Any], size: int
) -> Case:
    def build() -> Workload:
        x = normal((size,), "float32")

        def torch_impl() -> Call:
            return peers.forward(partial(torch_function, peers.torch()), x)

        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(function, x),
            "torch": torch_impl,
        }
        return Workload(impls, partial(function, x.astype("float64")))

    moved = size * itemsize("float32") * (2 if name in ("parallel_scan", "parallel_sort") else 1)
    return Case(FAMILY, name, f"{size}", "float32", build, bytes=moved)
