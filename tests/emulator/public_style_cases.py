"""Launches and expected results of the kernels in public_style/.

The function with the name of a file yields the cases of that file: kernel, grid, block, arguments,
and the expected value of each argument that the kernel writes, by position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    """One launch.

    expected: argument position -> value. constants: values of device variables. rtol: tolerance for
    floats.
    """

    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]
    expected: Mapping[int, Any]
    shared_bytes: int = 0
    constants: Mapping[str, Any] = {}
    rtol: float = 2e-5


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def integers(count: int, low: int = -50, high: int = 50, dtype: Any = np.int32) -> Array:
    return np.random.default_rng(count).integers(low, high, count).astype(dtype)


def nan(*shape: int, dtype: Any = np.float32) -> Array:
    """An output array of floats, initialised to NaN."""
    return np.full(shape, np.nan, dtype)


def unset(*shape: int, dtype: Any = np.int32) -> Array:
    """An output array of integers, initialised to 99."""
    return np.full(shape, 99, dtype)


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    result: Array = e / e.sum(-1, keepdims=True)
    return result


def reductions() -> Iterator[Case]:
    x, n = floats(500), 500
    tail = np.append(x, zeros(12))
    yield Case(
        "sum_interleaved", (4,), (128,), (x, nan(4), n), {1: tail.reshape(4, 128).sum(1)}, 512
    )
    yield Case("sum_strided", (4,), (128,), (x, nan(4), n), {1: tail.reshape(4, 128).sum(1)}, 512)
    yield Case(
        "sum_sequential", (2,), (128,), (x, nan(2), n), {1: tail.reshape(2, 256).sum(1)}, 512
    )
    strided = tail.reshape(2, 2, 128).sum((0, 2))
    yield Case("sum_unrolled<float, 128>", (2,), (128,), (x, nan(2), n), {1: strided})
    yield Case("sum_shuffle", (2,), (96,), (x, zeros(1), n), {1: [x.sum()]}, rtol=1e-4)
    yield Case("max_of", (4,), (128,), (x, np.full(1, -np.inf, np.float32), n), {1: [x.max()]})
    rows = floats(3, 70)
    yield Case("arg_max", (3,), (32,), (rows, unset(3), 70), {1: rows.argmax(1)}, 32 * 8)
    y = floats(500, seed=1)
    yield Case("dot_product", (2,), (256,), (x, y, zeros(1), n), {2: [x @ y]}, rtol=1e-4)
    args = (rows, nan(3), nan(3), 3, 70)
    yield Case("welford", (2,), (32, 2), args, {1: rows.mean(1), 2: rows.var(1)}, rtol=1e-4)
    i = integers(200, 0)
    yield Case("any_negative", (2,), (128,), (i, zeros(1, dtype=np.int32), 200), {1: [0]})
    even = int((i % 2 == 0).sum())
    yield Case("count_even", (2,), (128,), (i, zeros(1, dtype=np.uint32), 200), {1: [even]})


def scans() -> Iterator[Case]:
    x = floats(64)
    before = np.append(0, np.cumsum(x)[:-1])
    yield Case("scan_hillis_steele", (1,), (64,), (nan(64), x, 64), {0: before}, 512, rtol=1e-3)
    yield Case("scan_blelloch", (1,), (32,), (nan(64), x, 64), {0: before}, 66 * 4, rtol=1e-3)
    i = integers(250)
    padded = np.append(i, zeros(6, dtype=np.int32)).reshape(2, 128)
    within, sums = np.cumsum(padded, 1), padded.sum(1)
    args = (i, unset(250), unset(2), 250)
    yield Case("scan_warps", (2,), (128,), args, {1: within.ravel()[:250], 2: sums})
    data = within.ravel()[:250].astype(np.int32)
    args = (data.copy(), sums.astype(np.int32), 250)
    yield Case("add_offsets", (2,), (128,), args, {0: np.cumsum(i)})
    heads = (integers(64, 0, 4, np.uint8) == 0).astype(np.uint8)
    runs, total = [], 0
    for at, (value, head) in enumerate(zip(i[:64], heads, strict=True)):
        total = int(value) + (0 if head or at % 32 == 0 else total)
        runs.append(total)
    yield Case("segmented_scan", (1,), (64,), (i[:64].copy(), heads, unset(64)), {2: runs})
    few = integers(32)
    kept = few[few > 0]
    args = (few, unset(32), zeros(1, dtype=np.int32), 32)
    yield Case(
        "compact", (1,), (32,), args, {1: np.append(kept, [99] * (32 - len(kept))), 2: [len(kept)]}
    )
    r = integers(200, 0, 3)
    yield Case("run_heads", (2,), (128,), (r, unset(200), 200), {1: np.append(1, np.diff(r) != 0)})


def elementwise() -> Iterator[Case]:
    n, grid, block = 200, (2,), (128,)
    x, y = floats(n), floats(n, seed=1)
    yield Case("vector_add", grid, block, (x, y, nan(n), n), {2: x + y})
    yield Case("saxpy", (1,), (64,), (n, np.float32(2), x, y.copy()), {3: 2 * x + y})
    yield Case("copy_float4", (1,), (64,), (x, nan(n), n), {1: x})
    half, other = x.astype(np.float16), y.astype(np.float16)
    yield Case(
        "add_half2", (1,), (128,), (half, other, nan(n, dtype=np.float16), n), {2: half + other}
    )
    b = x.astype(ml_dtypes.bfloat16)
    scaled = (b.astype(np.float32) * np.float32(3)).astype(ml_dtypes.bfloat16)
    yield Case("scale_bf16", grid, block, (b.copy(), np.float32(3), n), {0: scaled})
    yield Case("relu", grid, block, (x.copy(), n), {0: np.maximum(x, 0)})
    g = 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))
    yield Case("gelu", grid, block, (x, nan(n), n), {1: g})
    yield Case("sigmoid", grid, block, (x, nan(n), n), {1: 1 / (1 + np.exp(-x))})
    gate = half.astype(np.float32)
    silu = gate / (1 + np.exp(-gate)) * other.astype(np.float32)
    args: tuple[Any, ...] = (half, other, nan(n, dtype=np.float16), n)
    yield Case("swiglu", grid, block, args, {2: silu}, rtol=2e-3)
    a, c = floats(n, 2), floats(n, 2, seed=2)
    product = (a[:, 0] + 1j * a[:, 1]) * (c[:, 0] + 1j * c[:, 1])
    expected = {2: np.stack([product.real, product.imag], 1)}
    yield Case("complex_multiply", grid, block, (a, c, nan(n, 2), n), expected, rtol=1e-4)
    q = np.clip(np.rint(x / np.float32(0.01)), -127, 127)
    yield Case(
        "quantize_int8", grid, block, (x, unset(n, dtype=np.int8), np.float32(0.01), n), {1: q}
    )
    words = np.random.default_rng(3).integers(0, 2**32, 40, dtype=np.uint32)
    nibbles = (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(int) - 8
    yield Case("unpack_int4", (1,), (64,), (words, nan(40, 8), 40), {1: nibbles})
    w, h = 20, 12
    z = np.zeros((h, w), complex)
    counts = np.zeros((h, w), int)
    where = (-2 + 3 * np.arange(w) / w)[None] + 1j * (-1 + 2 * np.arange(h) / h)[:, None]
    for _ in range(30):
        inside = z.real**2 + z.imag**2 < 4
        counts += inside
        z = np.where(inside, z * z + where, z)
    yield Case("mandelbrot", (2, 2), (16, 8), (unset(h, w), w, h, 30), {0: counts})
    rgb = integers(300, 0, 256, np.uint8).reshape(100, 3)
    gray = (rgb.astype(int) @ [77, 150, 29]) >> 8
    yield Case("gray", (1,), (128,), (rgb, unset(100, dtype=np.uint8), 100), {1: gray})
    p, grad, m, v = floats(n), floats(n, seed=4), floats(n, seed=5), floats(n, seed=6) ** 2
    m1, v1 = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad**2
    new = p - 0.1 * (m1 / (1 - 0.9**3) / (np.sqrt(v1 / (1 - 0.99**3)) + 1e-6) + 0.01 * p)
    numbers = [np.float32(value) for value in (0.1, 0.9, 0.99, 1e-6, 0.01)]
    args = (p.copy(), grad, m.copy(), v.copy(), *numbers, 3, n)
    yield Case("adamw", grid, block, args, {0: new, 2: m1, 3: v1}, rtol=1e-3)
    odd = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    largest = np.finfo(np.float32).max
    yield Case("nan_to_num", (1,), (32,), (odd, 4), {0: [0, largest, -largest, 1]})
    bits = np.array([5, 256, 0x80000001], np.uint32)
    ones, leading, first = [2, 1, 2], [29, 23, 0], [1, 9, 1]
    result = [
        ones[i]
        + 100 * leading[i]
        + 10000 * first[i]
        + (u >> 31)
        - 3 * (u & 7)
        + (u & 255)
        + (u >> 28)
        for i, u in enumerate(map(int, bits))
    ]
    yield Case("bit_tricks", (1,), (32,), (bits, unset(3), 3), {1: result})


def transposes() -> Iterator[Case]:
    x = floats(40, 50)
    for name in ("transpose_naive", "transpose_padded"):
        yield Case(name, (2, 2), (32, 8), (nan(50, 40), x, 50, 40), {0: x.T})
    square = floats(64, 64)
    yield Case("transpose_swizzled", (2, 2), (32, 8), (nan(64, 64), square, 64), {0: square.T})
    q = floats(2, 3, 4, 8)
    args = (nan(2, 4, 3, 8), q, 2, 3, 4, 8)
    yield Case("permute_heads", (3, 2), (8, 4), args, {0: q.transpose(0, 2, 1, 3)})
    i = integers(64)
    yield Case("static_reverse", (1,), (64,), (i.copy(), 64), {0: i[::-1]})
    yield Case("dynamic_reverse", (1,), (64,), (i.copy(), 64), {0: i[::-1]}, 256)
    table, ids = floats(9, 24), np.array([3, 8, 3], np.int32)
    yield Case("gather_rows", (3,), (4,), (table, ids, nan(3, 24), 24), {2: table[ids]})
    rows, sums = floats(3, 24, seed=1), zeros(9, 24)
    np.add.at(sums, ids, rows)
    yield Case("scatter_add", (3,), (16,), (zeros(9, 24), ids, rows, 24), {0: sums})


def stencils() -> Iterator[Case]:
    i = integers(134)
    sums = np.convolve(i, np.ones(7, int), "valid")
    yield Case("stencil_1d", (2,), (64,), (i, unset(128), 128), {1: sums})
    f = floats(50)
    d = 0.5 * f + sum(2.0 ** -(r + 1) * (np.roll(f, -r) - np.roll(f, r)) for r in (1, 2, 3))
    yield Case("derivative", (1,), (64,), (f, nan(50), 50), {1: d}, rtol=1e-4)
    mask, image = floats(5, 5), floats(20, 17)
    around = np.pad(image, 2)
    windows = np.lib.stride_tricks.sliding_window_view(around, (5, 5))
    convolved = (windows * mask).sum((2, 3))
    args: tuple[Any, ...] = (image, nan(20, 17), 20, 17)
    constants = {"mask": mask.ravel()}
    yield Case("convolution_2d", (2, 2), (16, 16), args, {1: convolved}, 0, constants, 1e-4)
    u = floats(12, 10).astype(np.float64)
    nxt = u.copy()
    nxt[1:-1, 1:-1] = (u[1:-1, 2:] + u[1:-1, :-2] + u[2:, 1:-1] + u[:-2, 1:-1]) / 4
    yield Case("jacobi", (2, 2), (8, 8), (u, u.copy(), 10, 12), {1: nxt})
    cube = floats(6, 5, 7)
    e = np.pad(cube, 1, "edge")
    inner = slice(1, -1)
    heat = cube + np.float32(0.1) * (
        e[inner, inner, :-2] + e[inner, inner, 2:] + e[inner, :-2, inner] + e[inner, 2:, inner]
        + e[:-2, inner, inner] + e[2:, inner, inner] - 6 * cube
    )  # fmt: skip
    size = np.array([(7, 5, 6)], "u4,u4,u4").view(np.dtype((np.void, 12)))
    args = (cube, nan(6, 5, 7), size, np.float32(0.1))
    yield Case("heat_3d", (2, 2, 2), (4, 4, 4), args, {1: heat}, rtol=1e-4)
    board = integers(120, 0, 2, np.uint8).reshape(10, 12)
    shifts = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)]
    alive = np.sum([np.roll(board, s, (0, 1)).astype(int) for s in shifts], 0)
    life = (alive == 3) | ((alive == 2) & (board == 1))
    yield Case("life", (1,), (64,), (board, unset(10, 12, dtype=np.uint8), 12, 10), {1: life})
    planes = floats(2, 6, 8)
    pooled = planes.reshape(2, 3, 2, 4, 2).max((2, 4))
    yield Case("max_pool", (1,), (32,), (planes, nan(2, 3, 4), 2, 6, 8), {1: pooled})
    lines = floats(5, 20)
    box = np.lib.stride_tricks.sliding_window_view(np.pad(lines, ((0, 0), (2, 2)), "edge"), 5, 1)
    args = (lines, nan(5, 20), 20, 5, 2)
    yield Case("box_rows", (1,), (32,), args, {1: box.mean(2)}, rtol=1e-3)
    columns = np.lib.stride_tricks.sliding_window_view(image, (3, 3)).transpose(2, 3, 0, 1)
    args = (image, nan(9, 18 * 15), 20, 17, 3)
    yield Case("im2col", (3,), (128,), args, {1: columns.reshape(9, -1)})


def histograms() -> Iterator[Case]:
    x = integers(500, 0, 256, np.uint8)
    bins = np.bincount(x % 64, minlength=64)
    for name in ("histogram_global", "histogram_shared", "histogram_warps", "histogram_match"):
        yield Case(name, (4,), (128,), (x, zeros(64, dtype=np.uint32), 500), {1: bins}, 4 * 64 * 4)
    experts = integers(70, 0, 9)
    counts = np.bincount(experts, minlength=9)
    args = (experts, unset(9), unset(9), 70, 9)
    expected = {1: counts, 2: np.cumsum(counts) - counts}
    yield Case("expert_counts", (1,), (64,), args, expected, 36)


def norms() -> Iterator[Case]:
    x = floats(5, 70)
    s = softmax(x)
    yield Case("softmax_row_per_thread", (1,), (32,), (nan(5, 70), x, 5, 70), {0: s})
    yield Case("softmax_shared", (5,), (64,), (nan(5, 70), x, 70), {0: s}, 256)
    yield Case("softmax_online", (2,), (128,), (nan(5, 70), x, 5, 70), {0: s})
    w, b = floats(70, seed=1), floats(70, seed=2)
    normal = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    args = (nan(5, 70), x, w, b, 5, 70)
    yield Case("layernorm_tile", (2,), (128,), args, {0: normal * w + b}, rtol=1e-3)
    half, gamma = x.astype(np.float16), w.astype(np.float16)
    args = (half, nan(5, 70, dtype=np.float16), gamma, 70)
    yield Case("layernorm_block<64>", (5,), (64,), args, {1: normal * gamma}, rtol=2e-2)
    root = 1 / np.sqrt((x[0] ** 2).mean() + 1e-5)
    yield Case("rmsnorm", (1,), (64,), (nan(70), x[0].copy(), w, 70), {0: w * x[0] * root})
    targets = integers(5, 0, 70)
    losses = -np.log(s[np.arange(5), targets])
    yield Case("cross_entropy", (5,), (64,), (nan(5), x, targets, 70), {0: losses}, rtol=1e-3)
    q, angle = floats(3, 2, 8), floats(3, 4)
    turned = (q[..., ::2] + 1j * q[..., 1::2]) * np.exp(1j * angle)[:, None]
    expected = {0: np.stack([turned.real, turned.imag], -1).reshape(3, 2, 8)}
    table = np.stack([np.cos(angle), np.sin(angle)], -1).copy()
    yield Case("rope", (3,), (4, 2), (q.copy(), table, 2, 8), expected, rtol=1e-3)
    k, v, t = floats(9, 16, seed=3), floats(9, 16, seed=4), floats(9, 16, seed=5)
    scores = np.where(np.tri(9) > 0, t @ k.T / 4, -np.inf)
    args = (t, k, v, nan(9, 16), 9, 16)
    yield Case("attention", (9,), (32,), args, {3: softmax(scores) @ v}, 25 * 4, rtol=1e-3)


def matmuls() -> Iterator[Case]:
    a, b, c = floats(32, 48), floats(48, 32, seed=1), floats(32, 32, seed=2)
    args: tuple[Any, ...] = (32, 32, 48, np.float32(2), a, b, np.float32(3), c.copy())
    yield Case("matmul_naive", (2, 2), (16, 16), args, {7: 2 * a @ b + 3 * c}, rtol=1e-3)
    yield Case("matmul_tiled", (2, 2), (16, 16), (nan(32, 32), a, b, 48, 32), {0: a @ b}, rtol=1e-3)
    args = (32, 32, 48, a, b, nan(32, 32))
    entry = "matmul_blocktile<32, 32, 8, 4>"
    yield Case(entry, (1, 1), (256,), args, {5: a @ b}, rtol=1e-3)
    args = (a, b, nan(32, 32), 32, 32, 48)
    yield Case("matmul_vectorized", (1, 1), (64,), args, {2: a @ b}, rtol=1e-3)
    x = floats(48)
    yield Case("gemv", (8,), (32, 4), (a, x, nan(32), 32, 48), {2: a @ x}, rtol=1e-3)
    ha, hb = a.astype(np.float16), b.astype(np.float16)
    args = (ha, hb.T.copy(), nan(32, 32), 32, 32, 48)
    product = 2 * ha.astype(np.float32) @ hb.astype(np.float32)
    yield Case("wmma_half", (1, 2), (64, 1), args, {2: product}, rtol=1e-3)
    ia = integers(16 * 32, -20, 20, np.int8).reshape(16, 32)
    ib = integers(32 * 16, -9, 9, np.int8).reshape(32, 16)
    exact = ia.astype(int) @ ib.astype(int)
    yield Case("wmma_int8", (1,), (32,), (ia, ib, unset(16, 16), 32), {2: exact})
    args = (ia, ib.T.copy(), unset(16, 16), 16, 8)
    yield Case("dot_int8", (2,), (128,), args, {2: exact})


def sorts() -> Iterator[Case]:
    keys = integers(128)
    yield Case("bitonic_shared", (1,), (64,), (keys.copy(), 128), {0: np.sort(keys)}, 512)
    x = floats(40)
    yield Case("odd_even_sort", (1,), (32,), (x.copy(), 40), {0: np.sort(x)})
    yield Case("rank_sort", (1,), (64,), (x, nan(40), 40), {1: np.sort(x)})
    unsigned = integers(128, 0, 256, np.uint32)
    yield Case("radix_split", (1,), (128,), (unsigned.copy(), 8), {0: np.sort(unsigned)})
    a, b = np.sort(keys[:50]), np.sort(keys[50:110])
    args: tuple[Any, ...] = (a, 50, b, 60, unset(110))
    yield Case("merge_by_rank", (1,), (64,), args, {4: np.sort(keys[:110])})
    rows = floats(2, 90)
    order = np.argsort(-rows, 1)[:, :3]
    args = (rows, nan(2, 3), unset(2, 3), 90)
    expected = {1: np.take_along_axis(rows, order, 1), 2: order}
    yield Case("top_k<3>", (2,), (32,), args, expected)


def groups() -> Iterator[Case]:
    i = integers(128)
    yield Case("tile_sums", (2,), (64,), (i, unset(8)), {1: i.reshape(8, 16).sum(1)})
    x = floats(128)
    yield Case("block_sum", (1,), (128,), (x, nan(1)), {1: [x.sum()]}, rtol=1e-4)
    kept = i[:32][i[:32] > 0]
    args = (unset(32), zeros(1, dtype=np.int32), i[:32].copy(), 32)
    kept_first = np.append(kept, [99] * (32 - len(kept)))
    yield Case("filter_aggregated", (1,), (32,), args, {0: kept_first, 1: [len(kept)]})
    within = np.cumsum(i[:64].reshape(8, 8), 1)
    args = (i[:64].copy(), unset(64), unset(64))
    before = (within - i[:64].reshape(8, 8)).ravel()
    yield Case("tile_scan", (1,), (64,), args, {1: within.ravel(), 2: before})
    few = i[:32].copy()
    even = np.where(few % 2 == 0, few[few % 2 == 0].sum(), few[few % 2 != 0].sum())
    yield Case("even_odd", (1,), (32,), (few, unset(32)), {1: even})
    positive = np.abs(floats(300)) + 1
    args = (positive.copy(), zeros(1), 300)
    yield Case("grid_normalize", (3,), (64,), args, {0: positive / positive.sum()}, rtol=1e-4)
    tiles = i.reshape(2, 64)
    yield Case("staged_copy", (1,), (64,), (i, unset(2, 64), 2), {1: tiles[:, ::-1]}, 256)
    quads = few.reshape(8, 4)
    up = quads > 0
    ballots = (up * [1, 2, 4, 8]).sum(1) | (quads > 5).any(1) << 8 | up.all(1) << 9
    neighbours = quads[:, [1, 0, 3, 2]].astype(np.uint32) << 16
    votes = ballots[:, None].astype(np.uint32) | neighbours
    yield Case("tile_votes", (1,), (32,), (few, unset(32, dtype=np.uint32)), {1: votes.ravel()})


def asynchronous() -> Iterator[Case]:
    x = floats(4, 64, 4)
    y = x[:, ::-1].copy()
    y[..., 0] += 1
    yield Case("primitive_pipeline", (1,), (64,), (x, nan(4, 64, 4), 4), {1: y})
    i = integers(192).reshape(3, 64)
    args = (i, unset(3, 64), 3)
    yield Case("block_pipeline", (1,), (64,), args, {1: np.roll(i, -1, 1)}, 512)
    yield Case(
        "thread_pipeline",
        (1,),
        (128,),
        (x.ravel()[:128].copy(), nan(128)),
        {1: 2 * x.ravel()[:128]},
    )
    yield Case("split_barrier", (1,), (64,), (i, unset(64), 3), {1: (i - i[:, ::-1]).sum(0)})
    f = floats(5, 32)
    yield Case("producer_consumer", (1,), (64,), (f, nan(5, 32), 5), {1: 3 * f[:, ::-1]})


def libraries() -> Iterator[Case]:
    i = integers(256)
    yield Case("cub_sum<64, 4>", (1,), (64,), (i, unset(1)), {1: [i.sum()]})
    scanned = np.append(0, np.cumsum(i))
    yield Case("cub_scan<64, 4>", (1,), (64,), (i, unset(257)), {1: scanned})
    keys, values = integers(128, 0, 40, np.uint32), np.arange(128, dtype=np.int32)
    order = np.argsort(keys, kind="stable")
    expected: dict[int, Any] = {0: keys[order], 1: order}
    yield Case("cub_sort", (1,), (64,), (keys.copy(), values), expected)
    x = floats(4, 32)
    args: tuple[Any, ...] = (x, nan(4), nan(4, 32))
    yield Case("cub_warp", (1,), (128,), args, {1: x.max(1), 2: np.cumsum(x, 1)}, rtol=1e-3)
    yield Case(
        "device_atomics",
        (1,),
        (64,),
        (unset(1), unset(1, dtype=np.uint32)),
        {0: [99 + 128], 1: [99]},
    )
    args = (unset(4, dtype=np.uint32), nan(1), np.uint64(0), np.uint64(0))
    four = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]  # from Random123's known answers
    yield Case("philox_numbers", (1,), (1,), args, {0: four})


def inline_ptx() -> Iterator[Case]:
    lane = np.arange(64) % 32
    registers = lane + 100 * (np.arange(64) // 32) + 10000 * lane
    yield Case("special_registers", (1,), (64,), (unset(64, dtype=np.uint32),), {0: registers})
    u = np.random.default_rng(1).integers(0, 2**32, 32, dtype=np.uint32)
    field = u >> 4 & 0xFF
    sign = u.view(np.int32) >> 28
    three = u ^ u << np.uint32(3) ^ u >> np.uint32(5)
    result = (
        field
        + sign.view(np.uint32) * np.uint32(31)
        + ((u & 15) << 8)
        + three * np.uint32(7)
        + u.byteswap()
    )
    yield Case("bit_fields", (1,), (32,), (u, unset(32, dtype=np.uint32)), {1: result})
    a, b = floats(32), floats(32, seed=1)
    total = a * b + 1.5 + np.exp2(a) + np.maximum(a, b) + 1
    yield Case("arithmetic", (1,), (32,), (a, b, nan(32)), {2: total})
    v = u[::-1].copy()
    wide = u.astype(np.uint64) * v
    carry = (wide & 0xFFFFFFFF) * 3 + (wide >> 32) & 0xFFFFFFFF
    args = (u, v, unset(32, dtype=np.uint64), unset(32, dtype=np.uint32))
    yield Case("multiply_wide", (1,), (32,), args, {2: wide, 3: carry})
    x = floats(32, 4)
    args = (x, nan(32, 4), zeros(2, dtype=np.int32))
    yield Case("memory_instructions", (1,), (32,), args, {1: x[:, ::-1], 2: [32, 31]})
    i = integers(32)
    t = np.arange(32)
    loaded = i[(t + 30) % 31 + 1]
    args = (i, unset(32))
    yield Case("shared_instructions", (1,), (32,), args, {1: loaded * 100 + loaded[t ^ 1]})
    pairs = floats(32, 2)
    packed = pairs.astype(np.float16).view(np.uint32).ravel()
    args = (pairs, unset(32, dtype=np.uint32), unset(32))
    yield Case("convert_pairs", (1,), (32,), args, {1: packed, 2: np.rint(pairs[:, 0])})
    ha, hb = floats(16, 16).astype(np.float16), floats(16, 8, seed=1).astype(np.float16)
    product = ha.astype(np.float32) @ hb.astype(np.float32)
    yield Case("tensor_core_tile", (1,), (32,), (ha, hb, nan(16, 8)), {2: product}, rtol=1e-3)
    yield Case("mbarrier_wait_loop", (1,), (32,), (i, unset(32)), {1: i[::-1]})
    args = (zeros(1, dtype=np.int32), unset(32), unset(32))
    yield Case("release_acquire", (2,), (32,), args, {2: 5 * t})


def programs() -> Iterator[Case]:
    p, v = floats(100, 4), floats(100, 4, seed=1)
    g = np.array([0, -9.8, 1], np.float32)
    moved = p + np.float32(0.1) * (v + np.float32(0.1) * np.append(g, 0))
    args: tuple[Any, ...] = (p.copy(), v, np.float32(0.1), 100)
    yield Case("sim::integrate", (1,), (128,), args, {0: moved}, 0, {"gravity": g}, 1e-4)
    bodies = np.abs(floats(64, 4))
    r = bodies[None, :, :3] - bodies[:, None, :3]
    force = (r * (bodies[:, 3] / ((r**2).sum(2) + 1e-3) ** 1.5)[..., None]).sum(1)
    yield Case("n_body", (2,), (32,), (bodies, nan(64, 3), 64), {1: force}, 512, rtol=1e-3)
    dense = np.where(floats(40, 30) > 0.5, floats(40, 30, seed=2), 0).astype(np.float64)
    x = floats(30).astype(np.float64)
    ptr = np.append(0, np.cumsum((dense != 0).sum(1))).astype(np.int32)
    col = np.nonzero(dense)[1].astype(np.int32)
    args = (40, ptr, col, dense[dense != 0], x, nan(40, dtype=np.float64))
    yield Case("spmv_scalar", (2,), (32,), args, {5: dense @ x})
    args = (*args[:5], nan(40, dtype=np.float64))
    yield Case("spmv_vector", (10,), (128,), args, {5: dense @ x})
    ring = np.arange(7, dtype=np.int32)
    level = np.array([-1, -1, 0, -1, -1, -1, -1], np.int32)
    after = level.copy()
    after[3] = 1
    args = (np.arange(8, dtype=np.int32), (ring + 1) % 7, level, 0, 7)
    yield Case("bfs_level", (1,), (32,), args, {2: after})
    f = floats(300)
    args = (f, nan(4), nan(1), 300)
    yield Case("last_block_sum", (4,), (64,), args, {2: [f.sum()]}, rtol=1e-3)
    numbers = [0, 1]
    while len(numbers) < 12:
        numbers.append(numbers[-1] + numbers[-2])
    expected = [numbers[t % 12] + 3 for t in range(32)]
    yield Case("recursion", (1,), (32,), (unset(32),), {0: expected})
    affine = np.array([(2, 1)], "f4,f4").view(np.dtype((np.void, 8)))
    args = (f.copy(), 300, affine)
    yield Case("map_with<Affine>", (3,), (128,), args, {0: 2 * f + 1})
    rows = np.zeros((5, 8), np.float32)
    pitched = rows.copy()
    pitched[:, :6] = 1000 * np.arange(5)[:, None] + np.arange(6)
    yield Case("pitched", (1, 1), (8, 8), (rows, np.uint64(32), 6, 5), {0: pitched})
    which = integers(32, 0, 2)
    values = np.where(which == 0, 2 * f[:32], f[:32] ** 2)
    yield Case("function_table", (1,), (32,), (f[:32].copy(), which), {0: values})
    points, centers = floats(50, 2), floats(3, 2, seed=1)
    nearest = ((points[:, None] - centers) ** 2).sum(2).argmin(1)
    sums = np.stack([points[nearest == c].sum(0) for c in range(3)])
    args = (points, centers, unset(50), zeros(3, 2), zeros(3, dtype=np.int32), 50, 3)
    counts = np.bincount(nearest, minlength=3)
    expected = {2: nearest, 3: sums, 4: counts}  # type: ignore[assignment]
    yield Case("nearest", (1,), (64,), args, expected, 24, rtol=1e-3)  # type: ignore[arg-type]


FILES: Mapping[str, Callable[[], Iterator[Case]]] = {
    function.__name__: function
    for function in (
        reductions, scans, elementwise, transposes, stencils, histograms, norms, matmuls, sorts,
        groups, asynchronous, libraries, inline_ptx, programs,
    )
}  # fmt: skip


@functools.cache
def cases(name: str) -> tuple[Case, ...]:
    """The cases of one file."""
    return tuple(FILES[name]())
