"""Ranks as threads of the test process, which start faster than processes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cukit.distributed import Alone, HostCommunicator, Ranks


class Mirrored(Alone):
    """Rank 0 of two, to run its kernels alone: all_gather returns its own data for both ranks."""

    size = 2

    def all_gather(self, array: Any, out: Any = None) -> Any:
        out[0], out[1] = array, array
        return out


def free_port() -> int:
    """A free TCP port of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    size: int, work: Callable[[HostCommunicator], Any], *, port: int | None = None
) -> list[Any]:
    """Returns the results of `work` on `size` ranks; raises the first error, in rank order."""
    where = free_port() if port is None else port

    def one(rank: int) -> Any:
        ranks = Ranks(rank, size, rank, port=where, job=f"test {where}")
        comm = HostCommunicator(ranks, timeout_seconds=20)
        try:
            return work(comm)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
