"""Launches that a GPU would reject."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cukit.core.device import KIB, TYPICAL_DEVICES
from cukit.emulator.limits import reason_against_launch


def reason_against(arch: str = "sm_90", **changes: Any) -> str | None:
    launch: dict[str, Any] = {
        "grid": (1, 1, 1),
        "block": (256, 1, 1),
        "cluster": (1, 1, 1),
        "static_bytes": 0,
        "dynamic_bytes": 0,
        "max_threads": 0,
    }
    return reason_against_launch(TYPICAL_DEVICES[arch], **{**launch, **changes})


@pytest.mark.parametrize(
    "launch",
    [
        {},
        {"block": (32, 32, 1)},
        {"block": (1024, 1, 1), "grid": (2**31 - 1, 65535, 65535)},
        {"dynamic_bytes": 227 * KIB},
        {"static_bytes": 48 * KIB, "dynamic_bytes": 100 * KIB},
        {"block": (256, 1, 1), "max_threads": 256},
        {"cluster": (8, 1, 1), "grid": (16, 1, 1)},
    ],
)
def test_launches_within_the_limits_are_accepted(launch):
    assert reason_against(**launch) is None


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"block": (2048, 1, 1)}, "2048 along x, must be 1 to 1024"),
        ({"block": (1, 1, 65)}, "65 along z, must be 1 to 64"),
        ({"block": (64, 32, 1)}, "has 2048 threads, the limit is 1024"),
        ({"block": (0, 1, 1)}, "0 along x"),
        ({"grid": (1, 65536, 1)}, "grid .* 65536 along y, must be 1 to 65535"),
        ({"max_threads": 128}, "has 256 threads, the kernel's __launch_bounds__ allow 128"),
        ({"dynamic_bytes": 228 * KIB}, "233472 of dynamic .* limit on sm_90 is 232448"),
        ({"arch": "sm_120", "dynamic_bytes": 100 * KIB}, "the limit on sm_120 is 101376"),
        ({"static_bytes": 40 * KIB, "dynamic_bytes": 200 * KIB}, "40960 bytes of static"),
        ({"static_bytes": 49 * KIB}, "50176 bytes of static .* limit is 49152"),
        ({"cluster": (2, 1, 1), "grid": (2, 1, 1), "arch": "sm_80"}, "need sm_90 .* is sm_80"),
        ({"cluster": (32, 1, 1), "grid": (32, 1, 1)}, "of 32 blocks, the limit is 16"),
        ({"cluster": (16, 1, 1), "grid": (16, 1, 1), "arch": "sm_120"}, "the limit is 8"),
        ({"cluster": (2, 1, 1), "grid": (3, 1, 1)}, "do not divide the grid"),
    ],
)  # fmt: skip
def test_the_reason_names_the_limit(launch, message):
    reason = reason_against(**launch)
    assert reason is not None
    assert re.search(message, reason), reason
