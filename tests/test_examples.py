"""Every Python example of the docs and of docstrings runs and prints what is stated.

The blocks of a page run in order in one namespace, on NumPy arrays. SETUPS defines variables that a
page assumes (a prompt, a model's keys). README.md and some pages are tested elsewhere:
tests/test_documents.py, tests/memory/test_document.py, tests/torch/test_document.py.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

TESTED_ELSEWHERE = {"check_your_kernel.md", "memory.md", "torch.md"}

NEED_A_GPU = {"profiling.md"}
"""Only the imports of these pages are tested."""

NEED_TORCH = {"first_hour/torch.md"}

SETUPS: dict[tuple[str, int], str] = {
    ("emulator.md", 0): """
import cukit
import numpy as np
x, weight = np.ones((2, 64), np.float32), np.ones(64, np.float32)
""",
    ("kv_cache.md", 0): """
prompt, token = list(range(40)), 7
""",
    ("kv_cache.md", 1): """
import numpy as np
rng = np.random.default_rng(0)
half = lambda *shape: rng.standard_normal(shape).astype(np.float16)
cache.allocate("first", prompt)
slots = cache.append_each(["first"], [token])
k, v, q = half(1, 2, 64), half(1, 2, 64), half(1, 8, 64)
cos, sin = rng.random((2, 64, 32), np.float32)
positions = np.array([40], np.int32)
""",
    ("kv_cache.md", 2): """
cache = ck.KVCacheManager(num_blocks=64, block_size=16, num_heads_kv=2, head_dim=64)
q, k, v, layer = half(1, 40, 8, 64), half(1, 40, 2, 64), half(1, 40, 2, 64), 0
""",
    ("kv_cache.md", 3): """
cache = ck.KVCacheManager(4, 64, num_heads_kv=2, head_dim=64, dtype=ck.int4, num_rings=1)
k_int4, v_int4 = cache.keys(0), cache.values(0)
ring_k, ring_v, q = half(1, 128, 2, 64), half(1, 128, 2, 64), half(1, 1, 8, 64)
ck.pack_kv(ring_k, ring_v, k_int4, v_int4, np.array([0]), np.array([2]))
rings, packed_lens, lengths = (np.array([n], np.int32) for n in (0, 64, 100))
table = np.array([[2, 0]], np.int32)
sources, targets = np.array([1]), np.array([0])
""",
    ("kv_cache.md", 4): """
k, v, q = half(1, 2048, 2, 64), half(1, 2048, 2, 64), half(1, 32, 8, 64)
k_new, v_new, q_new = half(1, 4, 2, 64), half(1, 4, 2, 64), half(1, 4, 8, 64)
""",
    ("reports.md", 0): f"""
import shutil
shutil.copy({str(ROOT / "profiling" / "results" / "h200.json")!r}, "results.json")
""",
    ("reports.md", 1): """
from cukit.memory import MemoryPool
pool, train = MemoryPool(), lambda: pool.free(pool.allocate(1000))
""",
}


def examples(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


PAGES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if examples(path.relative_to(DOCS).as_posix())
)


def program(page: str) -> str:
    """Return one program of all blocks, with a separator printed after each."""
    parts = []
    for number, block in enumerate(examples(page)):
        parts.append(SETUPS.get((page, number), "") + block + "\nprint('\\0')\n")
    return "".join(parts)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in TESTED_ELSEWHERE | NEED_A_GPU]
)
def test_examples_run_and_print_their_comments(page: str, tmp_path: Path) -> None:
    if page in NEED_TORCH and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is an extra: pip install 'cukit[torch]'")
    result = subprocess.run(
        [sys.executable, "-c", program(page)],
        cwd=tmp_path,
        env=os.environ | {"CUKIT_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    printed = result.stdout.split("\0\n")
    for block, lines in zip(examples(page), printed, strict=False):
        promised = re.findall(r"^print\(.*\)  # (.*)", block, re.MULTILINE)
        promised += re.findall(r"^ *# (.*)", block.rpartition("print(")[2], re.MULTILINE)
        if promised:
            assert lines.splitlines()[-len(promised) :] == promised


@pytest.mark.parametrize("page", sorted(NEED_A_GPU))
def test_examples_for_a_gpu_import_what_exists(page: str) -> None:
    for block in examples(page):
        for node in ast.parse(block).body:
            if isinstance(node, ast.Import | ast.ImportFrom) and "cupy" not in ast.unparse(node):
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(ast.unparse(node), {})


def test_setups_are_of_blocks_that_exist() -> None:
    for page, number in SETUPS:
        assert number < len(examples(page)), page


DOCTESTS = """
import doctest, importlib, sys
failed = [name for name in sys.argv[1:] if doctest.testmod(importlib.import_module(name)).failed]
sys.exit(", ".join(failed) or 0)
"""


def test_examples_of_docstrings() -> None:
    """Doctests of all modules; modules that need PyTorch are skipped if it is not installed."""
    has_torch = importlib.util.find_spec("torch") is not None
    paths = [path for path in (ROOT / "cukit").rglob("*.py") if ">>>" in path.read_text()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(paths)]
    names = [name for name in names if has_torch or not name.startswith("cukit.torch.")]
    assert len(names) > 80
    result = subprocess.run(
        [sys.executable, "-c", DOCTESTS, *(name.removesuffix(".__init__") for name in names)],
        env=os.environ | {"CUKIT_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
