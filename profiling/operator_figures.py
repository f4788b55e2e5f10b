"""Draws the figures of docs/graph_memory.md and of docs/moe.md's bank of layers.

Run by `python -m profiling.operator_figures` (`make tables`). Each figure shows results of the ops
on small inputs; a test compares the files with the ops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from cukit.analyzer.report import svg
from cukit.graph_memory import Transition, graph_diffusion, memory_write, retrieve_top_k
from cukit.moe import layer_bank, topk_router
from profiling.tables import ROOT

WIDTH, MARGIN = 720.0, 24.0


def main() -> int:
    """Update the figures; print the names of those that changed."""
    for name, draw in FIGURES.items():
        path, new = ROOT / "docs" / name, draw()
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


def page(height: float, title: str, parts: list[str]) -> str:
    """Return a self-contained figure that supports light and dark mode."""
    panel = svg.element("rect", class_="panel", width=WIDTH, height=height, rx=12.0)
    style = svg.element("style", svg.style() + "svg .panel { fill: var(--page); }\n")
    head = svg.text(title, MARGIN, 34.0, "label")
    return svg.figure(WIDTH, height, title, [style, panel, head, *parts]) + "\n"


def bar(x: float, y: float, width: float, height: float, class_: str, opacity: float = 1.0) -> str:
    """A rectangle."""
    return svg.element("rect", x=x, y=y, width=width, height=height, class_=class_, opacity=opacity)


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
    parts = [
        svg.text(
            f"Scores of one query against {group * groups} rows, in {groups} groups of {group}. "
            "Only the maximum of each group (line) is written.",
            MARGIN, 54.0, "detail",
        ),
        svg.text(
            f"The {k} best rows (blue) lie in the {k} groups with the highest maxima (shaded), "
            "which are scored again.",
            MARGIN, 70.0, "detail",
        ),
    ]  # fmt: skip
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
    """The mass of one lattice node after several diffusion steps."""
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
    parts = [
        svg.text(
            "Unit mass at one node of a lattice diffuses. The area of a dot is the mass of its "
            "node; each panel sums to 1.",
            MARGIN, 54.0, "detail",
        )
    ]  # fmt: skip
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


def draw_write() -> str:
    """Contributions to a row as a function of the summed gates of three writes to it."""
    indices, gates = np.zeros(3, np.int32), np.array([0.5, 0.3, 0.2])
    left, right, top, base = MARGIN + 40, WIDTH - MARGIN, 84.0, 214.0
    across, up = svg.Scale(0.0, 2.0, left, right), svg.Scale(0.0, 1.0, base, top)
    totals = np.linspace(0, 2, 81)
    # One column for the old row and one per write: the value of a column is its share.
    memory, values = np.eye(1, 4), np.eye(4)[1:]
    shares = np.array([memory_write(memory, indices, values, gates * s)[0] for s in totals])
    parts = [
        svg.text(
            "Three writes to one row with gates in the ratio 5 : 3 : 2. The shares always sum "
            "to 1.",
            MARGIN, 54.0, "detail",
        )
    ]  # fmt: skip
    ends = np.concatenate([np.zeros((len(totals), 1)), np.cumsum(shares, axis=1)], axis=1)
    for part, name in enumerate(("old row", "write 0", "write 1", "write 2")):
        outline = [(across(s), up(e)) for s, e in zip(totals, ends[:, part], strict=True)]
        outline += [
            (across(s), up(e)) for s, e in zip(totals[::-1], ends[::-1, part + 1], strict=True)
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
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


def draw_bank() -> str:
    """The layers that samples choose, and their order in the grouped product."""
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
    parts = [
        svg.text(
            f"p = softmax(router mean(x)) for {batch} samples and {num_layers} layers; the top "
            f"{top_k} of each sample are framed.",
            MARGIN, 54.0, "detail",
        )
    ]  # fmt: skip
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
                parts.append(
                    svg.element(
                        "path",
                        d=f"M{x_at + 2:.1f} {y + 2:.1f}h{cell - 4:.1f}v{cell - 4:.1f}h"
                        f"{4 - cell:.1f}z",
                        class_="roof", fill="none",
                    )
                )  # fmt: skip
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


FIGURES: dict[str, Callable[[], str]] = {
    "retrieval.svg": draw_retrieval,
    "graph_diffusion.svg": draw_diffusion,
    "memory_write.svg": draw_write,
    "layer_bank.svg": draw_bank,
}


if __name__ == "__main__":
    sys.exit(main())
