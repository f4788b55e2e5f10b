"""Cases of `cukit.attention`: most have 16384 tokens and heads of 2048 columns in total. Cases of
windows, block masks and variable-length sequences are in `attention_options`.

The peers are the two backends of torch's scaled_dot_product_attention that do not write the score
matrix: FlashAttention-2 and cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from cukit.attention import flash_attention, flash_attention_backward
from cukit.reference import attention as reference
from profiling import peers
from profiling.case import Call, Case, Workload, itemsize
from profiling.data import array_module, normal

BACKENDS = {"torch-flash": "FLASH_ATTENTION", "torch-cudnn": "CUDNN_ATTENTION"}


@dataclass(frozen=True)
class Shape:
    """Queries and keys of one length."""

    batch: int
    seq_len: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    causal: bool
    value_dim: int | None = None
    """head_dim of v and out, if different."""

    def __str__(self) -> str:
        width = (
            str(self.head_dim) if self.value_dim is None else f"{self.head_dim}/{self.value_dim}"
        )
        heads = str(self.num_heads_q)
        if self.num_heads_kv != self.num_heads_q:
            heads += f"/{self.num_heads_kv}"
        mask = " causal" if self.causal else ""
        return f"d{width} {self.batch}x{heads}x{self.seq_len}{mask}"

    @property
    def flops(self) -> float:
        """FLOPs of the two products of the forward; a causal mask halves them."""
        columns = self.head_dim + (self.value_dim or self.head_dim)
        square = self.batch * self.num_heads_q * self.seq_len**2
        return 2 * columns * square / (2 if self.causal else 1)

    def elements(self, num_heads: int) -> int:
        """Number of elements of q and out, or of k and v, with this many heads."""
        columns = self.head_dim + (self.value_dim or self.head_dim)
        return self.batch * self.seq_len * num_heads * columns

    def arrays(self, dtype: str) -> tuple[Any, Any, Any, Any]:
        """q, k, v and the gradient of out."""
        value_dim = self.value_dim or self.head_dim
        q, k, v, grad_out = (
            normal((self.batch, self.seq_len, heads, width), dtype)
            for heads, width in (
                (self.num_heads_q, self.head_dim),
                (self.num_heads_kv, self.head_dim),
                (self.num_heads_kv, value_dim),
                (self.num_heads_q, value_dim),
            )
        )
        return q, k, v, grad_out


def cases(small: bool = False) -> list[Case]:
    """Three lengths for each of three head_dims, and one GQA shape, forward and backward; other
    head_dims, some of them forward only; float16."""
    if small:
        shapes = [Shape(1, 40, 4, 2, 16, causal) for causal in (False, True)]
        further = [Shape(1, 40, 4, 2, 24, False, 16)]
    else:
        shapes = [
            Shape(16384 // seq_len, seq_len, 2048 // width, 2048 // width, width, causal)
            for width in (64, 128, 256)
            for seq_len in (1024, 4096, 16384)
            for causal in (False, True)
        ]
        shapes.append(Shape(2, 8192, 32, 8, 128, True))
        further = [
            Shape(4, 4096, 16, 16, head_dim, causal, value_dim)
            for head_dim, value_dim in ((96, None), (192, 128))
            for causal in (False, True)
        ]
    found = [make(shape, "bfloat16") for make in (forward_case, backward_case) for shape in shapes]
    found += [forward_case(shape, "bfloat16") for shape in further]
    if not small:
        found.append(forward_case(Shape(16, 512, 32, 32, 64, False), "float16"))
        wide = (Shape(4, 4096, 16, 16, 192, True, 128), Shape(1, 12000, 16, 1, 192, True))
        found += [backward_case(shape, "bfloat16") for shape in wide]
    return found


def _sdpa(backend: str, shape: Shape) -> Callable[..., Any]:
    """torch's attention through one backend, on [batch, seq, heads, head_dim]."""
    torch = peers.torch()
    attention = peers.optional("torch.nn.attention")
    chosen = getattr(attention.SDPBackend, backend)

    def function(q: Any, k: Any, v: Any) -> Any:
        context: AbstractContextManager[Any] = attention.sdpa_kernel(chosen)
        with context:
            out = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)),
                is_causal=shape.causal,
                enable_gqa=shape.num_heads_q != shape.num_heads_kv,
            )
        return out.transpose(1, 2)

    return function


def by_key_head(shape: Shape, function: Callable[..., Any], *arrays: Any) -> tuple[Any, ...]:
    """The reference, per KV head and batch: all scores at once would not fit in memory."""
    xp = array_module()

    def part(array: Any, b: int, h: int) -> Any:
        width = array.shape[2] // shape.num_heads_kv
        return array[b : b + 1, :, h * width : (h + 1) * width].astype(xp.float32)

    rows = []
    for b in range(shape.batch):
        heads = [
            function(*(part(array, b, h) for array in arrays)) for h in range(shape.num_heads_kv)
        ]
        rows.append([xp.concatenate(parts, axis=2) for parts in zip(*heads, strict=True)])
    return tuple(xp.concatenate(parts, axis=0) for parts in zip(*rows, strict=True))


def forward_case(shape: Shape, dtype: str) -> Case:
    """Reads q, k and v, writes out."""

    def build() -> Workload:
        q, k, v, _ = shape.arrays(dtype)

        def attend(*heads: Any) -> tuple[Any]:
            return (reference.flash_attention(*heads, causal=shape.causal),)

        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: partial(flash_attention, q, k, v, causal=shape.causal)
        }
        for name, backend in BACKENDS.items():
            impls[name] = partial(forward_impl, backend, shape, q, k, v)
        return Workload(impls=impls, expected=lambda: by_key_head(shape, attend, q, k, v)[0])

    elements = shape.elements(shape.num_heads_q) + shape.elements(shape.num_heads_kv)
    return Case(
        family="attention",
        op="flash_attention",
        name=str(shape),
        dtype=dtype,
        build=build,
        flops=shape.flops,
        bytes=elements * itemsize(dtype),
    )


def backward_case(shape: Shape, dtype: str) -> Case:
    """The three gradients, also with deterministic grad_q."""

    def build() -> Workload:
        q, k, v, grad_out = shape.arrays(dtype)
        out, lse = flash_attention(q, k, v, causal=shape.causal, return_lse=True)
        arguments = (grad_out, q, k, v, out, lse)

        def gradients(grad_out: Any, *heads: Any) -> tuple[Any, ...]:
            out, lse = reference.flash_attention(*heads, causal=shape.causal, return_lse=True)
            return reference.flash_attention_backward(
                grad_out, *heads, out, lse, causal=shape.causal
            )

        ours = partial(flash_attention_backward, *arguments, causal=shape.causal)
        impls: dict[str, Callable[[], Call]] = {
            "cukit": lambda: ours,
            "cukit-ordered": lambda: partial(ours, deterministic=True),
        }
        for name, backend in BACKENDS.items():
            impls[name] = partial(_backward_impl, backend, shape, q, k, v, grad_out)
        return Workload(
            impls=impls, expected=lambda: by_key_head(shape, gradients, grad_out, q, k, v)
        )

    elements = 2 * shape.elements(shape.num_heads_q) + 2 * shape.elements(shape.num_heads_kv)
    return Case(
        family="attention",
        op="flash_attention_backward",
        name=str(shape),
        dtype=dtype,
        build=build,
        flops=2.5 * shape.flops,
        bytes=elements * itemsize(dtype),
    )


def forward_impl(backend: str, shape: Shape, *arrays: Any) -> Call:
    return peers.forward(_sdpa(backend, shape), *arrays)


def _backward_impl(backend: str, shape: Shape, q: Any, k: Any, v: Any, grad_out: Any) -> Call:
    return peers.backward(_sdpa(backend, shape), (q, k, v), grad_out)
