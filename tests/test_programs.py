"""The programs in examples/ run on the CPU at small sizes."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import cukit as ck
from cukit.distill.run._host_workers import one_thread_each
from tests.distributed.ranks import free_port

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


def test_distilling_without_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUKIT_DEVICE", "cpu")
    example = runpy.run_path(str(EXAMPLES / "distill_cupy.py"))
    text = write_text(tmp_path)
    options = ["--text", text, "--steps", "6", "--batch", "2", "--seq", "32"]
    with one_thread_each():  # tests run in parallel
        bits = example["main"]([*options, "--output", str(tmp_path)])
        again = example["main"]([*options, "--output", str(tmp_path)])  # from the last checkpoints
    assert again == bits
    assert list(bits) == ["teacher", "alone", "distilled", "offline", "distilled, averaged"]
    assert all(0 < value < 8.2 for value in bits.values())
    assert (tmp_path / "student.safetensors").is_file()
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.slow
def test_distilling_in_two_processes(tmp_path: Path) -> None:
    """Started with the environment variables that torchrun sets."""
    command = [sys.executable, str(EXAMPLES / "distill_cupy.py"), "--text", write_text(tmp_path)]
    command += ["--steps", "4", "--batch", "2", "--seq", "32", "--output", str(tmp_path / "out")]
    env = dict(
        os.environ,
        CUKIT_DEVICE="cpu",
        OMP_NUM_THREADS="1",
        WORLD_SIZE="2",
        MASTER_PORT=str(free_port()),
    )
    env["PYTHONPATH"] = str(EXAMPLES.parent)
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "distilled, averaged" in printed[0]
    assert printed[1] == ""


def test_distilling_in_torch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is an extra: pip install 'cukit[torch]'")
    pytest.importorskip("transformers", reason="transformers is not installed")
    if torch.cuda.is_available():
        pytest.skip("a test of the CPU; tests/torch covers the GPU")
    torch.set_num_threads(1)  # tests run in parallel
    example = runpy.run_path(str(EXAMPLES / "distill_torch.py"))
    text = write_text(tmp_path)
    options = ["--text", text, "--steps", "4", "--batch", "2", "--seq", "16", "--size", "64"]
    bits = example["main"]([*options, "--output", str(tmp_path)])
    assert list(bits) == ["teacher", "student alone", "student"]
    assert all(0 < value < 8.5 for value in bits.values())
    assert (tmp_path / "teacher" / "config.json").is_file()
    assert (tmp_path / "student" / "config.json").is_file()
    assert "would swap" in capsys.readouterr().out


def write_text(folder: Path) -> str:
    """A page of English, repeated: enough for training and validation windows."""
    file = folder / "text.md"
    file.write_text((EXAMPLES.parent / "docs" / "memory.md").read_text() * 2)
    return str(file)
