"""docs/memory.md: its examples run without a GPU and from any folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "memory.md").read_text(), re.DOTALL)

EACH_ALONE = """
import sys
for number, code in enumerate(sys.stdin.read().split("\\0")):
    print("example", number)
    exec(compile(code, f"example {number}", "exec"), {"__name__": "__main__"})
"""


def test_the_examples_run(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", EACH_ALONE],
        input="\0".join(EXAMPLES),
        cwd=tmp_path,
        env=os.environ | {"CUKIT_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    shown = re.split(r"^example \d+\n", result.stdout, flags=re.MULTILINE)[1:]
    assert len(shown) == len(EXAMPLES) == 5
    assert all(part.strip() for part in shown), "an example prints nothing"
    remapped, moved, failure, seen, log = shown
    assert re.search(r"[1-9]\d* pages remapped, 0 moved", remapped)
    assert re.search(r"[1-9]\d* KiB moved", moved)
    assert "reclaimable by remap" in failure
    assert "largest hole" in seen
    assert "LogAction.ALLOCATE" in log
    assert {"pool.pickle", "pool.json", "pool.csv"} <= {path.name for path in tmp_path.iterdir()}
