"""The kernel cache on disk: cubins, and the emulator's shared libraries.

Code from the cache runs in the user's process, so only files that cukit wrote are loaded:

- Folders belong to the user (or root), and only the owner may write to them; they are created with
  mode 0700, which the umask can only restrict. Symbolic links are not followed. No parent folder
  may be world-writable without the sticky bit.
- Each file has a record next to it, `NAME.json`, with the SHA-256 of its contents. A file without a
  record, or with a different hash, is rebuilt.
- Files are published by an atomic rename, the record last.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cukit.errors import CacheError

Record = dict[str, Any]

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """`$CUKIT_CACHE_DIR`, else `$XDG_CACHE_HOME/cukit`, else `~/.cache/cukit`."""
    explicit = os.environ.get("CUKIT_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "cukit"


def load(path: Path) -> tuple[bytes, Record] | None:
    """Contents and record of a cached file; None if it is missing or damaged.

    Raises CacheError if another user could have written it.
    """
    record_path = _record_path(path)
    try:
        check_folder(path.parent)
        for file in (path, record_path):
            check_owner(file)
        data = path.read_bytes()
        record = json.loads(record_path.read_text(encoding="utf-8"))
        if record["sha256"] == hashlib.sha256(data).hexdigest():
            return data, record
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def store(path: Path, data: bytes, **facts: Any) -> None:
    """Writes a cached file, and its record with `facts`. Raises CacheError on failure."""
    with _explained():
        make_private_folder(path.parent)
        _publish(path, data)
        record = {"sha256": hashlib.sha256(data).hexdigest(), **facts}
        _publish(_record_path(path), json.dumps(record, indent=1).encode())


def build_once(path: Path, build: Callable[[], tuple[bytes, Record]]) -> tuple[bytes, Record, bool]:
    """Contents and record of a cached file, and whether this call built it.

    If several processes need the file at the same time, one builds it and the others wait.
    """
    found = load(path)
    if found is not None:
        return *found, False
    with _locked(path):
        found = load(path)
        if found is not None:
            return *found, False
        data, facts = build()
        store(path, data, **facts)
    return data, facts, True


def make_private_folder(folder: Path) -> None:
    """Creates a folder of the cache, or checks an existing one."""
    with _explained():
        for each in (*reversed(folder.parents), folder):
            if not each.exists():
                with contextlib.suppress(FileExistsError):
                    os.mkdir(each, 0o700)  # the umask can only clear bits
        check_folder(folder)


def check_folder(folder: Path) -> None:
    """Raises CacheError unless only the user (or root) can change the contents of `folder`.

    Raises OSError if it does not exist.
    """
    check_owner(folder)
    for above in folder.resolve().parents:
        mode = os.stat(above).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            problem = f"lets any user replace {folder.name} (mode {_bits(mode)})"
            raise _unsafe(above, problem, "run chmod o-w on it")


def check_owner(path: Path) -> None:
    """Raises CacheError if another user could have written `path`, or if it is a symbolic link.

    Raises OSError if it does not exist.
    """
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        problem = "is a symbolic link"
    elif status.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to another user (uid {status.st_uid})"
    elif status.st_mode & _OTHERS_MAY_WRITE:
        problem = f"is writable by other users (mode {_bits(status.st_mode)})"
    else:
        return
    raise _unsafe(path, problem, "delete it")


def _unsafe(path: Path, problem: str, remedy: str) -> CacheError:
    return CacheError(
        f"the kernel cache is not safe to load code from: {path} {problem}; {remedy}, or set "
        "CUKIT_CACHE_DIR to a folder of your own"
    )


def _bits(mode: int) -> str:
    return f"{stat.S_IMODE(mode):o}"


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _publish(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)  # a symbolic link is replaced, not its target
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of a cached file. On file systems without locks (some network folders)
    several processes may build the same file."""
    with _explained():
        make_private_folder(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path.with_name(f".{path.name}.lock"), flags, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # the file is kept: without it, two processes could hold the lock


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns an OSError into a CacheError that names a remedy."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"the kernel cache cannot be written: {error}; set CUKIT_CACHE_DIR to a writable folder"
        ) from error
