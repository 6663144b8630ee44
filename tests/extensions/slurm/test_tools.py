"""scripts/debian_tools.py: Slurm and bubblewrap are unpacked with all that they need, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import debian_tools
from tests.extensions.slurm import lab

SIMULATION = """\
NOTE: This is only a simulation!
Inst libmunge2 (0.5.15-2+deb12u1 Debian:12.15/oldstable [amd64])
Inst libhwloc15 [2.8.0-1] (2.9.0-1 Debian:12.15/oldstable [amd64])
Inst slurmd (22.05.8-4+deb12u3 Debian:12.15/oldstable [amd64])
Conf slurmd (22.05.8-4+deb12u3 Debian:12.15/oldstable [amd64])
"""
APT_GET = """#!/bin/sh
case $1 in
install) echo 'Inst slurmd (1 Debian [amd64])';;
download) touch slurmd.deb;;
esac
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that come before the machine's."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(debian_tools, "installed", lambda tool: False)
    return folder


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_packages_are_downloaded_at_apts_version() -> None:
    expected = ["libmunge2=0.5.15-2+deb12u1", "libhwloc15=2.9.0-1", "slurmd=22.05.8-4+deb12u3"]
    assert debian_tools.to_install(SIMULATION) == expected


def test_libraries_are_found_whatever_the_architecture(tmp_path: Path) -> None:
    for name in ("usr/lib/aarch64-linux-gnu/slurm-wlm", "lib/aarch64-linux-gnu", "usr/lib/systemd"):
        (tmp_path / name).mkdir(parents=True)
    found = [str(path.relative_to(tmp_path)) for path in debian_tools.library_folders(tmp_path)]
    assert found == ["usr/lib/aarch64-linux-gnu", "lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu/slurm-wlm"]


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler here")
def test_program_without_its_library_is_found_out(tmp_path: Path) -> None:
    libraries, programs = tmp_path / "usr/lib/x-linux-gnu", tmp_path / "usr/sbin"
    for folder in (libraries, programs):
        folder.mkdir(parents=True)
    (tmp_path / "lib.c").write_text("int f(void) { return 0; }")
    (tmp_path / "main.c").write_text("int f(void); int main(void) { return f(); }")
    library = libraries / "libasked.so.1"
    soname = "-Wl,-soname,libasked.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", soname, tmp_path / "lib.c", "-o", library], check=True)
    subprocess.run(["cc", tmp_path / "main.c", library, "-o", programs / "slurmd"], check=True)
    program(programs / "a-script", "#!/bin/sh\n")
    assert debian_tools.unresolved(tmp_path) == []
    library.unlink()
    assert debian_tools.unresolved(tmp_path) == ["slurmd: libasked.so.1"]


def test_failure_leaves_no_folder_and_no_slurm(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "venv with a space" / "slurm"
    program(path / "apt-get", APT_GET)
    program(path / "dpkg", "#!/bin/sh\necho 'dpkg-deb: error: it is no archive' >&2; exit 2\n")
    debian_tools.main(["slurm", str(folder)])
    assert list(folder.parent.iterdir()) == []
    assert (
        "its tests are skipped: dpkg cannot unpack it.\n    dpkg-deb: error: it is no archive"
        in capsys.readouterr().out
    )

    program(path / "apt-get", "#!/bin/sh\necho 'E: Unable to locate package slurmctld' >&2; exit 100\n")
    debian_tools.main(["slurm", str(folder)])
    assert "Run `apt-get update` as root.\n    E: Unable to locate package slurmctld" in capsys.readouterr().out

    debian_tools.main(["bubblewrap", str(folder)])
    assert "No bubblewrap here, so there are no sandboxes and their tests are skipped" in capsys.readouterr().out

    monkeypatch.setattr(lab, "UNPACKED", folder)
    (folder / "usr/sbin").mkdir(parents=True)  # as an interrupted `make slurm` of old left it
    program(folder / "usr/sbin/slurmctld", "")
    assert "`make slurm` unpacks it" in lab.missing()


def test_partial_folder_is_replaced_and_a_whole_one_stays(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "slurm"
    (folder / "usr/sbin").mkdir(parents=True)
    (folder / "usr/sbin/old").touch()
    program(path / "apt-get", APT_GET)
    program(path / "dpkg", '#!/bin/sh\nmkdir -p "$3/usr/sbin"; touch "$3/usr/sbin/slurmd"\n')
    debian_tools.main(["slurm", str(folder)])
    assert debian_tools.complete(folder)
    assert sorted(item.name for item in (folder / "usr/sbin").iterdir()) == ["slurmd"]
    assert sorted(item.name for item in folder.parent.iterdir()) == ["programs", "slurm"]
    program(path / "apt-get", "#!/bin/sh\nexit 1\n")
    debian_tools.main(["slurm", str(folder)])
    assert debian_tools.complete(folder)


assert sys.platform == "linux"
