"""A fixture for the device of tensors; one thread for torch: tests run in one process per core."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def place(device: str) -> str:
    """The device of a test's tensors; the emulator uses CPU tensors."""
    return "cuda" if device == "gpu" else "cpu"
