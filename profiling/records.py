"""The results file: its schema, merging a run into it, and writing it whole or not at all.

    {"environment": {"gpu", "driver", "cuda", "versions": {...}, "clocks": {...}, "ceilings": {...},
                     "commit", "date"},
     "records": [{"family", "op", "case", "dtype", "impl", "median_us", "iqr_us", "samples",
                  "tflops", "gbps", "floor_us", "error", "correct", "peak_bytes"?,
                  "commit"?, "date"?}]}

`environment` is that of the latest run. A record of an earlier run on the same machine keeps its
own `commit` and `date` where they differ. One file holds one kind of GPU.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]

PROVENANCE = ("commit", "date")


class ResultsError(Exception):
    """The results file is damaged, or was measured on another kind of GPU."""


def read(path: Path) -> dict[str, Any]:
    """The file's content, or an empty set of results if there is no file yet."""
    if not path.exists():
        return {"environment": {}, "records": []}
    try:
        content = json.loads(path.read_text())
        return {"environment": dict(content["environment"]), "records": list(content["records"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} is no results file: {error!r}") from None


def write(path: Path, results: dict[str, Any]) -> None:
    """Replace the file at once: a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(results, file, indent=1)
            file.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class ResultsFile:
    """A run's results, merged case by case into what the file already held."""

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self.path = path
        self._environment = environment
        before = read(path)
        gpu = before["environment"].get("gpu")
        if gpu not in (None, environment["gpu"]):
            raise ResultsError(
                f"{path} holds results of {gpu}, this is {environment['gpu']}: choose another --out"
            )
        self._records = [self._with_provenance(r, before["environment"]) for r in before["records"]]

    def _with_provenance(self, record: Record, environment: dict[str, Any]) -> Record:
        """`record` with its own commit and date wherever they are not those of this run."""
        values = {key: record.get(key, environment.get(key)) for key in PROVENANCE}
        rest = {key: value for key, value in record.items() if key not in PROVENANCE}
        if values == {key: self._environment.get(key) for key in PROVENANCE}:
            return rest
        return rest | values

    def drop(self, family: str, ops: Iterable[str] | None = None) -> None:
        """Forget what earlier runs measured of a family, or of some of its ops."""
        chosen = None if ops is None else set(ops)
        self._records = [
            record
            for record in self._records
            if record["family"] != family or (chosen is not None and record["op"] not in chosen)
        ]

    def add(self, records: Iterable[Record]) -> None:
        """Append records of this run and write the file."""
        self._records.extend(records)
        write(self.path, {"environment": self._environment, "records": self._records})
