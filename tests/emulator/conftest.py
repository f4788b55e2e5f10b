"""What the emulator's tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def emulator_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are kept in pytest's own cache: a second run compiles only what changed."""
    assert request.config.cache is not None
    monkeypatch.setenv("CUKIT_CACHE_DIR", str(request.config.cache.mkdir("cukit-kernels")))
