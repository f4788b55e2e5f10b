"""Cases of `cukit.moe`: routing, permutation to expert order and back, expert layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from cukit import moe
from cukit.reference import layer_bank as bank_reference
from cukit.reference import moe as reference
from cukit.reference import moe_ffn as ffn_reference
from profiling import peers
from profiling.case import Case, Workload, itemsize
from profiling.data import integers, normal
from profiling.standard_impls import forward_impls

FAMILY = "moe"
DTYPE = "bfloat16"


def cases(small: bool = False) -> list[Case]:
    """Routing of one token, a batch and a prompt; rows as wide as in DeepSeek-V3."""
    if small:
        routings, rows, layer = [(5, 16, 2), (70, 16, 2)], [(6, 64, 2, 4)], (20, 64, 32, 8, 2)
        bank = (3, 8, 16, 4, 2)
    else:
        routings, rows = [(1, 128, 8), (64, 256, 8), (4096, 128, 8)], [(4096, 7168, 8, 128)]
        layer, bank = (8192, 4096, 1536, 64, 8), (64, 512, 1024, 32, 4)
    last = routings[-1]
    return [
        *(router_case(*shape) for shape in routings),
        router_case(*last, losses=True),
        router_backward_case(*last),
        order_case(*last),
        *(
            maker(*shape)
            for maker in (
                permute_case,
                permute_backward_case,
                unpermute_case,
                unpermute_backward_case,
            )
            for shape in rows
        ),
        ffn_case(*layer),
        ffn_backward_case(*layer),
        bank_case(*bank),
        bank_backward_case(*bank),
    ]


def router_case(num_tokens: int, num_experts: int, top_k: int, losses: bool = False) -> Case:
    """Weights, experts and expert order, optionally the losses; torch computes only weights and
    experts."""

    def torch_router(torch: ModuleType) -> Callable[..., Any]:
        def function(logits: Any) -> Any:
            scores = torch.softmax(logits, dim=-1)
            weights, _ = torch.topk(scores, top_k, dim=-1)
            return weights / weights.sum(dim=-1, keepdim=True)

        return function

    def build() -> Workload:
        logits = normal((num_tokens, num_experts), "float32")
        return Workload(
            impls=forward_impls(
                lambda: moe.topk_router(logits, top_k, losses=losses).weights, torch_router, logits
            ),
            expected=lambda: reference.topk_router(logits, top_k).weights,
        )

    name = f"{num_tokens} of {num_experts} top {top_k}{' losses' if losses else ''}"
    moved = num_tokens * (num_experts + 3 * top_k) * itemsize("float32")
    return Case(FAMILY, "topk_router", name, "float32", build, bytes=moved)


def router_backward_case(num_tokens: int, num_experts: int, top_k: int) -> Case:
    """The gradient of the logits, through weights and both losses."""
    options = {"grad_balance_loss": 0.01, "grad_z_loss": 0.001}

    def build() -> Workload:
        logits = normal((num_tokens, num_experts), "float32")
        grad = normal((num_tokens, top_k), "float32")
        routing = moe.topk_router(logits, top_k)
        arrays = (grad, logits, routing.experts, routing.rows, routing.expert_counts)
        return Workload(
            impls={"cukit": lambda: partial(moe.topk_router_backward, *arrays, **options)},
            expected=partial(reference.topk_router_backward, *arrays, **options),
        )

    name = f"{num_tokens} of {num_experts} top {top_k} losses"
    moved = num_tokens * (2 * num_experts + 3 * top_k) * itemsize("float32")
    return Case(FAMILY, "topk_router_backward", name, "float32", build, bytes=moved)


def order_case(num_tokens: int, num_experts: int, top_k: int) -> Case:
    """Rows and offsets of given choices; torch sorts and counts them."""

    def torch_order(torch: ModuleType) -> Callable[..., Any]:
        def function(experts: Any) -> Any:
            flat = experts.reshape(-1)
            order = torch.argsort(flat, stable=True)
            rows = torch.empty_like(order)
            rows[order] = torch.arange(flat.numel(), device=flat.device)
            counts = torch.bincount(flat, minlength=num_experts)
            return rows.reshape(experts.shape), torch.cumsum(counts, 0)

        return function

    def build() -> Workload:
        experts = integers(0, num_experts, (num_tokens, top_k))

        def ours() -> Any:
            order = moe.expert_order(experts, num_experts)
            return order.rows, order.expert_offsets[1:]

        def expected() -> Any:
            order = reference.expert_order(experts, num_experts)
            return order.rows, order.expert_offsets[1:]

        return Workload(forward_impls(ours, torch_order, experts), expected, tolerance=1e-9)

    name = f"{num_tokens} of {num_experts} top {top_k}"
    moved = 2 * num_tokens * top_k * itemsize("int32")
    return Case(FAMILY, "expert_order", name, "int32", build, bytes=moved)


def permute_case(num_tokens: int, hidden: int, top_k: int, num_experts: int) -> Case:
    """x to expert order; torch gathers by the inverse of `rows`, which is precomputed."""

    def torch_permute(torch: ModuleType) -> Callable[..., Any]:
        return lambda x, source: torch.index_select(x, 0, source)

    def build() -> Workload:
        x, rows = normal((num_tokens, hidden), DTYPE), _rows(num_tokens, top_k, num_experts)
        source = rows.ravel().argsort() // top_k
        impls = forward_impls(partial(moe.moe_permute, x, rows), torch_permute, x, source)
        return Workload(impls, partial(reference.moe_permute, x, rows, rows.size), tolerance=1e-9)

    return _row_case("moe_permute", num_tokens, hidden, top_k, build)


def permute_backward_case(num_tokens: int, hidden: int, top_k: int, num_experts: int) -> Case:
    """The plain sum of each token's rows."""

    def torch_sum(torch: ModuleType) -> Callable[..., Any]:
        return lambda grad, rows: grad[rows.long()].sum(dim=1)

    def build() -> Workload:
        rows = _rows(num_tokens, top_k, num_experts)
        grad = normal((rows.size, hidden), DTYPE)
        impls = forward_impls(partial(moe.moe_permute_backward, grad, rows), torch_sum, grad, rows)
        return Workload(impls, partial(reference.moe_permute_backward, grad, rows))

    return _row_case("moe_permute_backward", num_tokens, hidden, top_k, build)


def unpermute_case(num_tokens: int, hidden: int, top_k: int, num_experts: int) -> Case:
    """The weighted sum of each token's rows."""

    def torch_unpermute(torch: ModuleType) -> Callable[..., Any]:
        return lambda y, rows, weights: (y[rows.long()] * weights.to(y.dtype)[..., None]).sum(dim=1)

    def build() -> Workload:
        rows = _rows(num_tokens, top_k, num_experts)
        arrays = normal((rows.size, hidden), DTYPE), rows, _weights(num_tokens, top_k)
        impls = forward_impls(partial(moe.moe_unpermute, *arrays), torch_unpermute, *arrays)
        return Workload(impls, partial(reference.moe_unpermute, *arrays))

    return _row_case("moe_unpermute", num_tokens, hidden, top_k, build)


def unpermute_backward_case(num_tokens: int, hidden: int, top_k: int, num_experts: int) -> Case:
    """Gradients of rows and weights."""

    def build() -> Workload:
        rows = _rows(num_tokens, top_k, num_experts)
        grad = normal((num_tokens, hidden), DTYPE, scale=hidden**-0.5)
        arrays = grad, normal((rows.size, hidden), DTYPE), rows, _weights(num_tokens, top_k)
        return Workload(
            impls={"cukit": lambda: partial(moe.moe_unpermute_backward, *arrays)},
            expected=partial(reference.moe_unpermute_backward, *arrays),
        )

    # Reads rows and writes their gradients.
    return _row_case("moe_unpermute_backward", num_tokens, hidden, top_k, build, passes=2)


def ffn_case(num_tokens: int, hidden: int, width: int, num_experts: int, top_k: int) -> Case:
    """A SwiGLU layer of experts; the peer is torch's grouped products."""

    def torch_ffn(torch: ModuleType) -> Callable[..., Any]:
        silu = torch.nn.functional.silu

        def function(x: Any, rows: Any, weights: Any, ends: Any, gate_up: Any, down: Any) -> Any:
            source = torch.argsort(rows.reshape(-1)) // top_k
            joined = torch._grouped_mm(x[source], gate_up.transpose(1, 2), offs=ends)
            gated = silu(joined[:, :width]) * joined[:, width:]
            out = torch._grouped_mm(gated, down.transpose(1, 2), offs=ends)
            return (out[rows.long()] * weights.to(out.dtype)[..., None]).sum(dim=1)

        return function

    def build() -> Workload:
        x, routing, gate_up, down = _layer(num_tokens, hidden, width, num_experts, top_k)
        ends = routing.expert_offsets[1:]
        arrays = (x, routing.rows, routing.weights, ends, gate_up, down)
        impls = forward_impls(partial(moe.moe_ffn, x, routing, gate_up, down), torch_ffn, *arrays)
        del impls["torch-compile"]  # torch.compile cannot trace the grouped product
        return Workload(impls, partial(ffn_reference.moe_ffn, x, routing, gate_up, down))

    return _layer_case("moe_ffn", num_tokens, hidden, width, num_experts, top_k, build)


def ffn_backward_case(
    num_tokens: int, hidden: int, width: int, num_experts: int, top_k: int
) -> Case:
    """Gradients of tokens, routing weights and experts."""

    def build() -> Workload:
        x, routing, gate_up, down = _layer(num_tokens, hidden, width, num_experts, top_k)
        _, kept = moe.moe_ffn(x, routing, gate_up, down, keep=True)
        arrays = (normal(x.shape, DTYPE), kept, routing, gate_up, down)
        return Workload(
            impls={"cukit": lambda: partial(moe.moe_ffn_backward, *arrays)},
            expected=partial(ffn_reference.moe_ffn_backward, *arrays),
        )

    shape = (num_tokens, hidden, width, num_experts, top_k)
    return _layer_case("moe_ffn_backward", *shape, build, products=2)


def bank_case(batch: int, seq_len: int, dim: int, num_layers: int, top_k: int) -> Case:
    """The peers compute all layers for all samples, or gather the chosen layers of each sample."""

    def torch_bank(dense: bool) -> Callable[[ModuleType], Callable[..., Any]]:
        def make(torch: ModuleType) -> Callable[..., Any]:
            silu = torch.nn.functional.silu

            def function(x: Any, router: Any, layers: Any) -> Any:
                p = torch.softmax(x.float().mean(dim=1) @ router.T, dim=1)
                best, chosen = torch.topk(p, top_k, dim=1)
                if not dense:
                    made = silu(x[:, None] @ layers[chosen].transpose(2, 3))
                    return (x + (best[..., None, None] * made).sum(dim=1)).to(x.dtype)
                p = torch.zeros_like(p).scatter_(1, chosen, best)
                made = torch.bmm(x.reshape(1, -1, dim).expand(num_layers, -1, -1), layers.mT)
                made = silu(made).view(num_layers, batch, seq_len, dim)
                return (x + (p.T[..., None, None] * made).sum(dim=0)).to(x.dtype)

            return function

        return make

    def build() -> Workload:
        x, router, layers = arrays = _bank(batch, seq_len, dim, num_layers)
        ours = partial(moe.layer_bank, x, router, layers, top_k)
        impls = forward_impls(ours, torch_bank(dense=True), *arrays)
        del impls["torch-eager"]
        impls["torch-gather"] = lambda: peers.forward(
            torch_bank(dense=False)(peers.torch()), *arrays
        )
        return Workload(impls, partial(bank_reference.layer_bank, x, router, layers, top_k))

    return _bank_case("layer_bank", batch, seq_len, dim, num_layers, top_k, build)


def bank_backward_case(batch: int, seq_len: int, dim: int, num_layers: int, top_k: int) -> Case:
    """Gradients of samples, router and layers."""

    def build() -> Workload:
        x, router, layers = _bank(batch, seq_len, dim, num_layers)
        _, kept = moe.layer_bank(x, router, layers, top_k, keep=True)
        arrays = (normal(x.shape, DTYPE), kept, router, layers)
        return Workload(
            impls={"cukit": lambda: partial(moe.layer_bank_backward, *arrays)},
            expected=partial(bank_reference.layer_bank_backward, *arrays),
        )

    shape = (batch, seq_len, dim, num_layers, top_k)
    return _bank_case("layer_bank_backward", *shape, build, products=2)


def _bank(batch: int, seq_len: int, dim: int, num_layers: int) -> tuple[Any, Any, Any]:
    """Samples, the router and the layers."""
    x = normal((batch, seq_len, dim), DTYPE)
    router = normal((num_layers, dim), "float32")
    return x, router, normal((num_layers, dim, dim), DTYPE, scale=dim**-0.5)


def _bank_case(
    op: str,
    batch: int,
    seq_len: int,
    dim: int,
    num_layers: int,
    top_k: int,
    build: Callable[[], Workload],
    products: int = 1,
) -> Case:
    rows = batch * seq_len * top_k
    moved = products * (2 * batch * seq_len + num_layers * dim) * dim * itemsize(DTYPE)
    name = f"{batch}x{seq_len}x{dim}, {num_layers} layers top {top_k}"
    return Case(
        FAMILY, op, name, DTYPE, build, flops=2.0 * products * rows * dim * dim, bytes=moved
    )


def _layer(num_tokens: int, hidden: int, width: int, num_experts: int, top_k: int) -> Any:
    """Tokens, their routing, and the weights of the experts."""
    routing = moe.topk_router(normal((num_tokens, num_experts), "float32"), top_k)
    gate_up = normal((num_experts, 2 * width, hidden), DTYPE, scale=hidden**-0.5)
    down = normal((num_experts, hidden, width), DTYPE, scale=width**-0.5)
    return normal((num_tokens, hidden), DTYPE), routing, gate_up, down


def _layer_case(
    op: str,
    num_tokens: int,
    hidden: int,
    width: int,
    num_experts: int,
    top_k: int,
    build: Callable[[], Workload],
    products: int = 1,
) -> Case:
    rows = num_tokens * top_k
    name = f"{num_tokens}x{hidden}, {num_experts} of 3x{width} top {top_k}"
    flops = 2.0 * products * rows * 3 * width * hidden
    moved = products * (2 * num_tokens + num_experts * 3 * width) * hidden * itemsize(DTYPE)
    return Case(FAMILY, op, name, DTYPE, build, flops=flops, bytes=moved)


def _rows(num_tokens: int, top_k: int, num_experts: int) -> Any:
    """Rows of the choices of a router for random logits."""
    return moe.topk_router(normal((num_tokens, num_experts), "float32"), top_k).rows


def _weights(num_tokens: int, top_k: int) -> Any:
    return abs(normal((num_tokens, top_k), "float32", scale=1 / top_k))


def _row_case(
    op: str,
    num_tokens: int,
    hidden: int,
    top_k: int,
    build: Callable[[], Workload],
    passes: int = 1,
) -> Case:
    moved = num_tokens * (1 + passes * top_k) * hidden * itemsize(DTYPE)
    return Case(FAMILY, op, f"{num_tokens}x{hidden} top {top_k}", DTYPE, build, bytes=moved)
