"""Files of arrays: every dtype that can be written can be read; failures are DataErrors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cukit.core.files import _DTYPES, read_arrays, write_arrays, write_text
from cukit.errors import DataError


@pytest.mark.parametrize("name", _DTYPES)
def test_every_dtype_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    array = np.arange(6).reshape(2, 3).astype(_DTYPES[name])
    write_arrays(tmp_path / "file", {"array": array}, {"key": [1]})
    arrays, description = read_arrays(tmp_path / "file")
    np.testing.assert_array_equal(arrays["array"], array, strict=True)
    assert description == {"key": [1]}


def test_other_dtypes_are_rejected_before_writing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="array a has dtype complex64, which is not supported"):
        write_arrays(tmp_path / "file", {"a": np.zeros(2, np.complex64)}, {})
    assert not list(tmp_path.iterdir())


def test_a_device_that_cannot_be_written_is_reported() -> None:
    with pytest.raises(DataError, match="/dev/full: cannot be written"):
        write_text(Path("/dev/full"), "text")
