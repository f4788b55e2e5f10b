"""Collectives over NumPy arrays through sockets: every rank is connected to rank 0.

Rank 0 sums in rank order, so all ranks get the same bits in every run. Needs only the standard
library, works on every machine, and distributes the unique id that initialises NCCL.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cukit.core.arrays import Array
from cukit.distributed.ranks import Ranks
from cukit.errors import ArrayError, CommunicationError

OPERATIONS = ("sum", "max", "min")

_MAGIC = b"cukit-ranks-1\0"
_PORTS = 16  # number of ports to try, starting at `Ranks.port`
_HEADER = struct.Struct("<16sQ")
_HELLO = struct.Struct("<14s16sII")
_ANSWER_SECONDS = 3.0

_REDUCE: dict[str, Callable[..., Any]] = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class HostCommunicator:
    """A `Communicator` of NumPy arrays.

    Args:
        ranks: rank and number of processes.
        timeout_seconds: how long to wait for the other processes to connect, and for their data.

    Raises:
        CommunicationError: a process does not connect in time, for example because `job` or `size`
            differ between the processes.
    """

    def __init__(self, ranks: Ranks, *, timeout_seconds: float = 600.0) -> None:
        self.ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size
        self._timeout = timeout_seconds
        self._job = hashlib.sha256(ranks.job.encode()).digest()[:16]
        self._peers: list[socket.socket] = []
        """On rank 0: connections to ranks 1, 2, ...; on the others: the one to rank 0."""
        if self.size == 1:
            return
        self._peers = self._accept_all() if self.rank == 0 else [self._connect()]
        for peer in self._peers:
            peer.settimeout(timeout_seconds)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        """Replaces `array`, C-contiguous, by the sum, "max" or "min" over all ranks."""
        check_operation("all_reduce", array, op)
        if self.size == 1:
            return
        tag = _tag("all_reduce", array, op)
        if self.rank:
            self._send(self._peers[0], tag, _bytes_of(array))
            self._receive_into(0, tag, array)
            return
        narrow = array.dtype.kind not in "biu" and array.dtype.itemsize < 4
        wide = np.promote_types(array.dtype, np.float32) if narrow else None
        total = array if wide is None else array.astype(wide)
        buffer = np.empty_like(array)
        for index in range(len(self._peers)):
            self._receive_into(index, tag, buffer)
            _REDUCE[op](total, buffer, out=total)
        if wide is not None:
            array[...] = total.astype(array.dtype)
        for peer in self._peers:
            self._send(peer, tag, _bytes_of(array))

    def all_gather(self, array: Array, out: Array | None = None) -> Array:
        """The arrays of all ranks, of one shape and dtype: [size, *shape], in `out` if given."""
        check_operation("all_gather", array)
        check_gathered(self.size, array, out)
        gathered = np.empty((self.size, *array.shape), array.dtype) if out is None else out
        gathered[self.rank] = array
        tag = _tag("all_gather", array)
        if self.rank:
            self._send(self._peers[0], tag, _bytes_of(array))
            self._receive_into(0, tag, gathered)
            return gathered
        for index in range(len(self._peers)):
            self._receive_into(index, tag, gathered[index + 1 : index + 2])
        for peer in self._peers:
            self._send(peer, tag, _bytes_of(gathered))
        return gathered

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replaces `array`, C-contiguous, by that of rank `root`."""
        check_operation("broadcast", array)
        check_root(self, root)
        tag = _tag("broadcast", array, str(root))
        if self.rank:
            if self.rank == root:
                self._send(self._peers[0], tag, _bytes_of(array))
            else:
                self._receive_into(0, tag, array)
            return
        if root:
            self._receive_into(root - 1, tag, array)
        for index, peer in enumerate(self._peers):
            if index + 1 != root:
                self._send(peer, tag, _bytes_of(array))

    def exchange(self, message: bytes) -> list[bytes]:
        """The messages of all ranks, in rank order; for small data other than arrays."""
        sizes = self.all_gather(np.array([len(message)], np.int64))[:, 0]
        padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
        padded[: len(message)] = np.frombuffer(message, np.uint8)
        return [
            row[:size].tobytes() for row, size in zip(self.all_gather(padded), sizes, strict=True)
        ]

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.all_reduce(np.zeros(1, np.int64))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Does nothing: collectives are complete when they return."""
        yield

    def join(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Closes the connections."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.close()
        self._peers = []

    # -- connections ---------------------------------------------------------------------------

    def _accept_all(self) -> list[socket.socket]:
        deadline = time.monotonic() + self._timeout
        found: dict[int, socket.socket] = {}
        with self._listen() as server:
            while len(found) < self.size - 1:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.size)) - set(found))
                    raise CommunicationError(
                        f"rank 0 waited {self._timeout:g} s for rank {missing[0]} of {self.size} "
                        f"at port {server.getsockname()[1]}"
                    ) from None
                rank = self._greet(peer)
                if rank is None or rank in found:
                    peer.close()
                else:
                    found[rank] = peer
        return [found[rank] for rank in sorted(found)]

    def _listen(self) -> socket.socket:
        bind_error: OSError | None = None
        for port in self._ports():
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                # A run on one host must not be reachable from other hosts.
                local = self.ranks.address in ("127.0.0.1", "localhost")
                server.bind(("127.0.0.1" if local else "", port))
                server.listen(self.size)
            except OSError as error:
                bind_error = error
                server.close()
                continue
            return server
        raise CommunicationError(
            f"rank 0 found no free port from {self.ranks.port} on: {bind_error}"
        ) from bind_error

    def _ports(self) -> range:
        return range(self.ranks.port, min(self.ranks.port + _PORTS, 65536))

    def _greet(self, peer: socket.socket) -> int | None:
        """The rank of the connected process, or None if it does not belong to this run."""
        peer.settimeout(_ANSWER_SECONDS)
        try:
            magic, job, rank, size = _HELLO.unpack(_read(peer, _HELLO.size))
            known = magic == _MAGIC and job == self._job and size == self.size
            if not known or not 0 < rank < size:
                return None
            peer.sendall(_MAGIC)
        except (OSError, CommunicationError):
            return None
        return int(rank)

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._timeout
        hello = _HELLO.pack(_MAGIC, self._job, self.rank, self.size)
        pause = 0.01
        while True:
            for port in self._ports():
                peer = None
                try:
                    peer = socket.create_connection((self.ranks.address, port), _ANSWER_SECONDS)
                    peer.settimeout(_ANSWER_SECONDS)
                    peer.sendall(hello)
                    if _read(peer, len(_MAGIC)) == _MAGIC:
                        return peer
                except (OSError, CommunicationError):
                    pass
                if peer is not None:
                    peer.close()
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"rank {self.rank} found no rank 0 of {self.size} at {self.ranks.address}, "
                    f"ports {self._ports().start}..{self._ports().stop - 1}, in {self._timeout:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def _send(self, peer: socket.socket, tag: bytes, content: memoryview) -> None:
        try:
            peer.sendall(_HEADER.pack(tag, content.nbytes))
            peer.sendall(content)
        except OSError as error:
            raise CommunicationError(f"rank {self.rank}: lost connection ({error})") from error

    def _receive_into(self, index: int, tag: bytes, array: Array) -> None:
        other = index + 1 if self.rank == 0 else 0
        into = _bytes_of(array)
        try:
            found, count = _HEADER.unpack(_read(self._peers[index], _HEADER.size))
            if (found, count) != (tag, into.nbytes):
                raise CommunicationError(
                    f"rank {self.rank} and rank {other} call different collectives, or with "
                    f"different shapes or dtypes: expected {into.nbytes} bytes, got {count}"
                )
            _read_into(self._peers[index], into)
        except CommunicationError:
            raise
        except OSError as error:
            raise CommunicationError(
                f"rank {self.rank}: received nothing from rank {other} ({error})"
            ) from error


def check_operation(name: str, array: Array, op: str = "sum") -> None:
    """Raises ArrayError unless `op` is known and `array` is C-contiguous."""
    if op not in OPERATIONS:
        raise ArrayError(f"{name}: op must be one of {', '.join(OPERATIONS)}, got {op!r}")
    if not array.flags.c_contiguous:
        raise ArrayError(f"{name}: array must be C-contiguous, got strides {array.strides}")


def check_gathered(size: int, array: Array, out: Array | None) -> None:
    """Raises ArrayError unless `out` is None or can hold the arrays of `size` ranks."""
    if out is None:
        return
    shape = (size, *array.shape)
    if out.shape != shape or out.dtype != array.dtype or not out.flags.c_contiguous:
        raise ArrayError(
            f"all_gather: out must be {array.dtype} {shape}, C-contiguous, got {out.dtype} "
            f"{out.shape} with strides {out.strides}"
        )


def check_root(ranks: Any, root: int) -> None:
    """Raises ArrayError unless `root` is one of the ranks."""
    if not 0 <= root < ranks.size:
        raise ArrayError(f"broadcast: root must be in 0..{ranks.size - 1}, got {root}")


def _tag(name: str, array: Array, *more: str) -> bytes:
    """A digest of the collective and its arguments, by which ranks detect mismatched calls."""
    words: Sequence[str] = (name, str(array.dtype), str(array.shape), *more)
    return hashlib.sha256("/".join(words).encode()).digest()[:16]


def _bytes_of(array: Array) -> memoryview:
    return (
        memoryview(array.reshape(-1).view(np.uint8)) if math.prod(array.shape) else memoryview(b"")
    )


def _read(peer: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    _read_into(peer, memoryview(content))
    return bytes(content)


def _read_into(peer: socket.socket, into: memoryview) -> None:
    while into.nbytes:
        count = peer.recv_into(into)
        if count == 0:
            raise CommunicationError("a rank closed its connection: it exited or failed")
        into = into[count:]
