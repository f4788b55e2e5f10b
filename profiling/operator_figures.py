"""Draws the figures that explain ops in docs/.

Run by `python -m profiling.operator_figures` (`make tables`). Each figure shows results of an op on
small inputs, that of `linear` its launch plan; a test compares the files with new drawings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import cukit as ck
from cukit.analyzer.report import svg
from cukit.core.device import typical_device
from cukit.gemm.dense._linear_plan import Product, Sm90Config, plan_linear
from cukit.graph_memory import Transition, graph_diffusion, memory_write, retrieve_top_k
from cukit.moe import layer_bank, topk_router
from cukit.reference.sampling import kept_tokens
from profiling.drawing import background, write_changed
from profiling.tables import ROOT

WIDTH, MARGIN = 720.0, 24.0


def main() -> int:
    """Update the figures; print the names of those that changed."""
    write_changed({ROOT / "docs" / name: draw() for name, draw in FIGURES.items()})
    return 0


def page(height: float, title: str, parts: list[str]) -> str:
    """Return a self-contained figure that supports light and dark mode."""
    head = svg.text(title, MARGIN, 34.0, "label")
    return svg.figure(WIDTH, height, title, [*background(WIDTH, height), head, *parts]) + "\n"


def bar(x: float, y: float, width: float, height: float, class_: str, opacity: float = 1.0) -> str:
    """A rectangle."""
    return svg.element("rect", x=x, y=y, width=width, height=height, class_=class_, opacity=opacity)


def outline(x: float, y: float, width: float, height: float) -> str:
    """A rectangle that is not filled."""
    path = f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"
    return svg.element("path", d=path, class_="roof", fill="none")


def explanation(*lines: str) -> list[str]:
    """Lines of text under the title."""
    return [svg.text(line, MARGIN, 54.0 + 16 * i, "detail") for i, line in enumerate(lines)]


def draw_retrieval() -> str:
    """Scores of a query in groups, their maxima, and the groups that are scored again."""
    rng = np.random.default_rng(4)
    group, groups, k = 32, 8, 5
    memory = rng.standard_normal((group * groups, 16)).astype(np.float32)
    query = rng.standard_normal((1, 16)).astype(np.float32)
    scores = (memory @ query[0]).reshape(groups, group)
    found = retrieve_top_k(query, memory, k).indices[0]
    maxima = scores.max(axis=1)
    chosen = np.argsort(-maxima, kind="stable")[:k]
    top, base = 96.0, 196.0
    scale = svg.Scale(0.0, float(maxima.max()), base, top)
    step = (WIDTH - 2 * MARGIN) / (group * groups)
    parts = explanation(
        f"Scores of one query against {group * groups} rows, in {groups} groups of {group}. "
        "Only the maximum of each group (line) is written.",
        f"The {k} best rows (blue) are in the {k} groups with the highest maxima (shaded), "
        "which are scored again.",
    )
    for g in range(groups):
        left = MARGIN + g * group * step
        if g in chosen:
            parts.append(bar(left + 1, 84.0, group * step - 2, base - 84.0, svg.colour(0), 0.12))
        for i, score in enumerate(scores[g]):
            best = g * group + i in found
            high = max(float(score), 0.0)
            y = scale(high)
            parts.append(
                bar(left + i * step + 0.4, y, step - 0.8, base - y, svg.colour(0 if best else 1))
            )
        y = scale(float(maxima[g]))
        parts.append(svg.line(left + 1, y, left + group * step - 1, y, "roof"))
        parts.append(svg.text(f"group {g}", left + group * step / 2, 214.0, "tick", "middle"))
    return page(232.0, "retrieve_top_k: one pass over all scores, none of them stored", parts)


def draw_diffusion() -> str:
    """How a unit mass at one lattice node is distributed after several diffusion steps."""
    side, cell = 9, 17.0
    nodes = np.arange(side * side).reshape(side, side)
    edges = [
        (int(a), int(b))
        for first, second in ((nodes[1:], nodes[:-1]), (nodes[:, 1:], nodes[:, :-1]))
        for pair in zip(first.ravel(), second.ravel(), strict=True)
        for a, b in (pair, pair[::-1])
    ]
    edges.sort()
    rows, columns = (np.array(part, np.int32) for part in zip(*edges, strict=True))
    degrees = np.bincount(rows)
    offsets = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    walk = Transition(offsets, columns, (1 / degrees[columns]).astype(np.float32))
    memory = np.zeros((side * side, 1), np.float32)
    memory[nodes[side // 2, side // 2]] = 1
    parts = explanation(
        "Unit mass at one node of a lattice diffuses. The area of a dot is the mass of its "
        "node; each panel sums to 1."
    )
    panels: list[tuple[str, dict[str, object]]] = [
        ("memory", {"steps": 0}),
        ("pagerank, 2 steps", {"steps": 2}),
        ("pagerank, 10 steps", {"steps": 10}),
        ("heat, time 3", {"steps": 20, "method": "heat", "time": 3.0}),
    ]
    for number, (name, options) in enumerate(panels):
        left = MARGIN + number * (WIDTH - 2 * MARGIN) / len(panels)
        z = graph_diffusion(memory, walk, **options)[:, 0]  # type: ignore[arg-type]
        for node, held in enumerate(z):
            x, y = left + (node % side + 0.5) * cell, 76.0 + (node // side + 0.5) * cell
            parts.append(
                svg.element("circle", cx=x, cy=y, r=1.0, class_=svg.colour(1), opacity=0.6)
            )
            if held > 1e-5:
                parts.append(
                    svg.element(
                        "circle", cx=x, cy=y, r=0.85 * cell * float(held) ** 0.5,
                        class_=svg.colour(0), opacity=0.75,
                    )
                )  # fmt: skip
        parts.append(svg.text(name, left + side * cell / 2, 246.0, "tick", "middle"))
    return page(264.0, "graph_diffusion: mass diffuses over the graph", parts)


def draw_memory_write() -> str:
    """Contributions to a row as a function of the summed gates of three writes to it."""
    indices, gates = np.zeros(3, np.int32), np.array([0.5, 0.3, 0.2])
    left, right, top, base = MARGIN + 40, WIDTH - MARGIN, 84.0, 214.0
    across, up = svg.Scale(0.0, 2.0, left, right), svg.Scale(0.0, 1.0, base, top)
    totals = np.linspace(0, 2, 81)
    # One column for the old row and one per write: the value of a column is its share.
    memory, values = np.eye(1, 4), np.eye(4)[1:]
    shares = np.array([memory_write(memory, indices, values, gates * s)[0] for s in totals])
    parts = explanation(
        "Three writes to one row with gates in the ratio 5 : 3 : 2. The shares always sum to 1."
    )
    ends = np.concatenate([np.zeros((len(totals), 1)), np.cumsum(shares, axis=1)], axis=1)
    for part, name in enumerate(("old row", "write 0", "write 1", "write 2")):
        corners = [(across(s), up(e)) for s, e in zip(totals, ends[:, part], strict=True)]
        corners += [
            (across(s), up(e)) for s, e in zip(totals[::-1], ends[::-1, part + 1], strict=True)
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        parts.append(
            svg.element(
                "polygon", points=points, class_=svg.colour((1, 0, 2, 3)[part]), opacity=0.75,
                stroke_width=0,
            )
        )  # fmt: skip
        at = 10 if part == 0 else 60
        middle = (ends[at, part] + ends[at, part + 1]) / 2
        parts.append(svg.text(name, across(totals[at]), up(float(middle)) + 4, "label", "middle"))
    for value in (0.0, 0.5, 1.0, 1.5, 2.0):
        parts.append(svg.text(f"{value:g}", across(value), base + 16, "tick", "middle"))
    for value in (0.0, 0.5, 1.0):
        parts.append(svg.text(f"{value:g}", left - 8, up(value) + 4, "tick", "end"))
    parts.append(svg.text("sum of the gates", right, base + 32, "detail", "end"))
    return page(258.0, "memory_write: contributions to a row after gated writes", parts)


def draw_layer_bank() -> str:
    """The layers chosen for each sample, and the order of the rows in the grouped product."""
    rng = np.random.default_rng(7)
    batch, num_layers, dim, top_k, cell = 6, 8, 16, 2, 26.0
    x = rng.standard_normal((batch, 4, dim)).astype(np.float32)
    router = rng.standard_normal((num_layers, dim)).astype(np.float32) * 1.5
    layers = rng.standard_normal((num_layers, dim, dim)).astype(np.float32) / 4
    _, kept = layer_bank(x, router, layers, top_k, keep=True)
    every = topk_router(kept.logits, num_layers, renormalize=False)
    p = np.zeros((batch, num_layers))
    np.put_along_axis(p, every.experts, every.weights, axis=1)
    left, top = MARGIN + 64, 92.0
    parts = explanation(
        f"p = softmax(router mean(x)) for {batch} samples and {num_layers} layers; the top "
        f"{top_k} of each sample are framed."
    )
    for layer in range(num_layers):
        x_at = left + (layer + 0.5) * cell
        parts.append(svg.text(str(layer), x_at, top - 6, "tick", "middle"))
    for sample in range(batch):
        y = top + sample * cell
        parts.append(svg.text(f"sample {sample}", left - 8, y + 17, "tick", "end"))
        for layer in range(num_layers):
            x_at = left + layer * cell
            share = float(p[sample, layer])
            parts.append(
                bar(x_at + 2, y + 2, cell - 4, cell - 4, svg.colour(0), 0.06 + 0.94 * share)
            )
            if layer in kept.routing.experts[sample]:
                parts.append(outline(x_at + 2, y + 2, cell - 4, cell - 4))
    column = WIDTH - MARGIN - 190
    height = batch * cell / (batch * top_k)
    owner = np.empty(batch * top_k, int)
    owner[kept.routing.rows.ravel()] = np.repeat(np.arange(batch), top_k)
    for row in range(batch * top_k):
        layer = int(np.searchsorted(kept.routing.expert_offsets, row, side="right")) - 1
        y = top + row * height
        parts.append(bar(column, y + 0.5, 90, height - 1, svg.colour(layer), 0.8))
        parts.append(svg.text(f"sample {owner[row]}", column - 8, y + height - 3, "small", "end"))
        if row == int(kept.routing.expert_offsets[layer]):
            parts.append(svg.text(f"layer {layer}", column + 98, y + height - 3, "small"))
    parts.append(svg.text("rows of the grouped product", column - 50, top - 6, "tick"))
    return page(
        top + batch * cell + 22, "layer_bank: each sample runs through its top layers", parts
    )


def curve(points: list[tuple[float, float]], colour: int, *, dashed: bool = False) -> str:
    """A line through points."""
    return svg.element(
        "path",
        d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points),
        class_=svg.colour(colour),
        style="fill: none; stroke-width: 2",
        stroke_dasharray="4 3" if dashed else None,
    )


def draw_attention() -> str:
    """Tiles of the score matrix under three masks: skipped, partially masked, unmasked."""
    tile, tiles, cell = 16, 12, 16.0
    length = tile * tiles
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((2, 1, length, 1, 16)).astype(np.float32)
    v = np.eye(length, dtype=np.float32)[None, :, None]  # the outputs are the probabilities
    mask = rng.random((tiles // 2, tiles // 2)) < 0.4
    np.fill_diagonal(mask, True)
    panels: list[tuple[str, Any]] = [
        ("causal=True", ck.flash_attention(q, k, v, causal=True)),
        ("window_size=(70, 0)", ck.flash_attention(q, k, v, window_size=(70, 0))),
        (
            "block_mask, causal=True",
            ck.block_sparse_attention(q, k, v, mask, block_size=2 * tile, causal=True),
        ),
    ]
    parts = explanation(
        f"{length} queries (rows) and keys (columns) in tiles of {tile} x {tile}. Empty tiles are "
        "fully masked and skipped.",
        "Light tiles are partially masked: the mask is applied score by score. Dark tiles need no "
        "mask.",
    )
    for number, (name, out) in enumerate(panels):
        left, top = MARGIN + number * 240.0, 88.0
        visible = (out[0, :, 0] > 0).reshape(tiles, tile, tiles, tile).mean(axis=(1, 3))
        for (i, j), share in np.ndenumerate(visible):
            x, y = left + j * cell, top + i * cell
            opacity = 0.0 if share == 0 else 0.85 if share == 1 else 0.35
            parts.append(bar(x + 1, y + 1, cell - 2, cell - 2, svg.colour(1), 0.12))
            if opacity:
                parts.append(bar(x + 1, y + 1, cell - 2, cell - 2, svg.colour(0), opacity))
        read = f"{np.count_nonzero(visible)} of {tiles * tiles} tiles"
        middle = left + tiles * cell / 2
        parts.append(svg.text(name, middle, top + tiles * cell + 18, "tick strong", "middle"))
        parts.append(svg.text(read, middle, top + tiles * cell + 34, "tick", "middle"))
    return page(338.0, "flash_attention: tiles of the score matrix", parts)


def draw_gemm() -> str:
    """The order in which a persistent kernel computes the output tiles of a product."""
    m, n, k = 4096, 8192, 4096
    config = plan_linear(Product(m, n, k, "bfloat16"), True, typical_device("sm_90"))
    assert isinstance(config, Sm90Config)
    tiling, blocks = config.tiling, config.num_blocks
    tiles_m, tiles_n = -(-m // tiling.tile_m), -(-n // tiling.tile_n)
    width, height = 640.0 / tiles_n, 6.5
    left, top = MARGIN, 100.0
    parts = explanation(
        f"linear, {m} x {k} by {n} x {k} in bfloat16 on an H100: {tiles_m * tiles_n} tiles of "
        f"{tiling.tile_m} x {tiling.tile_n}, computed by {blocks} thread blocks.",
        f"Tiles of one colour are computed at the same time. In rasterisation groups of "
        f"{config.raster_group} tile rows (framed), they share few rows of x",
        "and few rows of w, which stay in L2.",
    )
    for tile in range(tiles_m * tiles_n):
        first = tile // (config.raster_group * tiles_n) * config.raster_group
        rows = min(config.raster_group, tiles_m - first)
        within = tile - first * tiles_n
        x, y = left + within // rows * width, top + (first + within % rows) * height
        parts.append(bar(x + 0.5, y + 0.5, width - 1, height - 1, svg.colour(tile // blocks), 0.8))
    for first in range(0, tiles_m, config.raster_group):
        rows = min(config.raster_group, tiles_m - first)
        parts.append(outline(left, top + first * height, 640.0, rows * height))
    bottom = top + tiles_m * height
    for wave in range(-(-tiles_m * tiles_n // blocks)):
        x = left + wave * 90
        parts.append(bar(x, bottom + 12, 11, 11, svg.colour(wave), 0.8))
        parts.append(svg.text(f"wave {wave}", x + 16, bottom + 22, "tick"))
    return page(bottom + 38, "linear: rasterisation order of the output tiles", parts)


def draw_quantization() -> str:
    """The scales of one matrix for each granularity."""
    size, cell = 8, 15.0
    rng = np.random.default_rng(1)
    x = rng.standard_normal((size, size)).astype(np.float32)
    x *= np.exp(0.7 * rng.standard_normal((size, 1)) + 0.7 * rng.standard_normal(size))
    x = x.astype(np.float32)
    panels: list[tuple[str, dict[str, object]]] = [
        ("axis=None", {"axis": None}),
        ("rows: the default", {}),
        ("axis=-2", {"axis": -2}),
        ("group_size=4", {"group_size": 4}),
        ("axis=(-2, -1), group_size=4", {"axis": (-2, -1), "group_size": 4}),
    ]
    parts = explanation(
        "One scale per frame; darker scales are larger. The error of a value is at most half of "
        "its scale,",
        "so smaller blocks keep an outlier from widening the steps of other values.",
    )
    for number, (name, options) in enumerate(panels):
        left, top = MARGIN + number * 138.0, 88.0
        array = ck.quantize(x, ck.int8, **options)  # type: ignore[arg-type]
        assert array.scales is not None
        rows, cols = (size // n for n in array.scales.shape)
        error = np.abs(array.decode() - x).mean() / np.abs(x).mean()
        share = np.log(array.scales / 0.002) / np.log(30.0)
        for (i, j), dark in np.ndenumerate(share):
            place = (left + j * cols * cell, top + i * rows * cell, cols * cell, rows * cell)
            parts.append(bar(*place, svg.colour(0), float(np.clip(dark, 0.08, 1.0))))
            parts.append(outline(*place))
        count, middle = array.scales.size, left + size * cell / 2
        base = top + size * cell
        parts.append(svg.text(name, middle, base + 18, "small", "middle"))
        parts.append(
            svg.text(f"{count} scale{'s' * (count > 1)}", middle, base + 34, "tick", "middle")
        )
        parts.append(svg.text(f"error {error:.2%}", middle, base + 49, "tick", "middle"))
    return page(274.0, "quantize: int8 codes of one 8 x 8 matrix", parts)


def draw_sampling() -> str:
    """The tokens that each option keeps, and the frequencies of drawn tokens."""
    count = 24
    logits = np.sort(2.0 * np.random.default_rng(11).standard_normal(count))[::-1].copy()
    p = np.exp(logits - logits.max())
    p /= p.sum()
    options: list[tuple[str, dict[str, float]]] = [
        ("top_k = 6", {"top_k": 6}),
        ("top_p = 0.9", {"top_p": 0.9}),
        ("min_p = 0.1", {"min_p": 0.1}),
    ]
    draws = 20000
    rows = np.broadcast_to(logits.astype(np.float32), (draws, count)).copy()
    drawn = ck.sample(rows, top_p=0.9, seed=np.arange(draws)).tokens
    frequency = np.bincount(drawn, minlength=count) / draws
    left, top, base = MARGIN + 90, 92.0, 216.0
    step = (WIDTH - MARGIN - left) / count
    up = svg.Scale(0.0, float(frequency.max()), base, top)
    parts = explanation(
        f"Probabilities of {count} tokens, sorted (bars), and the tokens that three options keep "
        "(rows below).",
        f"Dots: frequencies in {draws} draws with top_p = 0.9. They follow the renormalised "
        "probabilities of the kept tokens.",
    )
    for i in range(count):
        x = left + i * step
        parts.append(bar(x + 2, up(float(p[i])), step - 4, base - up(float(p[i])), svg.colour(1)))
        parts.append(
            svg.element(
                "circle", cx=x + step / 2, cy=up(float(frequency[i])), r=3.5, class_=svg.colour(2)
            )
        )
    for number, (name, option) in enumerate(options):
        y = base + 12 + 20 * number
        parts.append(svg.text(name, left - 10, y + 11, "tick", "end"))
        kept = kept_tokens(logits[None], **option)[0]
        for i in range(count):
            opacity = 0.85 if kept[i] else 0.1
            parts.append(bar(left + i * step + 2, y, step - 4, 14, svg.colour(0), opacity))
    return page(base + 86, "sample: truncation of a distribution", parts)


def draw_scan() -> str:
    """The weight of each input in each output of a scan, and the two paths to the output."""
    tokens, chunk, cell = 32, 8, 8.5
    rng = np.random.default_rng(2)
    log_decay = -np.abs(0.25 * rng.standard_normal((1, tokens, 1))).astype(np.float32)
    log_decay[0, 13] = -3.0
    x = np.eye(tokens, dtype=np.float32)[None, :, None]  # the outputs are the weights
    ones = np.ones((1, tokens, 1, 1), np.float32)
    weights = ck.gated_scan(x, ones, ones, log_decay).y[0, :, 0]
    left, top = MARGIN + 30, 104.0
    parts = explanation(
        f"Weight exp(l_{{j+1}} + ... + l_i) of input j (column) in output i (row), {tokens} tokens "
        f"in chunks of {chunk}. Token 13 decays strongly.",
        "Blue: within a chunk, a masked matrix product, as in attention. Amber: inputs of earlier "
        "chunks, which reach the output",
        "through the state at the start of the chunk. A chunk reads only its own tokens and one "
        "state.",
    )
    for i in range(tokens):
        for j in range(i + 1):
            same = i // chunk == j // chunk
            place = (left + j * cell + 0.5, top + i * cell + 0.5, cell - 1, cell - 1)
            opacity = max(0.04, float(weights[i, j]))
            parts.append(bar(*place, svg.colour(0 if same else 2), opacity))
    for number in range(tokens // chunk):
        at = number * chunk * cell
        parts.append(outline(left + at, top + at, chunk * cell, chunk * cell))
        y = top + at + chunk * cell / 2 + 4
        parts.append(svg.text(f"chunk {number}", left - 6, y, "small", "end"))
    x_state = left + tokens * cell + 60
    for number in range(tokens // chunk):
        y = top + number * chunk * cell
        parts.append(bar(x_state, y + 14, 110, 40, svg.colour(0), 0.3))
        parts.append(svg.text(f"chunk {number}", x_state + 55, y + 38, "label", "middle"))
        parts.append(bar(x_state + 170, y + 14, 110, 40, svg.colour(2), 0.3))
        parts.append(svg.text(f"h after chunk {number}", x_state + 225, y + 38, "tick", "middle"))
        parts.append(svg.line(x_state + 112, y + 34, x_state + 168, y + 34, "axis"))
        if number:
            parts.append(svg.line(x_state + 225, y - 14, x_state + 225, y + 14, "axis"))
            parts.append(svg.line(x_state + 190, y - 14, x_state + 92, y + 14, "axis"))
    return page(top + tokens * cell + 20, "gated_scan: chunks and states", parts)


def draw_sparse() -> str:
    """A block-sparse matrix and the arrays that store it."""
    side, cell = 8, 22.0
    mask = np.random.default_rng(5).random((side, side)) < 0.28
    mask[4] = False
    pattern = ck.BlockPattern.from_mask(mask, 16)
    left, top = MARGIN + 10, 84.0
    parts = explanation(
        f"A matrix of {16 * side} x {16 * side} with {len(pattern.indices)} nonzero blocks of "
        "16 x 16, and its BSR arrays. The number in a block is",
        "its index in `indices` and `values`. Block row r has the blocks indptr[r] to "
        "indptr[r + 1] - 1; row 4 has none.",
    )
    for i, j in np.ndindex(side, side):
        place = (left + j * cell + 1, top + i * cell + 1, cell - 2, cell - 2)
        parts.append(bar(*place, svg.colour(1), 0.12))
    for row in range(side):
        for block in range(pattern.indptr[row], pattern.indptr[row + 1]):
            x, y = left + pattern.indices[block] * cell, top + row * cell
            parts.append(bar(x + 1, y + 1, cell - 2, cell - 2, svg.colour(row), 0.6))
            parts.append(svg.text(str(block), x + cell / 2, y + 15, "tick strong", "middle"))
    column = left + side * cell + 110
    rows = [("indptr", pattern.indptr), ("indices", pattern.indices)]
    owner = np.repeat(np.arange(side), np.diff(pattern.indptr))
    for number, (name, values) in enumerate(rows):
        y = top + 14 + 60 * number
        parts.append(svg.text(name, column - 10, y + 16, "tick strong", "end"))
        for i, value in enumerate(values):
            x = column + i * 20.0
            opacity = 0.6 if number else 0.15
            class_ = svg.colour(int(owner[i])) if number else svg.colour(1)
            parts.append(bar(x + 1, y, 18, 24, class_, opacity))
            parts.append(svg.text(str(value), x + 10, y + 16, "tick strong", "middle"))
    y = top + 134
    parts.append(svg.text("values", column - 10, y + 16, "tick strong", "end"))
    for i in range(len(pattern.indices)):
        parts.append(bar(column + i * 20.0 + 1, y, 18, 24, svg.colour(int(owner[i])), 0.6))
    parts.append(svg.text(f"[{len(pattern.indices)}, 16, 16]", column, y + 40, "tick"))
    return page(top + side * cell + 20, "BlockSparseMatrix: blocks and BSR arrays", parts)


def draw_kv_cache() -> str:
    """Block tables of requests with a common prefix, of a fork, and the blocks of the slab."""
    block_size, cell = 4, 44.0
    cache = ck.KVCacheManager(num_blocks=12, block_size=block_size, num_heads_kv=1, head_dim=8)
    prompt = list(range(8))
    cache.allocate("a", [*prompt, 20, 21])
    cache.publish("a")
    found = cache.allocate("b", [*prompt, 30, 31, 32, 33, 34])
    cache.publish("b")
    cache.fork("b", "c")
    cache.append_each(["b", "c"], [40, 41])
    requests = ["a", "b", "c"]
    tables, lengths = cache.block_table(requests)
    parts = explanation(
        f"Blocks of {block_size} tokens. Request b has the first {found} tokens of a in common and "
        "reads the same blocks (frames mark shared blocks).",
        "c is a fork of b. Both then append a token to a partially filled block, so one of them "
        "first gets a copy of it.",
    )
    left, top = MARGIN + 80, 84.0
    for number, (request, table, length) in enumerate(zip(requests, tables, lengths, strict=True)):
        y = top + number * 34.0
        parts.append(svg.text(f"request {request}", left - 12, y + 17, "tick", "end"))
        for i in range(-(-int(length) // block_size)):
            block = int(table[i])
            x = left + i * (cell + 4)
            filled = min(block_size, int(length) - i * block_size) / block_size
            parts.append(bar(x, y, cell, 26, svg.colour(1), 0.15))
            parts.append(bar(x, y, cell * filled, 26, svg.colour(block), 0.6))
            parts.append(svg.text(str(block), x + cell / 2, y + 17, "tick strong", "middle"))
            holders = sum(
                block in tables[r][: -(-int(n) // block_size)] for r, n in enumerate(lengths)
            )
            if holders > 1:
                parts.append(outline(x, y, cell, 26))
        words = f"{length} tokens"
        parts.append(svg.text(words, left + 5 * (cell + 4), y + 17, "tick"))
    y = top + 3 * 34.0 + 18
    parts.append(svg.text("slab", left - 12, y + 17, "tick", "end"))
    used = {
        int(b) for t, n in zip(tables, lengths, strict=True) for b in t[: -(-int(n) // block_size)]
    }
    for block in range(12):
        x = left + block * (cell + 4)
        parts.append(bar(x, y, cell, 26, svg.colour(block), 0.6 if block in used else 0.08))
        parts.append(svg.text(str(block), x + cell / 2, y + 17, "tick strong", "middle"))
        state = cache.block(block)
        words = f"{state.references} ref." if state.references else "free"
        parts.append(svg.text(words, x + cell / 2, y + 42, "small", "middle"))
    for request in requests:
        cache.free(request)
    return page(y + 60, "KVCacheManager: block tables share blocks", parts)


def draw_temperature() -> str:
    """Teacher and student distributions at three temperatures, with the gradient of the KL."""
    count = 14
    rng = np.random.default_rng(8)
    teacher = np.sort(2.5 * rng.standard_normal(count))[::-1].copy()
    student = (0.6 * teacher + rng.standard_normal(count)).astype(np.float64)
    panel, base, zero = 224.0, 200.0, 246.0
    parts = explanation(
        "softmax(logits / T) of teacher (blue) and student (grey) for one token, and the gradient "
        "of the loss with respect to",
        "the student's logits (amber). A higher T raises the weight of unlikely tokens; the factor "
        "T^2 keeps the gradient's scale.",
    )

    def softmax(z: Any, temperature: float) -> Any:
        p = np.exp((z - z.max()) / temperature)
        return p / p.sum()

    for number, temperature in enumerate((1.0, 2.0, 4.0)):
        left = MARGIN + number * panel
        _, grad = ck.distillation_loss(
            student[None], teacher[None], temperature=temperature,
            scale_by_temperature_squared=True, return_grad=True,
        )  # fmt: skip
        gradient = grad[0]
        step = (panel - 16) / count
        for i in range(count):
            x = left + i * step
            for offset, logits, colour in ((0.0, teacher, 0), (step / 2 - 1, student, 1)):
                height = 260.0 * float(softmax(logits, temperature)[i])
                place = (x + offset, base - height, step / 2 - 1, height)
                parts.append(bar(*place, svg.colour(colour), 0.85))
            height = 130.0 * float(gradient[i])
            y = zero - max(height, 0.0)
            parts.append(bar(x, y, step - 2, abs(height), svg.colour(2), 0.85))
        parts.append(svg.line(left, base, left + panel - 18, base, "axis"))
        parts.append(svg.line(left, zero, left + panel - 18, zero, "axis"))
        middle = left + panel / 2 - 8
        parts.append(svg.text(f"T = {temperature:g}", middle, 296.0, "tick strong", "middle"))
    return page(310.0, "distillation_loss: temperature", parts)


def draw_layers() -> str:
    """Activations with their derivatives, and the cosines that rope applies."""
    x = np.linspace(-4, 3, 141)
    ones = np.ones_like(x)
    left, right, top, base = MARGIN + 24, 340.0, 88.0, 250.0
    across, up = svg.Scale(-4.0, 3.0, left, right), svg.Scale(-0.5, 3.0, base, top)
    gated = ck.silu_and_mul(np.stack([x, ones], axis=1))[:, 0]
    grad_gated = ck.silu_and_mul_backward(ones[:, None], np.stack([x, ones], axis=1))[:, 0]
    curves = [
        ("silu", gated, grad_gated),
        ("gelu", ck.gelu(x), ck.gelu_backward(ones, x)),
    ]
    parts = explanation(
        "Left: activations and their derivatives (dashed). Right: rope rotates a pair (1, 0); the "
        "cosine of its angle,",
        "for each position and pair: blue positive, amber negative.",
    )
    for value in (0.0, 1.0, 2.0, 3.0):
        parts.append(svg.line(left, up(value), right, up(value), "grid"))
        parts.append(svg.text(f"{value:g}", left - 8, up(value) + 4, "tick", "end"))
    for value in (-4, -2, 0, 2):
        parts.append(svg.text(f"{value}", across(value), base + 16, "tick", "middle"))
    for number, (name, y, slope) in enumerate(curves):
        series = 2 * number
        for values, dashed in ((y, False), (slope, True)):
            points = [(across(float(a)), up(float(b))) for a, b in zip(x, values, strict=True)]
            parts.append(curve(points, series, dashed=dashed))
        parts.append(bar(left + 14 + 70 * number, top + 8, 11, 11, svg.colour(series)))
        parts.append(svg.text(name, left + 30 + 70 * number, top + 18, "tick"))
    positions, pairs, cell = 28, 16, 10.0
    angles = np.arange(positions)[:, None] / 10000 ** (np.arange(pairs) / pairs)
    unit = np.zeros((1, positions, 1, 2 * pairs))
    unit[..., :pairs] = 1
    turned, _ = ck.rope(unit, unit, np.cos(angles), np.sin(angles))
    column = 410.0
    for (position, pair), cosine in np.ndenumerate(turned[0, :, 0, :pairs]):
        place = (column + position * cell, top + pair * cell, cell - 1, cell - 1)
        colour = svg.colour(0 if cosine >= 0 else 2)
        parts.append(bar(*place, colour, max(0.04, abs(float(cosine)))))
    middle = column + positions * cell / 2
    low = top + pairs * cell
    parts.append(svg.text("positions 0 to 27", middle, low + 16, "tick", "middle"))
    parts.append(svg.text("pair 0", column - 8, top + 9, "tick", "end"))
    parts.append(svg.text(f"pair {pairs - 1}", column - 8, low - 2, "tick", "end"))
    return page(280.0, "gelu, silu_and_mul, rope", parts)


FIGURES: dict[str, Callable[[], str]] = {
    "attention_tiles.svg": draw_attention,
    "distillation_temperature.svg": draw_temperature,
    "gated_scan.svg": draw_scan,
    "kv_cache_blocks.svg": draw_kv_cache,
    "layers.svg": draw_layers,
    "linear_tiles.svg": draw_gemm,
    "quantization_scales.svg": draw_quantization,
    "sampling_options.svg": draw_sampling,
    "sparse_blocks.svg": draw_sparse,
    "retrieval.svg": draw_retrieval,
    "graph_diffusion.svg": draw_diffusion,
    "memory_write.svg": draw_memory_write,
    "layer_bank.svg": draw_layer_bank,
}


if __name__ == "__main__":
    sys.exit(main())
