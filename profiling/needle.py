"""Retrieval accuracy of attention over long KV caches of 16, 8 and 4 bits:

    python -m profiling.needle [KEYS]
    python -m profiling.needle --write      # into docs/kv_cache.md

The needle of a query is one of KEYS (131072) keys. The others are random; the needle has the
query's direction and an attention weight of 0.7 / sqrt(KEYS), 1/517, small enough that some needles
are missed in 16 bits. A needle counts as found if the output's dot product with its value is at
least as large as those with the values of a thousand random tokens. Prints a table.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cukit.attention import flash_attention, pack_kv, paged_attention
from cukit.core.arrays import bfloat16
from cukit.core.narrow_dtype import float8_e4m3, int4, int8
from cukit.core.quantized_array import QuantizedArray
from cukit.quantization import quantize
from profiling.data import array_module
from profiling.tables import ROOT, markdown, replace_between_marks

KEYS = 131072
HEAD_DIM, HEADS, GROUP = 128, 2, 64
WEIGHT = 0.7
"""Attention weight of a needle, times the square root of the number of keys. All other keys
together add noise with a standard deviation of 1.6 divided by that root; values have one of 1."""
_CANDIDATES = 1000
QUERIES = 512
DOCUMENT = "docs/kv_cache.md"
MARKS = re.compile(r"(<!-- needle -->\n).*?(<!-- /needle -->)", re.DOTALL)
ROWS = ("16 bits", "int8", "float8", "int4", "float8 q, k, v and probabilities")
"""Rows of the table."""


class Haystack:
    """Queries, keys and values of one request, and the needle of each query and head."""

    def __init__(self, keys: int, queries: int, seed: int = 0) -> None:
        self.xp = array_module()
        rng = np.random.default_rng(seed)
        shape = HEADS, HEAD_DIM
        self.q, self.k, self.v = (
            rng.standard_normal((rows, *shape), np.float32) for rows in (queries, keys, keys)
        )
        self.needles = np.stack([rng.permutation(keys)[:queries] for _ in range(HEADS)], axis=1)
        # exp(score) is the weight times sum(exp(scores)) of the random keys, about keys * exp(0.5),
        # as their scores are standard normal.
        score = math.log(WEIGHT * math.sqrt(keys) * math.exp(0.5))
        for head in range(HEADS):
            q = self.q[:, head]
            lengths = (q * q).sum(axis=1, keepdims=True)
            self.k[self.needles[:, head], head] = q * (score * math.sqrt(HEAD_DIM) / lengths)
        self.others = rng.permutation(keys)[:_CANDIDATES]

    def found(self, out: Any) -> float:
        """The share of needles found in `out`, [queries, heads, head_dim]."""
        host = np.asarray(out if self.xp is np else out.get(), np.float32)
        hits = 0
        for head in range(HEADS):
            rows, values = host[:, head], self.v[:, head]
            own = (rows * values[self.needles[:, head]]).sum(axis=1)
            best = (rows @ values[self.others].T).max(axis=1)
            hits += int((own >= best).sum())
        return hits / self.needles.size

    def arrays(self) -> tuple[Any, Any, Any]:
        """q, k and v in bfloat16, [1, rows, heads, head_dim]."""
        q, k, v = (self.xp.asarray(x[None].astype(bfloat16)) for x in (self.q, self.k, self.v))
        return q, k, v


def outputs(haystack: Haystack) -> dict[str, Callable[[], Any]]:
    """Functions that return outputs [queries, heads, head_dim], one per storage format."""
    xp = haystack.xp
    q, k, v = haystack.arrays()
    keys = k.shape[1]
    table = xp.arange(keys // GROUP, dtype=np.int32)[None]
    lengths = xp.full(1, keys, np.int32)

    def blocks(x: Any) -> Any:
        return x.reshape(-1, GROUP, HEADS, HEAD_DIM)

    def paged(k_cache: Any, v_cache: Any) -> Any:
        return paged_attention(q, k_cache, v_cache, table, lengths, causal=False)[0]

    def coded(dtype: Any) -> Any:
        return paged(*(quantize(blocks(x), dtype) for x in (k, v)))

    def packed() -> Any:
        shape = blocks(k).shape
        caches = []
        for axis, size, extents in (
            (1, GROUP, (len(table[0]), 1, HEADS, HEAD_DIM)),
            (3, HEAD_DIM, (len(table[0]), HEADS, GROUP, 1)),
        ):
            factors = [xp.zeros(extents, np.float16) for _ in range(2)]
            if axis == 3:
                factors = [x.swapaxes(1, 2) for x in factors]
            storage = xp.zeros((*shape[:-1], HEAD_DIM // 2), np.uint8)
            caches.append(QuantizedArray(storage, int4, shape, *factors, axis, size))
        groups = xp.arange(len(table[0]))
        pack_kv(blocks(k), blocks(v), *caches, groups, groups)
        return paged(*caches)

    def float8_probabilities() -> Any:
        codes = [QuantizedArray.encode(x.astype(np.float32), float8_e4m3) for x in (q, k, v)]
        return flash_attention(*codes)[0]

    formats = (
        lambda: paged(blocks(k), blocks(v)),
        lambda: coded(int8),
        lambda: coded(float8_e4m3),
        packed,
        float8_probabilities,
    )
    return dict(zip(ROWS, formats, strict=True))


def measure(keys: int = KEYS, queries: int = QUERIES) -> dict[str, float]:
    """The share of needles found, for each storage format."""
    haystack = Haystack(keys, queries)
    return {name: haystack.found(compute()) for name, compute in outputs(haystack).items()}


def table(found: Mapping[str, float], keys: int = KEYS, queries: int = QUERIES) -> str:
    """Format the table as Markdown."""
    header = [f"{keys} keys, {queries * HEADS} needles", "found"]
    return markdown(header, [[name, f"{part:.1%}"] for name, part in found.items()], left=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; with --write, update the document."""
    parser = argparse.ArgumentParser(prog="python -m profiling.needle")
    parser.add_argument(
        "keys", type=int, nargs="?", default=KEYS, metavar="KEYS", help=f"a multiple of {GROUP}"
    )
    parser.add_argument("--write", action="store_true", help=f"into {DOCUMENT}")
    options = parser.parse_args(arguments)
    if options.keys % GROUP or options.keys < QUERIES:
        parser.error(
            f"KEYS must be a multiple of {GROUP} and at least {QUERIES}, got {options.keys}"
        )
    made = table(measure(options.keys), options.keys)
    print(made)
    if options.write:
        replace_between_marks(ROOT / DOCUMENT, MARKS, made)


if __name__ == "__main__":
    main()
