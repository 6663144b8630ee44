"""Locks pin everything and no CUDA, pyproject.toml agrees with them, the wheel carries conf/, recipes and the lock."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import asyncrl
from asyncrl import __version__
from asyncrl.extensions.install import command as install
from tests.pins import ROOT, lock, pins, project

BESIDE = ("asyncrl_convert", "asyncrl_view")
"""Packages of the wheel beside asyncrl."""
LOCKS = ["cpu.txt", "dev.txt", "docs.txt"]
SCRIPTS = ("lock.sh", "container_check.py", "clean_root.py", "debian_tools.py")
ELSEWHERE = ("../pyproject.toml", "../Dockerfile", *(f"../scripts/{name}" for name in SCRIPTS))


@pytest.mark.parametrize("name", LOCKS)
def test_lock_pins_every_line_exactly_and_without_cuda(name):
    forbidden = ("nvidia-", "cuda-", "triton", "torchvision", "sglang-kernel", "flashinfer")
    assert not [package for package in lock(name) if package.startswith(forbidden)]


def test_locks_do_not_overlap():
    assert not lock("cpu.txt").keys() & lock("dev.txt").keys()
    assert not (lock("cpu.txt") | lock("dev.txt")).keys() & lock("docs.txt").keys()


def test_tests_of_transformer_engine_use_the_versions_of_the_gpu_lock():
    assert lock("te.txt").items() <= lock("gpu.txt").items()


@pytest.mark.parametrize("name", [*LOCKS, "gpu.txt", "te.txt", *ELSEWHERE])
def test_no_index_or_machine_path_is_written_down(name):
    text = (ROOT / "requirements" / name).read_text()
    assert not re.search(r"https?://|file:|^--|/home/|/root/|/work/", text, re.MULTILINE)


def test_pyproject_agrees_with_the_locks():
    table = project()["project"]
    locked = lock("cpu.txt") | lock("dev.txt") | lock("docs.txt")
    shared = pins(table["dependencies"]) | pins(table["optional-dependencies"]["dev"])
    shared |= pins([line.replace("[python]", "") for line in table["optional-dependencies"]["docs"]])
    assert {name: locked.get(name) for name in shared} == shared
    assert pins(table["optional-dependencies"]["gpu"])["sglang"] == locked["sglang"]
    assert pins(project()["build-system"]["requires"])["hatchling"] == locked["hatchling"]


def test_every_python_that_is_declared_is_one_that_the_locks_are_checked_for():
    declared = [line.split()[-1] for line in project()["project"]["classifiers"] if "Python :: 3." in line]
    (checked,) = re.findall(r"^PYTHONS=\((.*?)\)", (ROOT / "scripts" / "lock.sh").read_text(), re.MULTILINE)
    assert declared == checked.split()
    assert project()["project"]["requires-python"] == f">={declared[0]}"


def test_make_refuses_another_python_than_the_one_of_an_environment_that_is_there(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for path, version in (
        (python, "3.11.2"),
        (tmp_path / "python-new", "3.12.1"),
        (tmp_path / "python-same", "3.11.2"),
    ):
        path.write_text(f"#!/bin/sh\necho Python {version}\n")
        path.chmod(0o755)

    def make(**environment):
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS")}
        command = ["make", "interpreter"]
        done = subprocess.run(
            command, cwd=tmp_path, env=clean | environment, capture_output=True, text=True, check=False
        )
        return done.returncode == 0, done.stderr

    assert make() == (True, "")
    assert make(PYTHON="./python-same") == (True, "")
    fine, said = make(PYTHON="./python-new")
    assert not fine
    assert ".venv has Python 3.11.2, and PYTHON=./python-new is Python 3.12.1: unset PYTHON, or rename .venv" in said


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_carries_conf_recipes_lock_and_commands(wheel):
    assert wheel.name.startswith(f"asyncrl-{__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    conf = {f"asyncrl/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    recipes = {
        f"asyncrl_{path.relative_to(ROOT)}"
        for path in (ROOT / "recipes").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    beside = {str(path.relative_to(ROOT)) for name in BESIDE for path in (ROOT / name).rglob("*.*")}
    assert {name for name in beside if "__pycache__" not in name and (ROOT / name).is_file()} <= names
    assert {"asyncrl/conf/train.yaml", "asyncrl/requirements/cpu.txt", "asyncrl_recipes/__init__.py"} <= names
    assert conf | recipes <= names
    assert not [name for name in names if name.startswith(("tests/", "conf/", "recipes/")) or "__pycache__" in name]
    assert "asyncrl-train = asyncrl.launch.main:main" in entry_points
    assert "asyncrl-convert = asyncrl_convert.cli:main" in entry_points
    assert "asyncrl-watch = asyncrl_view.watch.cli:main" in entry_points
    assert "asyncrl-install = asyncrl.extensions.install.command:main" in entry_points


def test_sdist_carries_what_the_wheel_is_built_from(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(*tmp_path.glob("*.tar.gz")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = [
        path
        for top in ("conf", "recipes", *BESIDE)
        for path in (ROOT / top).rglob("*.*")
        if "__pycache__" not in path.parts
    ]
    assert {str(path.relative_to(ROOT)) for path in files if path.is_file()} <= names


COMPOSE = """
import json, re, sys
from asyncrl.config import load
from asyncrl.imports import load as imported
from asyncrl.launch.compose import compose
from asyncrl.launch.main import CONF

found = {}
for name in sys.argv[1].split(","):
    sys.argv[1:] = [f"experiment={name}", "model.path=/models/m", "task.train_file=/rows.jsonl"]
    (composed,) = compose(CONF)
    config = load(composed.values)
    paths = re.findall(r"asyncrl\\w*(?:\\.\\w+)+:\\w+", json.dumps(composed.values))
    modules = [imported(path, name).__module__ for path in paths]
    found[name] = {"name": config.run.name, "modules": {module: sys.modules[module].__file__ for module in modules}}
print(json.dumps(found))
"""


@pytest.mark.parametrize("installation", ["wheel", "clone"])
def test_experiments_compose_where_they_are_installed(installation, wheel, tmp_path):
    """The wheel is alone in its folder: neither conf/ nor recipes/ of the clone is in reach. That the experiments in
    the clone's conf/ compose is tested in test_config.py, and the wheel has the same files, so that two of them show
    that they are found there."""
    target = tmp_path if installation == "wheel" else ROOT
    if installation == "wheel":
        pip = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel)]
        subprocess.run([sys.executable, "-m", "pip", *pip], check=True)
    files = list((ROOT / "recipes").rglob("experiment/*.yaml"))
    if installation == "wheel":
        files += [ROOT / "conf" / "experiment" / f"{name}.yaml" for name in ("default", "tiny")]
    names = sorted(file.stem for file in files)
    command = [sys.executable, "-c", COMPOSE, ",".join(names)]
    environment = {**os.environ, "PYTHONPATH": str(target)}  # before what .venv has installed
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: one["name"] for name, one in found.items()} == {name: name for name in names}
    modules = {module: file for one in found.values() for module, file in one["modules"].items()}
    recipes = {file.parents[2].name for file in files if file.is_relative_to(ROOT / "recipes")}
    assert recipes == {module.split(".")[1] for module in modules if module.startswith("asyncrl_recipes.")} != set()
    assert [file for file in modules.values() if not Path(file).is_relative_to(target)] == []


def test_clone_has_the_name_of_the_installed_package_for_its_recipes():
    """So that import paths are the same in an editable install."""
    assert (ROOT / "asyncrl_recipes").samefile(ROOT / "recipes")


def test_install_dry_run_prints_the_pip_command(capsys):
    assert install.main(["--cpu", "--dry-run", "--no-cache-dir"]) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[:6] == [sys.executable, "-m", "pip", "install", "--no-deps", "-r"]
    assert Path(command[6]).samefile(ROOT / "requirements" / "cpu.txt")
    assert command[7:] == ["--no-cache-dir"]


def test_install_on_a_gpu_machine_names_the_gpu_extra(monkeypatch, capsys):
    monkeypatch.setattr(install, "has_gpu", lambda: True)
    assert install.main(["--dry-run"]) == 1
    assert 'pip install "asyncrl[gpu]"' in capsys.readouterr().err


def test_install_failure_shows_the_command(monkeypatch, capfd):
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    assert install.main(["--no-such-option-of-pip"]) == 1
    assert "--no-such-option-of-pip" in capfd.readouterr().err.splitlines()[-1]


def test_install_tells_a_torch_without_its_libraries_from_a_failed_pip(monkeypatch, capsys):
    def run(command, **_):
        return subprocess.CompletedProcess(command, returncode=0 if "pip" in command else 1)

    monkeypatch.setattr(install.subprocess, "run", run)
    assert install.main(["--cpu"]) == 1
    assert "torch is installed but does not import" in capsys.readouterr().err


def test_install_removes_a_replaced_package_before_its_successor_comes(monkeypatch):
    commands: list[list[str]] = []

    def note(command, **_):
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(install.subprocess, "run", note)
    monkeypatch.setattr(install, "_installed", lambda name: True)
    assert install.main(["--cpu"]) == 0
    changes = [command for command in commands if command[:2] == ["-m", "pip"] and "--dry-run" not in command]
    assert changes[0] == ["-m", "pip", "uninstall", "--quiet", "--yes", "sglang-router"]
    assert changes[1][:3] == ["-m", "pip", "install"]
    assert not set(install.REPLACED) & lock("cpu.txt").keys()


BUILT = f"cp{sys.version_info[0]}{sys.version_info[1]}"
TORCH_TAG = f"{BUILT}-{BUILT}-manylinux_2_28_{platform.machine()}"


def write_wheel(
    folder: Path, name: str, version: str, *, tag: str = "py3-none-any", code: str, requires: str = ""
) -> None:
    """Write a wheel that holds the module `name` with this code."""
    stem = f"{name}-{version}"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{stem}-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", code)
        file.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        file.writestr(f"{stem}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
        file.writestr(f"{stem}.dist-info/RECORD", "")


INSTALLER = ("__init__", "__main__", "command", "bundle")


@pytest.fixture(scope="module")
def bare_environment(tmp_path_factory) -> Path:
    """A Python with pip alone, and the modules of the installer beside locks that name torch only."""
    folder = tmp_path_factory.mktemp("bare")
    package = Path(asyncrl.__file__).parent
    for module in ("__init__.py", "extensions/__init__.py", *(f"extensions/install/{one}.py" for one in INSTALLER)):
        (folder / "asyncrl" / module).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / module, folder / "asyncrl" / module)
    (folder / "requirements").mkdir()
    shutil.copy(ROOT / "requirements" / "cuda.txt", folder / "requirements")
    (folder / "requirements" / "cpu.txt").write_text(f"torch=={lock('cpu.txt')['torch']}\n")
    venv.create(folder / "env", with_pip=True)
    return folder


@pytest.mark.parametrize("builds", [[""], ["", "+cu130", "+cpu", "+xpu"]], ids=["cuda alone", "cpu among others"])
def test_install_ends_with_a_torch_that_imports(builds, bare_environment, tmp_path):
    """PyPI has the CUDA build alone, whose import needs libraries of other packages. Where there is a CPU build it is
    taken, although pip orders others after it, and none of the libraries come."""
    pin = lock("cpu.txt")["torch"]
    libraries = [line.partition("==") for line in install.libraries()]
    modules = [name.replace("-", "_") for name, _, _ in libraries]
    assert len(modules) == len(install.LIBRARIES)  # the lock of the CUDA build pins each
    for module, (_, _, version) in zip(modules, libraries, strict=True):
        write_wheel(tmp_path, module, version, code="")
    for build in builds:
        code = f"build = {build!r}\n" + ("" if build == "+cpu" else f"import {', '.join(modules)}\n")
        needs = "" if build == "+cpu" else 'nvidia-nccl-cu13; platform_system == "Linux"'
        write_wheel(tmp_path, "torch", f"{pin}{build}", tag=TORCH_TAG, code=code, requires=needs)
    python = str(bare_environment / "env" / "bin" / "python")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    index = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "torch", *modules], env=clean, check=True)
    command = [python, "-m", "asyncrl.extensions.install", "--cpu", "--quiet"]
    done = subprocess.run(command, cwd=bare_environment, env=clean | index, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    chosen = subprocess.run(
        [python, "-c", "import torch; print(torch.build)"], capture_output=True, text=True, check=True
    )
    listed = subprocess.run(
        [python, "-m", "pip", "freeze"], env=clean, capture_output=True, text=True, check=True
    ).stdout
    has_cpu = "+cpu" in builds
    assert chosen.stdout.strip() == ("+cpu" if has_cpu else "")
    assert ("nvidia" in listed, "about 4 GB" in done.stderr) == (not has_cpu, not has_cpu)


def test_install_imports_only_the_standard_library():
    code = "import sys, asyncrl.extensions.install.command; print(*{name.split('.')[0] for name in sys.modules})"
    # -S keeps site-packages, and what editable installs import at start, out of the answer
    result = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) <= {*sys.stdlib_module_names, "__main__", "asyncrl"}
