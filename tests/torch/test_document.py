"""docs/torch.md: its code runs, and the names in it exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install 'cukit[torch]'")

import cukit.torch as ckt  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()


def test_the_first_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    exec(compile(code[1], "docs/torch.md", "exec"), {})


def test_names_in_examples_exist() -> None:
    names = set(re.findall(r"\bckt\.(\w+)", PAGE))
    assert names <= set(ckt.__all__), names - set(ckt.__all__)


def test_every_public_name_is_on_the_page() -> None:
    missing = {name for name in ckt.__all__ if f"{name}" not in PAGE}
    assert missing <= {"Optimized", "SwapReport"}, missing
    assert list(ckt.__all__) == sorted(ckt.__all__)


def test_without_torch_the_message_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    from cukit.errors import MissingDependencyError

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "cukit.torch")
    with pytest.raises(MissingDependencyError, match=r"pip install 'cukit\[torch\]'"):
        importlib.import_module("cukit.torch")


def test_importing_cukit_does_not_import_torch() -> None:
    import subprocess
    import sys

    code = "import cukit, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
