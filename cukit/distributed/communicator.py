"""What processes that work together do with one another's arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol

import numpy as np

from cukit.core.arrays import Array, namespace
from cukit.distributed.host import HostCommunicator, check_operation, check_root
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
        """The messages of all ranks, in their order, through the host."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has come here."""

    def beside(self) -> AbstractContextManager[None]:
        """Collectives in the block run beside what the current stream does next, after what it was
        given before. Their memory must not be freed before :meth:`join`."""
        ...

    def join(self) -> None:
        """What comes next on the current stream waits for everything that runs beside it."""

    def close(self) -> None:
        """Ends the connections."""


class Alone:
    """The communicator of one process: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """`array` is the sum."""
        check_operation("all_reduce", array, op)

    def all_gather(self, array: Array, out: Array | None = None) -> Array:
        """[1, *shape]."""
        gathered = namespace(array).empty((1, *array.shape), array.dtype) if out is None else out
        gathered[0] = array
        return gathered

    def broadcast(self, array: Array, root: int = 0) -> None:
        """`array` is the root's."""
        check_root(self, root)

    def exchange(self, message: bytes) -> list[bytes]:
        """The one message."""
        return [message]

    def barrier(self) -> None:
        """Everybody is here."""

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Nothing to run beside."""
        yield

    def join(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to end."""


def communicator(
    xp: ModuleType = np, ranks: Ranks | None = None, *, timeout_seconds: float = 600.0
) -> Communicator:
    """The communicator of this process, as torchrun, mpirun or srun started it.

    Args:
        xp: numpy or cupy: whose arrays are exchanged.
        ranks: who this process is; None reads it from the environment.
        timeout_seconds: how long the others may take to appear.

    Returns:
        `Alone` where there is one process, with or without a GPU and NCCL; `NcclCommunicator` for
        cupy (and this process's GPU is then the current device), `HostCommunicator` for numpy.

    Raises:
        ConfigError: the environment.
        CommunicationError: a process does not appear.
        MissingDependencyError: several GPUs, and no NCCL.
    """
    ranks = ranks_from_environment() if ranks is None else ranks
    if ranks.size == 1:
        return Alone()
    kind = HostCommunicator if xp is np else NcclCommunicator
    return kind(ranks, timeout_seconds=timeout_seconds)
