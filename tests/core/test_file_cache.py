"""The kernel cache: damaged files are rebuilt; files that other users can write are rejected."""

from __future__ import annotations

import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cukit.core.file_cache import build_once, cache_folder, load, make_private_folder, store
from cukit.errors import CacheError


@pytest.fixture
def path(kernel_cache) -> Path:
    return cache_folder() / "kernels" / "k.cubin"


def test_stored_values_are_found_again(path):
    assert load(path) is None
    store(path, b"code", entry="k")
    data, record = load(path)
    assert data == b"code"
    assert record["entry"] == "k"


@pytest.mark.parametrize("damaged", ["k.cubin", "k.cubin.json"])
@pytest.mark.parametrize("contents", [b"", b"cod", b"\x00{", None])
def test_damaged_files_are_rebuilt(path, damaged, contents):
    store(path, b"code")
    file = path.with_name(damaged)
    file.unlink() if contents is None else file.write_bytes(contents)
    assert load(path) is None
    assert build_once(path, lambda: (b"anew", {})) == (b"anew", {}, True)
    assert load(path)[0] == b"anew"


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX file modes")
@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("name", ["k.cubin", "k.cubin.json", "."])
def test_files_that_others_can_write_are_rejected(path, name, mode):
    store(path, b"code")
    target = path.parent / name
    target.chmod(target.stat().st_mode | mode)
    with pytest.raises(CacheError, match=r"is writable by other users \(mode \d+\); delete it"):
        load(path)


def test_a_world_writable_parent_folder_is_rejected(path):
    store(path, b"code")
    above = cache_folder().parent
    above.chmod(0o777)
    with pytest.raises(CacheError, match=r"lets any user replace .* run chmod o-w"):
        load(path)
    above.chmod(0o1777)  # sticky, like /tmp: only the owner of a file can rename it
    assert load(path)


def test_new_folders_and_files_are_private_with_any_umask(tmp_path):
    path = tmp_path / "a" / "b" / "k.cubin"
    before = os.umask(0)
    try:
        store(path, b"code")
    finally:
        os.umask(before)
    for folder in (path.parent, path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_symbolic_links_are_not_followed(path, tmp_path):
    store(path, b"code")
    victim = tmp_path / "victim"
    victim.write_bytes(b"code")
    path.unlink()
    path.symlink_to(victim)
    with pytest.raises(CacheError, match="is a symbolic link"):
        load(path)
    store(path, b"other")
    assert victim.read_bytes() == b"code"
    assert not path.is_symlink()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (cache_folder() / "emulator").symlink_to(elsewhere)
    with pytest.raises(CacheError, match="is a symbolic link"):
        make_private_folder(cache_folder() / "emulator")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_files_of_another_user_are_rejected(path):
    store(path, b"code")
    os.chown(path, 12345, -1)
    with pytest.raises(CacheError, match="belongs to another user"):
        load(path)


def test_concurrent_callers_build_once(path):
    built = []

    def build():
        built.append(1)
        return b"code", {}

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: build_once(path, build), range(16)))
    assert {data for data, *_ in found} == {b"code"}
    assert len(built) == 1


def test_a_failed_build_stores_nothing(path):
    def build():
        raise RuntimeError("compiler")

    with pytest.raises(RuntimeError, match="compiler"):
        build_once(path, build)
    assert load(path) is None
    assert build_once(path, lambda: (b"code", {}))[2]
