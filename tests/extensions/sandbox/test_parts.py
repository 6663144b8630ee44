"""The parts of the local sandboxes that need none: names, paths, users, control groups, folders, meters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.extensions.sandbox import bubblewrap, call, cgroups
from asyncrl.extensions.sandbox.call import Meter
from asyncrl.extensions.sandbox.cgroups import Bases, ControlGroup, Marker, bases, started
from asyncrl.extensions.sandbox.protections import NAMES, Kind, in_force
from asyncrl.extensions.sandbox.protocol import Limits, Outcome
from asyncrl.extensions.sandbox.start import guest_uid
from asyncrl.extensions.sandbox.worker import Folder, parts
from tests.extensions.sandbox.machine import settings

# --- the protocol --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*vars(Limits())])
def test_limit_that_allows_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"Limits.{name} must be above 0, but is 0"):
        Limits(**{name: 0})


def test_outcome_is_ok_only_with_exit_status_zero() -> None:
    assert Outcome("exited", 0, b"a\xff", b"", 0.1).ok
    assert Outcome("exited", 0, b"a\xff", b"", 0.1).text == "a�"
    assert not Outcome("exited", 1, b"", b"", 0.1).ok
    assert not Outcome("timeout", None, b"", b"", 0.1).ok


# --- whose a leftover is -------------------------------------------------------------------------------------


def test_marker_finds_its_process_again_and_nobody_elses() -> None:
    mine = Marker.mine()
    assert Marker.of(mine.name(7)) == mine
    assert mine.alive()
    assert not Marker(mine.namespace, mine.pid, mine.started + 1).alive()  # the pid was given to another
    assert [Marker.of(name) for name in ("asyncrl-sandbox-1-2-3", "asyncrl-sandbox-a-2-3-4", "x" + mine.name(1))] == [
        None
    ] * 3


def test_process_of_another_pid_namespace_is_left_in_peace() -> None:
    mine = Marker.mine()
    assert Marker(mine.namespace + 1, 2**22 - 1, 1).alive()
    assert not Marker(mine.namespace, 2**22 - 1, 1).alive()


def test_process_that_has_ended_and_is_not_reaped_is_dead() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.read()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started(process.pid) == -1


# --- users ---------------------------------------------------------------------------------------------------


def maps(folder: Path, text: str) -> Path:
    for name in ("uid_map", "gid_map"):
        folder.joinpath(name).write_text(text)
    return folder


def test_sandboxes_have_users_that_nobody_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    found, everybody = [], maps(tmp_path, "0 0 4294967295\n")
    for pid in (1234, 1235):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        found += [guest_uid(number, everybody) for number in range(1000)]
    uids = [uid for uid in found if uid is not None]
    assert len({*uids}) == 2000
    assert 2_000_000_000 < min(uids) < max(uids) < 2_100_000_000


def test_users_of_a_container_stay_within_its_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "getpid", lambda: 4_000_000)
    text = "         0       1000          1\n         1     100000      65536\n"
    inside = maps(tmp_path, text)
    uids = [uid for number in range(5000) if (uid := guest_uid(number, inside)) is not None]
    assert len(uids) == 5000
    assert 1 + 65536 // 2 <= min(uids) < max(uids) < 1 + 65536
    assert guest_uid(1, maps(tmp_path, "0 1000 1\n")) is None  # root of a namespace with one user
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert guest_uid(1, maps(tmp_path, text)) is None


# --- control groups ------------------------------------------------------------------------------------------

V1 = """\
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 /docker/abc /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
22 27 0:21 / /proc rw,relatime - proc proc rw
"""
V2 = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"


def proc(folder: Path, mountinfo: str, cgroup: str) -> Path:
    folder.joinpath("mountinfo").write_text(mountinfo)
    folder.joinpath("cgroup").write_text(cgroup)
    return folder


def test_groups_are_below_our_own_in_each_v1_hierarchy(tmp_path: Path) -> None:
    lines = "8:pids:/docker/abc/x\n4:memory:/a/b\n2:cpu,cpuacct:/\n1:name=systemd:/elsewhere\n"
    assert bases(proc(tmp_path, V1, lines)) == Bases(
        {
            "cpuacct": Path("/sys/fs/cgroup/cpu,cpuacct"),
            "memory": Path("/sys/fs/cgroup/memory/a/b"),
            "pids": Path("/sys/fs/cgroup/pids/x"),
        }
    )


def test_hierarchy_without_our_own_group_is_left_out(tmp_path: Path) -> None:
    assert "pids" not in bases(proc(tmp_path, V1, "8:pids:/docker/other\n")).version_1


def test_version_2_is_tried_in_our_own_group_and_beside_it(tmp_path: Path) -> None:
    root = Path("/sys/fs/cgroup")
    assert bases(proc(tmp_path, V2, "0::/user.slice/run.scope\n")).version_2 == (
        root / "user.slice/run.scope",
        root / "user.slice",
    )
    assert bases(proc(tmp_path, V2, "0::/\n")).version_2 == (root,)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Groups are folders of files that appear with them, as the kernel makes them: by parent's name, their files."""
    files: dict[str, list[str]] = {}
    mkdir, rmdir = Path.mkdir, Path.rmdir

    def make(folder: Path) -> None:
        mkdir(folder)
        for name in files.get(folder.parent.name, []):
            text = "oom_kill 3\n" if "memory" in name else "usage_usec 2500000\n"
            folder.joinpath(name).write_text("" if name == "cgroup.procs" else text)

    def remove(folder: Path) -> None:
        for file in list(folder.glob("*")):
            file.unlink()
        rmdir(folder)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    return files


MEMORY_2 = ["cgroup.procs", "memory.max", "memory.events", "cpu.stat"]


def test_group_of_version_2_bounds_memory_swap_and_processes(kernel: dict[str, list[str]], tmp_path: Path) -> None:
    kernel[tmp_path.name] = [*MEMORY_2, "memory.swap.max", "pids.max"]
    group = ControlGroup(Bases(version_2=(tmp_path,)), "g", memory=4096, processes=7)
    assert group.bounds == {"memory", "pids"}
    written = {name: (tmp_path / "g" / name).read_text()[:4] for name in ("memory.max", "memory.swap.max", "pids.max")}
    assert written == {"memory.max": "4096", "memory.swap.max": "0om_", "pids.max": "7sag"}  # what follows was there
    assert group.oom is not None
    assert group.cpu is not None
    assert (call._ooms(group.oom), call._cpu_of(group.cpu)) == (3, 2.5)
    group.release()
    assert group.remove()
    assert list(tmp_path.iterdir()) == []


def test_group_without_controller_leaves_no_folder(kernel: dict[str, list[str]], tmp_path: Path) -> None:
    scope = tmp_path / "scope"
    os.mkdir(scope)
    kernel["scope"] = ["cgroup.procs"]
    kernel[tmp_path.name] = MEMORY_2  # without swap there is no file for it
    group = ControlGroup(Bases(version_2=(scope, tmp_path)), "g", memory=4096, processes=7)
    assert group.bounds == {"memory"}
    assert list(scope.iterdir()) == []
    assert (tmp_path / "g").is_dir()
    group.release()


def test_without_groups_nothing_is_bounded_or_raised(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    group = ControlGroup(Bases({"memory": missing}, (missing,)), "g", memory=1, processes=1)
    assert (group.bounds, group.descriptors, group.remove()) == (set(), [], True)


def test_sweep_removes_groups_of_the_dead_and_no_other(kernel: dict[str, list[str]], tmp_path: Path) -> None:
    mine = Marker.mine()
    dead = Marker(mine.namespace, mine.pid, mine.started + 1)
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as left:
        for name in (mine.name(1), dead.name(1), "somebody-elses"):
            os.mkdir(tmp_path / name)
        tmp_path.joinpath(dead.name(1), "cgroup.procs").write_text(f"{left.pid}\n")
        cgroups.sweep(Bases(version_2=(tmp_path,)))
        assert left.wait(50) == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} == {mine.name(1), "somebody-elses"}


# --- the folder ----------------------------------------------------------------------------------------------

ESCAPES = ["/etc/passwd", "../x", "a/../../x", "a/..", "", ".", "a/", "a\0b"]


@pytest.mark.parametrize("path", ESCAPES)
def test_path_that_leaves_the_folder_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a relative path of a file inside"):
        parts(path)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    tmp_path.joinpath("secret").write_bytes(b"secret")
    tmp_path.joinpath("box").mkdir()
    return Folder(str(tmp_path / "box"), None)


def test_files_come_back_and_are_replaced(folder: Folder) -> None:
    for data in (b"", b"\0\xff" * 1000, b"short"):
        folder.write("./a//b/c.bin", data)
        assert folder.read("a/b/c.bin", 2000) == data


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "inside", "missing"])
def test_links_are_not_followed_wherever_they_lead(folder: Folder, tmp_path: Path, target: str) -> None:
    box = tmp_path / "box"
    box.joinpath("inside").write_bytes(b"inside")
    box.joinpath("link").symlink_to(target)
    box.joinpath("up").symlink_to("..")
    for path in ("link", "up/secret"):
        with pytest.raises(ValueError, match="goes through a link"):
            folder.read(path, 100)
        with pytest.raises(ValueError, match="goes through a link"):
            folder.write(path, b"changed")
    assert tmp_path.joinpath("secret").read_bytes() == b"secret"
    assert box.joinpath("inside").read_bytes() == b"inside"
    assert not box.joinpath("missing").exists()


def test_hard_link_is_replaced_and_what_it_shared_stays(folder: Folder, tmp_path: Path) -> None:
    os.link(tmp_path / "secret", tmp_path / "box" / "hard")
    folder.write("hard", b"changed")
    assert tmp_path.joinpath("secret").read_bytes() == b"secret"


def test_folder_that_was_moved_away_stays_the_folder(folder: Folder, tmp_path: Path) -> None:
    tmp_path.joinpath("box").rename(tmp_path / "moved")
    tmp_path.joinpath("box").symlink_to("/etc")
    folder.write("passwd", b"mine")
    assert tmp_path.joinpath("moved", "passwd").read_bytes() == b"mine"


def test_what_is_no_file_is_refused_and_not_waited_for(folder: Folder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "box" / "pipe")
    with pytest.raises(ValueError, match="'pipe' is not a regular file"):
        folder.read("pipe", 100)
    folder.write("pipe", b"replaced")
    assert folder.read("pipe", 100) == b"replaced"
    with pytest.raises(ValueError, match="has 8 bytes, more than the limit of 7"):
        folder.read("pipe", 7)


def test_what_a_program_can_have_brought_about_is_an_os_error(folder: Folder, tmp_path: Path) -> None:
    folder.write("file", b"")
    tmp_path.joinpath("box", "folder").mkdir()
    with pytest.raises(FileNotFoundError):
        folder.read("missing", 100)
    with pytest.raises(IsADirectoryError):
        folder.read("folder", 100)
    with pytest.raises(IsADirectoryError):
        folder.write("folder", b"")
    with pytest.raises(NotADirectoryError):
        folder.write("file/below", b"")


# --- the meter -----------------------------------------------------------------------------------------------

LIMITS = {"cpu_seconds": 1e9, "memory_mb": 1 << 40, "processes": 100, "disk_mb": 1}


def meter(monkeypatch: pytest.MonkeyPatch, pids: Sequence[int], alone: bool = False, **limits: float) -> Meter:
    monkeypatch.setattr(call, "others", lambda alone: pids)
    return Meter(settings(limits={**LIMITS, **limits}, alone=alone))


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        ({}, None),
        ({"memory_mb": 1}, "memory"),
        ({"processes": 1}, "processes"),
        ({"cpu_seconds": 0.0}, "cpu"),
    ],
)
def test_meter_tells_the_limit_that_living_processes_break(
    limits: dict[str, float], broken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert meter(monkeypatch, [os.getpid(), 2**22 - 1], **limits).broken() == broken


def test_memory_that_processes_share_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    reader, writer = os.pipe()
    pids = [os.getpid()]
    for _ in range(8):
        if not (pid := os.fork()):
            os.read(reader, 1)  # until the writer's end is closed
            os._exit(0)
        pids.append(pid)
    try:
        assert meter(monkeypatch, pids, memory_mb=4 * resident >> 20).broken() is None
    finally:
        os.write(writer, b"x" * 8)
        for pid in pids[1:]:
            os.waitpid(pid, 0)


def test_files_are_counted_where_the_kernel_counts_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, broken in ((256, None), (257, "disk")):
        found = SimpleNamespace(f_files=1000, f_ffree=1000 - files)
        monkeypatch.setattr(os, "statvfs", lambda folder, found=found: found)
        assert meter(monkeypatch, [], alone=True).broken() == broken
        assert meter(monkeypatch, []).broken() is None


# --- what is seen, and what is in force ----------------------------------------------------------------------


def test_guests_see_our_python_and_no_environment_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-guests")
    shown = bubblewrap.shown()
    for path in (sys.prefix, sys.base_prefix):
        assert any(os.path.realpath(path).startswith(seen) for seen in shown)
    assert not {"/", "/home", "/root", "/etc", "/tmp", os.path.expanduser("~"), os.getcwd()} & set(shown)
    assert "not-for-guests" not in str(bubblewrap.environment())
    assert not any(bubblewrap.folders_above(path) & set(shown) for path in shown)


def test_python_below_tmp_is_shown_and_tmp_stays_a_link() -> None:
    assert bubblewrap.links()["/tmp"] == "/sandbox/tmp"
    assert bubblewrap.nested(["/usr", "/opt/tmp"]) == []
    deep, direct, shared = bubblewrap.nested(["/usr", "/tmp/checkout/.venv", "/tmp/venv", "/dev/shm/a/b"])
    assert (deep.target, deep.top) == ("/sandbox/tmp/checkout/.venv", "/sandbox/tmp/checkout")
    assert (direct.target, direct.top) == ("/sandbox/tmp/venv", "/sandbox/tmp/venv")
    assert (shared.source, shared.top) == ("/dev/shm/a/b", "/sandbox/shm/a")


@pytest.mark.parametrize("kind", ["bubblewrap", "unsafe"])
@pytest.mark.parametrize("own_uid", [True, False])
@pytest.mark.parametrize("bounds", [[], ["memory", "pids"]])
@pytest.mark.parametrize("unfiltered", ["", "libseccomp is missing"])
def test_every_protection_either_holds_or_is_said_to_lack(
    kind: Kind, own_uid: bool, bounds: list[str], unfiltered: str
) -> None:
    found = in_force(kind, own_uid=own_uid, counted=own_uid, bounds=bounds, unfiltered=unfiltered)
    assert sorted([*found.holds, *found.lacks]) == sorted(NAMES)
    assert found.missing(NAMES) == [name for name in NAMES if name in found.lacks]
    assert found.isolated == (kind == "bubblewrap")
    assert unfiltered in str(found)
    with pytest.raises(ValueError, match="unknown protections"):
        found.missing(["nework"])
    if kind == "unsafe" and not own_uid:
        assert {"secrets", "files", "signals"} <= found.lacks.keys()


def test_virtual_environment_comes_first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, unpacked = tmp_path / "bin" / "bwrap", tmp_path / "venv" / bubblewrap.UNPACKED
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", str(elsewhere.parent))
    assert bubblewrap.find() is None
    for program, found in (
        (elsewhere, {}),
        (unpacked, {"LD_LIBRARY_PATH": str(tmp_path / "venv/bubblewrap/lib/x-linux-gnu")}),
    ):
        program.parent.mkdir(parents=True)
        program.write_text("")
        program.chmod(0o755)
        tmp_path.joinpath("venv/bubblewrap/lib/x-linux-gnu").mkdir(parents=True, exist_ok=True)
        assert bubblewrap.find() == (str(program), found)
