"""What processes map in shared memory and would have to remove is found, and nobody else's is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.launch.leftovers import SHARED, shared_files, sweep

MAPS = """
import mmap, sys, time
held = []
for path in sys.argv[1:]:
    file = open(path, "w+b")
    file.truncate(4096)
    held.append(mmap.mmap(file.fileno(), 4096))
print("mapped", flush=True)
time.sleep(60)
"""


@pytest.fixture
def files() -> Iterator[list[Path]]:
    made = [SHARED / f"{prefix}asyncrl-test-{os.getpid()}" for prefix in ("torch_", "sem.mp-", "users-data-")]
    yield made
    for file in made:
        file.unlink(missing_ok=True)


def test_only_what_a_process_made_for_itself_is_removed(files: list[Path]) -> None:
    environment = {**os.environ, "ASYNCRL_RUN_ID": "leftovers-test"}
    command = [sys.executable, "-c", MAPS, *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        assert shared_files([process.pid + 10_000_000]) == set()  # of other groups
        found = shared_files([process.pid])
        assert found == set(files[:2])
        sweep("another-run", [])
        assert process.poll() is None
        sweep("leftovers-test", found)
        assert process.wait(5) != 0
    assert [file.exists() for file in files] == [False, False, True]
