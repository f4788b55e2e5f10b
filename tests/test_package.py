"""The wheel: built, installed in an environment without this tree, and used."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import cukit

ROOT = Path(__file__).parents[1]

USE_IT = """
import cukit
from cukit.core.source import closure_hash, kernels_root, read_source
assert "__global__" in read_source("layers/rms_norm.cu")
print(cukit.__version__)
print(cukit.__file__)
print(kernels_root())
print(closure_hash("layers/rms_norm.cu"))
"""


def run(*command: object, cwd: Path) -> str:
    result = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT,
        cwd=folder,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its dependencies, but not this tree.

    A `.pth` file adds the dependencies' folder to the path. Python does not process `.pth` files in
    that folder, so an editable install of cukit is not visible.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    python = folder / "bin" / "python"
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    )
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
        "--no-index", wheel, cwd=folder,
    )  # fmt: skip
    return python


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"cukit", f"cukit-{cukit.__version__}.dist-info"}
    for source in (ROOT / "kernels_cu").rglob("*.cu*"):
        assert f"cukit/kernels_cu/{source.relative_to(ROOT / 'kernels_cu').as_posix()}" in names
    assert "cukit/py.typed" in names
    assert "cukit/analyzer/report/templates/report.html" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_an_installed_wheel_finds_its_kernels(clean_python: Path, tmp_path: Path) -> None:
    version, file, kernels, _ = run(clean_python, "-c", USE_IT, cwd=tmp_path).splitlines()
    site = clean_python.parents[1]
    assert version == cukit.__version__
    assert Path(file).is_relative_to(site)
    assert Path(kernels).is_relative_to(site)


def test_wheel_and_tree_share_compiled_kernels(clean_python: Path, tmp_path: Path) -> None:
    """The cache key depends on the contents of the sources, not on their location."""
    from cukit.core.source import closure_hash

    installed = run(clean_python, "-c", USE_IT, cwd=tmp_path).splitlines()[-1]
    assert installed == closure_hash("layers/rms_norm.cu")


def test_an_installed_wheel_brings_the_command(clean_python: Path, tmp_path: Path) -> None:
    command = clean_python.parent / "cukit"
    assert run(command, "--version", cwd=tmp_path).strip() == cukit.__version__
    assert "rms_norm" in run(command, "list", cwd=tmp_path)
