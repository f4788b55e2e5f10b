"""The interface of collectives between processes, and its implementation for one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol

import numpy as np

from cukit.core.arrays import Array, namespace
from cukit.distributed.host import HostCommunicator, check_gathered, check_operation, check_root
from cukit.distributed.nccl import NcclCommunicator
from cukit.distributed.ranks import Ranks, ranks_from_environment


class Communicator(Protocol):
    """Collectives over the arrays of `size` processes. All ranks call the same ones in the same
    order; every rank gets the same bits.

    Attributes:
        rank: of this process, 0 .. size - 1.
        size: number of processes.
    """

    rank: int
    size: int

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Replaces `array`, C-contiguous, by the sum, "max" or "min" over all ranks."""

    def all_gather(self, array: Array, out: Array | None = None) -> Array:
        """The arrays of all ranks, of one shape and dtype: [size, *shape], in `out` if given."""
        ...

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replaces `array`, C-contiguous, by that of rank `root`."""

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in rank order, exchanged through the host."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def beside(self) -> AbstractContextManager[None]:
        """Collectives in the block run after earlier work on the current stream and concurrently
        with later work. Their memory must not be freed before :meth:`join`."""
        ...

    def join(self) -> None:
        """Later work on the current stream waits for all collectives issued in `beside` blocks."""

    def close(self) -> None:
        """Closes the connections."""


class Alone:
    """The communicator of a single process: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Leaves `array` unchanged."""
        check_operation("all_reduce", array, op)

    def all_gather(self, array: Array, out: Array | None = None) -> Array:
        """`array` as [1, *shape], in `out` if given."""
        check_operation("all_gather", array)
        check_gathered(1, array, out)
        gathered = namespace(array).empty((1, *array.shape), array.dtype) if out is None else out
        gathered[0] = array
        return gathered

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Leaves `array` unchanged."""
        check_operation("broadcast", array)
        check_root(self, root)

    def exchange(self, message: bytes) -> list[bytes]:
        """[message]."""
        return [message]

    def barrier(self) -> None:
        """Does nothing."""

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Does nothing."""
        yield

    def join(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def communicator(
    xp: ModuleType = np, ranks: Ranks | None = None, *, timeout_seconds: float = 600.0
) -> Communicator:
    """The communicator of this process, which torchrun, mpirun or srun started.

    Args:
        xp: numpy or cupy, the library of the arrays.
        ranks: rank and number of processes; None reads them from the environment.
        timeout_seconds: how long to wait for the other processes to connect.

    Returns:
        `Alone` for a single process, with or without a GPU and NCCL; `NcclCommunicator` for cupy,
        which makes this process's GPU the current device; `HostCommunicator` for numpy.

    Raises:
        ConfigError: the environment's ranks are invalid.
        CommunicationError: a process does not connect.
        MissingDependencyError: several GPUs, and no NCCL.
    """
    ranks = ranks_from_environment() if ranks is None else ranks
    if ranks.size == 1:
        return Alone()
    kind = HostCommunicator if xp is np else NcclCommunicator
    return kind(ranks, timeout_seconds=timeout_seconds)
