"""Text as training data: bytes as tokens, split into training and validation by file.

Nothing is downloaded. By default the corpus is the source code of the running Python's standard
library: a few megabytes of real, human-written text on every machine. Longer runs, which would
overfit it, may also train on the sources of installed packages; validation text is still from the
standard library.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import site
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cukit.errors import DataError

VOCAB_SIZE = 256
SEPARATOR = b"\0"
"""Separates files. A file that contains this byte is treated as binary."""

VALIDATION_SHARE = 0.05
"""Minimum share of the bytes for validation, in whole files."""

# Byte-order marks, UTF-32's first, because UTF-32LE's begins with UTF-16LE's.
_WIDE_ENCODINGS = (
    (codecs.BOM_UTF32_LE, "UTF-32LE"),
    (codecs.BOM_UTF32_BE, "UTF-32BE"),
    (codecs.BOM_UTF16_LE, "UTF-16LE"),
    (codecs.BOM_UTF16_BE, "UTF-16BE"),
)

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
_SKIPPED_IN_STDLIB = {"test", "tests", "idle_test", "encodings"}  # tables and fixtures, not prose
# May hold copies of the standard library, which would put validation text into the training text.
_SKIPPED_IN_PACKAGES = {*_SKIPPED_IN_STDLIB, "testing", "_vendor", "_vendored", "_distutils"}
_COPIES_OF_STDLIB = {"typing_extensions.py", "six.py"}
_LONGEST_SOURCE = 1 << 18  # bytes; longer files are taken to be generated

MAX_TEXT = 64 << 20
"""Limit on the bytes of training text that includes packages."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation text as uint8 arrays, and their origin."""

    description: str
    train: np.ndarray[Any, Any]
    validation: np.ndarray[Any, Any]
    num_train_files: int
    num_validation_files: int

    @property
    def fingerprint(self) -> str:
        """SHA-256 of both parts; a run resumes only with the same fingerprint."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.data)
        return digest.hexdigest()

    def facts(self) -> dict[str, Any]:
        """The facts about the text that a report contains."""
        return {
            "text": self.description,
            "train_bytes": len(self.train),
            "validation_bytes": len(self.validation),
            "train_files": self.num_train_files,
            "validation_files": self.num_validation_files,
            "fingerprint": self.fingerprint,
        }


def read_corpus(paths: Sequence[Path] = (), *, packages: bool = False) -> Corpus:
    """The text in files and folders (searched recursively), or the standard library's.

    packages: without paths, also train on the sources of installed packages, up to MAX_TEXT bytes
    of training text. The validation text stays the same.

    Whole files go to training or to validation, by a hash of their content: the split depends only
    on the text, and duplicates cannot be on both sides. A single file is cut instead: its last
    tenth (2 * VALIDATION_SHARE) is the validation text.

    Raises:
        DataError: a path is missing, unreadable or binary, or there is no text at all.
    """
    if paths:
        description = ", ".join(str(path) for path in paths)
        contents = [_read_text(file, named) for file, named in _files_of(paths)]
    else:
        description = "the Python standard library"
        contents = [_read_text(file, False) for file in standard_library_files()]
    texts = {hashlib.sha256(text).digest(): text for text in contents if text}
    if not texts:
        raise DataError(f"{description}: no text found there")
    ordered = [texts[digest] for digest in sorted(texts)]
    if len(ordered) == 1:
        cut = len(ordered[0]) - int(len(ordered[0]) * 2 * VALIDATION_SHARE)
        return Corpus(description, _join([ordered[0][:cut]]), _join([ordered[0][cut:]]), 1, 1)
    total = sum(map(len, ordered))
    validation: list[bytes] = []
    while len(ordered) > 1 and sum(map(len, validation)) < VALIDATION_SHARE * total:
        validation.append(ordered.pop(0))
    if packages and not paths:
        description += " and installed packages"
        ordered += _more_texts(texts.keys(), MAX_TEXT - sum(map(len, ordered)))
    return Corpus(description, _join(ordered), _join(validation), len(ordered), len(validation))


def _more_texts(known: Collection[bytes], most: int) -> list[bytes]:
    """Sources of packages whose digests are not in `known`, up to `most` bytes."""
    found: dict[bytes, bytes] = {}
    for file in package_files():
        try:
            text = _read_text(file, False)
        except DataError:
            continue  # not readable
        most -= len(text)
        if most < 0:
            break
        digest = hashlib.sha256(text).digest()
        if text and digest not in known:
            found[digest] = text
    return [found[digest] for digest in sorted(found)]


def package_files() -> list[Path]:
    """The .py files of installed packages, without tests, generated tables and copies of the
    standard library. The order depends only on file names and mixes packages."""
    roots = [sysconfig.get_paths()[name] for name in ("purelib", "platlib")]
    found: dict[bytes, Path] = {}
    for root in map(Path, dict.fromkeys([*roots, *site.getsitepackages()])):
        for folder, folders, names in os.walk(root):
            folders[:] = [
                name
                for name in folders
                if name not in _SKIPPED_FOLDERS | _SKIPPED_IN_PACKAGES and not name.startswith(".")
            ]
            for name in names:
                file = Path(folder, name)
                if name.endswith(".py") and name not in _COPIES_OF_STDLIB and _is_written(file):
                    key = file.relative_to(root).as_posix().encode(errors="surrogateescape")
                    found.setdefault(hashlib.sha256(key).digest(), file)
    return [found[digest] for digest in sorted(found)]


def _is_written(file: Path) -> bool:
    """Whether a file is short enough to be hand-written."""
    try:
        return file.stat().st_size <= _LONGEST_SOURCE
    except OSError:
        return False


def standard_library_files() -> list[Path]:
    """The .py files of the running Python's own standard library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [
        file
        for file in _walk(root)
        if file.suffix == ".py" and not _SKIPPED_IN_STDLIB & set(file.relative_to(root).parts)
    ]


class AnyRanks(Protocol):
    """Anything with a rank and the number of processes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class BatchSource(Protocol):
    """The source of `Trainer`'s batches: `Windows`, `OfflineBatches` or your own class.

    Attributes `rank` and `num_ranks`, if present, must be the trainer's. If `every_target_counts`
    is present and true, no target is `ignore_index`; otherwise the trainer counts the targets on
    the device.
    """

    batch: int
    seq_len: int
    xp: ModuleType

    def __call__(self, step: int, part: int = 0) -> tuple[Any, ...]:
        """(tokens, targets), int32 [batch, seq_len], or (tokens, targets, signals): a pure function
        of step and part."""
        ...


class Windows:
    """Random windows of a text, the same for the same seed and step.

    A window depends only on (seed, step, part), not on earlier calls: a resumed run, or a second
    run with the same seed, reads exactly the same tokens.

    Args:
        text: uint8 [length], longer than seq_len.
        xp: numpy or cupy; the text is copied there once, and windows are cut there.
        ranks: rank and number of processes, such as a `Communicator`: rank r of n takes windows
            r * batch .. (r + 1) * batch - 1 of those that one process with a batch of n * batch
            would take.
    """

    every_target_counts = True
    """No target is `ignore_index`, so targets need not be counted."""

    def __init__(
        self,
        text: np.ndarray[Any, Any],
        *,
        batch: int,
        seq_len: int,
        seed: int,
        xp: ModuleType = np,
        ranks: AnyRanks | None = None,
    ) -> None:
        check_length(text, seq_len, "training text")
        self.batch, self.seq_len, self.seed, self.xp = batch, seq_len, seed, xp
        self.rank, self.num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._text = xp.asarray(text)
        self._offsets = xp.arange(seq_len + 1)[None, :]

    def __call__(self, step: int, part: int = 0) -> tuple[Any, Any]:
        """(tokens, targets), both int32 [batch, seq_len]; targets are the tokens that follow."""
        rng = np.random.default_rng((self.seed, step, part))
        count = self.batch * self.num_ranks
        starts = rng.integers(0, len(self._text) - self.seq_len, (count, 1))
        starts = starts[self.rank * self.batch :][: self.batch]
        return cut(self._text, self.xp.asarray(starts) + self._offsets, self.xp)


def validation_batches(
    text: np.ndarray[Any, Any], *, batch: int, seq_len: int, max_windows: int, xp: ModuleType = np
) -> Iterator[tuple[Any, Any]]:
    """Windows spread evenly over a text, adjacent if they cover it; the same on every call."""
    check_length(text, seq_len, "validation text")
    count = max(1, min(max_windows, (len(text) - 1) // seq_len))
    starts = np.linspace(0, len(text) - seq_len - 1, count).astype(np.int64)
    for first in range(0, count, batch):
        positions = starts[first : first + batch, None] + np.arange(seq_len + 1)[None, :]
        tokens, targets = cut(text, positions, np)
        yield xp.asarray(tokens), xp.asarray(targets)


def cut(text: Any, positions: Any, xp: ModuleType) -> tuple[Any, Any]:
    """(tokens, targets) at `positions` [batch, seq_len + 1]."""
    window = text[positions].astype(np.int32)
    return xp.ascontiguousarray(window[:, :-1]), xp.ascontiguousarray(window[:, 1:])


def check_length(text: np.ndarray[Any, Any], seq_len: int, name: str) -> None:
    """Raise DataError if the text is shorter than one window."""
    if len(text) < seq_len + 1:
        raise DataError(
            f"{name}: {len(text)} bytes are too short for windows of {seq_len} tokens; "
            "use more text or a smaller --seq-len"
        )


def _files_of(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Every file of `paths`, and whether `paths` names it; a named file must be readable text."""
    for path in paths:
        if path.is_dir():
            found = list(_walk(path))
            if not found:
                raise DataError(f"{path}: contains no files, apart from hidden files and links")
            yield from ((file, False) for file in found)
        elif not path.exists():
            raise DataError(f"{path}: no such file or folder")
        elif not path.is_file():
            raise DataError(f"{path}: is a device or a pipe, not a file or folder")
        else:
            yield path, True


def _walk(folder: Path) -> Iterator[Path]:
    """All files below `folder`, in sorted order, without hidden ones, links and skipped folders."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror})") from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED_FOLDERS or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _walk(entry)
        elif entry.is_file():
            yield entry


def _read_text(file: Path, named: bool) -> bytes:
    """The file's bytes; for a binary file b"", or DataError if it was named explicitly."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error
    if named and not content:
        raise DataError(f"{file}: is empty")
    if SEPARATOR in content:
        if not named:
            return b""
        for mark, encoding in _WIDE_ENCODINGS:
            if content.startswith(mark):
                raise DataError(
                    f"{file}: is text in {encoding}; convert it first: "
                    f"iconv -f {encoding} -t UTF-8 {quote(str(file))} > converted.txt"
                )
        raise DataError(f"{file}: is not a text file (it contains NUL bytes)")
    return content


def _join(texts: Sequence[bytes]) -> np.ndarray[Any, Any]:
    return np.frombuffer(SEPARATOR.join(texts), np.uint8)
