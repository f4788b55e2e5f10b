"""Pages of the host provider: mapped, remapped, counted."""

from __future__ import annotations

import os

import numpy as np
import pytest

from cukit.memory import DeviceOutOfMemory, HostProvider, Provider
from cukit.memory.providers import host

PAGE = 64 << 10


def test_host_provider_implements_the_protocol() -> None:
    assert isinstance(HostProvider(), Provider)


def test_a_remapped_page_keeps_its_bytes() -> None:
    provider = HostProvider(8 * PAGE, page_bytes=PAGE)
    base = provider.reserve(8 * PAGE)
    assert base % PAGE == 0
    pages = provider.create_pages(3)
    provider.map_pages(base, pages)
    before = provider.array(base, (3, PAGE // 4), np.uint32, None)
    before[:] = np.arange(3)[:, None]
    provider.unmap_pages(base, 3)
    provider.map_pages(base + 4 * PAGE, [pages[2], pages[0], pages[1]])
    after = provider.array(base + 4 * PAGE, (3, PAGE // 4), np.uint32, None)
    assert (after == np.array([2, 0, 1])[:, None]).all()
    provider.unmap_pages(base + 4 * PAGE, 3)
    provider.destroy_pages(pages)
    provider.release(base, 8 * PAGE)
    assert provider.memory_info() == (8 * PAGE, 8 * PAGE)


def test_new_pages_do_not_show_old_bytes() -> None:
    provider = HostProvider(2 * PAGE, page_bytes=PAGE)
    base = provider.reserve(PAGE)
    for _ in range(3):
        (page,) = provider.create_pages(1)
        provider.map_pages(base, [page])
        array = provider.array(base, (PAGE,), np.uint8, None)
        assert not array.any()
        array[:] = 1
        provider.unmap_pages(base, 1)
        provider.destroy_pages([page])


def test_a_failed_creation_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space")

    provider = HostProvider(8 * PAGE, page_bytes=PAGE, large_pages=2)
    provider.destroy_pages(provider.create_pages(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", full)
        for create, count in ((provider.create_pages, 3), (provider.create_large_pages, 2)):
            with pytest.raises(OSError, match="no space"):
                create(count)
    assert provider.memory_info() == (8 * PAGE, 8 * PAGE)
    assert len(set(provider.create_pages(8))) == 8


def test_a_failed_mapping_maps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = HostProvider(8 * PAGE, page_bytes=PAGE)
    base = provider.reserve(4 * PAGE)
    first, second, third = provider.create_pages(3)
    mapped: list[int] = []
    mmap = host._mmap

    def second_run_fails(address: int, size: int, access: int, *rest: int) -> int:
        mapped.append(address if access else -address)
        if len(mapped) == 2:
            raise OSError("no mapping")
        return mmap(address, size, access, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(host, "_mmap", second_run_fails)
        with pytest.raises(OSError, match="no mapping"):
            provider.map_pages(base, [second, third, first])
    assert mapped == [base, base + 2 * PAGE, -base], "the first run is inaccessible again"
    provider.map_pages(base, [first, second, third])


@pytest.mark.parametrize("can_remap", [True, False])
def test_creation_beyond_the_total_fails(*, can_remap: bool) -> None:
    provider = HostProvider(4 * PAGE, page_bytes=PAGE, can_remap=can_remap)
    take = provider.create_pages if can_remap else lambda count: provider.reserve(count * PAGE)
    taken = take(3)
    with pytest.raises(DeviceOutOfMemory):
        take(2)
    assert provider.memory_info() == (PAGE, 4 * PAGE)
    if can_remap:
        provider.destroy_pages(taken)  # type: ignore[arg-type]
    else:
        provider.release(taken, 3 * PAGE)  # type: ignore[arg-type]
    take(4)


def test_moves_and_narrow_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    provider = HostProvider(4 * PAGE, page_bytes=PAGE, can_remap=False)
    base = provider.reserve(2 * PAGE)
    array = provider.array(base, (256,), ml_dtypes.bfloat16, None)
    array[:] = np.arange(256).astype(ml_dtypes.bfloat16)
    provider.copy(np.array([(base + PAGE, base, 512)]), 0)
    moved = provider.array(base + PAGE, (16, 16), ml_dtypes.bfloat16, None)
    assert (moved.ravel() == array).all()
