"""Text data: the split depends only on the text, windows only on seed and step."""

from __future__ import annotations

import os
import site
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from cukit.distill.training import data
from cukit.distill.training.data import (
    VALIDATION_SHARE,
    Windows,
    read_corpus,
    standard_library_files,
    validation_batches,
)
from cukit.errors import DataError


def write_texts(folder: Path, count: int = 60) -> None:
    rng = np.random.default_rng(1)
    for number in range(count):
        sub = folder / f"part{number % 3}"
        sub.mkdir(parents=True, exist_ok=True)
        (sub / f"{number}.txt").write_bytes(bytes(rng.integers(97, 123, 500).astype(np.uint8)))


def test_split_is_by_file_and_depends_on_the_text_alone(tmp_path: Path) -> None:
    write_texts(tmp_path / "first")
    corpus = read_corpus([tmp_path / "first"])
    assert corpus.num_train_files + corpus.num_validation_files == 60
    assert corpus.num_validation_files == 60 * VALIDATION_SHARE
    train, validation = (bytes(p).split(b"\0") for p in (corpus.train, corpus.validation))
    assert len(train) == corpus.num_train_files
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(
        file.read_bytes() for file in (tmp_path / "first").rglob("*.txt")
    )
    (tmp_path / "first").rename(tmp_path / "second")
    moved = read_corpus([tmp_path / "second" / f"part{n}" for n in (2, 0, 1)])
    assert moved.fingerprint == corpus.fingerprint
    (tmp_path / "second" / "part0" / "0.txt").write_text("another text")
    assert read_corpus([tmp_path / "second"]).fingerprint != corpus.fingerprint


def test_copies_of_a_file_count_once(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("the same" if number < 6 else f"text {number}")
    corpus = read_corpus([tmp_path])
    assert corpus.num_train_files + corpus.num_validation_files == 3


def test_a_single_file_is_split(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(b"a" * 900 + b"b" * 100)
    corpus = read_corpus([tmp_path / "book.txt"])
    assert bytes(corpus.train) == b"a" * 900
    assert bytes(corpus.validation) == b"b" * 100


def test_standard_library_excludes_installed_packages() -> None:
    files = standard_library_files()
    assert len(files) > 300
    assert not any("site-packages" in file.parts or "test" in file.parts for file in files)
    assert any(file.name == "argparse.py" for file in files)


def test_packages_are_training_text_but_not_validation_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Excluded: tests, copies of the standard library, long tables, and text beyond the limit."""
    package = tmp_path / "package"
    for name in ("a", "b", "tests/c", "_vendor/d", "typing_extensions"):
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {name}\n" * 10)
    (package / "table.py").write_text("x = 1\n" * 50_000)
    (package / "read.me").write_text("no source")
    paths = dict.fromkeys(("purelib", "platlib"), str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path / "missing")])
    assert sorted(file.name for file in data.package_files()) == ["a.py", "b.py"]
    monkeypatch.setattr(data, "standard_library_files", lambda: [Path(__file__), package / "a.py"])
    plain, more = (data.read_corpus(packages=packages) for packages in (False, True))
    assert more.validation.tobytes() == plain.validation.tobytes()
    assert more.num_train_files == plain.num_train_files + 1
    assert b"# b" in more.train.tobytes()
    monkeypatch.setattr(data, "MAX_TEXT", len(plain.train) + 10)
    assert data.read_corpus(packages=True).train.tobytes() == plain.train.tobytes()


def test_binary_and_hidden_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".secret").write_text("hidden")
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "empty.txt").write_text("")
    corpus = read_corpus([tmp_path])
    assert b"text" in bytes(corpus.train) + bytes(corpus.validation)
    assert len(corpus.train) + len(corpus.validation) == len("a text")


def test_errors_name_the_invalid_path(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow2").mkdir()
    (tmp_path / "hollow2" / "x").write_bytes(b"\0")
    for name, message in (
        ("binary", "not a text file"),
        ("empty", "is empty"),
        ("absent", "no such file"),
        ("hollow", "contains no files"),
        ("hollow2", "no text found"),
    ):
        with pytest.raises(DataError, match=f"{name}: .*{message}"):
            read_corpus([tmp_path / name])


def test_errors_name_the_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "locked.txt"
    file.write_text("text")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"locked\.txt: cannot be read \(Permission denied\)"):
        read_corpus([file])


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need privileges on Windows")
def test_circular_symbolic_links_terminate(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert read_corpus([tmp_path]).num_train_files == 1


def test_windows_are_a_function_of_seed_step_and_part() -> None:
    text = np.arange(1000, dtype=np.int64).astype(np.uint8)
    windows = Windows(text, batch=5, seq_len=16, seed=3)
    tokens, targets = windows(7, 1)
    assert tokens.dtype == targets.dtype == np.int32
    assert tokens.shape == targets.shape == (5, 16)
    assert np.array_equal(tokens[:, 1:], targets[:, :-1])
    assert np.array_equal((tokens + 1) % 256, targets)
    again = Windows(text, batch=5, seq_len=16, seed=3)(7, 1)
    assert np.array_equal(again[0], tokens)
    for other in (windows(7, 0), windows(8, 1), Windows(text, batch=5, seq_len=16, seed=4)(7, 1)):
        assert not np.array_equal(other[0], tokens)


def test_windows_reach_both_ends_of_the_text() -> None:
    text = np.arange(10, dtype=np.uint8)
    windows = Windows(text, batch=50, seq_len=8, seed=0)
    tokens, targets = windows(0)
    assert set(tokens[:, 0]) == {0, 1}
    assert targets.max() == 9


def test_validation_covers_the_text_once() -> None:
    text = np.arange(33, dtype=np.uint8)
    batches = list(validation_batches(text, batch=3, seq_len=8, max_windows=100))
    assert [len(tokens) for tokens, _ in batches] == [3, 1]
    seen = np.concatenate([targets.reshape(-1) for _, targets in batches])
    assert sorted(seen) == list(range(1, 33))
    assert sum(len(t) for t, _ in validation_batches(text, batch=3, seq_len=8, max_windows=2)) == 2


def test_a_text_that_is_too_short_is_rejected() -> None:
    with pytest.raises(DataError, match="8 bytes are too short for windows of 8"):
        Windows(np.zeros(8, np.uint8), batch=1, seq_len=8, seed=0)
