"""The roofline model: a kernel's time compared with the least time for its declared work.

The least time is max(bytes / bandwidth, FLOPs / rate). There are several roofs, for different
questions: the datasheet's (the hardware's limit), the datasheet's at the clock during the run (the
limit at this run's temperature and power), and the measured one (what a device-to-device copy and
arithmetic benchmarks reach on this machine). Pure arithmetic, no measurements.
"""

from __future__ import annotations

from cukit.analyzer.schema import Ceilings, RooflinePoint, Throughput

DEFAULT_PIPE = "fp32"


def throughput(
    *, bytes_moved: float | None, flops: float | None, time_us: float | None
) -> Throughput:
    """Rates of the declared work; None if the work or the time is unknown."""
    gbps = bytes_moved / time_us / 1e3 if bytes_moved and time_us else None
    tflops = flops / time_us / 1e6 if flops and time_us else None
    return Throughput(bytes_moved, flops, gbps, tflops)


def roofline(
    work: Throughput,
    ceilings: Ceilings,
    *,
    median_us: float,
    pipe: str = DEFAULT_PIPE,
    held_clock_mhz: float | None = None,
) -> tuple[RooflinePoint, ...]:
    """One point for each roof with a known bandwidth and rate. Needs declared bytes."""
    if not work.bytes:
        return ()
    flops = work.flops or 0.0
    at_clock = ceilings.tflops_per_mhz.get(pipe)
    held = at_clock * held_clock_mhz if at_clock and held_clock_mhz else None
    roofs = [("datasheet", ceilings.datasheet_gbps, ceilings.datasheet_tflops.get(pipe))]
    if held is not None:
        roofs.append(("datasheet at the held clock", ceilings.datasheet_gbps, held))
    measured = ceilings.measured_tflops.get(pipe)
    roofs.append(("measured", ceilings.measured_copy_gbps, measured))
    points = []
    for roof, gbps, tflops in roofs:
        # A kernel without FLOPs needs no compute roof.
        if gbps is None or (tflops is None and flops):
            continue
        memory_us = work.bytes / gbps / 1e3
        compute_us = flops / tflops / 1e6 if tflops else 0.0
        attainable_us = max(memory_us, compute_us)
        points.append(
            RooflinePoint(
                pipe=pipe,
                intensity=flops / work.bytes,
                bound="memory" if memory_us >= compute_us else "compute",
                roof=roof,
                memory_gbps=gbps,
                compute_tflops=tflops,
                attainable_us=attainable_us,
                fraction=attainable_us / median_us,
            )
        )
    return tuple(points)
