"""Code rewards: what counts as passed, and code that would rather be believed than be right.

The sandbox here is a plain process of the same user, without any walls: what holds is the harness's own.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.code import code_tests
from asyncrl.extensions.code.code_reward import CodeReward, CodeSettings
from asyncrl.extensions.code.code_tests import code_of
from asyncrl.extensions.code.code_values import pack, unpack
from asyncrl.extensions.sandbox.protocol import Limits
from asyncrl.rewards import Score, build
from tests.extensions.code.doubles import Outcome, Plain, Sandboxes
from tests.rewards.doubles import answer

ADD = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add([1], [2]) == [1, 2]"]
RIGHT = "def add(a, b):\n    return a + b"


def scored(code: str, asserts: Any = ADD, *, sandboxes: Sandboxes | None = None, **params: Any) -> Score:
    """Return the score of an answer with this code, for a record with these asserts or for this record."""
    record = asserts if isinstance(asserts, dict) else {"test_list": asserts}
    options: dict[str, Any] = {"reward": "share", "python": sys.executable, "seconds": 5.0} | params

    async def main() -> Score:
        reward = CodeReward(CodeSettings(**options), sandboxes or Sandboxes())
        try:
            return await asyncio.wait_for(reward(answer(f"Here it is:\n```python\n{code}\n```\n", **record)), 60)
        finally:
            await reward.close()

    return asyncio.run(main())


# --- what counts --------------------------------------------------------------------------------------------


def test_reward_is_the_share_of_tests_or_all_of_them() -> None:
    half = "def add(a, b):\n    return a + b if isinstance(a, int) else None"
    assert scored(RIGHT).reward == 1.0
    assert scored(half).reward == pytest.approx(1 / 3)
    assert scored(half, reward="all") == Score(
        0.0, parts={"code/found": 1.0, "code/passed": 0.5, "code/timeout": 0.0, "code/no_verdict": 0.0}
    )  # up to the first that failed


def test_check_function_of_humaneval_with_a_helper_of_the_prompt() -> None:
    record = {
        "prompt": "import math\ndef half(x):\n    return x / 2\n\ndef area(d):\n    '''Of a circle.'''\n",
        "test": "def check(candidate):\n    assert abs(candidate(2) - 3.14159) < 1e-4\n    assert half(4) == 2",
        "entry_point": "area",
    }
    options = {"tests": "check", "prefix_key": "prompt"}
    assert scored("    return math.pi * half(d) ** 2", record, **options).reward == 1.0
    assert scored("def area(d):\n    return math.pi * half(d) ** 2", record, **options).reward == 1.0
    assert scored("    return d", record, **options).reward == 0.0


def test_programs_are_compared_by_their_lines_and_must_end_well() -> None:
    pairs = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7"]}
    record = {"input_output": json.dumps(pairs)}
    program = (
        "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin.read().split())), ' ')\n    print()"
    )
    assert scored(program, record, tests="programs").reward == 1.0
    assert scored("print(3)", record, tests="programs").reward == 0.5
    assert scored(program + "\nsys.exit(1)", record, tests="programs").reward == 0.0
    assert scored("print(0)", {"input_output": [{"input": "", "output": "1"}]}, tests="programs").reward == 0.0


def test_setup_records_exceptions_and_objects_without_data() -> None:
    record = {
        "test_setup_code": "import math",
        "test_list": [
            "assert math.isclose(Point(3, 4).norm(), 5)",
            "try:\n    norm(None)\n    assert False\nexcept TypeError:\n    pass",
            "assert norm(Point(3, 4)) == 5.0",
            "assert list(upto(3)) == [0, 1, 2]",
            "assert LIMIT == (1, {2}, None, 2**70)",
        ],
    }
    code = """
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def norm(self): return (self.x ** 2 + self.y ** 2) ** 0.5
def norm(p): return (p if isinstance(p, Point) else Point(p, p)).norm()
def upto(n): yield from range(n)
LIMIT = (1, {2}, None, 2**70)
"""
    assert scored(code, record).reward == 1.0


def test_hang_costs_its_test_alone_and_is_told() -> None:
    code = "def add(a, b):\n    while a == 'a': pass\n    return a + b"
    score = scored(code, seconds=3.0)
    assert score.reward == pytest.approx(2 / 3)
    assert score.parts["code/timeout"] == 1.0


def test_answer_without_python_scores_0_and_costs_no_sandbox() -> None:
    sandboxes = Sandboxes()

    async def main() -> Score:
        return await CodeReward(CodeSettings(), sandboxes)(answer("```bash\nls\n```", test_list=ADD))

    score = asyncio.run(main())
    assert (score.reward, score.parts["code/found"], sandboxes.opened) == (0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a = 1", "a = 1"),
        ("x\n```python\na = 1\n```\ny\n```py\na = 2\n```\n```bash\nls\n```", "a = 2"),
        ("```\na = 1\n```", "a = 1"),
        ("```python\na = 1\nb = 2", "a = 1\nb = 2"),
        ("```bash\nls\n```", ""),
        ("  ```Python\n  a = 1\n  ```", "  a = 1"),
    ],
)
def test_code_is_the_last_fenced_block_of_python(text: str, code: str) -> None:
    assert code_of(text) == code


# --- code that would rather be believed -----------------------------------------------------------------------

FORGERIES = {
    "exits": "import os; os._exit(0)",
    "exits_politely": "import sys; sys.exit(0)",
    "exits_when_called": "import os\ndef add(a, b): os._exit(0)",
    "prints": "print('passed'); print('1 {\"results\": [\"passed\"]}')\ndef add(a, b): return None",
    "equals_everything": "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()",
    "subclasses": "class E(int):\n    def __eq__(self, other): return True\ndef add(a, b): return E(0)",
    "replaces_assert": "import builtins\nbuiltins.AssertionError = ValueError\nclass AssertionError(Exception): pass",
    "shadows_builtins": "def isinstance(*a): return True\ndef all(x): return True\ndef any(x): return True\nadd = max",
    "patches_json": 'import json\njson.dumps = lambda x: \'{"results": ["passed"]}\'\ndef add(a, b): return 0',
    "raises_what_passes": "def add(a, b): raise SystemExit(0)",
    "walks_the_stack": """
import sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if 'assert' in repr(value): return eval(repr(value).split('==')[1])
        frame = frame.f_back
""",
    "reads_files": """
import glob
def add(a, b):
    for path in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/fd/*') + glob.glob('*.py'):
        try: text = open(path, errors='ignore').read(4096) if '/fd/' not in path else ''
        except OSError: continue
        if 'assert add' in text: return 3
""",
    "writes_to_the_other_side": """
import os
for fd in range(3, 20):
    try: os.write(fd, b'{"value": ["bool", true]}\\n' * 50)
    except OSError: pass
def add(a, b): return None
""",
    "stops_whoever_listens": """
import os, signal
for pid in {os.getppid()} | {int(p) for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()}:
    try: text = open(f'/proc/{pid}/cmdline').read()
    except OSError: continue
    if 'channel' in text:
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
""",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_passes_no_test(name: str) -> None:
    shadowed = "assert all([add(1, 1) == 2, isinstance(add, int)])"
    score = scored(FORGERIES[name], [shadowed if name == "shadows_builtins" else ADD[0]])
    assert score.reward == 0.0
    assert score.parts["code/found"] == 1.0


def test_module_planted_by_the_code_is_not_imported(tmp_path: Path) -> None:
    """Lazy imports go on as ever: strptime's is one."""
    record = {
        "test_setup_code": f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import datetime",
        "test_list": [
            "assert add(1, 2) == 3\ntry:\n    import planted\nexcept ImportError:\n    pass\nelse:\n    assert False",
            "assert add(1, 2) == 3 and datetime.datetime.strptime('2026', '%Y').year == 2026",
        ],
    }
    code = f"open({str(tmp_path / 'planted.py')!r}, 'w').write('x = 1')\n{RIGHT}"
    assert scored(code, record).reward == 1.0


PEEK = """
import os
def peek():
    found = {}
    for pid in os.listdir('/proc'):
        try: text = open(f'/proc/{pid}/cmdline').read()
        except OSError: continue
        if 'channel' in text and text.endswith('0\\0') or int(pid if pid.isdigit() else 0) == %d:
            for file in ('mem', 'maps', 'environ', 'fd/1'):
                try: found[pid + file] = open(f'/proc/{pid}/{file}', 'rb').close() is None
                except OSError: found.setdefault('refused', 0); found['refused'] += 1
    return found
"""
NAMESPACES = "CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000"


@pytest.mark.parametrize("namespaces", [True, False])
def test_memory_and_descriptors_of_the_harness_are_out_of_reach(
    namespaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no namespaces can be made. With them, whoever started the harness is out of reach too."""
    if not namespaces:
        without_namespaces(monkeypatch)
    started_by = os.getpid() if namespaces else -1
    refused = 12 if namespaces else 4  # the third is the process between harness and code, a fork of the harness
    seen = f"found = peek(); assert [*found] == ['refused'] and found['refused'] >= {refused}, found"  # also of others
    assert scored(PEEK % started_by, [seen]).reward == 1.0


def without_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the namespaces from the harness: unshare(2) rejects such flags."""
    sources = code_tests.modules.__wrapped__("code_values", "code_process", "code_harness")
    assert NAMESPACES in sources[1][1]
    changed = [(name, text.replace(NAMESPACES, "CLONE_NEWUSER, CLONE_NEWPID = 1, 2")) for name, text in sources]
    plain = code_tests.modules
    monkeypatch.setattr(code_tests, "modules", lambda *names: changed if "code_harness" in names else plain(*names))


def test_code_that_ends_the_harness_scores_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_namespaces(monkeypatch)  # in one of its own it cannot
    sandboxes = Sandboxes()
    score = scored("import os; os.kill(os.getppid(), 9)", sandboxes=sandboxes)
    assert (score.reward, score.parts["code/no_verdict"]) == (0.0, 1.0)
    assert sandboxes.opened == 3  # twice, and once with code that does nothing


class LateAtFirst(Sandboxes):
    """The first command reaches a limit, whatever it is."""

    async def open(self) -> Plain:
        plain = await super().open()
        return Saying(self) if self.opened == 1 else plain


@pytest.mark.parametrize("reason", ["timeout", "cpu", "memory"])
def test_code_that_hits_a_harness_limit_is_not_asked_twice(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saying, "reason", reason)
    sandboxes = LateAtFirst()
    score = scored(RIGHT, sandboxes=sandboxes)
    assert (score.reward, score.parts["code/no_verdict"], sandboxes.opened) == (0.0, 1.0, 2)


@pytest.mark.integration
def test_harness_that_is_stopped_is_ended_by_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    without_namespaces(monkeypatch)
    monkeypatch.setattr("asyncrl.extensions.code.code_reward.MARGIN_SECONDS", 9.0)
    code = "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)"
    score = scored(code, seconds=0.5, total_seconds=0.5)
    assert (score.reward, score.parts["code/no_verdict"]) == (0.0, 1.0)


# --- whose fault it is ----------------------------------------------------------------------------------------


class Saying(Plain):
    """Runs nothing, and says always the same."""

    stdout = b"hello\n"
    reason = "exited"

    async def run(self, command: Any, *, stdin: bytes = b"", seconds: Any = None, env: Any = ()) -> Outcome:
        return Outcome(self.reason, 127, self.stdout, b"python: not found", 0.0)


class Dumb(Sandboxes):
    async def open(self) -> Plain:
        await super().open()
        return Saying(self)


@pytest.mark.parametrize(
    ("failing", "reason", "text"),
    [
        (lambda: scored(RIGHT, sandboxes=Dumb()), "sandbox", "exit code 127: python: not found"),
        (
            lambda: scored(RIGHT, sandboxes=Sandboxes(lambda: EpisodeFailed("sandbox", "no room"))),
            "sandbox",
            "no room",
        ),
        (lambda: scored(RIGHT, memory_mb=1), "sandbox", "the tests cannot be run"),
        (lambda: scored(RIGHT, []), "reward_error", "no tests in 'test_list'"),
        (lambda: scored(RIGHT, {"other": 1}), "reward_error", "no field 'test_list'"),
        (lambda: scored(RIGHT, ["assert add(1"]), "reward_error", "test 0 of the record is not valid Python"),
        (lambda: scored(RIGHT, ["import no_such\nassert add(1, 1) == 2"]), "reward_error", "that the sandbox lacks"),
        (lambda: scored(RIGHT, [*ADD, "assert add(object(), 1)"]), "reward_error", r"test 3 .* other than plain data"),
        (lambda: scored(RIGHT, {"input_output": {"inputs": ["1"]}}, tests="programs"), "reward_error", "no pairs"),
        (lambda: scored(RIGHT, {"input_output": "{"}, tests="programs"), "reward_error", "no pairs"),
    ],
)
def test_fault_that_is_not_the_codes_fails_the_episode(failing: Callable[[], Score], reason: str, text: str) -> None:
    with pytest.raises(EpisodeFailed, match=text) as caught:
        failing()
    assert caught.value.reason == reason


def test_verdict_is_heard_with_this_runs_nonce_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saying, "stdout", b'abc {"results": ["passed"]}\n')
    monkeypatch.setattr("asyncrl.extensions.code.code_reward.secrets.token_hex", lambda size: "abc")
    assert scored(RIGHT, sandboxes=Dumb()).reward == 1.0
    monkeypatch.setattr("asyncrl.extensions.code.code_reward.secrets.token_hex", lambda size: "abcd")
    with pytest.raises(EpisodeFailed, match="no verdict"):
        scored(RIGHT, sandboxes=Dumb())


def test_sandboxes_are_bounded_closed_and_new_for_every_answer() -> None:
    sandboxes = Sandboxes()

    async def main() -> list[Score]:
        reward = CodeReward(CodeSettings(python=sys.executable, max_running=2), sandboxes)
        text = f"```python\n{RIGHT}\n```"
        scores = await asyncio.gather(*(reward(answer(text, test_list=ADD[:1])) for _ in range(5)))
        await reward.close()
        return scores

    assert [score.reward for score in asyncio.run(main())] == [1.0] * 5
    assert (sandboxes.opened, sandboxes.open_now, sandboxes.most, sandboxes.closed) == (5, 0, 2, True)


class Bounded(Sandboxes):
    def __init__(self, limits: Limits, warm: int = 0) -> None:
        super().__init__()
        self.limits, self.warm = limits, warm


def test_own_backend_gets_limits_with_room_for_all_tests() -> None:
    own = {"sandbox": f"{__name__}:Bounded", "sandbox_params": {"warm": 3}}
    reward = build("code", {**own, "total_seconds": 40.0, "seconds": 5.0, "memory_mb": 300})
    backend: Any = reward._backend  # type: ignore[attr-defined]
    assert backend.warm == 3
    assert backend.limits.seconds >= 45
    assert backend.limits.cpu_seconds >= 45
    assert backend.limits.memory_mb > 300


def test_backend_comes_by_import_path_and_others_are_refused() -> None:
    build("code", {"sandbox": f"{Sandboxes.__module__}:Sandboxes", "sandbox_params": {}})
    for sandbox, params, field in (
        ("no.such:Backend", {}, "sandbox"),
        (f"{Sandboxes.__module__}:Sandboxes", {"falt": 1}, "sandbox_params.falt"),
        (7, {}, "sandbox"),
        ("collections:Counter", {}, "sandbox"),
    ):
        with pytest.raises(ConfigError) as caught:
            build("code", {"sandbox": sandbox, "sandbox_params": params})
        assert caught.value.field == f"reward.params.{field}"


# --- values ---------------------------------------------------------------------------------------------------


def test_plain_data_arrives_as_it_was_the_rest_as_a_number() -> None:
    def no_keep(value: Any) -> list[Any]:
        raise AssertionError(value)

    values = [None, True, -(2**200), 0.1, float("inf"), "ä\ud800", b"\xff", 1 + 2j, range(1, 9, 2), Decimal("0.10")]
    values += [Fraction(1, 3), [1, (2, {3}, frozenset({4}))], {(1, 2): [None], "b": {}}]
    for value in values:
        found = unpack(json.loads(json.dumps(pack(value, no_keep))), no_keep)
        assert (found, type(found)) == (value, type(value))
    assert pack(numpy.array([[1, 2]]), no_keep) == pack([[1, 2]], no_keep)
    assert unpack(["list", [["kept", 3]]], lambda number: f"number {number}") == ["number 3"]


def test_sandboxed_code_imports_pythons_library_alone() -> None:
    for name, source in code_tests.modules("code_values", "code_candidate", "code_process", "code_harness"):
        nodes = list(ast.walk(ast.parse(source)))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        others = {one for one in imported if one.split(".")[0] not in sys.stdlib_module_names}
        assert others <= {"asyncrl.extensions.code.code_values", "asyncrl.extensions.code.code_process"}, name


def test_wrong_form_of_tests_is_named_with_its_field() -> None:
    with pytest.raises(ConfigError, match="'asserts', 'check' or 'programs'") as caught:
        build("code", {"tests": "unit"})
    assert caught.value.field == "reward.params.tests"
