"""One hypothesis profile for all tests: the same examples on every machine, and no deadlines on shared cores. And the
schedule of the tests: which tier has them (tests/tiers.py), which run in one process, and which start first."""

from asyncrl import import_hooks

# isort: split
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import examples
from tests.tiers import chosen, tier

settings.register_profile(
    "asyncrl",
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("asyncrl")

SANDBOXES = (
    *(f"tests/extensions/{name}/" for name in ("code", "sandbox", "tools")),
    "tests/integration/test_agents.py",
)
"""These tests look for what sandboxes have left anywhere on the machine, so they run one at a time."""


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/integration/test_{name}.py" for name in names)


ONE_FLEET = _files("proxy", "fleet", "continuation", "weight_faults")
"""Files that share the engines of tests/integration/conftest.py. The order matters: the last ones kill engines."""
LONGEST = _files(
    "benchmarks", "slurm", "resume", "resume_environments", "elastic", "colocated", "adapter_runs", "ends", "weights",
    "proxy", "fleet", "continuation", "weight_faults", "bench_gpu", "leftovers", "vision_run", "survival", "layouts",
    "vision_engine", "teacher", "precision", "variants", "hangs", "experiments", "checksum", "quantized", "replay",
    "loaded_publishes", "agents", "adapters", "lora", "first_steps", "synchronous", "intruder", "rollout_faults",
    "mixture", "deaths", "preflight",
)  # fmt: skip
"""Files that start whole runs or engines, the longest first: a long file that starts last leaves the other processes
without work."""
SEPARATE = _files(
    "benchmarks", "resume", "elastic", "colocated", "adapter_runs", "ends", "bench_gpu", "leftovers", "survival",
    "layouts", "teacher", "precision", "hangs", "rollout_faults", "deaths",
)  # fmt: skip
"""Files whose tests share nothing, so that each test can run in any process."""


class Failures:
    """Names each failure when it happens: pytest itself does only at its end."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f" FAILED {report.nodeid} ({report.when})")


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option and no variable: the pytest that a test starts must run all it is asked for."""
    parser.addoption(
        "--part", default="", help="2/6: of all files, and of the tests of files whose tests share nothing, one part"
    )


def pytest_collection_finish() -> None:
    """All test modules, and what they test, are imported."""
    import_hooks.done()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, sort the longest files first, and leave out what belongs to other parts."""
    place = {file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(_file(item.nodeid), len(place)))
    for item in items:
        if mark := tier(item.nodeid):
            item.add_marker(mark)
    if part := config.getoption("part"):
        others = [item for item in items if not chosen(_alone(item.nodeid), part)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if chosen(_alone(item.nodeid), part)]


@pytest.hookimpl(tryfirst=True)  # before its fixtures
def pytest_runtest_setup() -> None:
    """A test draws the same numbers from torch's own generator, whatever ran before it in its process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _alone(nodeid: str) -> str:
    """Return the test if it shares nothing with the others of its file, else the file."""
    file = _file(nodeid)
    return nodeid if file in SEPARATE else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule by file (--dist loadfile), so that the tests of a file share its engines. (xdist_group has no effect
    under pytest 9, which ignores the names that xdist 3.8 gives to tests.)"""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(ONE_FLEET):
                return "one fleet"
            return "sandboxes" if nodeid.startswith(SANDBOXES) else _alone(nodeid)

        def _reschedule(self, node: Any) -> None:
            """Give a process its next file when its last test begins. xdist would do so at the last test but one, and
            a test of minutes would keep files waiting that another process has time for."""
            if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
                super()._reschedule(node)

    return ByFile(config, log)


@pytest.hookimpl(trylast=True)  # after pytest's own, which makes its terminal
def pytest_configure(config: pytest.Config) -> None:
    """sentencepiece (SWIG) warns while it is imported; as an error that is a segmentation fault at Python's exit."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failures(config.pluginmanager.get_plugin("terminalreporter")))
    config.addinivalue_line("filterwarnings", r"ignore:builtin type .* has no __module__ attribute:DeprecationWarning")


@pytest.fixture(autouse=True)
def _same_umask() -> Iterator[None]:
    """Commands that a test calls in its own process have set that of a run."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
