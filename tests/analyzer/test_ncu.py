"""Both formats of ncu's CSV, and errors if ncu lacks permission or is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cukit.analyzer import ncu
from cukit.analyzer.ncu import ncu_durations, parse_csv, read_counters, run_ncu
from cukit.errors import CukitError, DataError, MissingDependencyError

RAW = """==PROF== Connected to process 7
the program's own words
"ID","Process ID","Kernel Name","Block Size","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum","sm__warps_active.avg.pct_of_peak_sustained_active","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
"","","","","","byte","byte","ns","%","inst"
"0","7","scale","(256, 1, 1)","(1000, 1, 1)","1,000,000","500000","2,000","50.5","12.5"
"1","7","scale","(256, 1, 1)","(1000, 1, 1)","3,000,000","500000","4,000","51.5","13.5"
"2","7","void cub::Reduce<int, float>(T1 *)","(256, 1, 1)","(1, 1, 1)","64","n/a","1000","nan","1"
"""  # noqa: E501

DETAILS = """"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","scale","dram__bytes_read.sum","Mbyte","1.5"
"0","scale","gpu__time_duration.sum","usecond","3.25"
"0","scale","lts__t_sector_hit_rate.pct","%","25"
"""


def test_the_raw_page_is_averaged_by_kernel() -> None:
    counters = parse_csv(RAW, "ncu")
    assert set(counters) == {"scale", "void cub::Reduce<int, float>(T1 *)"}
    scale = counters["scale"]
    assert (scale.source, scale.dram_read_bytes, scale.dram_write_bytes) == ("ncu", 2e6, 5e5)
    assert scale.duration_us == pytest.approx(3.0)
    assert scale.achieved_occupancy == pytest.approx(0.51)
    assert scale.stall_reasons == {"long_scoreboard": 13.0}
    assert scale.l2_hit_fraction is None
    reduce = counters["void cub::Reduce<int, float>(T1 *)"]
    assert (reduce.dram_read_bytes, reduce.dram_write_bytes) == (64, None)
    assert reduce.achieved_occupancy is None, "ncu reported nan"


def test_units_of_the_details_page_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "counters.csv"
    path.write_text(DETAILS)
    scale = read_counters(path)["scale"]
    assert scale.source == "counters.csv"
    assert scale.dram_read_bytes == 1.5e6
    assert scale.duration_us == 3.25
    assert scale.l2_hit_fraction == 0.25


def test_sectors_and_requests_make_an_average() -> None:
    """A report of `ncu --set full` has only the sums."""
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for launch, sectors, requests in (("0", 4096, 1024), ("1", 12288, 1024)):
        lines += [
            f'"{launch}","scale","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","sector","{sectors}"',
            f'"{launch}","scale","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","{requests}"',
            f'"{launch}","scale","l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum","sector","0"',
            f'"{launch}","scale","l1tex__t_requests_pipe_lsu_mem_global_op_st.sum","","0"',
        ]
    scale = parse_csv("\n".join(lines), "ncu")["scale"]
    assert scale.load_sectors_per_request == 8.0
    assert scale.store_sectors_per_request is None, "it stores nothing"


def test_durations_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.csv").write_text(RAW)
    monkeypatch.setattr(
        ncu, "_find_ncu", lambda: script(tmp_path, f"cat {tmp_path}/out.csv > $log")
    )
    names = ["scale", "scale", "void cub::Reduce<int, float>(T1 *)"]
    assert ncu_durations(["true"]) == list(zip(names, [2.0, 4.0, 1.0], strict=True))
    arguments = (tmp_path / "arguments").read_text()
    assert "--cache-control none" in arguments
    assert "--clock-control none" in arguments


def test_a_file_without_a_table_is_rejected() -> None:
    with pytest.raises(DataError, match="no table"):
        parse_csv("==PROF== nothing was profiled", "empty.csv")


def script(folder: Path, text: str) -> str:
    path = folder / "ncu"
    find_log = 'while [ $# -gt 0 ]; do [ "$1" = --log-file ] && log=$2; shift; done'
    path.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\n{find_log}\n{text}\n')
    path.chmod(0o755)
    return str(path)


def test_ncu_without_permission_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "ERR_NVGPUCTRPERM - The user does not have permission"
    fake = script(tmp_path, f"echo '==ERROR== {words}' > $log; exit 1")
    monkeypatch.setattr(ncu, "_find_ncu", lambda: fake)
    with pytest.raises(CukitError, match="ERR_NVGPUCTRPERM"):
        run_ncu(["true"])


def test_ncu_runs_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.csv").write_text(RAW)
    fake = script(tmp_path, f"cat {tmp_path}/out.csv > ${{log:-/dev/stdout}}; echo chatter >&2")
    monkeypatch.setattr(ncu, "_find_ncu", lambda: fake)
    assert run_ncu(["python", "user.py"])["scale"].dram_write_bytes == 5e5
    assert (tmp_path / "arguments").read_text().endswith("python user.py\n")
    assert read_counters(tmp_path / "saved.ncu-rep")["scale"].source == "saved.ncu-rep"
    assert "--import" in (tmp_path / "arguments").read_text()


def test_a_missing_ncu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "_INSTALLED", tmp_path)
    with pytest.raises(MissingDependencyError, match="Nsight Compute"):
        run_ncu(["true"])


def test_the_newest_installed_ncu_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "_INSTALLED", tmp_path)
    for version in ("2024.3.2", "2025.10.0", "2025.2.1"):
        folder = tmp_path / "nsight-compute" / version
        folder.mkdir(parents=True)
        (folder / "ncu").touch()
    assert ncu._find_ncu() == str(tmp_path / "nsight-compute/2025.10.0/ncu")
