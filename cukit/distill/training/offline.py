"""A recorded teacher: its k most likely tokens for every position of a run's batches, on disk.

    folder/index.json                      settings, and the number of batches in each shard
    folder/signals-000000.safetensors      tokens, targets, log_probs, ids of some batches
    ...

A batch is stored with its tokens, so that it cannot be paired with another text. Shards and index
are written atomically, so `record_teacher` can continue after being killed. Reading is a function
of step and part, like `Windows`: a resumed run needs only its step.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cukit.core.arrays import Array
from cukit.core.files import Exclusive, read_arrays, read_text, write_arrays, write_json
from cukit.core.scalars import check_choice, check_integer, check_number
from cukit.distill.losses.topk_distillation_loss import teacher_top_k
from cukit.distill.training.data import AnyRanks
from cukit.distill.training.distiller import IGNORE_INDEX
from cukit.distill.training.signals import OfflineTeacher, TeacherSignals
from cukit.distill.training.trainer import Batch
from cukit.errors import DataError
from cukit.models import Transformer
from cukit.models.parameters import host_array

INDEX = "index.json"
_FORMAT = "cukit teacher signals 1"
_PARTS = ("tokens", "targets", "log_probs", "ids")
_ROWS_AT_ONCE = 1024


class SignalWriter:
    """Writes signals to a folder, batch after batch; a folder has one writer at a time.

    In a folder with signals of the same settings, it continues after the last complete shard.

    Args:
        folder: created if it does not exist.
        k: tokens per position.
        temperature: T of the log-probabilities.
        vocab_size: of the teacher.
        batch, seq_len: shape of every batch.
        batches_per_shard: batches per file. If the process is killed, at most this number is lost.
        dtype: "float32" or "float16", of the log-probabilities on disk.
        source: an identifier of the teacher.

    Attributes:
        position: batches that are on disk.

    Raises:
        ConfigError: an option outside its range.
        DataError: the folder cannot be written to, has another writer, or contains signals with
            other settings.
    """

    def __init__(
        self,
        folder: Path,
        *,
        k: int,
        temperature: float,
        vocab_size: int,
        batch: int,
        seq_len: int,
        batches_per_shard: int = 64,
        dtype: str = "float32",
        source: str = "",
    ) -> None:
        op = "SignalWriter"
        for name, value in (("k", k), ("batch", batch), ("seq_len", seq_len)):
            check_integer(op, name, value, least=1)
        check_integer(op, "batches_per_shard", batches_per_shard, least=1)
        check_number(op, "temperature", temperature, above=0)
        check_choice(op, "dtype", dtype, ("float32", "float16"))
        self._settings: dict[str, Any] = {
            "format": _FORMAT,
            "k": k,
            "temperature": float(temperature),
            "vocab_size": vocab_size,
            "batch": batch,
            "seq_len": seq_len,
            "dtype": dtype,
            "source": source,
        }
        self._folder, self._batches_per_shard = folder, batches_per_shard
        self._lock = Exclusive(folder / INDEX)
        self._shards: list[dict[str, Any]] = []
        self._ignored = 0
        if (folder / INDEX).exists():
            index = _read_index(folder)
            for name, value in self._settings.items():
                if index[name] != value:
                    raise DataError(
                        f"{folder}: contains signals with {name}={index[name]}, not {value}; use "
                        "another folder"
                    )
            self._shards, self._ignored = index["shards"], index["ignored_targets"]
        self._pending: list[tuple[np.ndarray[Any, Any], ...]] = []

    @property
    def position(self) -> int:
        """Batches that are on disk."""
        return sum(shard["batches"] for shard in self._shards)

    def write(self, tokens: Array, targets: Array, signals: TeacherSignals) -> None:
        """Add a batch; `batches_per_shard` of them are written as a shard. Waits for the GPU."""
        settings = self._settings
        rows = (settings["batch"], settings["seq_len"])
        shapes = (rows, rows, (*rows, settings["k"]), (*rows, settings["k"]))
        arrays = [host_array(each) for each in (tokens, targets, *signals)]
        for name, array, shape in zip(_PARTS, arrays, shapes, strict=True):
            if array.shape != shape:
                raise DataError(
                    f"{self._folder}: {name} must have shape {shape}, got {array.shape}"
                )
        dtypes: tuple[Any, ...] = (np.int32, np.int32, settings["dtype"], np.int32)
        self._pending.append(
            tuple(array.astype(dtype) for array, dtype in zip(arrays, dtypes, strict=True))
        )
        if len(self._pending) >= self._batches_per_shard:
            self.flush()

    def flush(self) -> None:
        """Write pending batches as a shard, then the index."""
        if not self._pending:
            return
        columns = zip(*self._pending, strict=True)
        arrays = {name: np.stack(column) for name, column in zip(_PARTS, columns, strict=True)}
        name = f"signals-{len(self._shards):06d}.safetensors"
        write_arrays(self._folder / name, arrays, {**self._settings, "first": self.position})
        self._shards.append({"file": name, "batches": len(self._pending)})
        self._ignored += int((arrays["targets"] == IGNORE_INDEX).sum())
        self._pending.clear()
        index = {**self._settings, "ignored_targets": self._ignored, "shards": self._shards}
        write_json(self._folder / INDEX, index)


def _fingerprint(teacher: Transformer) -> str:
    content = host_array(teacher.parameters.flat).view(np.uint8)
    return f"parameters of crc32 {zlib.crc32(content.data):08x}"


def record_teacher(
    folder: Path,
    teacher: Transformer,
    windows: Callable[[int, int], Batch],
    *,
    steps: int,
    accumulate: int = 1,
    k: int = 16,
    temperature: float = 1.0,
    batches_per_shard: int = 64,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the teacher's k most likely tokens for the batches of `steps` steps. Batches that are
    already in the folder are skipped, so an interrupted recording continues.

    Args:
        folder, k, temperature, batches_per_shard, dtype: as in :class:`SignalWriter`.
        teacher: the model; it runs on every batch.
        windows: batches by step and part, on the teacher's device.
        steps, accumulate: of the run that will read them.
        progress: called after each batch with the number of finished batches and the total.

    On disk a token takes 8 k + 8 bytes (6 k + 8 with dtype "float16").
    """
    tokens, _, *_ = windows(0, 0)
    writer = SignalWriter(
        folder, k=k, temperature=temperature, vocab_size=teacher.config.vocab_size,
        batch=tokens.shape[0], seq_len=tokens.shape[1], batches_per_shard=batches_per_shard,
        dtype=dtype, source=_fingerprint(teacher),
    )  # fmt: skip
    total = steps * accumulate
    for index in range(writer.position, total):
        tokens, targets, *_ = windows(*divmod(index, accumulate))
        hidden = teacher.forward(tokens, keep=False).hidden
        found = [
            teacher_top_k(
                teacher.logits(hidden[start : start + _ROWS_AT_ONCE]), k, temperature=temperature
            )
            for start in range(0, len(hidden), _ROWS_AT_ONCE)
        ]
        shape = (*tokens.shape, k)
        columns = (
            teacher.xp.concatenate(column).reshape(shape) for column in zip(*found, strict=True)
        )
        writer.write(tokens, targets, TeacherSignals(*columns))
        if progress is not None:
            progress(index + 1, total)
    writer.flush()


class OfflineBatches:
    """Batches with a teacher's signals, from a folder that `record_teacher` wrote, as `Trainer`'s
    windows.

    Called with step and part it returns (tokens, targets, :class:`TeacherSignals`). Rank r of n
    reads batch (step * accumulate + part) * n + r, or with shared=False batch
    step * accumulate + part; after the last batch, the first follows (the next epoch). A thread
    prefetches batches; on a GPU they are copied through pinned memory on a separate stream, so that
    a step waits for neither the disk nor the bus.

    Args:
        folder: a folder with an index.
        accumulate: batches per step, as in `Trainer`.
        xp: numpy or cupy: the device of the batches.
        ranks: rank and number of processes, such as a `Communicator`.
        shared: whether all ranks read the same folder; False: each rank has recorded its own
            windows in its own folder.
        prefetch: batches to read ahead; 0 reads synchronously.

    Raises:
        ConfigError: an option outside its range.
        DataError: the folder has no signals, or fewer batches than ranks; when a batch is read: its
            file is damaged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        accumulate: int = 1,
        xp: ModuleType = np,
        ranks: AnyRanks | None = None,
        shared: bool = True,
        prefetch: int = 2,
    ) -> None:
        check_integer("OfflineBatches", "accumulate", accumulate, least=1)
        check_integer("OfflineBatches", "prefetch", prefetch, least=0)
        index = _read_index(folder)
        self._index, self.xp = index, xp
        self.batch, self.seq_len = int(index["batch"]), int(index["seq_len"])
        self.every_target_counts = index["ignored_targets"] == 0
        self.rank, self.num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self._accumulate, self._shared = accumulate, shared
        self._shards = _Shards(folder, index["shards"])
        if self._shards.count < (self.num_ranks if shared else 1):
            raise DataError(
                f"{folder}: contains {self._shards.count} batches for {self.num_ranks} ranks"
            )
        self._prefetch = prefetch
        self._load = _to_host if xp is np else _ToGpu(xp, prefetch + 1)
        self._reader = ThreadPoolExecutor(1, "cukit-offline") if prefetch else None
        self._ahead: OrderedDict[int, Any] = OrderedDict()

    @property
    def num_batches(self) -> int:
        """Batches on disk."""
        return self._shards.count

    def teacher(self, tail: str = "bucket") -> OfflineTeacher:
        """The teacher argument of `Distiller`."""
        return OfflineTeacher(self._index["temperature"], self._index["vocab_size"], tail)

    def __call__(self, step: int, part: int = 0) -> Batch:
        """(tokens, targets, signals): int32 [batch, seq_len] twice, and the teacher's signals."""
        number = step * self._accumulate + part
        ready = self._ahead.pop(number, None)
        if ready is None:
            self._ahead.clear()  # not the expected position: for example, a resumed run
            ready = self._start(number)
        for later in range(number + 1, number + 1 + self._prefetch):
            if later not in self._ahead:
                self._ahead[later] = self._start(later)
        tokens, targets, *signals = ready()
        return tokens, targets, TeacherSignals(*signals)

    def _start(self, number: int) -> Callable[[], Sequence[Array]]:
        """Starts reading a batch; returns a function that waits for it and returns it."""
        if self._shared:
            number = number * self.num_ranks + self.rank
        position = number % self._shards.count
        shapes = self._shapes()
        return self._load(lambda: self._shards.batch(position), shapes, self._reader)

    def _shapes(self) -> list[tuple[tuple[int, ...], Any]]:
        rows = (self.batch, self.seq_len)
        known = (*rows, int(self._index["k"]))
        return [(rows, np.int32), (rows, np.int32), (known, np.float32), (known, np.int32)]


HostBatch = Sequence[np.ndarray[Any, Any]]
_Read = Callable[[], HostBatch]


class _Shards:
    """Batches by number; caches the two most recently used shards."""

    _KEPT = 2

    def __init__(self, folder: Path, shards: Sequence[dict[str, Any]]) -> None:
        self._folder = folder
        self._files = [shard["file"] for shard in shards]
        self._ends = np.cumsum([shard["batches"] for shard in shards])
        self.count = int(self._ends[-1]) if len(shards) else 0
        self._open: OrderedDict[int, dict[str, np.ndarray[Any, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def batch(self, position: int) -> HostBatch:
        """tokens, targets, log_probs (float32) and ids of one batch."""
        number = int(np.searchsorted(self._ends, position, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        with self._lock:
            arrays = self._open.pop(number, None) or self._read(number)
            self._open[number] = arrays
            while len(self._open) > self._KEPT:
                self._open.popitem(last=False)
        found = [arrays[name][position - first] for name in _PARTS]
        found[2] = found[2].astype(np.float32, copy=False)
        return found

    def _read(self, number: int) -> dict[str, np.ndarray[Any, Any]]:
        path = self._folder / self._files[number]
        arrays, _ = read_arrays(path)
        count = int(self._ends[number]) - (int(self._ends[number - 1]) if number else 0)
        for name in _PARTS:
            if name not in arrays or len(arrays[name]) != count:
                raise DataError(f"{path}: does not contain {count} batches, as stated in {INDEX}")
        return arrays


def _to_host(
    read: _Read, shapes: Any, reader: ThreadPoolExecutor | None
) -> Callable[[], Sequence[Array]]:
    if reader is None:
        return read
    future = reader.submit(read)
    return future.result


class _ToGpu:
    """Copies batches to the GPU through pinned memory.

    GPU arrays are allocated on the current stream, which will use them. Before each copy, the copy
    stream waits for the work submitted to the current stream up to the allocation, so a copy never
    overwrites memory that a kernel still reads.
    """

    def __init__(self, xp: ModuleType, slots: int) -> None:
        self._xp, self._slots, self._next = xp, slots, 0
        self._device = xp.cuda.Device()
        self._stream = xp.cuda.Stream(non_blocking=True)
        self._pinned: list[list[np.ndarray[Any, Any]]] = []
        self._copied: list[Any] = []
        # The last arrays of each slot, so that the memory of a batch that is discarded is not
        # reused before its copy is complete.
        self._arrays: list[Sequence[Array]] = []

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._stream.synchronize()

    def __call__(
        self, read: _Read, shapes: Any, reader: ThreadPoolExecutor | None
    ) -> Callable[[], Sequence[Array]]:
        xp = self._xp
        arrays = [xp.empty(shape, dtype) for shape, dtype in shapes]
        before, after = (xp.cuda.Event(disable_timing=True) for _ in range(2))
        before.record()
        slot = self._slot(shapes)

        def copy() -> None:
            with self._device:
                self._copied[slot].synchronize()  # the previous copy from this slot is complete
                self._arrays[slot] = arrays
                for pinned, host in zip(self._pinned[slot], read(), strict=True):
                    pinned[...] = host
                self._stream.wait_event(before)
                for pinned, array in zip(self._pinned[slot], arrays, strict=True):
                    array.data.copy_from_host_async(pinned.ctypes.data, pinned.nbytes, self._stream)
                after.record(self._stream)
                self._copied[slot].record(self._stream)

        future: Future[None] | None = None
        if reader is None:
            copy()
        else:
            future = reader.submit(copy)

        def result() -> Sequence[Array]:
            if future is not None:
                future.result()
            xp.cuda.get_current_stream().wait_event(after)
            return arrays

        return result

    def _slot(self, shapes: Any) -> int:
        slot = self._next % self._slots
        self._next += 1
        if len(self._pinned) <= slot:
            self._pinned.append([_pinned(self._xp, *each) for each in shapes])
            self._arrays.append(())
            event = self._xp.cuda.Event(disable_timing=True)
            event.record(self._stream)
            self._copied.append(event)
        return slot


def _pinned(xp: ModuleType, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape))
    memory = xp.cuda.alloc_pinned_memory(size * np.dtype(dtype).itemsize)
    array: np.ndarray[Any, Any] = np.frombuffer(memory, dtype, size).reshape(shape)
    return array


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: is not an index of teacher signals ({error})") from error
    names = {
        "k",
        "temperature",
        "vocab_size",
        "batch",
        "seq_len",
        "dtype",
        "source",
        "ignored_targets",
    }
    if (
        not isinstance(index, dict)
        or index.get("format") != _FORMAT
        or not names | {"shards"} <= set(index)
    ):
        raise DataError(f"{path}: is not an index of teacher signals")
    return index
