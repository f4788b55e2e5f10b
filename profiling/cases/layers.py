"""Cases of `cukit.layers`; all but `linear_rope` are memory-bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit import layers
from cukit.reference import activations, norms
from cukit.reference import embedding as embedding_reference
from cukit.reference import gemm as gemm_reference
from cukit.reference import rope as rope_reference
from profiling import layer_peers, peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import array_module, integers, normal
from profiling.standard_impls import LigerFunction, TorchFunction, backward_impls, forward_impls

FAMILY = "layers"
DTYPE = "bfloat16"

Inputs = Callable[[], tuple[Any, ...]]


def cases(small: bool = False) -> list[Case]:
    """Every op of the family, bfloat16: most of them on [tokens, hidden]."""
    shapes = ((24, 256),) if small else ((8192, 4096), (16384, 8192))
    # Norms of single heads, and narrow models.
    short_rows = ((24, 32),) if small else ((131072, 128), (32768, 512))
    heads = ((12, 4, 2, 32),) if small else ((8192, 32, 8, 128), (16384, 64, 8, 128))
    projections = (
        ((24, 4, 2, 16, 32),) if small else ((65536, 24, 12, 64, 768), (8192, 40, 8, 128, 4096))
    )
    # A byte-level vocabulary, with long runs of equal ids, and a large one.
    tables = ((100, 7, 16),) if small else ((100_000, 256, 1024), (16384, 256_000, 2048))
    return [
        *(maker(*shape) for maker in ROW_MAKERS for shape in shapes),
        *(maker(*shape) for maker in NORM_MAKERS for shape in short_rows),
        *(maker(*shape) for maker in (rope_case, rope_backward_case) for shape in heads),
        *(linear_rope_case(*shape) for shape in projections),
        *(maker(*table) for maker in (embedding_case, embedding_backward_case) for table in tables),
    ]


def _forward(
    op: str,
    name: str,
    elements_moved: int,
    inputs: Inputs,
    reference: Callable[..., Any],
    torch_function: TorchFunction,
    liger: LigerFunction | None = None,
    **options: Any,
) -> Case:
    """`cukit.layers.<op>(*inputs(), **options)` and its peers."""

    def build() -> Workload:
        arrays = inputs()
        ours = partial(getattr(layers, op), *arrays, **options)
        impls = forward_impls(ours, torch_function, *arrays, liger=liger)
        return Workload(impls=impls, expected=partial(reference, *arrays, **options))

    return Case(FAMILY, op, name, DTYPE, build, bytes=elements_moved * itemsize(DTYPE))


def _backward(
    op: str,
    name: str,
    elements_moved: int,
    inputs: Inputs,
    reference: Callable[..., Any],
    torch_function: TorchFunction,
    liger: LigerFunction | None = None,
    **options: Any,
) -> Case:
    """`cukit.layers.<op>(*inputs(), **options)`; the first input is `grad_out`."""

    def build() -> Workload:
        grad_out, *arrays = inputs()
        ours = partial(getattr(layers, op), grad_out, *arrays, **options)
        impls = backward_impls(ours, torch_function, arrays, grad_out, liger=liger)
        return Workload(impls=impls, expected=partial(reference, grad_out, *arrays, **options))

    return Case(FAMILY, op, name, DTYPE, build, bytes=elements_moved * itemsize(DTYPE))


def _normals(*shapes: tuple[int, ...]) -> Inputs:
    return lambda: tuple(normal(shape, DTYPE) for shape in shapes)


# rms_norm


def rms_norm_case(tokens: int, hidden: int) -> Case:
    """Reads one tensor, writes one."""
    return _forward(
        "rms_norm",
        f"{tokens}x{hidden}",
        2 * tokens * hidden,
        _normals((tokens, hidden), (hidden,)),
        norms.rms_norm,
        layer_peers.torch_rms_norm,
        layer_peers.liger_rms_norm,
        eps=layer_peers.EPS,
    )


def rms_norm_residual_case(tokens: int, hidden: int) -> Case:
    """Reads x and residual, writes y and x + residual."""

    def build() -> Workload:
        x, weight, residual = _normals((tokens, hidden), (hidden,), (tokens, hidden))()
        return Workload(
            impls=forward_impls(
                partial(layers.rms_norm, x, weight, layer_peers.EPS, residual),
                layer_peers.torch_rms_norm_residual,
                x,
                weight,
                residual,
                liger=layer_peers.liger_rms_norm_residual,
            ),
            expected=partial(norms.rms_norm, x, weight, layer_peers.EPS, residual),
        )

    traffic = 4 * tokens * hidden * itemsize(DTYPE)
    return Case(FAMILY, "rms_norm", f"{tokens}x{hidden} residual", DTYPE, build, bytes=traffic)


def rms_norm_backward_case(tokens: int, hidden: int) -> Case:
    """Reads grad_out and x, writes grad_x and the gradient of the weight."""
    return _backward(
        "rms_norm_backward",
        f"{tokens}x{hidden}",
        3 * tokens * hidden,
        _normals((tokens, hidden), (tokens, hidden), (hidden,)),
        norms.rms_norm_backward,
        layer_peers.torch_rms_norm,
        layer_peers.liger_rms_norm,
        eps=layer_peers.EPS,
    )


# layer_norm


def layer_norm_case(tokens: int, hidden: int) -> Case:
    """Reads one tensor, writes one."""
    return _forward(
        "layer_norm",
        f"{tokens}x{hidden}",
        2 * tokens * hidden,
        _normals((tokens, hidden), (hidden,), (hidden,)),
        norms.layer_norm,
        layer_peers.torch_layer_norm,
        layer_peers.liger_layer_norm,
        eps=layer_peers.EPS,
    )


def layer_norm_backward_case(tokens: int, hidden: int) -> Case:
    """Reads grad_out and x, writes grad_x and the gradients of weight and bias."""

    def build() -> Workload:
        grad_out, x, weight, bias = _normals(
            (tokens, hidden), (tokens, hidden), (hidden,), (hidden,)
        )()
        return Workload(
            impls=backward_impls(
                partial(layers.layer_norm_backward, grad_out, x, weight, layer_peers.EPS),
                layer_peers.torch_layer_norm,
                (x, weight, bias),
                grad_out,
                liger=layer_peers.liger_layer_norm,
            ),
            expected=partial(norms.layer_norm_backward, grad_out, x, weight, layer_peers.EPS),
        )

    traffic = 3 * tokens * hidden * itemsize(DTYPE)
    name = f"{tokens}x{hidden}"
    return Case(FAMILY, "layer_norm_backward", name, DTYPE, build, bytes=traffic)


# Gated activations and gelu


def _gated_case(
    op: str,
    tokens: int,
    hidden: int,
    reference: Callable[..., Any],
    torch_function: TorchFunction,
    liger_module: str,
    liger_name: str,
) -> Case:
    def build() -> Workload:
        x = normal((tokens, 2 * hidden), DTYPE)

        def liger() -> Call:
            # Liger takes gate and up as two contiguous tensors; the split is not timed.
            function = getattr(peers.optional(liger_module), liger_name)
            contiguous = array_module().ascontiguousarray
            return peers.forward(
                function.apply, contiguous(x[:, :hidden]), contiguous(x[:, hidden:])
            )

        impls = forward_impls(partial(getattr(layers, op), x), torch_function, x)
        return Workload(impls={**impls, "liger": liger}, expected=partial(reference, x))

    traffic = 3 * tokens * hidden * itemsize(DTYPE)
    return Case(FAMILY, op, f"{tokens}x{hidden}", DTYPE, build, bytes=traffic)


def silu_and_mul_case(tokens: int, hidden: int) -> Case:
    """Reads gate and up, writes one tensor."""
    return _gated_case(
        "silu_and_mul",
        tokens,
        hidden,
        activations.silu_and_mul,
        layer_peers.torch_silu_and_mul,
        "liger_kernel.ops.swiglu",
        "LigerSiLUMulFunction",
    )


def gelu_and_mul_case(tokens: int, hidden: int) -> Case:
    """Reads gate and up, writes one tensor."""
    return _gated_case(
        "gelu_and_mul",
        tokens,
        hidden,
        activations.gelu_and_mul,
        layer_peers.torch_gelu_and_mul,
        "liger_kernel.ops.geglu",
        "LigerGELUMulFunction",
    )


def silu_and_mul_backward_case(tokens: int, hidden: int) -> Case:
    """Reads three tensors, writes two. Liger overwrites its inputs, so it cannot be repeated."""
    return _backward(
        "silu_and_mul_backward",
        f"{tokens}x{hidden}",
        5 * tokens * hidden,
        _normals((tokens, hidden), (tokens, 2 * hidden)),
        activations.silu_and_mul_backward,
        layer_peers.torch_silu_and_mul,
    )


def gelu_and_mul_backward_case(tokens: int, hidden: int) -> Case:
    """Reads three tensors, writes two. Liger overwrites its inputs, so it cannot be repeated."""
    return _backward(
        "gelu_and_mul_backward",
        f"{tokens}x{hidden}",
        5 * tokens * hidden,
        _normals((tokens, hidden), (tokens, 2 * hidden)),
        activations.gelu_and_mul_backward,
        layer_peers.torch_gelu_and_mul,
    )


def gelu_case(tokens: int, hidden: int) -> Case:
    """The erf form: reads one tensor, writes one."""
    return _forward(
        "gelu",
        f"{tokens}x{hidden}",
        2 * tokens * hidden,
        _normals((tokens, hidden)),
        activations.gelu,
        layer_peers.torch_gelu,
    )


def gelu_backward_case(tokens: int, hidden: int) -> Case:
    """The erf form: reads two tensors, writes one."""
    return _backward(
        "gelu_backward",
        f"{tokens}x{hidden}",
        3 * tokens * hidden,
        _normals((tokens, hidden), (tokens, hidden)),
        activations.gelu_backward,
        layer_peers.torch_gelu,
    )


NORM_MAKERS = (
    rms_norm_case,
    rms_norm_backward_case,
    layer_norm_case,
    layer_norm_backward_case,
)

ROW_MAKERS = (
    *NORM_MAKERS,
    rms_norm_residual_case,
    silu_and_mul_case,
    silu_and_mul_backward_case,
    gelu_and_mul_case,
    gelu_and_mul_backward_case,
    gelu_case,
    gelu_backward_case,
)


# rope


def _rope_inputs(tokens: int, heads_q: int, heads_k: int, head_dim: int) -> tuple[Any, ...]:
    xp = array_module()
    frequencies = 1e4 ** -(xp.arange(0, head_dim, 2) / head_dim)
    angles = xp.arange(tokens)[:, None] * frequencies
    return (
        normal((1, tokens, heads_q, head_dim), DTYPE),
        normal((1, tokens, heads_k, head_dim), DTYPE),
        xp.cos(angles).astype(xp.float32),
        xp.sin(angles).astype(xp.float32),
    )


def _rope_name(tokens: int, heads_q: int, heads_k: int, head_dim: int) -> tuple[str, int]:
    """The name of a case and its bytes: heads read and written, tables read. Liger works only in
    place, so it is not a peer."""
    heads = 2 * tokens * (heads_q + heads_k) * head_dim * itemsize(DTYPE)
    return f"{tokens}x{heads_q}/{heads_k}x{head_dim}", heads + 4 * tokens * head_dim


def rope_case(*size: int) -> Case:
    """tokens, query heads, key heads, head_dim: q and k in one launch."""
    name, traffic = _rope_name(*size)

    def build() -> Workload:
        arrays = _rope_inputs(*size)
        return Workload(
            impls=forward_impls(partial(layers.rope, *arrays), layer_peers.torch_rope, *arrays),
            expected=partial(rope_reference.rope, *arrays),
        )

    return Case(FAMILY, "rope", name, DTYPE, build, bytes=traffic)


def rope_backward_case(*size: int) -> Case:
    """The gradients of q and k in one launch."""
    name, traffic = _rope_name(*size)

    def build() -> Workload:
        grad_q, grad_k, cos, sin = _rope_inputs(*size)
        q, k, _, _ = _rope_inputs(*size)
        return Workload(
            impls=backward_impls(
                partial(layers.rope_backward, grad_q, grad_k, cos, sin),
                layer_peers.torch_rope,
                (q, k),
                (grad_q, grad_k),
                cos,
                sin,
            ),
            expected=partial(rope_reference.rope_backward, grad_q, grad_k, cos, sin),
        )

    return Case(FAMILY, "rope_backward", name, DTYPE, build, bytes=traffic)


def linear_rope_case(tokens: int, rotated: int, others: int, head_dim: int, hidden: int) -> Case:
    """One projection: `rotated` heads of queries and keys, which are rotated, and `others` heads of
    values."""
    columns = (rotated + others) * head_dim

    def torch_projection(torch: ModuleType) -> Callable[..., Any]:
        rotate = layer_peers.torch_rope(torch)

        def function(x: Any, w: Any, cos: Any, sin: Any) -> Any:
            heads = torch.nn.functional.linear(x, w).unflatten(-1, (-1, head_dim))[None]
            q, v = heads.split((rotated, others), dim=2)
            return torch.cat((rotate(q, q, cos, sin)[0], v), dim=2).reshape(tokens, columns)

        return function

    def build() -> Workload:
        x = normal((tokens, hidden), DTYPE)
        w = normal((columns, hidden), DTYPE, scale=hidden**-0.5)
        arrays = (x, w, *_rope_inputs(tokens, 1, 1, head_dim)[2:])
        return Workload(
            impls=forward_impls(
                partial(layers.linear_rope, *arrays, rotated), torch_projection, *arrays
            ),
            expected=partial(gemm_reference.linear_rope, *arrays, rotated),
        )

    elements = tokens * (hidden + columns) + columns * hidden
    return Case(
        FAMILY, "linear_rope", f"{tokens}x{columns}x{hidden} head_dim {head_dim}", DTYPE, build,
        flops=2 * tokens * columns * hidden,
        bytes=elements * itemsize(DTYPE) + 4 * tokens * head_dim,
    )  # fmt: skip


# embedding


def embedding_case(tokens: int, num_embeddings: int, hidden: int) -> Case:
    """One row of the table per token."""

    def build() -> Workload:
        ids, weight = (
            integers(0, num_embeddings, (tokens,)),
            normal((num_embeddings, hidden), DTYPE),
        )
        return Workload(
            impls=forward_impls(
                partial(layers.embedding, ids, weight), layer_peers.torch_embedding, weight, ids
            ),
            expected=partial(embedding_reference.embedding, ids, weight),
        )

    rows_read = min(tokens, num_embeddings)
    traffic = (tokens + rows_read) * hidden * itemsize(DTYPE) + 4 * tokens
    name = f"{tokens} of {num_embeddings}x{hidden}"
    return Case(FAMILY, "embedding", name, DTYPE, build, bytes=traffic)


def embedding_backward_case(tokens: int, num_embeddings: int, hidden: int) -> Case:
    """The gradient of the table."""

    def build() -> Workload:
        ids, weight = (
            integers(0, num_embeddings, (tokens,)),
            normal((num_embeddings, hidden), DTYPE),
        )
        grad_out = normal((tokens, hidden), DTYPE)
        return Workload(
            impls=backward_impls(
                partial(layers.embedding_backward, grad_out, ids, num_embeddings),
                layer_peers.torch_embedding,
                (weight,),
                grad_out,
                ids,
            ),
            expected=partial(embedding_reference.embedding_backward, grad_out, ids, num_embeddings),
        )

    traffic = (tokens + num_embeddings) * hidden * itemsize(DTYPE) + 4 * tokens
    name = f"{tokens} of {num_embeddings}x{hidden}"
    return Case(FAMILY, "embedding_backward", name, DTYPE, build, bytes=traffic)
