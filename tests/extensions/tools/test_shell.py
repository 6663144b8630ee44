"""A task in a shell: commands act on files that stay, and hidden checks judge what is there at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.agents.multi_turn import MultiTurn
from asyncrl.envs.env import EnvSpec, Step
from asyncrl.envs.pool import EnvironmentPool
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.tools.shell import ShellEnv
from asyncrl.schema import Prompt
from tests.agents.talking import Talking, written
from tests.extensions.tools.sandboxes import Folders
from tests.extensions.tools.scripts import run
from tests.extensions.tools.shells import QUESTION, SANDBOX, block, play
from tests.fakes import FakeTemplate


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every sandbox is closed."""
    Folders.opened.clear()
    yield
    assert [one for one in Folders.opened if one.path.exists()] == []


def shown(step: Step) -> str:
    (message,) = step.messages
    return message["content"]  # type: ignore[index]


def test_share_of_checks_on_the_files_is_the_reward() -> None:
    first, second, third, last = play(
        block("cat data/n.txt; cd data; pwd >&2"), block("exit 3"), block("echo 3 > answer.txt"), "DONE"
    )
    assert shown(first).startswith("1\n2\n")
    assert shown(first).endswith("/data")
    assert (shown(second), shown(third)) == ("[exit code 3]", "[no output]")
    assert (last.done, last.reward, last.messages, last.score) == (True, 0.75, (), False)
    assert [step.done for step in (first, second, third)] == [False] * 3
    assert first.messages[0]["role"] == "user"  # type: ignore[index]


@pytest.mark.parametrize("text", ["DONE", "  DONE  \n", "It is done.", f"{block('echo 3 > answer.txt')}DONE"])
def test_episode_ends_when_the_model_says_so_or_has_no_command(text: str) -> None:
    (step,) = play(text)
    assert step.done
    assert step.reward == (0.75 if "answer" in text else 0.25)


def test_word_in_a_command_is_not_the_end() -> None:
    (step,) = play(block("cat <<X\nDONE\nX"))
    assert not step.done
    assert shown(step) == "DONE"


def test_last_turn_runs_its_command_and_then_the_checks() -> None:
    steps = play(block("true"), block("echo 3 > answer.txt"), max_turns=2)
    assert [(step.done, step.reward) for step in steps] == [(False, 0.0), (True, 0.75)]


def test_two_blocks_are_not_run() -> None:
    (step, last) = play(block("echo 3 > answer.txt") + block("true"), "DONE")
    assert shown(step).startswith("One block")
    assert (step.done, last.reward) == (False, 0.25)


def test_tests_are_hidden_until_the_end_and_replaced() -> None:
    first, last = play(block("ls -R; echo 'echo 3' > check.sh; echo 7 > answer.txt"), "DONE")
    assert "check" not in shown(first)
    assert last.reward == 0.5  # the answer is there, and wrong


@pytest.mark.parametrize("place", ["ln -s /nowhere check.sh", "mkdir check.sh"])
def test_tests_that_cannot_be_written_are_not_passed(place: str) -> None:
    assert play(block(f"{place}; echo 3 > answer.txt"), "DONE")[-1].reward == 0.0


def test_hanging_command_and_hanging_check_are_the_model_s_time() -> None:
    question = {**QUESTION, "tests": {}, "checks": [{"command": "sh slow.sh"}, {"command": "true"}]}
    first, second, last = play(
        block("sleep 100"), block("echo sleep 100 > slow.sh"), "DONE", question=question, seconds=3.0
    )
    assert shown(first) == "[it ran out of time]"
    assert (shown(second), last.reward) == ("[no output]", 0.5)


def test_files_can_come_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "n.txt").write_text("1\n2\n")
    (tmp_path / "raw").write_bytes(b"\xff")
    (step,) = play(block("cat data/n.txt; wc -c < raw"), question={**QUESTION, "files": {}, "folder": str(tmp_path)})
    assert shown(step) == "1\n2\n1"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>{"name": "bash", "arguments": {"command": "echo hi"}}</tool_call>', "hi"),
        ('<tool_call>{"name": "sh", "arguments": {"command": "echo hi"}}</tool_call>', "Error: one call of bash"),
        ('<tool_call>{"name": "bash", "arguments": {"command": 1}}</tool_call>', "Error: one call of bash"),
        ('<tool_call>{"name": "bash", "arguments": {"command": "true"}}</tool_call>' * 2, "Error: one call of bash"),
        ("<tool_call>{</tool_call>", "Error: The call is not JSON"),
    ],
)
def test_commands_can_come_as_calls(text: str, content: str) -> None:
    (step,) = play(text, format="hermes")
    assert not step.done
    assert step.messages[0]["role"] == "tool"  # type: ignore[index]
    assert shown(step).startswith(content)
    assert play(block("echo hi"), format="hermes")[0].done  # no call


def test_sandbox_that_fails_is_a_fault_and_no_reward() -> None:
    async def script() -> None:
        env = ShellEnv(**SANDBOX)
        await env.reset(QUESTION)
        await Folders.opened[0].close()
        for text in (block("true"), "DONE"):
            with pytest.raises(EpisodeFailed, match="sandbox: it is gone"):
                await env.step(text)

    run(script)


def test_step_before_a_reset_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="call reset first"):
        run(lambda: ShellEnv(**SANDBOX).step(block("true")))


@pytest.mark.parametrize("options", [{"format": "xml"}, {"sandbox": "no.such:Thing"}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ShellEnv(**options)


# --- the shipped tasks ----------------------------------------------------------------------------------------


def test_episode_that_is_cut_off_is_judged_all_the_same() -> None:
    """Played as a run plays it; the second answer has no room left."""
    texts = {1: block("echo 3 > answer.txt"), 2: "and then"}

    class Words(FakeTemplate):
        def extend(self, messages: Any, *, last: int | None) -> list[int]:
            return [20]

    async def script() -> Any:
        environments = EnvironmentPool("t", EnvSpec("asyncrl.extensions.tools.shell:ShellEnv", SANDBOX))
        prompt = Prompt("p", [12], QUESTION, "t")
        generate = Talking([written(1, 10)], Words(lambda ids: texts[ids[0]]))
        found = await MultiTurn(environments, max_turns=1).run(prompt, generate)
        await environments.close()
        return found

    found = run(script)
    assert (found.reward, [turn.reward for turn in found.turns]) == (0.0, [0.75])
