"""The Slurm that `make slurm` unpacks has everything that its programs need, whatever is installed on this machine."""

from __future__ import annotations

import pytest

from scripts import debian_tools
from tests.extensions.slurm import lab


@pytest.mark.integration
@pytest.mark.skipif(not debian_tools.complete(lab.UNPACKED), reason="no Slurm was unpacked here")
def test_unpacked_programs_find_all_their_libraries() -> None:
    names = {path.name for path in debian_tools.programs(lab.UNPACKED)}
    assert {"munged", "scontrol"} <= names
    assert names & {"slurmd", "slurmd-wlm"}
    assert debian_tools.unresolved(lab.UNPACKED) == []
