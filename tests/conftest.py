"""One hypothesis profile for all: the same examples on every machine, and no deadlines on shared cores; and which tests
may run at the same time."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "asyncrl", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("asyncrl")

SANDBOXES = ("tests/envs/", "tests/rewards/", "tests/integration/test_agents.py")
"""Their tests look for what sandboxes have left anywhere on the machine: one of them at a time."""
LONGEST = ("slurm", "elastic", "resume", "resume_environments", "survival", "ends", "teacher")
LONG = tuple(f"tests/integration/test_{name}.py" for name in LONGEST)
"""Files of minutes: begun first, or one process would end on them while the other has nothing left."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, all else as it stands."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile: a file's tests share a process, and so its engines. (xdist_group does nothing under
    pytest 9: xdist 3.8 renames tests, which pytest no longer heeds.)"""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "sandboxes" if file.startswith(SANDBOXES) else file

    return ByFile(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """sentencepiece (SWIG) warns while it is imported; as an error that is a segmentation fault at Python's exit."""
    config.addinivalue_line("filterwarnings", r"ignore:builtin type .* has no __module__ attribute:DeprecationWarning")
