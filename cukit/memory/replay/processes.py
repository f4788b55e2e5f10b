"""Replays in one process per pool: pools then share no device memory and no library caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cukit.core.workers import end_with_parent
from cukit.errors import CukitError, MissingDependencyError, UnsupportedDeviceError
from cukit.memory.log import read_log
from cukit.memory.replay.mixes import make_log
from cukit.memory.replay.pools import make_pool
from cukit.memory.replay.replay import Latency, ReplayResult, Script, replay, script_of


class PoolMissing(CukitError):  # noqa: N818 - a reason to skip a pool, not an error
    """A pool is not available on this machine; the message has the reason."""


@dataclass(frozen=True)
class Request:
    """One log to replay."""

    log: str
    """A file, or the name of a mix (:mod:`cukit.memory.replay.mixes`)."""
    limit: int | str | None = None
    """Bytes, None for no limit, or "tight"."""
    seed: int = 0
    """The seed of a mix."""

    def script(self) -> Script:
        is_file = os.path.exists(self.log) or Path(self.log).suffix != ""
        return script_of(read_log(self.log) if is_file else make_log(self.log, self.seed))


def replay_apart(pool: str, requests: Sequence[Request]) -> list[ReplayResult]:
    """Replays logs one after another on one kind of pool, in a new process.

    Raises PoolMissing if the pool's library or a GPU is missing.
    """
    with tempfile.TemporaryDirectory(prefix="cukit-replay-") as folder:
        answer = Path(folder) / "answer.json"
        order = {
            "parent": os.getpid(),
            "pool": pool,
            "requests": [asdict(request) for request in requests],
            "answer": str(answer),
        }
        ran = subprocess.run(
            [sys.executable, "-c", "from cukit.memory.replay.processes import serve; serve()"],
            input=json.dumps(order),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )
        if not answer.exists():
            last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            raise CukitError(f"replaying on {pool} ended with code {ran.returncode}: {last}")
        found = json.loads(answer.read_text())
    if "missing" in found:
        raise PoolMissing(found["missing"])
    return [_result_from(entry) for entry in found["results"]]


def serve() -> None:
    """The child process of :func:`replay_apart`: reads the requests from stdin."""
    order = json.load(sys.stdin)
    end_with_parent(order["parent"])
    answer: dict[str, Any] = {"results": []}
    try:
        for entry in order["requests"]:
            request = Request(**entry)
            answer["results"].append(asdict(replay_request(order["pool"], request)))
    except (MissingDependencyError, UnsupportedDeviceError) as reason:
        answer = {"missing": str(reason)}
    Path(order["answer"]).write_text(json.dumps(answer))


def replay_request(pool: str, request: Request) -> ReplayResult:
    """Replays one log on a new pool in this process."""
    script = request.script()
    limit = script.tight_limit if request.limit == "tight" else request.limit
    assert not isinstance(limit, str)
    made = make_pool(pool, script.num_streams, limit)
    try:
        return replay(script, made, name=pool, limit=limit)
    finally:
        made.close()


def _result_from(entry: dict[str, Any]) -> ReplayResult:
    return ReplayResult(
        **entry | {name: Latency(**entry[name]) for name in ("allocate", "free")},
    )
