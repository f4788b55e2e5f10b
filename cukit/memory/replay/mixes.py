"""Synthetic allocation logs for comparing memory pools.

`random-N-M`   N allocations of 1 byte to M MiB, freed in random order (RMM's random_allocations:
               73% of the steps allocate, at most 16000 MiB live).
`serving`      LLM serving: requests of very different lengths arrive and finish, their key-value
               caches grow, and each step needs scratch memory.
`streams`      Four streams take turns: each needs most of the memory, and keeps a tenth of it until
               its next turn.
`torture`      Alternating blocks of two sizes; every second one is freed, then three blocks are
               allocated, each larger than any hole but far smaller than all holes together.

A name and a seed determine the log, on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from cukit.errors import ConfigError
from cukit.memory.log import LogAction, LogEvent

MIB = 1 << 20

FIRST_ADDRESS = 0x7F00_0000_0000
ALIGNMENT = 512
STEP_US = 10

MAX_ALLOCATIONS = 10_000_000
MAX_MIB = 1 << 20
_MAX_DIGITS = 9  # more than any legal number has

STANDARD = (
    "random-1000-4096",
    "random-10000-64",
    "random-10000-16",
    "random-100000-1",
    "serving",
    "streams",
    "torture",
)
"""The mixes used in benchmarks."""


class LogBuilder:
    """Builds a log. Every block gets new, fictitious addresses."""

    def __init__(self) -> None:
        self.events: list[LogEvent] = []
        self.live_bytes = 0
        self._next = FIRST_ADDRESS

    def allocate(self, size: int, stream: int = 0) -> LogEvent:
        """Appends an allocation; returns the event that `free` takes."""
        event = self._note(LogAction.ALLOCATE, self._next, size, stream)
        self._next += -(-size // ALIGNMENT) * ALIGNMENT
        self.live_bytes += size
        return event

    def free(self, event: LogEvent) -> None:
        self._note(LogAction.FREE, event.pointer, event.size, event.stream)
        self.live_bytes -= event.size

    def _note(self, action: LogAction, pointer: int, size: int, stream: int) -> LogEvent:
        event = LogEvent(1, STEP_US * len(self.events), action, pointer, size, stream)
        self.events.append(event)
        return event


def make_log(name: str, seed: int = 0) -> list[LogEvent]:
    """The log called `name` (see the module docstring). Raises ConfigError for an unknown name."""
    log = LogBuilder()
    _maker(name)(log, random.Random(f"{name} {seed}"))
    return log.events


def _maker(name: str) -> Callable[[LogBuilder, random.Random], None]:
    if name in _MAKERS:
        return _MAKERS[name]
    kind, *numbers = name.split("-")
    if kind == "random" and len(numbers) == 2 and all(n.isascii() and n.isdigit() for n in numbers):
        count, largest = (int(number[:_MAX_DIGITS]) for number in numbers)
        if 0 < count <= MAX_ALLOCATIONS and 0 < largest <= MAX_MIB:
            return partial(_random, count=count, largest=largest * MIB)
    shown = name if len(name) <= 40 else f"{name[:40]}..."
    raise ConfigError(
        f"{shown!r} is not a mix: expected random-N-M (N allocations of at most M MiB, N up to "
        f"{MAX_ALLOCATIONS}, M up to {MAX_MIB}), " + " or ".join(sorted(_MAKERS))
    )


def _random(log: LogBuilder, rng: random.Random, *, count: int, largest: int) -> None:
    """RMM's random_allocations."""
    allocate_percent, max_live = 73, 16000 * MIB
    live: list[LogEvent] = []
    made = 0
    for _ in range(2 * count):
        size = rng.randint(1, largest)
        wanted = rng.randrange(100) < allocate_percent and made < count
        if not live or (wanted and log.live_bytes + size < max_live):
            if made == count:
                break
            live.append(log.allocate(size))
            made += 1
            continue
        index = rng.randrange(len(live))
        live[index], live[-1] = live[-1], live[index]
        log.free(live.pop())
    for event in live:
        log.free(event)


class _Request:
    """A sequence being generated, with one cache block per layer."""

    LAYERS = 24
    TOKEN_BYTES = 2 * 8 * 128 * 2
    """Keys and values of one token in one layer: 8 heads of 128 in bfloat16."""
    CHUNK = 512
    """Caches grow by this many tokens: a new block is allocated, then the old one freed."""

    def __init__(self, log: LogBuilder, prompt: int, output: int) -> None:
        self.log, self.tokens, self.last = log, prompt, prompt + output
        self.caches = [self._cache() for _ in range(self.LAYERS)]

    def _room(self) -> int:
        return -(-(self.tokens + 1) // self.CHUNK) * self.CHUNK

    def _cache(self) -> LogEvent:
        return self.log.allocate(self._room() * self.TOKEN_BYTES)

    def step(self) -> bool:
        """Generates one token; frees the caches and returns True when the request is finished."""
        self.tokens += 1
        if self.tokens >= self.last:
            for cache in self.caches:
                self.log.free(cache)
            return True
        if self._room() * self.TOKEN_BYTES > self.caches[0].size:
            for layer, old in enumerate(self.caches):
                self.caches[layer] = self._cache()
                self.log.free(old)
        return False


def _serving(log: LogBuilder, rng: random.Random) -> None:
    """Weights, then 400 requests of 48 to 18000 tokens (with output), at most 48 at a time."""
    hidden, vocabulary, max_live = 4096, 32000, 48
    weights = [log.allocate(rng.choice((32, 56, 112)) * MIB) for _ in range(3 * _Request.LAYERS)]
    waiting = 400
    running: list[_Request] = []
    while waiting or running:
        while waiting and len(running) < max_live and rng.random() < 0.4:
            prompt = min(16000, int(rng.lognormvariate(6.5, 1.2)) + 32)
            output = min(2000, int(rng.lognormvariate(5.0, 0.8)) + 16)
            activations = [log.allocate(prompt * hidden * 2 * k) for k in (1, 3, 4)]
            running.append(_Request(log, prompt, output))
            for event in activations:
                log.free(event)
            waiting -= 1
        rows = max(len(running), 1)
        scratch = [log.allocate(rows * n * 2) for n in (hidden, 3 * hidden, 4 * hidden)]
        scratch.append(log.allocate(rows * vocabulary * 4))
        for event in scratch:
            log.free(event)
        running = [request for request in running if not request.step()]
    for event in weights:
        log.free(event)


def _streams(log: LogBuilder, rng: random.Random) -> None:
    """Twelve turns of 4 GiB in blocks of 1 to 128 MiB; a tenth of the blocks live until the
    stream's next turn."""
    kept: list[list[LogEvent]] = [[] for _ in range(4)]
    for turn in range(12):
        stream = turn % len(kept)
        for event in kept[stream]:
            log.free(event)
        live: list[LogEvent] = []
        held = 0
        while held < 4 << 30:
            size = int(MIB * 2 ** rng.uniform(0, 7))
            live.append(log.allocate(size, stream))
            held += size
            if rng.random() < 0.2:
                gone = live.pop(rng.randrange(len(live)))
                log.free(gone)
                held -= gone.size
        rng.shuffle(live)
        few = len(live) // 10
        kept[stream] = live[:few]
        for event in live[few:]:
            log.free(event)
    for events in kept:
        for event in events:
            log.free(event)


def _torture(log: LogBuilder, rng: random.Random) -> None:
    """Six rounds; each makes 96 holes and then requests blocks larger than any two holes.

    The requests add up to 60% of the freed memory, so less is live than before.
    """
    small, large = 7 * MIB + 3 * ALIGNMENT, 19 * MIB + 5 * ALIGNMENT
    for number in range(6):
        log.free(log.allocate(96 * (small + large)))  # pools split the pairs off this block
        pairs = [(log.allocate(small), log.allocate(large)) for _ in range(96)]
        which = number % 2
        for pair in pairs:
            log.free(pair[which])
        hole = pairs[0][which].size
        big = [log.allocate(int(96 * hole * share)) for share in (0.3, 0.2, 0.1)]
        for pair in pairs:
            log.free(pair[1 - which])
        for event in big:
            log.free(event)
        small, large = small + rng.randrange(MIB), large + rng.randrange(2 * MIB)


_MAKERS: dict[str, Callable[[LogBuilder, random.Random], None]] = {
    "serving": _serving,
    "streams": _streams,
    "torture": _torture,
}
