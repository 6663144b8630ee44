"""asyncrl-install takes the locks, the CPU build of torch where there is one, and says what went wrong."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import asyncrl
from asyncrl.extensions.install import command as install
from tests.pins import ROOT, lock


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


def test_torch_without_libraries_is_told_from_a_failed_pip(monkeypatch, capsys):
    def run(command, **_):
        return subprocess.CompletedProcess(command, returncode=0 if "pip" in command else 1)

    monkeypatch.setattr(install.subprocess, "run", run)
    assert install.main(["--cpu"]) == 1
    assert "torch is installed but does not import" in capsys.readouterr().err


def test_replaced_package_is_removed_before_its_successor(monkeypatch):
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
