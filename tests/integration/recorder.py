"""Hook for rollout.accept that accepts every group and writes it to the file that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from asyncrl.schema import Group

FILE = "ASYNCRL_TEST_RECORDING"


def take(group: Group) -> bool:
    with Path(os.environ[FILE]).open("ab") as file:
        file.write(msgspec.json.encode(group) + b"\n")
    return True
