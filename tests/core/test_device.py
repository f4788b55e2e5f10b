"""Device facts and architecture names."""

from __future__ import annotations

import pytest

from cukit.core.device import TYPICAL_DEVICES, parse_arch, typical_device
from cukit.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "expected"), [("sm_80", (8, 0)), ("sm_90a", (9, 0)), ("sm_120a", (12, 0))]
)
def test_parse_arch_returns_the_compute_capability(name, expected):
    assert parse_arch(name) == expected


@pytest.mark.parametrize("name", ["", "sm_", "sm_9", "90", "compute_90", "sm_xy"])
def test_parse_arch_rejects_other_names(name):
    with pytest.raises(ConfigError, match="expected a name such as sm_80"):
        parse_arch(name)


def test_compile_targets_are_architecture_specific_since_hopper():
    assert typical_device("sm_80").compile_arch == "sm_80"
    assert typical_device("sm_90a").compile_arch == "sm_90a"
    assert TYPICAL_DEVICES["sm_120"].compile_arch == "sm_120a"


def test_an_unknown_arch_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"known: .*sm_90"):
        typical_device("sm_70")


@pytest.mark.gpu
def test_current_device_is_read_from_the_driver():
    import cupy

    from cukit.core.device import current_device

    device = current_device()
    digits = cupy.cuda.Device().compute_capability
    assert device.compute_capability == (int(digits[:-1]), int(digits[-1]))
    assert device.num_sms == cupy.cuda.Device().attributes["MultiProcessorCount"]
