"""Reads JSON files that may be damaged or have another format; accepts finite numbers only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from cukit.core.files import read_text
from cukit.errors import DataError

_MAX_DIGITS = 19
"""Digits of an integer that fits in 64 bits."""


def read_json(path: Path) -> Any:
    """A file's content. Raises DataError if it is unreadable, not JSON or has an invalid number."""
    try:
        return json.loads(
            read_text(path),
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_reject,
        )
    except DataError:
        raise
    except RecursionError:
        raise DataError(f"{path}: not JSON (nested too deeply)") from None
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error})") from None


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_DIGITS:
        _reject(text)
    return int(text)


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _reject(text)
    return number


def _reject(text: str) -> NoReturn:
    raise ValueError(f"the number {text[:24]}{'...' if len(text) > 24 else ''} is out of range")
