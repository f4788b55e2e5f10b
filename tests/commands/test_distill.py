"""`cukit distill` and `cukit generate` as commands: results, interruptions, invalid input."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukit.cli import run
from cukit.core import files
from cukit.distill.run import pipeline
from cukit.distill.run.folder import exclusive
from tests.commands.tiny_run import TINY_RUN

TINY = [*TINY_RUN, "--no-ablation"]
MODELS = ("teacher", "student", "student-alone")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = ["north", "wind", "and", "the", "sun", "were", "disputing"]
    for number in range(30):
        (folder / f"{number}.txt").write_text(" ".join(rng.choice(words, 60)))
    return folder


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, to compare with; tests must not write there."""
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert run(["distill", "-o", str(folder), "--text", str(text), *TINY]) == 0
    return folder


def model_bytes(folder: Path) -> dict[str, Any]:
    """The parameters of the three models, without their training records, whose times differ."""
    contents = {name: files.read_arrays(folder / f"{name}.safetensors")[0] for name in MODELS}
    return {name: {k: v.tobytes() for k, v in arrays.items()} for name, arrays in contents.items()}


def evaluations(folder: Path) -> dict[str, Any]:
    models = json.loads((folder / "report.json").read_text())["models"]
    names = ("bits_per_byte", "accuracy", "teacher_kl_bits", "teacher_agreement")
    return {model: {name: models[model][name] for name in names} for model in MODELS}


def test_report_contains_the_documented_fields(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    for model in MODELS:
        facts = report["models"][model]
        assert 0 < facts["bits_per_byte"] < 9
        assert facts["tokens_per_second"] > 0
        assert facts["tokens"] == 32 * (6 if model == "teacher" else 5)
        assert [step for step, _ in facts["history"]] == list(range(1, facts["steps"] + 1))
        assert facts["steps"] == (6 if model == "teacher" else 5)
        assert (facts["teacher_kl_bits"] is None) == (model == "teacher")
    assert report["models"]["student"]["teacher_kl_bits"] > 0
    gain = (
        report["models"]["student-alone"]["bits_per_byte"]
        - report["models"]["student"]["bits_per_byte"]
    )
    assert report["gain_bits_per_byte"] == pytest.approx(gain)
    low, high = report["gain_interval"]
    assert low < gain < high
    helped = None if low <= 0 <= high else low > 0
    assert report["distilled_beats_alone"] == helped
    words = {True: "The teacher helped", False: "The teacher did not", None: "No significant"}
    assert report["verdict"].startswith(words[helped])
    assert report["validation_windows"] == 8
    assert report["peak_memory_bytes"] > 1e6
    assert report["pool"] is None
    assert len(report["sample"]) > len(pipeline.SAMPLE_PROMPT)
    ops = {entry["name"]: entry for entry in report["milliseconds_per_step_by_op"]}
    assert {"matmul", "flash_attention_backward", "linear_distillation_loss", "adamw"} <= set(ops)
    assert ops["flash_attention"]["calls"] == 2  # teacher and student have one layer each
    assert ops["flash_attention_backward"]["calls"] == 1
    assert all(entry["milliseconds"] >= 0 for entry in ops.values())
    assert sorted(os.listdir(finished)) == sorted(
        [
            "report.html",
            "report.json",
            "settings.json",
            *(f"{model}.safetensors" for model in MODELS),
        ]
    )


def test_quantised_students_are_evaluated(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--quantize applies to a finished run too, without training again."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    formats = ("int8", "int4", "fp8")
    options = [word for name in formats for word in ("--quantize", name)]
    assert run(["distill", "-o", str(folder), "--resume", *options]) == 0
    assert model_bytes(folder) == model_bytes(finished)
    assert "quantised" in capsys.readouterr().out
    report = json.loads((folder / "report.json").read_text())
    plain = report["models"]["student"]["bits_per_byte"]
    found = {each["format"]: each for each in report["quantized"]}
    assert tuple(found) == formats
    for name, bound in zip(formats, (0.01, 0.3, 0.05), strict=True):
        assert abs(found[name]["bits_per_byte"] - plain) < bound
        assert 4 < found[name]["bits_per_weight"] < 13  # with a scale per row of 16 weights
    assert "quantised" in (folder / "report.html").read_text()


def test_an_ablation_shows_what_each_term_adds(
    text: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run(["distill", "-o", str(folder), "--text", str(text), *TINY, "--ablation"]) == 0
    assert "gain from distillation, and with each term" in capsys.readouterr().out
    assert evaluations(folder) == evaluations(finished)
    report = json.loads((folder / "report.json").read_text())
    ways = {each["model"]: each for each in report["ways"]}
    assert list(ways) == ["student", "student-attention", "student-hidden"]
    assert len({each["bits_per_byte"] for each in ways.values()}) == 3
    for name, way in ways.items():
        assert (folder / f"{name}.safetensors").exists()
        low, high = way["gain_interval"]
        assert low < way["gain_bits_per_byte"] < high
    page = (folder / "report.html").read_text()
    assert "Gain from distillation, and with each term" in page


def test_without_jinja_the_missing_report_is_explained(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert run(["distill", "-o", str(tmp_path / "run"), "--text", str(text), *TINY]) == 0
    assert "no report.html: an HTML report needs Jinja2" in capsys.readouterr().out
    assert (tmp_path / "run" / "report.json").exists()
    assert not (tmp_path / "run" / "report.html").exists()


GPU = ["--device", "gpu", "--dtype", "bfloat16", "--workers", "1"]


@pytest.mark.gpu
@pytest.mark.unguarded
def test_results_on_a_gpu_do_not_depend_on_the_pool(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for pool in ("cukit", "cupy"):
        arguments = ["-o", str(tmp_path / pool), "--text", str(text), *TINY, *GPU]
        more = ["--pool", pool] if pool == "cupy" else []
        assert run(["distill", *arguments, *more]) == 0
        output = capsys.readouterr().out
        assert ("memory pool" in output) == (pool == "cukit")
    assert model_bytes(tmp_path / "cukit") == model_bytes(tmp_path / "cupy")
    report = json.loads((tmp_path / "cukit" / "report.json").read_text())
    facts = report["pool"]
    assert facts["num_allocations"] > 1000
    assert 0.5 < facts["hit_rate"] < 1
    assert 0 < facts["peak_live_bytes"] <= facts["peak_reserved_bytes"]
    assert report["peak_memory_bytes"] == facts["peak_reserved_bytes"]
    assert json.loads((tmp_path / "cupy" / "report.json").read_text())["pool"] is None


def test_results_depend_on_the_seed_alone(finished: Path, text: Path, tmp_path: Path) -> None:
    for name, seed in (("again", "0"), ("other", "1")):
        arguments = ["-o", str(tmp_path / name), "--text", str(text), *TINY, "--seed", seed]
        assert run(["distill", *arguments]) == 0
    assert model_bytes(tmp_path / "again") == model_bytes(finished)
    assert evaluations(tmp_path / "again") == evaluations(finished)
    assert model_bytes(tmp_path / "other") != model_bytes(finished)


def test_runs_with_other_options_resume_too(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 with master weights, an untied head, projections, accumulation, threads."""
    options = ["--dtype", "bfloat16", "--untied", "--hidden-weight", "0.1", "--temperature", "2",
               "--accumulate", "2", "--workers", "2"]  # fmt: skip
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    for folder in (whole, interrupted):
        stop_after = {"student": 3} if folder is interrupted else {}

        def stop(self: Any, name: str, statistics: Any, at: Any = stop_after) -> None:
            if at.get(name) == statistics.step:
                raise KeyboardInterrupt

        monkeypatch.setattr("cukit.commands._distill_display.ProgressDisplay.step_done", stop)
        code = run(["distill", "-o", str(folder), "--text", str(text), *TINY, *options])
        assert code == (130 if folder is interrupted else 0)
    monkeypatch.undo()
    assert run(["distill", "-o", str(interrupted), "--resume"]) == 0
    assert model_bytes(interrupted) == model_bytes(whole)


@pytest.mark.parametrize("kill_at", [(0, 3), (1, 1), (1, 4), (2, 5)])
def test_a_resumed_run_equals_an_uninterrupted_run(
    kill_at: tuple[int, int], finished: Path, text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The run is interrupted in any phase, at a checkpoint or between two."""
    folder = tmp_path / "run"
    phase, step = MODELS[kill_at[0]], kill_at[1]

    class Killed(Exception):  # noqa: N818
        pass

    def kill(self: Any, name: str, statistics: Any) -> None:
        if name == phase and statistics.step == step:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("cukit.commands._distill_display.ProgressDisplay.step_done", kill)
        with pytest.raises(Killed):
            run(["distill", "-o", str(folder), "--text", str(text), *TINY])
    assert not (folder / "report.json").exists()
    assert run(["distill", "-o", str(folder), "--resume"]) == 0
    assert model_bytes(folder) == model_bytes(finished)
    assert evaluations(folder) == evaluations(finished)
    assert (
        json.loads((folder / "report.json").read_text())["models"][phase]["history"]
        == (json.loads((finished / "report.json").read_text())["models"][phase]["history"])
    )


def start(folder: Path, text: Path, *more: str) -> subprocess.Popen[str]:
    arguments = ["distill", "-o", str(folder), "--text", str(text), *TINY, *more]
    return subprocess.Popen(
        [sys.executable, "-m", "cukit", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.005)


LONG = ("--teacher-steps", "150", "--checkpoint-every", "20")


def test_a_killed_process_resumes_from_its_checkpoint(text: Path, tmp_path: Path) -> None:
    """After SIGKILL, a resumed run ends with the results of an uninterrupted run."""
    folder = tmp_path / "killed"
    process = start(folder, text, *LONG)
    wait_for(folder / "checkpoint.safetensors", process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "teacher.safetensors").exists(), "killed too late to test anything"
    assert run(["distill", "-o", str(folder), "--resume"]) == 0
    whole = tmp_path / "whole"
    assert run(["distill", "-o", str(whole), "--text", str(text), *TINY, *LONG]) == 0
    assert model_bytes(folder) == model_bytes(whole)
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_ctrl_c_saves_a_checkpoint_and_reports_it(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    process = start(folder, text, "--teacher-steps", "100000", "--checkpoint-every", "20")
    wait_for(folder / "checkpoint.safetensors", process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.rstrip().endswith(f"continue with `cukit distill -o {folder} --resume`")
    assert "Traceback" not in output
    _, description = files.read_arrays(folder / "checkpoint.safetensors")
    assert description["phase"] == "teacher"
    assert description["step"] >= 20


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one-line error message of a rejected command."""
    capsys.readouterr()
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("cukit: ")
    return captured.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--student-hidden", "24"], "--student-hidden: must be a multiple of --head-dim"),
        (["--head-dim", "0"], "--head-dim: expected 1 or more"),
        (["--head-dim", "1", "--teacher-hidden", "3"], "head_dim"),
        (["--steps", "0"], "--steps"),
        (["--batch", "-3"], "--batch"),
        (["--workers", "0"], "--workers"),
        (["--workers", "3"], "--workers"),
        (["--alpha", "1.5"], "--alpha"),
        (["--temperature", "0"], "--temperature"),
        (["--lr", "nan"], "--lr"),
        (["--seed", "-1"], "--seed"),
        (["--dtype", "int4"], "dtype"),
        (["--device", "tpu"], "--device"),
        (["--pool", "jemalloc"], "--pool: expected cukit or cupy"),
        (["--quantize", "int2"], "--quantize: expected one of int8, int4, fp8"),
        (["--quantize", "fp8", "--quantize", "fp8"], "formats must differ"),
        (["--seq-len", "100000"], "too short for windows of 100000"),
        (["--resume", "--overwrite"], "exclude each other"),
        (["--steps", "many"], "--steps"),
    ],
)
def test_invalid_options_are_rejected(
    options: list[str], named: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    arguments = ["-o", str(folder), "--text", str(text), *TINY, *options]
    assert named in complaint(capsys, "distill", *arguments)
    assert not folder.exists()


def test_unusable_text_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.bin").write_bytes(b"a\0b" * 1000)
    for name, message in (
        ("absent.txt", "no such file"),
        ("short.txt", "too short"),
        ("empty.txt", "is empty"),
        ("binary.bin", "not a text file"),
    ):
        arguments = ["-o", str(tmp_path / "run"), "--text", str(tmp_path / name), *TINY]
        assert message in complaint(capsys, "distill", *arguments)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["a file", "below a file", "/proc/nowhere/run"])
def test_an_unwritable_folder_is_reported(
    place: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("precious")
    folder = {"below a file": tmp_path / "a file" / "run"}.get(place, tmp_path / place)
    message = complaint(capsys, "distill", "-o", str(folder), "--text", str(text), *TINY)
    assert str(folder) in message
    assert (tmp_path / "a file").read_text() == "precious"


def test_a_full_disk_is_reported_and_the_run_resumes(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    arguments = ["distill", "-o", str(folder), "--text", str(text), *TINY]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 1000))
        assert "are free" in complaint(capsys, *arguments)
        assert not folder.exists()

    real, calls = os.fsync, []

    def full_later(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 2:  # room for the settings and one checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_later)
        assert run(arguments) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert sorted(os.listdir(folder)) == ["checkpoint.safetensors", "settings.json"]
    assert run(["distill", "-o", str(folder), "--resume"]) == 0


def test_out_of_memory_is_reported(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> None:
        raise MemoryError("Unable to allocate 9 GiB")

    monkeypatch.setattr("cukit.distill.training.trainer.Trainer.train_step", refuse)
    arguments = ["distill", "-o", str(tmp_path / "run"), "--text", str(text), *TINY]
    assert run(arguments) == 2
    assert "a smaller --batch" in capsys.readouterr().err


def test_divergence_is_reported(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["distill", "-o", str(tmp_path / "run"), "--text", str(text), *TINY]
    assert run([*arguments, "--teacher-lr", "1e30"]) == 2
    assert "teacher: the loss is " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run" / "teacher.safetensors").exists()


def test_a_folder_with_a_run_is_not_overwritten(
    finished: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = model_bytes(folder)
    arguments = ["-o", str(folder), "--text", str(text), *TINY]
    capsys.readouterr()
    assert run(["distill", *arguments]) == 0  # the same run again: its result is shown
    shown = capsys.readouterr().out
    assert "This run is finished" in shown
    assert "bits per byte" in shown
    other = complaint(capsys, "distill", *arguments, "--seed", "3")
    assert "--resume continues it" in other
    assert model_bytes(folder) == before
    assert run(["distill", *arguments, "--overwrite", "--seed", "3"]) == 0
    assert model_bytes(folder) != before


def test_a_folder_in_use_is_rejected(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with exclusive(folder):
        message = complaint(capsys, "distill", "-o", str(folder), "--text", str(text), *TINY)
    assert "another run is writing there" in message
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["distill", "--temperature", "1e300"], "--temperature: expected 0.01 to 1000"),
        (["distill", "--text", os.devnull], "is a device or a pipe"),
        (["generate", "{model}", "--temperature", "nan"], "expected a finite number"),
        (["generate", "{model}", "--tokens", "100000000000"], "num_tokens must be an integer"),
    ],
)
def test_invalid_settings_are_rejected_before_the_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments, message
) -> None:
    filled = [argument.format(model=finished) for argument in arguments]
    place = ["-o", str(tmp_path / "run"), "--device", "cpu"] if "distill" in filled else []
    assert message in complaint(capsys, *filled, *place)


def test_the_error_for_utf_16_text_names_the_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a b.txt").write_text("hello", encoding="utf-16")
    message = complaint(capsys, "distill", "--text", str(tmp_path / "a b.txt"), "--device", "cpu")
    assert f"iconv -f UTF-16LE -t UTF-8 '{tmp_path}/a b.txt'" in message


def test_resuming_with_other_settings_or_text_is_rejected(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    resume = ["distill", "-o", str(folder), "--resume"]
    assert "other settings: --lr (" in complaint(capsys, *resume, "--lr", "0.5")
    (tmp_path / "other.txt").write_text("another text " * 100)
    other_text = str(tmp_path / "other.txt")
    assert "is not the one that the run started with" in complaint(
        capsys, *resume, "--text", other_text
    )
    assert "no run to resume" in complaint(
        capsys, "distill", "-o", str(tmp_path / "nothing"), "--resume"
    )
    assert model_bytes(folder) == model_bytes(finished)


def test_damaged_files_of_a_run_are_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    resume = ["distill", "-o", str(folder), "--resume"]
    student = folder / "student.safetensors"
    student.write_bytes(student.read_bytes()[:-4])
    assert "student.safetensors: not a readable" in complaint(capsys, *resume)
    student.unlink()
    (folder / "checkpoint.safetensors").write_bytes(b"nonsense")
    assert "checkpoint.safetensors: not a readable" in complaint(capsys, *resume)
    (folder / "settings.json").write_text("{")
    assert "settings.json: damaged" in complaint(capsys, *resume)


def test_generate_continues_a_prompt(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for target, more in (
        (finished / "student.safetensors", []),
        (finished, []),
        (finished / "teacher.safetensors", []),
        (finished, ["--seed", "5"]),
    ):
        capsys.readouterr()
        arguments = ["generate", str(target), "--prompt", "the ", "--tokens", "30", *more]
        assert run([*arguments, "--device", "cpu"]) == 0
        outputs.append(capsys.readouterr().out)
    assert all(output.startswith("the ") for output in outputs)
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) == 3


def test_generate_rejects_invalid_input(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes((finished / "student.safetensors").read_bytes()[:50])
    for arguments, message in (
        ([str(tmp_path / "absent")], "no such file"),
        ([str(broken)], "not a readable safetensors file"),
        ([str(finished), "--prompt", ""], "--prompt"),
        ([str(finished), "--tokens", "-1"], "num_tokens"),
        ([str(finished), "--temperature", "-1"], "temperature"),
        ([str(finished), "--top-k", "0"], "top_k"),
        ([str(finished), "--seed", "-1"], "--seed"),
    ):
        assert message in complaint(capsys, "generate", *arguments, "--device", "cpu")
