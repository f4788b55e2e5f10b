"""`ck.xp` conforms to the array API standard."""

from __future__ import annotations

import os
from pathlib import Path

import array_api_strict
import pytest

import cukit as ck
from tests.array_api.conformance import failures, worse_than_numpy

SUITE = os.environ.get("ARRAY_API_TESTS")


@pytest.mark.parametrize("part", ["", "linalg", "fft"])
def test_every_name_of_the_standard_exists(part):
    standard = getattr(array_api_strict, part) if part else array_api_strict
    ours = getattr(ck.xp, part) if part else ck.xp
    of_strict_alone = {"ArrayAPIStrictFlags", "Device", "get_array_api_strict_flags"}
    names = {
        name
        for name in standard.__all__
        if not name.startswith(("__", "set_array_api", "reset_array_api"))
    }
    assert not {name for name in names - of_strict_alone if not hasattr(ours, name)}


def test_the_version_of_the_standard_is_reported():
    assert ck.xp.__array_api_version__ >= "2024.12"
    info = ck.xp.__array_namespace_info__()
    assert info.default_dtypes()["integral"] == ck.xp.int64
    assert info.capabilities()["boolean indexing"]


@pytest.mark.slow
@pytest.mark.skipif(not SUITE, reason="ARRAY_API_TESTS is not set to a checkout of array-api-tests")
@pytest.mark.timeout(900)
def test_no_test_of_the_suite_fails_that_passes_for_numpy():
    assert SUITE
    ours, total = failures(Path(SUITE), "cukit")
    theirs, _ = failures(Path(SUITE), "numpy")
    assert total > 1000
    assert not worse_than_numpy(Path(SUITE), ours, theirs)
