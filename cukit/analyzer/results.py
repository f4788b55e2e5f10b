"""The results file: its schema, merging a run into it, and writing it atomically.

    {"environment": {"gpu", "driver", "cuda", "versions": {...}, "clocks": {...}, "ceilings": {...},
                     "commit", "date"},
     "records": [{"family", "op", "case", "dtype", "impl", "median_us", "iqr_us", "samples",
                  "range_us", "tflops", "gbps", "floor_us", "error", "correct", "timer",
                  "other_us"?: {timer: median}, "peak_bytes"?, "joules_per_call"?,
                  "calls_per_joule"?, "joules_uncertainty"?, "energy_missing"?, "commit"?,
                  "date"?}]}

Records of family "memory_pool" have other fields: see profiling/memory_pool.py.

`environment` describes the latest run. A record of an earlier run on the same machine keeps its
own `commit` and `date` if they differ. A file holds results of one kind of GPU. `range_us` is the
estimated range of the true median (cukit.analyzer.statistics.estimate), which `cukit compare` uses.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cukit.analyzer.json_file import read_json
from cukit.core.files import Exclusive, write_text
from cukit.errors import DataError

Record = dict[str, Any]

OURS = "cukit"
"""The `impl` of cukit's own records."""

CaseKey = tuple[str, str, str, str]
"""Family, op, case, dtype."""

PROVENANCE = ("commit", "date")


class ResultsError(DataError):
    """The results file is damaged, or was measured on another kind of GPU."""


def case_key(record: Record) -> CaseKey:
    """The case that a record belongs to."""
    return record["family"], record["op"], record["case"], record["dtype"]


def read(path: Path) -> dict[str, Any]:
    """The file's content, or empty results if the file does not exist."""
    if not path.exists():
        return {"environment": {}, "records": []}
    try:
        content = read_json(path)
        return {"environment": dict(content["environment"]), "records": list(content["records"])}
    except DataError as error:
        raise ResultsError(f"{path} is not a results file: {error}") from None
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{path} is not a results file: {error!r}") from None


def write(path: Path, results: dict[str, Any]) -> None:
    """Replaces the file atomically: a reader sees either the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(results, indent=1) + "\n")


_locks: weakref.WeakValueDictionary[Path, Exclusive] = weakref.WeakValueDictionary()


def _exclusive(path: Path) -> Exclusive:
    """The lock of a file, shared by everything in this process that writes to it."""
    key = path.resolve()
    lock = _locks.get(key)
    if lock is None:
        lock = _locks[key] = Exclusive(path)
    return lock


class ResultsFile:
    """A run's results, merged case by case into the file's earlier content.

    Raises DataError while another process writes to the file, since the results of one of them
    would be lost.
    """

    def __init__(self, path: Path, environment: dict[str, Any]) -> None:
        self.path = path
        self._lock = _exclusive(path)
        self._environment = environment
        before = read(path)
        gpu = before["environment"].get("gpu")
        if gpu not in (None, environment["gpu"]):
            raise ResultsError(
                f"{path} holds results of {gpu}, this is {environment['gpu']}: choose another --out"
            )
        self._records = [self._with_provenance(r, before["environment"]) for r in before["records"]]

    def _with_provenance(self, record: Record, environment: dict[str, Any]) -> Record:
        """`record` with its own commit and date, if they differ from those of this run."""
        values = {key: record.get(key, environment.get(key)) for key in PROVENANCE}
        rest = {key: value for key, value in record.items() if key not in PROVENANCE}
        if values == {key: self._environment.get(key) for key in PROVENANCE}:
            return rest
        return rest | values

    def replace(
        self, case: CaseKey, records: Sequence[Record], *, only_measured: bool = False
    ) -> None:
        """Replaces the records of a case with those of this run, in place; writes the file.

        only_measured: replace only the implementations in `records`; else the whole case.
        """
        measured = {record["impl"] for record in records}

        def old(record: Record) -> bool:
            return case_key(record) == case and (not only_measured or record["impl"] in measured)

        places = [i for i, record in enumerate(self._records) if case_key(record) == case]
        place = places[0] if places else len(self._records)
        before = [record for record in self._records[:place] if not old(record)]
        after = [record for record in self._records[place:] if not old(record)]
        self._records = [*before, *records, *after]
        self._write()

    def keep_only(self, family: str, cases: Iterable[CaseKey]) -> None:
        """Removes the cases of a family that are not among `cases`, and writes the file."""
        known = set(cases)
        self._records = [r for r in self._records if r["family"] != family or case_key(r) in known]
        self._write()

    def _write(self) -> None:
        write(self.path, {"environment": self._environment, "records": self._records})
