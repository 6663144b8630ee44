"""A game is a function of its seed and of what is played, whatever else the process does; nothing is downloaded."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.games.textarena_env import BROKEN, STATES, TextArenaGame, TextArenaMatch

ALONE = {  # a game that draws, and moves that keep it drawing
    "GuessTheNumber-v0": ["3", "[17]", "9", "11"],
    "2048-v0": ["up", "left", "down", "right"] * 3,
    "Blackjack-v0": ["hit", "stand"] * 5,
    "Mastermind-v0": ["1 2 3 4", "4 3 2 1", "2 3 4 5"],
    "Minesweeper-v0": ["3 3", "0 7"],
    "FrozenLake-v0": ["down", "down", "right"],
    "TowerOfHanoi-v0": ["A C", "A B", "C B"],
    "Bandit-v0": ["red", "blue", "red"],
}
TOGETHER = {
    "TicTacToe-v0": ["4", "0", "8"],
    "KuhnPoker-v0": ["check"] * 6,
    "Nim-v0": ["0 3", "1 4", "2 5"],
    "ConnectFour-v0": ["1", "1", "2"],
    "IteratedPrisonersDilemma-v0": ["hello", "cooperate"] * 4,
}


def alone(name: str, seed: int) -> Iterator[Any]:
    """Return what a game reports, step by step."""
    game = TextArenaGame(name)
    yield game.begin(seed)
    for move in ALONE[name]:
        step = game.step(move)
        yield step
        if step.done:
            return


def together(name: str, seed: int) -> Iterator[Any]:
    match = TextArenaMatch(name)
    yield match.begin(seed)
    for move in TOGETHER[name]:
        step = match.step(move)
        yield step
        if step.done:
            return


GAMES = [(alone, name) for name in ALONE] + [(together, name) for name in TOGETHER]


def test_games_are_functions_of_their_seeds_alone() -> None:
    each = [(play, name, seed) for play, name in GAMES for seed in (1, 2, 3)]
    one_by_one = [list(play(name, seed)) for play, name, seed in each]
    beside: list[list[Any]] = [[] for _ in each]
    playing = dict(enumerate(play(name, seed) for play, name, seed in each))
    order = random.Random(5)
    while playing:
        number = order.choice(list(playing))
        random.seed(order.random())  # somebody else draws from the process' generator
        found = next(playing[number], None)
        if found is None:
            del playing[number]
        else:
            beside[number].append(found)
    assert beside == one_by_one


@pytest.mark.parametrize("name", ["2048-v0", "Blackjack-v0", "FrozenLake-v0"])
def test_other_seeds_are_other_games(name: str) -> None:
    assert len({str(next(alone(name, seed))) for seed in range(8)}) > 4


def test_games_leave_the_generator_of_the_process_as_it_was() -> None:
    before = random.getstate()
    for play, name in GAMES:
        list(play(name, 1))
    assert random.getstate() == before


def test_game_cannot_change_the_settings_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from textarena.envs.registration import ENV_REGISTRY, EnvSpec

    spec = EnvSpec("Greedy-v0", f"{__name__}:greedy", None, {"kept": [3, 4]})
    monkeypatch.setitem(ENV_REGISTRY, "Greedy-v0", spec)
    piles = [2, 1]
    told = [TextArenaMatch("Greedy-v0", {"piles": piles}).begin(0) for _ in range(2)]
    assert told[0] == told[1]
    assert (piles, spec.kwargs) == ([2, 1], {"kept": [3, 4]})


def greedy(piles: list[int], kept: list[int]) -> Any:
    """A Nim that takes its settings apart."""
    from textarena.envs.Nim.env import NimEnv

    return NimEnv(piles=[piles.pop(), kept.pop()])


# --- what is told -------------------------------------------------------------------------------------------


def test_a_turn_tells_only_what_was_not_told_before() -> None:
    rules, hint, *_ = (found for found in alone("GuessTheNumber-v0", 3))
    assert "between 1 and 20" in rules[0]
    assert hint.messages == "The target number is higher."
    moves = TextArenaGame("TowerOfHanoi-v0")
    moves.begin(0)
    assert moves.step("[A C]").messages == "You moved disk 1 from A to C.\nCurrent Board: \nA: [3, 2]\nB: []\nC: [1]\n."


def test_rules_of_ones_own_take_the_place_of_the_games() -> None:
    game = TextArenaGame("FrozenLake-v0", {"size": 3, "num_holes": 1}, "Walk to G.")
    told, _ = game.begin(0)
    assert told.startswith("Walk to G.\nCurrent Board:")
    assert "Welcome" not in told
    assert told.count("+-----+-----+-----+\n") == 4


def test_rewards_are_the_games_own_at_its_end() -> None:
    game = TextArenaGame("GuessTheNumber-v0", {"max_number": 3})
    steps = []
    for guess in ("1", "2", "3"):
        game.begin(4)
        steps.append(game.step(f"I say [{guess}]."))
    assert sorted((step.reward, step.done) for step in steps) == [(0.0, False), (0.0, False), (1.0, True)]
    game.begin(4)
    ends = [game.step("what?") for _ in range(2)]
    assert [(step.reward, step.done) for step in ends] == [(0.0, False), (0.0, True)]


def test_states_are_named_where_they_can_be_reached_again() -> None:
    moves = TextArenaGame("TowerOfHanoi-v0")
    _, first = moves.begin(0)
    there, back = moves.step("A B").state, moves.step("B A").state
    assert first == back != there
    warned = moves.step("nowhere").state
    assert warned not in ("", first)  # the next invalid move ends the game: another state
    assert {TextArenaGame(f"{name}-v0").begin(0)[1] == "" for name in ("2048", "GuessTheNumber")} == {True}
    for name in STATES:
        play = together if f"{name}-v0" in TOGETHER else alone
        found = [str(getattr(one, "state", one[1] if isinstance(one, tuple) else "")) for one in play(f"{name}-v0", 1)]
        assert found[0] not in ("", found[1])


# --- several players ----------------------------------------------------------------------------------------


def test_players_take_turns_and_are_rewarded_at_the_end() -> None:
    match = TextArenaMatch("TicTacToe-v0", system="Be brief.", rules="You are {player}.")
    assert match.roles == ["player-0", "player-1"]
    first = match.begin(0)
    *told, last = [first, *(match.step(move) for move in ("[0]", "[3]", "[1]", "[4]", "[2]"))]
    assert [one.role for one in told] == ["player-0", "player-1"] * 2 + ["player-0"]
    assert (last.done, last.rewards) == (True, {"player-0": 1.0, "player-1": -1.0})
    assert [[m["role"] for m in one.messages] for one in told[:3]] == [["system", "user"], ["system", "user"], ["user"]]
    assert [told[n].messages[-1]["content"].partition("\n")[0] for n in (0, 1)] == ["You are 0.", "You are 1."]
    assert "[Player 0] [0]" in told[1].messages[-1]["content"]
    assert "[Player 0]" not in told[2].messages[-1]["content"]  # its own move is in its context


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "remedy"),
    [
        ("Guess-v0", {}, "it has no such game"),
        ("Nim-v9", {}, r"it has no such game, but \['Nim-v0'"),
        ("Nim-v0", {}, "rejects it for 1 player"),
        ("GuessTheNumber-v0", {"highest": 3}, "highest"),
        (f"{BROKEN[0]}-v0", {}, "broken in textarena 0.7.4"),
    ],
)
def test_wrong_games_name_field_value_and_remedy(name: str, params: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        TextArenaGame(name, params).begin(0)
    assert caught.value.field.startswith("task.name")
    assert caught.value.value == name


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the folder where NLTK looks for its data, and forbid the network."""
    import nltk

    def download(*_: Any, **__: Any) -> None:
        raise AssertionError("a download was tried")

    monkeypatch.setattr(nltk, "download", download)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    return tmp_path / "corpora"


@pytest.mark.parametrize("name", ["Wordle-v0", "WordLadder-v0"])
def test_word_lists_are_not_downloaded(corpora: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"python -m nltk\.downloader words") as caught:
        TextArenaGame(name).begin(0)
    assert (caught.value.field, caught.value.value) == ("task.name", name)


def test_word_lists_on_disk_are_used(corpora: Path) -> None:
    (corpora / "words").mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (corpora / "words" / name).write_text("ox\n")
    game = TextArenaGame("Hangman-v0")
    assert "C00 C01" in game.begin(0)[0]
    step = game.step("[ox]")
    assert (step.done, step.reward) == (True, 1.0)


def test_rewards_that_are_no_numbers_cost_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    from textarena import SinglePlayerState

    game = TextArenaGame("GuessTheNumber-v0", {"max_number": 1})
    game.begin(0)
    monkeypatch.setattr(SinglePlayerState, "close", lambda _: ({0: "Bad move."}, {}))
    with pytest.raises(
        EpisodeFailed,
        match=re.escape("environment_error: GuessTheNumber-v0 returned invalid rewards: {0: 'Bad move.'}"),
    ):
        game.step("[1]")
