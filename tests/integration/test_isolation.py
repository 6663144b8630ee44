"""Code of the model runs on a machine without namespaces only if the user allows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
FORBID = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "$@"'
WITHOUT_NAMESPACES = ["unshare", "--user", "--map-root-user", "sh", "-c", FORBID, "sh"]
ALLOWED = "+task.reward_params.sandbox_params.allow_unsafe=true"


def can_be_forbidden() -> bool:
    """Return whether the kernel can forbid user namespaces below a user namespace."""
    return subprocess.run([*WITHOUT_NAMESPACES, "true"], capture_output=True, check=False).returncode == 0


needs_root_of_a_namespace = pytest.mark.skipif(not can_be_forbidden(), reason="no user namespaces on this machine")


def command(folder: Path, *arguments: str) -> tuple[int, str]:
    """Return exit code and output of a run without namespaces whose reward executes code of the model."""
    program = [
        sys.executable,
        "-m",
        "asyncrl.launch.main",
        "experiment=tiny",
        "task=programs",
        f"run.dir={folder / 'run'}",
    ]
    words = [*WITHOUT_NAMESPACES, *program, *arguments]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=600, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@needs_root_of_a_namespace
@pytest.mark.parametrize("arguments", [(), ("--check",)])
def test_run_with_code_of_the_model_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    code, text = command(tmp_path, *arguments)
    assert code != 0
    for words in (
        "cannot isolate code of the model",
        "bubblewrap: ",
        "allow_unsafe=true",
        "sandbox/README.md",
    ):
        assert words in text
    assert not (tmp_path / "run").exists()


@needs_root_of_a_namespace
def test_allowed_by_name_it_says_what_is_not_protected(tmp_path: Path) -> None:
    code, text = command(tmp_path, ALLOWED, "model=smollm2-135m", "--check")
    assert code == 0, text
    assert "warning sandbox no isolation (allow_unsafe=true)" in text
    assert "programs can read and write what their uid may" in text
