"""Small, complete results of every kind, as input of reports."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from cukit.analyzer import schema
from cukit.analyzer.report import generate_report

HOSTILE = "<script>alert('&')</script>"
"""A name that a browser would run as a script if the page did not escape it."""

LONG = "void gemm<" + "cutlass::layout::RowMajor,float," * 12 + ">(Params)"
"""A name of a template instance."""

ENVIRONMENT: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "cuda": "13.0",
    "versions": {"cupy-cuda13x": "14.2", "torch": "2.11"},
    "clocks": {"sm_under_load_mhz": 1500.0, "sm_max_mhz": 1980.0},
    "ceilings": {"copy_gbps": 4200.0, "bf16_gemm_tflops": 740.0},
    "commit": "abc1234",
    "date": "2026-01-02",
}


def record(impl: str, median_us: float, **more: Any) -> dict[str, Any]:
    """One benchmark record."""
    base = {
        "family": "layers",
        "op": "rms_norm",
        "case": "8192x4096",
        "dtype": "bfloat16",
        "impl": impl,
        "median_us": median_us,
        "iqr_us": 0.1,
        "samples": 80,
        "tflops": None,
        "gbps": 3300.0,
        "floor_us": 32.0,
        "error": 1e-5,
        "correct": True,
    }
    return base | more


def benchmarks() -> dict[str, Any]:
    """Two families, a wrong peer, a variant of cukit, a case without a floor, a hostile name."""
    attention = {"family": "attention", "op": "flash_attention", "case": "d128 causal"}
    host = {"family": "host", "op": "rms_norm", "case": "enqueue", "floor_us": None, "gbps": None}
    return {
        "environment": ENVIRONMENT,
        "records": [
            record("cukit", 40.25, range_us=[39.5, 41.0], joules_per_call=0.02, peak_bytes=2**20),
            record("torch-compile", 44.5),
            record("liger", 1.0, correct=False),
            record("cukit", 161.125, case="16384x8192", floor_us=128.0),
            record(HOSTILE, 201.5, case="16384x8192", floor_us=128.0),
            record("cukit", 1369.7, **attention, tflops=401.4, gbps=196.0, floor_us=719.5),
            record("cukit-ordered", 1500.5, **attention, tflops=366.4, gbps=180.0, floor_us=719.5),
            record("torch-cudnn", 820.78, **attention, tflops=669.8, gbps=327.0, floor_us=719.5),
            record("cukit", 5.5, **host),
        ],
    }


def kernels() -> dict[str, Any]:
    """Output of `cukit compile --json`: two variants of a kernel, one with spills, and an error.

    The variant without spills is in the format of older versions, without instruction counts.
    """
    base: dict[str, Any] = {
        "kernel": "rms_norm",
        "source": "layers/rms_norm.cu",
        "arch": "sm_90a",
        "static_shared_bytes": 64,
        "dynamic_shared_bytes": 0,
        "blocks_per_sm": 4,
        "compile_ms": 100.0,
        "cached": False,
    }
    lean = {"threads": 256, "registers": 32, "spill_bytes": 0, "occupancy": 1.0}
    fat: dict[str, Any] = {"threads": 512, "registers": 128, "spill_bytes": 24, "occupancy": 0.25}
    fat |= {
        "op": "rms_norm_backward",
        "spill_store_bytes": 8,
        "spill_load_bytes": 16,
        "memory_access": {
            "source": "decoded",
            "widths": [
                {"operation": "load", "bits": 128, "instructions": 3},
                {"operation": "store", "bits": 32, "instructions": 3},
                {"operation": "shared load", "bits": 32, "instructions": 7},
            ],
            "bulk_copies": 0,
            "atomics": 2,
        },
        "instruction_mix": {
            "source": "decoded",
            "instructions": 500,
            "by_class": {"floating point": 300, "global memory": 8, "integer and moves": 192},
        },
    }
    return {
        "kernels": [
            {**base, **lean, "defines": {"DTYPE": "bfloat16"}, "limiter": "threads"},
            {**base, **fat, "defines": {"DTYPE": "float32"}, "limiter": "registers"},
        ],
        "errors": [{"kernel": "rope()", "arch": "sm_90a", "log": f"rope.cu(3): error {HOSTILE}"}],
    }


def distillation() -> dict[str, Any]:
    """report.json of `cukit distill`."""
    rng = random.Random(0)

    def model(parameters: int, bits: float, *, teacher: bool = False) -> dict[str, Any]:
        return {
            "parameters": parameters,
            "bits_per_byte": bits,
            "accuracy": 0.75,
            "teacher_kl_bits": None if teacher else 0.4356,
            "teacher_agreement": None if teacher else 0.8241,
            "steps": 40,
            "tokens": 40960,
            "timed_tokens": 40000,
            "seconds": 57.9,
            "tokens_per_second": 848870.7,
            "history": [[step, 3.0 / step**0.5 + rng.random() / 10] for step in range(1, 41)],
        }

    return {
        "verdict": "The teacher helped: 0.0271 bits per byte.",
        "distilled_beats_alone": True,
        "gain_bits_per_byte": 0.02709,
        "settings": {"device": "gpu", "dtype": "bfloat16", "alpha": 0.9, "hidden_weight": 0.0},
        "corpus": {"text": HOSTILE, "train_bytes": 8272106, "validation_bytes": 474857},
        "models": {
            "teacher": model(65093376, 1.3716, teacher=True),
            "student": model(9835392, 1.2309),
            "student-alone": model(9835392, 1.258),
        },
        "milliseconds_per_step_by_op": [
            {"name": "matmul", "calls": 168.0, "milliseconds": 10.02836},
            {"name": "flash_attention", "calls": 16.0, "milliseconds": 2.70976},
            {"name": "everything else", "calls": 0, "milliseconds": 0.55918},
        ],
        "peak_memory_bytes": 9709769728,
        "pool": {
            "peak_live_bytes": 9663676416,
            "peak_reserved_bytes": 9709769728,
            "num_allocations": 412345,
            "hit_rate": 0.9971,
            "fragmentation": 0.25,
            "pages_remapped": 37,
            "num_defragments": 0,
            "bytes_moved": 0,
        },
        "seconds": 118.1,
        "sample": f"def get(self):\x00\x1b[31m\n    return {HOSTILE}",
    }


def memory() -> dict[str, Any]:
    """Snapshot of a pool of 6 MiB: 3 MiB live (peak: 5), 1 MiB pending, two holes of 1 MiB."""
    mib = 1 << 20

    def block(size: int, state: str, line: int = 0) -> dict[str, Any]:
        frames = [{"filename": HOSTILE, "line": line, "name": "load"}] if line else []
        return {"size": size * mib, "requested_size": 0, "state": state, "frames": frames}

    def event(action: str, address: int, size: int, time_us: int) -> dict[str, Any]:
        place = {"addr": address * mib, "size": size * mib}
        return {"action": action, **place, "stream": 0, "time_us": time_us}

    blocks = [
        block(1, "active_allocated", 7),
        block(1, "inactive"),
        block(2, "active_allocated", 9),
        block(1, "active_pending_free"),
        block(1, "inactive"),
    ]
    for place, (entry, address) in enumerate(zip(blocks, (0, 1, 2, 4, 5), strict=True)):
        entry |= {"address": address * mib, "stream": place % 2}
    segment = {"address": 0, "total_size": 6 * mib, "stream": 0, "blocks": blocks}
    trace = [
        event("segment_map", 0, 6, 10),
        event("alloc", 0, 1, 20),
        event("alloc", 1, 1, 30),
        event("alloc", 2, 2, 40),
        event("alloc", 4, 1, 50),
        event("free_requested", 1, 1, 60),
        event("free_completed", 1, 1, 60),
        event("free_requested", 4, 1, 70),
    ]
    return {
        "segments": [segment],
        "device_traces": [trace],
        "allocator_settings": {"backend": "cukit"},
        "statistics": {"peak_live_bytes": 5 * mib, "num_frees": 2, "fragmentation": 0.5},
    }


def analysis() -> schema.AnalysisReport:
    """A kernel with every field, and one with none."""
    environment = schema.Environment(
        gpu="NVIDIA H200",
        arch="sm_90",
        num_sms=132,
        l2_bytes=60 << 20,
        memory_bytes=141 << 30,
        driver="580.1",
        cuda="13.0",
        versions={"cupy-cuda13x": "14.2"},
        date="2026-01-02T03:04:05",
        ceilings=schema.Ceilings(
            datasheet_gbps=4800.0,
            datasheet_tflops={"tensor_bf16": 989.0},
            measured_copy_gbps=4269.0,
            measured_tflops={"tensor_bf16": 762.7},
        ),
    )
    accesses = tuple(
        schema.AccessPoint(
            width, stride, 4000.0 / stride, 1 / stride, min(1.0, 32 / width / stride)
        )
        for width in (4, 16)
        for stride in (1, 2, 4, 8, 16, 32)
    )
    return schema.AnalysisReport(environment, (_complete(), _empty()), accesses=accesses)


def traced() -> schema.AnalysisReport:
    """A trace of three launches on two streams, at 0 to 10, 5 to 25 and 45 to 50 us."""
    report = analysis()
    (first, _) = report.analyses

    def launched(name: str, total_us: float, samples: int) -> schema.KernelAnalysis:
        assert first.warm is not None
        warm = replace(first.warm, timer="cupti", mean_us=total_us / samples, samples=samples)
        missing = {"cold": "a trace"}
        return replace(first, name=name, cold=None, warm=warm, roofline=(), missing=missing)

    timeline = (
        schema.TracedLaunch("small", 7, 0.0, 10.0),
        schema.TracedLaunch("large", 13, 5.0, 20.0),
        schema.TracedLaunch("small", 7, 45.0, 5.0),
    )
    kernels = (launched("large", 20.0, 1), launched("small", 15.0, 2))
    return replace(report, analyses=kernels, timeline=timeline)


def every_kind() -> list[Any]:
    """Results of every kind, in the order of their sections."""
    return [analysis(), benchmarks(), kernels(), distillation(), memory()]


def documents() -> dict[str, Any]:
    """The contents of a results file of each kind."""
    (document,) = generate_report([analysis()]).to_dict()["documents"]
    return {
        "analysis": document["content"],
        "benchmarks": benchmarks(),
        "kernels": kernels(),
        "distillation": distillation(),
        "memory": memory(),
    }


def _complete() -> schema.KernelAnalysis:
    curve = tuple(schema.CurvePoint(t, min(1.0, t / 256)) for t in range(32, 1025, 32))
    resident = schema.OccupancyAnalysis(
        blocks_per_sm=4,
        warps_per_sm=32,
        max_warps_per_sm=64,
        fraction=0.5,
        limiter="registers",
        limits=(schema.ResourceLimit("registers", 4),),
        next_steps=(schema.NextStep("registers", 64, 56, 5, 0.625),),
        by_threads=curve,
        by_registers=(),
        by_shared_bytes=(),
    )
    launch = schema.LaunchAnalysis(
        name="my_kernel",
        grid=(1024, 1, 1),
        block=(128, 2, 1),
        resources=schema.Resources(64, 1024, 2048, 8, 16, 32, 256),
        occupancy=resident,
        waves=schema.Waves(1024, 528, 1.939, 0.939, 0.97),
        memory_access=schema.MemoryAccess("decoded", (schema.AccessWidth("load", 128, 4),), 0, 2),
        device_us=41.5,
    )

    def timing(cache: str, median: float) -> schema.TimeStatistics:
        spread = {"iqr_us": 0.5, "mean_us": median + 0.1, "std_us": 0.3}
        ends = {"min_us": median - 1, "max_us": median + 2}
        interval = {"ci_low_us": median - 0.25, "ci_high_us": median + 0.25, "confidence": 0.95}
        return schema.TimeStatistics(
            "events", cache, median, **spread, **ends, **interval, samples=80, noisy=cache == "warm"
        )

    return schema.KernelAnalysis(
        name="my_kernel",
        kind="raw kernel",
        arch="sm_90",
        launches=(launch,),
        cold=timing("cold", 42.125),
        warm=timing("warm", 30.5),
        throughput=schema.Throughput(1.5e8, 1.2e10, 3560.8, 284.9),
        roofline=(
            schema.RooflinePoint(
                "tensor_bf16", 80.0, "memory", "datasheet", 4800.0, 989.0, 31.2, 0.742
            ),
            schema.RooflinePoint(
                "tensor_bf16", 80.0, "memory", "measured", 4269.0, 762.7, 35.1, 0.834
            ),
        ),
        energy=schema.Energy(0.0123, 81.3, 0.0004, 410.0, 1.5, 36000),
        conditions=schema.Conditions(1755.0, 1980.0, 3201.0, 61.0, 700.0, ("power cap",)),
        counters=schema.Counters("ncu", achieved_occupancy=0.47, dram_read_bytes=1e8),
        advice=(
            schema.Advice(
                "registers",
                "64 registers allow 4 blocks",
                "56 registers let a fifth block in",
                "at most 1.25x where latency is the limit",
            ),
        ),
        missing={"counters.l2_hit_fraction": "ncu was not used"},
        peak_bytes=4096,
    )


def _empty() -> schema.KernelAnalysis:
    return schema.KernelAnalysis(
        name=HOSTILE + LONG,
        kind="call",
        arch="sm_90",
        launches=(),
        cold=None,
        warm=None,
        throughput=None,
        roofline=(),
        energy=None,
        conditions=None,
        counters=None,
        advice=(),
        missing={"cold": "it failed"},
    )
