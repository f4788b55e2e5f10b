"""The examples run, on the CPU and at small sizes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import cukit as ck

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_serving_with_a_prefix_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUKIT_DEVICE", "cpu")
    assert ck.default_device() == "cpu"
    example = runpy.run_path(str(EXAMPLES / "serve_prefix_cache.py"))
    options = ["--requests", "5", "--prompts", "1", "--new-tokens", "3", "--batch", "3"]
    shared, alone = example["main"](options)
    assert shared.answers == alone.answers
    assert {len(answer) for answer in shared.answers} == {3}
    assert shared.hit_rate > 0.6
    assert alone.hit_rate == 0
    assert shared.peak_bytes < alone.peak_bytes
    printed = capsys.readouterr().out
    for word in ("hit rate", "new tokens/s", "memory saved"):
        assert word in printed
