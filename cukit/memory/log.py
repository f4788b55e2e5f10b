"""Allocation logs: CSV with the columns of RMM's logging adaptor, readable by tools for RMM.

    Thread,Time,Action,Pointer,Size,Stream
    140213,09:15:02.104551,allocate,0x7f2a00000000,1048576,0
    140213,09:15:02.104923,free,0x7f2a00000000,1048576,0

Time is the time of day; a log may run past midnight. Files that end in `.gz` are compressed.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from cukit.core.files import check_file
from cukit.core.scalars import check_path
from cukit.errors import DataError
from cukit.memory.bookkeeping.blocks import Event

COLUMNS = ("Thread", "Time", "Action", "Pointer", "Size", "Stream")

DAY_US = 24 * 3600 * 1_000_000
BUFFERED = 8192
"""Lines queued before a write to the file."""

MAX_DIGITS = 20
"""Maximum digits of a number in the columns Thread and Size."""
MAX_SHOWN = 60
"""Maximum characters of an invalid value that an error message quotes."""

_TIME = re.compile("([01]?[0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9]|60)[.:]([0-9]{6})")
_ADDRESS = {
    16: re.compile("(?:0x)?[0-9a-f]{1,16}"),
    10: re.compile("0x[0-9a-f]{1,16}|[0-9]{1,20}"),
}
"""By the base of digits without a prefix."""


class LogError(DataError):
    """An invalid allocation log. The message names the file, the line and the column."""


class LogAction(str, Enum):
    """The action of a log line; the values are RMM's."""

    ALLOCATE = "allocate"
    FREE = "free"
    FAILURE = "allocate failure"


_ACTIONS = {action.value: action for action in LogAction}


class LogEvent(NamedTuple):
    """One line of a log."""

    thread: int
    time_us: int
    """Microseconds since the midnight before the log began."""
    action: LogAction
    pointer: int
    """0 for a failure."""
    size: int
    stream: int


# Writing ------------------------------------------------------------------------------------------


class LogWriter:
    """Writes a log as a listener of a pool: `pool.add_listener(writer)`. A context manager.

    Safe to call from any thread and during a garbage collection: a call only appends to a queue. If
    the queue is long and no other thread is writing, the call writes the queue to the file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = check_path("LogWriter", "path", path)
        self._file = _open(self.path, "w")
        self._file.write(",".join(COLUMNS) + "\n")
        self._queue: deque[LogEvent] = deque()
        self._file_lock = threading.Lock()
        self._streams: dict[Hashable, int] = {}
        midnight = datetime.now().replace(hour=0, minute=0, second=0, microsecond=0)
        self._zero = time.perf_counter() - (time.time() - midnight.timestamp())

    def __call__(self, event: Event) -> None:
        """Logs an event of a pool; events other than allocations and frees are skipped."""
        action = _ACTION_OF.get(event.action)
        if action is not None:
            stream = self._stream_number(event.stream)
            when = self.microseconds(event.time)
            self.write(LogEvent(event.thread, when, action, event.address, event.size, stream))

    def write(self, event: LogEvent) -> None:
        """Appends a line."""
        self._queue.append(event)
        if len(self._queue) >= BUFFERED and self._file_lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._file_lock.release()

    def microseconds(self, perf_counter: float) -> int:
        """Converts a time of `time.perf_counter()` to `LogEvent.time_us`."""
        return round((perf_counter - self._zero) * 1e6)

    def close(self) -> None:
        """Writes the rest of the queue; later events are lost."""
        with self._file_lock:
            self._drain()
            self._file.close()

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream_number(self, stream: Hashable) -> int:
        """The stream if it is an integer; otherwise its number in order of appearance."""
        if isinstance(stream, int):
            return stream
        return self._streams.setdefault(stream, len(self._streams) + 1)

    def _drain(self) -> None:
        """Writes the queue to the file, or discards it if the file is closed."""
        lines = []
        with contextlib.suppress(IndexError):  # empty; other threads may append meanwhile
            while True:
                lines.append(format_event(self._queue.popleft()))
        if not self._file.closed:
            self._file.write("".join(lines))


_ACTION_OF = {
    "alloc": LogAction.ALLOCATE,
    "free": LogAction.FREE,
    "oom": LogAction.FAILURE,
}


def format_event(event: LogEvent) -> str:
    """An event as one line."""
    seconds, microseconds = divmod(event.time_us % DAY_US, 1_000_000)
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}.{microseconds:06d}"
    return (
        f"{event.thread},{clock},{event.action.value},{event.pointer:#x},{event.size},"
        f"{event.stream}\n"
    )


def write_log(path: Path | str, events: Iterable[LogEvent]) -> None:
    """Writes a complete log. The file's bytes depend only on the events and, if compressed, on the
    file's name, which is in the gzip header."""
    with _open(check_path("write_log", "path", path), "w") as file:
        file.write(",".join(COLUMNS) + "\n")
        file.writelines(map(format_event, events))


# Reading ------------------------------------------------------------------------------------------


def read_log(path: Path | str) -> list[LogEvent]:
    """All events of a log except those of zero bytes. Blank lines and a byte-order mark are legal.

    Frees of memory that was allocated before the log began are legal. Raises LogError for a line
    that has an invalid value, frees memory twice, or allocates memory that is already allocated.
    """
    path = check_path("read_log", "path", path)
    check_file(path)
    try:
        with _open(path, "r") as file:
            return list(_checked(path, file))
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise LogError(f"{path}: not an allocation log ({error})") from None


def _checked(path: Path, file: TextIO) -> Iterator[LogEvent]:
    rows = csv.reader(file)
    header = tuple(cell.strip() for cell in next(rows, []))
    if header != COLUMNS:
        raise LogError(f"{path}:1: expected the columns {','.join(COLUMNS)}, got {header!r}")
    live: dict[int, int] = {}
    seen: set[int] = set()
    before = days = 0
    for row in rows:
        if not any(map(str.strip, row)):
            continue
        line = _Line(path, rows.line_num, row)
        event = line.parse()
        if event.time_us + days < before - DAY_US // 2:
            days += DAY_US
        event = event._replace(time_us=event.time_us + days)
        before = event.time_us
        if event.size == 0 and event.pointer not in live:
            continue
        line.check(event, live, seen)
        yield event


class _Line:
    """The line being read."""

    def __init__(self, path: Path, number: int, cells: list[str]) -> None:
        self._place = f"{path}:{number}"
        if len(cells) != len(COLUMNS):
            raise LogError(f"{self._place}: expected {len(COLUMNS)} columns, got {len(cells)}")
        self._cells = dict(zip(COLUMNS, map(str.strip, cells), strict=True))

    def parse(self) -> LogEvent:
        action = _ACTIONS.get(self._cells["Action"])
        if action is None:
            raise self._error("Action", " or ".join(map(repr, _ACTIONS)))
        return LogEvent(
            thread=self._number("Thread"),
            time_us=self._time(),
            action=action,
            pointer=self._address("Pointer"),
            size=self._number("Size"),
            stream=self._address("Stream", base=10),
        )

    def check(self, event: LogEvent, live: dict[int, int], seen: set[int]) -> None:
        """Raises LogError if the event cannot follow the earlier ones; `live` has the sizes of
        allocated memory by address, `seen` all addresses so far."""
        if event.action is LogAction.ALLOCATE:
            if event.pointer in live:
                raise self._error("Pointer", "memory that is not allocated already")
            if event.pointer == 0:
                raise self._error("Pointer", "above 0 in an allocation")
            live[event.pointer] = event.size
            seen.add(event.pointer)
        elif event.action is LogAction.FREE:
            size = live.pop(event.pointer, None)
            if size is None and event.pointer in seen:
                raise self._error("Pointer", "memory that is allocated at this line")
            seen.add(event.pointer)
            if size not in (None, event.size):
                raise self._error("Size", f"the {size} bytes that were allocated there")

    def _number(self, column: str) -> int:
        text = self._cells[column]
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise self._error(column, "a whole number")
        return int(text)

    def _address(self, column: str, base: int = 16) -> int:
        """`0x7f20`, `(nil)`, or digits of `base`."""
        text = self._cells[column].lower()
        if text == "(nil)":
            return 0
        if not _ADDRESS[base].fullmatch(text):
            raise self._error(column, "an address such as 0x7f2000000000")
        return int(text, 16 if text.startswith("0x") else base)

    def _time(self) -> int:
        found = _TIME.fullmatch(self._cells["Time"])
        if found is None:
            raise self._error("Time", "hours:minutes:seconds.microseconds")
        hours, minutes, seconds, microseconds = map(int, found.groups())
        return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + microseconds

    def _error(self, column: str, expected: str) -> LogError:
        got = self._cells[column]
        if len(got) > MAX_SHOWN:
            got = f"{got[:MAX_SHOWN]}..."
        return LogError(f"{self._place}: {column}: expected {expected}, got {got!r}")


def _open(path: Path, mode: Literal["r", "w"]) -> TextIO:
    encoding = "utf-8" if mode == "w" else "utf-8-sig"
    if path.suffix != ".gz":
        return path.open(mode, encoding=encoding, newline="")
    # No time in the gzip header, so that the same events and name produce the same file.
    packed: Any = gzip.GzipFile(path, f"{mode}b", mtime=0)
    return io.TextIOWrapper(packed, encoding=encoding, newline="")
