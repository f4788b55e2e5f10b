"""Ranges open and close around ops imported in any way, and are removed completely."""

from __future__ import annotations

import numpy as np
import pytest

import cukit as ck
from cukit.analyzer.nvtx import nvtx_ranges
from cukit.layers import rms_norm

cupy = pytest.importorskip("cupy", reason="NVTX is called through CuPy")


def test_ranges_enclose_ops_and_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cupy.cuda.nvtx, "RangePush", lambda name: seen.append(f"<{name}"))
    monkeypatch.setattr(cupy.cuda.nvtx, "RangePop", lambda: seen.append(">"))
    x, weight = np.ones((2, 8), np.float32), np.ones(8, np.float32)
    original = rms_norm
    with nvtx_ranges():
        assert globals()["rms_norm"] is not original
        rms_norm(x, weight)
        ck.gelu(x)
        with pytest.raises(ck.ArrayError):
            ck.rms_norm(x, weight[:3])
    assert seen == ["<rms_norm", ">", "<gelu", ">", "<rms_norm", ">"]
    assert rms_norm is original
    assert ck.rms_norm is original
    rms_norm(x, weight)
    assert len(seen) == 6
