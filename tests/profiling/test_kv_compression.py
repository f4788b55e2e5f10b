"""The table of compressed caches: computation at a tiny size, and the document."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cukit.distill import cross_entropy
from cukit.models import Transformer, TransformerConfig
from profiling.kv_compression import DOCUMENT, MARKS, measure_all, strategies, table
from profiling.tables import ROOT


def test_rows_of_a_tiny_model() -> None:
    config = TransformerConfig(256, 32, 2, 2, 1, 16, 48, 160)
    model = Transformer.initialise(config, seed=0)
    text = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    rows = measure_all(model, text, 3)
    bits = {row.title: row.bits_per_byte for row in rows}
    losses = []
    for start in np.linspace(0, 1000 - 161, 3).astype(int):
        window = text[start : start + 161].astype(np.int32)
        logits = model.logits(model.forward(window[None, :-1], keep=False).hidden)
        losses.append(cross_entropy(logits[120:], window[121:], reduction="none"))
    exact = float(np.mean(losses)) / math.log(2)
    assert bits["none"] == pytest.approx(exact, abs=2e-3)
    assert bits["`int8`"] == pytest.approx(exact, abs=2e-2)
    by_title = {row.title: row for row in rows}
    assert by_title["none"].ratio == 1
    assert by_title["`snapkv`, 1/4 of the tokens"].ratio == 4
    assert by_title["`int8`"].error < by_title["`kivi2`"].error
    assert len(table(model, rows, 3).splitlines()) == len(rows) + 4


def test_the_document_has_every_row() -> None:
    match = MARKS.search((ROOT / DOCUMENT).read_text(encoding="utf-8"))
    assert match is not None
    for title, _, _ in strategies(384):
        assert f"| {title} |" in match[0], "run `python -m profiling.kv_compression MODEL --write`"
