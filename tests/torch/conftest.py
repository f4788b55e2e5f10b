"""Tests run side by side, a process for each core: threads of torch would wait for one another."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch") is not None:
    import torch

    torch.set_num_threads(1)
