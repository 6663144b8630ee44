"""scripts/fresh.py and scripts/clean_root.py: what is read from the README and from pip's settings; what is removed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import clean_root, fresh
from tests.pins import ROOT


def test_system_packages_are_those_of_the_readme() -> None:
    words = fresh.prerequisites((ROOT / "README.md").read_text())
    assert words[:3] == ["apt-get", "install", "--no-install-recommends"]
    assert {"git", "make", "python3.11-venv"} <= set(words[3:])
    assert fresh.prerequisites("text\nsudo apt-get install git # once\n") == ["apt-get", "install", "git"]
    with pytest.raises(SystemExit, match="has 2"):
        fresh.prerequisites("apt-get install a\napt-get install b\n")


def test_readme_has_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line.split()[1] for line in lines if line.startswith(("make run", "make test"))][:2] == list(fresh.COMMANDS)


def test_variants_have_a_space_or_tmp_in_their_path() -> None:
    assert fresh.VARIANTS["root"].checkout.startswith("/tmp/")
    assert " " in fresh.VARIANTS["user"].checkout
    assert fresh.VARIANTS["user"].uid


def test_both_machines_and_both_commands_unless_told_otherwise() -> None:
    options = fresh.parsed([])
    assert (options.variant, options.command, options.bind, options.instead) == (None, None, [], None)
    options = fresh.parsed(["--variant", "user", "--command", "test", "--bind", "/a", "--bind", "/b"])
    assert (options.variant, options.command, options.bind) == (["user"], ["test"], ["/a", "/b"])


def test_local_indexes_of_pip_must_be_bound(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nfind-links = /srv/wheels\ncert = /etc/ssl/x.crt\n"
        "extra-index-url = file:///srv/a%20b/simple https://index.example/simple\n[install]\nconstraint=/etc/xdg/pip/c\n"
    )
    variables = {"PIP_FIND_LINKS": "/srv/more", "PIP_DEFAULT_TIMEOUT": "60"}
    places = fresh.local_places(fresh.pip_values([tmp_path, tmp_path / "absent"], variables))
    assert places == {"/srv/wheels", "/srv/a b/simple", "/srv/more", "/etc/xdg/pip/c"}
    assert fresh.unseen(places, ["/srv/wheels", "/srv/a b", "/etc/xdg/pip"]) == ["/srv/more"]


def test_environment_is_a_login_with_the_package_index() -> None:
    variables = {"PIP_INDEX_URL": "x", "https_proxy": "y", "NO_PROXY": "z", "PYTHONPATH": "no", "LD_LIBRARY_PATH": "no"}
    assert clean_root.index_variables(variables).keys() == {"PIP_INDEX_URL", "https_proxy", "NO_PROXY"}
    assert "sbin" not in fresh.environment(fresh.VARIANTS["user"])["PATH"]
    assert fresh.environment(fresh.VARIANTS["root"])["HOME"] == "/root"


def test_bundle_is_the_commit_and_not_the_working_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository, clone = tmp_path / "a repository", tmp_path / "clone"
    git = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", "init", "--quiet", repository], check=True)
    (repository / "kept").write_text("committed")
    subprocess.run([*git, "add", "kept"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "x"], check=True)
    (repository / "kept").write_text("changed")
    monkeypatch.setattr(fresh, "ROOT", repository)
    commit = fresh.make_bundle(tmp_path / "bundle")
    subprocess.run(["git", "clone", "--quiet", tmp_path / "bundle", clone], check=True)
    head = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert head.strip() == commit
    assert (clone / "kept").read_text() == "committed"


def test_folder_that_is_still_written_to_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "roots"
    folder.mkdir()
    errors, rmtree = [OSError(errno.ENOTEMPTY, "a process wrote to it")] * 2, shutil.rmtree

    def remove(path: Path) -> None:
        if errors:
            raise errors.pop()
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", remove)
    clean_root.remove(folder)
    assert not folder.exists()
    errors.append(OSError(errno.ENOTEMPTY, "a process wrote to it"))
    with pytest.raises(OSError, match="wrote to it"):
        clean_root.remove(folder, seconds=-1)


def test_folder_with_a_mount_in_it_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "roots"
    (folder / "bound").mkdir(parents=True)
    (folder / "bound" / "of the machine").touch()
    table = f"1 2 3:4 / {folder}/bound rw - ext4 /dev/x rw\n"
    monkeypatch.setattr(Path, "read_text", lambda self, *_: table)
    with pytest.raises(SystemExit, match="is mounted there"):
        clean_root.remove(folder)
    assert (folder / "bound" / "of the machine").exists()


# --- real roots: this machine's own /usr in a folder --------------------------------------------------------


def can_enter() -> bool:
    """Return whether this process can create mount namespaces, as `make fresh` must."""
    words = ["unshare", "--mount", "--pid", "--uts", "--fork", "true"]
    has_programs = all(map(shutil.which, ("unshare", "setpriv", "pivot_root")))
    return os.geteuid() == 0 and has_programs and not subprocess.run(words, capture_output=True, check=False).returncode


needs_namespaces = pytest.mark.skipif(not can_enter(), reason="only root can make mount namespaces")


@pytest.fixture
def small_root(tmp_path: Path) -> Path:
    """A root of empty folders; the machine's programs are bound into it."""
    root = tmp_path / "root"
    for name in ("proc", "sys", "dev", "tmp", "etc", "home"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if (Path("/") / name).is_symlink():
            (root / name).symlink_to(os.readlink(Path("/") / name))
    return root


def inside(root: Path, script: str, **more: object) -> str:
    with (root.parent / "output").open("w+b") as output:
        binds = ["/usr", *(f"/{name}" for name in ("bin", "sbin", "lib", "lib64") if not Path("/", name).is_symlink())]
        words = ["sh", "-c", script]
        shown = {"environment": {"PATH": clean_root.PATH}, "binds": [path for path in binds if Path(path).exists()]}
        try:
            clean_root.enter(root, words, output=output, **shown, **more)  # type: ignore[arg-type]
        finally:
            output.seek(0)
            said = output.read().decode()
            print(said)
        return said


@needs_namespaces
def test_root_shows_nothing_of_the_machine(small_root: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    secret = small_root.parent / "secret"
    secret.write_text("x")
    script = (
        f"test ! -e '{secret}'; test ! -e /.outside; ls -A /home; hostname; id -u; unshare --user true; echo $?; env"
    )
    text = inside(small_root, script, user="1000:1000", directory="/home", hostname="elsewhere")
    lines = text.splitlines()
    assert lines[:3] == ["elsewhere", "1000", "0"], text
    assert {line.partition("=")[0] for line in lines[3:]} <= {"PATH", "PWD", "SHLVL", "_", "OLDPWD"}
    assert Path("/proc/self/mountinfo").read_text() == before
    assert not list(small_root.glob("usr/*"))


@needs_namespaces
def test_failure_is_raised_and_orphans_end_with_the_command(small_root: Path) -> None:
    script = "(sleep 0.1 &) ; (sleep 617 &) ; sleep 0.5; grep -l '^State:.Z' /proc/[0-9]*/status; exit 3"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        inside(small_root, script)
    assert caught.value.returncode == 3
    assert (small_root.parent / "output").read_text() == ""  # no zombie
    commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK))
    assert b"sleep\x00617\x00" not in commands


STOPPED = """
import subprocess, sys
from scripts import clean_root
with clean_root.workspace(sys.argv[1], keep=False) as folder:
    (folder / "deep" / "deeper").mkdir(parents=True)
    print(folder, flush=True)
    subprocess.run(["sleep", "60"])
"""


def test_workspace_is_removed_when_it_is_terminated(tmp_path: Path) -> None:
    words = [sys.executable, "-c", STOPPED, "asyncrl-test-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        process.terminate()
        assert process.wait(30) == 143
    assert not folder.exists()
