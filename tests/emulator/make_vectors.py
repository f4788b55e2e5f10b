"""Runs the cases of vectors.py on a GPU and stores the results for test_instructions.py.

    python -m tests.emulator.make_vectors

Needs Hopper (sm_90). vectors.npz contains compressed integers, a few tens of kilobytes.
"""

from __future__ import annotations

import numpy as np

from cukit.core.device import current_device
from tests.emulator.vectors import STORED, cases


def main() -> None:
    """Write vectors.npz."""
    import cupy

    device = current_device()
    if device.arch != "sm_90":
        raise SystemExit(f"the cases need Hopper (sm_90); this is {device.name} ({device.arch})")
    results = {}
    for case in cases():
        result = cupy.asnumpy(case.run(cupy.asarray))
        exact = result.astype(np.int32)
        assert np.array_equal(exact, result), f"{case.name}: results must be integers"
        results[case.name] = exact
    np.savez_compressed(STORED, **results)
    print(f"{STORED}: {len(results)} cases, {STORED.stat().st_size} bytes, on {device.name}")


if __name__ == "__main__":
    main()
