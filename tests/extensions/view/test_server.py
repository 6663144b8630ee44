"""The page's server answers from the files what they hold, to those with its token, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from asyncrl import jsonl
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.view.watch.cli import main
from asyncrl.extensions.view.watch.ending import MOST_LINES, log_lines
from asyncrl.extensions.view.watch.runs import RunFolder
from asyncrl.extensions.view.watch.server import POLICY, POLL_SECONDS, _events, app, evidence
from scripts.synthetic_run import Plan, SyntheticRun, make
from tests.extensions.view.conftest import TOKEN


def get(client: TestClient, path: str, **parameters: Any) -> Any:
    answer = client.get(f"/api/{path}", params={"run": "run", **parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


# -- access ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/runs", "/api/events", "/api/group?run=run&uid=g000000"])
def test_nothing_is_served_without_the_token(client: TestClient, path: str) -> None:
    wrong = [
        ("authorization", ""),
        ("authorization", "Bearer wrong"),
        ("authorization", "Bearer "),
        ("cookie", "(=;\\x=é"),
    ]
    client.headers.pop("authorization")
    for name, value in wrong:
        answer = client.get(path, headers={name: value.encode("latin-1")})
        assert (answer.status_code, "asyncrl-watch" in answer.text) == (401, True)


def test_token_becomes_a_cookie_that_scripts_cannot_read(client: TestClient) -> None:
    client.headers.pop("authorization")
    assert client.get("/?token=wrong", follow_redirects=False).status_code == 401
    answer = client.get("/", params={"token": TOKEN}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert client.get("/api/runs").status_code == 200


def test_other_hosts_are_refused(client: TestClient) -> None:
    """A name of another site that was made to resolve to this machine (DNS rebinding)."""
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 400


def test_every_answer_forbids_inline_scripts_and_other_sites(client: TestClient) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY
    page = client.get("/").text
    assert page.count("<script") == page.count('src="/static/') == 2
    assert "http" not in page


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2f..%2fpyproject.toml"]
)
def test_files_outside_the_static_folder_are_not_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("name", ["../run", "run/../run", "/", "", "."])
def test_names_of_runs_are_not_paths(client: TestClient, name: str) -> None:
    for path in ("metrics", "group", "image", "settings"):
        answer = client.get(f"/api/{path}", params={"run": name})
        assert (answer.status_code, "there is no run" in answer.json()["error"]) == (404, True)


@pytest.mark.parametrize("name", ["../../config", "x" * 64, "a" * 64])
def test_images_are_named_by_their_hash_alone(client: TestClient, name: str) -> None:
    assert client.get("/api/image", params={"run": "run", "name": name}).status_code == 404


def test_key_of_the_run_is_never_served(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "addresses.json").write_text(json.dumps({"api_key": "the secret", "model": "/model", "gpus": 0}))
    with TestClient(app(RunFolder(tmp_path), TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}) as client:
        for path in ("runs", "settings", "fleet", "advice", "recording", "metrics"):
            assert "the secret" not in client.get(f"/api/{path}", params={"run": "run"}).text


@pytest.mark.parametrize("parameters", [{"step": "x"}, {"reward": "high"}, {"uid": "g", "first": "1e3"}])
def test_wrong_parameters_are_told(client: TestClient, parameters: dict[str, str]) -> None:
    path = "group" if "first" in parameters else "groups"
    answer = client.get(f"/api/{path}", params={"run": "run", **parameters})
    assert (answer.status_code, next(reversed(parameters.values())) in answer.json()["error"]) == (404, True)


def test_other_machines_need_a_token_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--host", "0.0.0.0"]) == 1
    assert "protect it with --token-file" in capsys.readouterr().err
    (tmp_path / "token").write_text("short")
    assert main([str(tmp_path), "--token-file", str(tmp_path / "token")]) == 1
    assert "at least 16" in capsys.readouterr().err


# -- content --------------------------------------------------------------------------------------------------


def test_runs_of_a_folder_are_listed_and_a_new_one_appears(client: TestClient, run: Path) -> None:
    (one,) = client.get("/api/runs").json()
    assert (one["name"], one["step"], one["steps"], one["state"]) == ("run", 6, 6, "running")


def test_metrics_are_continued_from_where_they_were_read(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", Plan())
    run.advance()
    with TestClient(app(RunFolder(tmp_path), TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}) as client:
        first = get(client, "metrics", fields="loss,absent")
        assert first["columns"] == {"step": [1], "loss": [-0.1], "absent": [None]}
        run.advance()
        assert get(client, "metrics", fields="loss", after=first["after"])["columns"] == {"step": [2], "loss": [-0.1]}
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 9, "loss": NaN}\n')  # started again
        time.sleep(0.01)
        (tmp_path / "run" / "config.json").write_text("{}")
        assert get(client, "metrics", fields="loss")["columns"] == {"step": [9], "loss": [None]}
    run.close()


def test_settings_of_two_runs_show_where_they_differ(tmp_path: Path) -> None:
    for name, lr in (("a", 1), ("b", 2)):
        make(tmp_path / name, Plan(steps=1, config={"trainer": {"optimizer": {"lr": lr}, "threads": 1}}))
    with TestClient(app(RunFolder(tmp_path), TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}) as client:
        assert get(client, "settings", run=["a", "b"])["rows"] == [["trainer.optimizer.lr", 1, 2]]
        assert ["trainer.threads", 1] in get(client, "settings", run="a")["rows"]


def test_runs_of_a_sweep_show_overridden_settings_first(tmp_path: Path) -> None:
    """A sweep's runs are called 0, 1, ...; what the command line set tells more than what follows from it."""
    names = ["experiment=tiny", "trainer.optimizer.lr", "run.max_steps"]
    for number, lr in enumerate((1e-6, 1e-5)):
        settings = {"trainer": {"optimizer": {"lr": lr, "beta": lr}}, "run": {"max_steps": 1, "dir": str(number)}}
        folder = make(tmp_path / "sweep" / str(number), Plan(steps=1, config=settings))
        (folder / "overrides.json").write_text(json.dumps({"names": names}))
    make(tmp_path / "alone", Plan(steps=1, config={"trainer": {"optimizer": {"lr": 7}}}))
    with TestClient(app(RunFolder(tmp_path), TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}) as client:
        differs = {one["name"]: one["differs"] for one in client.get("/api/runs").json()}
        assert differs == {
            "alone": [],
            "sweep/0": [["trainer.optimizer.lr", 1e-6], ["trainer.optimizer.beta", 1e-6]],
            "sweep/1": [["trainer.optimizer.lr", 1e-5], ["trainer.optimizer.beta", 1e-5]],
        }
        told = get(client, "settings", run="sweep/1")
        assert told["overridden"] == 3
        assert told["rows"][:3] == [["experiment", "tiny"], ["trainer.optimizer.lr", 1e-5], ["run.max_steps", 1]]
        assert [row[0] for row in told["rows"]].count("run.max_steps") == 1
        both = get(client, "settings", run=["sweep/0", "sweep/1"])
        assert ([row[0] for row in both["rows"]], both["overridden"]) == (
            ["trainer.optimizer.lr", "run.dir", "trainer.optimizer.beta"],
            1,
        )


def test_groups_are_filtered_and_paged_newest_first(client: TestClient) -> None:
    def uids(**parameters: Any) -> list[str]:
        return [row["uid"] for row in get(client, "groups", **parameters)["rows"]]

    everything = [f"g{number:06d}" for number in reversed(range(24))]
    assert uids() == everything
    assert uids(step=2) == everything[12:16]
    assert uids(task="sort", step=5) == ["g000023", "g000021"]
    assert uids(uid="g00001") == everything[4:14]
    assert uids(reason="no_signal") == []
    first = get(client, "groups", limit=5)
    rest = get(client, "groups", limit=50, cursor=first["cursor"])
    assert [row["uid"] for row in first["rows"] + rest["rows"]] == everything
    assert (rest["cursor"], rest["scanned"]) == (None, 1.0)
    row = get(client, "groups", uid="g000003")["rows"][0]
    assert uids(question=row["question"]) == everything[::4]  # the same prompt in each batch
    low = uids(reward="0:0")
    rewards = {row["uid"]: row["rewards"] for row in get(client, "groups")["rows"]}
    assert low == [uid for uid in everything if 0.0 in rewards[uid]]


def test_text_of_answers_is_searched(client: TestClient) -> None:
    """Without a tokenizer, the text is the token ids; those of the last episode of slot n begin with n + 3."""
    found = get(client, "groups", text=" 26 27 28 29 30 31 7 8")["rows"]
    assert [row["uid"] for row in found] == ["g000023"]


def test_a_group_is_shown_as_it_was_recorded(client: TestClient, run: Path) -> None:
    shown, group = get(client, "group", uid="g000009", first=1, count=2), Recording(run).group("g000009")
    assert [one["turns"] is None for one in shown["trajectories"]] == [True, False, False, True]
    for number in (1, 2):
        one, recorded = shown["trajectories"][number], group.trajectories[number]
        assert (one["reward"], one["length"], one["staleness"]) == (recorded.total, recorded.num_tokens, 1)
        for turn, original in zip(one["turns"], recorded.turns, strict=True):
            answer = original.completion
            assert [token[0].strip() for token in turn["tokens"]] == [str(token) for token in answer.token_ids]
            assert [token[1] for token in turn["tokens"]] == [pytest.approx(x, abs=1e-4) for x in answer.logprobs]
            assert [token[2] for token in turn["tokens"]] == [pytest.approx(-0.01, abs=1e-3)] * 6
            assert [token[3] for token in turn["tokens"]] == [1] * 3 + [2] * 3
    rewards = [one.total for one in group.trajectories]
    mean = sum(rewards) / 4
    deviation = (sum((one - mean) ** 2 for one in rewards) / 3) ** 0.5
    assert [one["advantage"] for one in shown["trajectories"]] == [
        pytest.approx((one - mean) / (deviation + 1e-6), abs=1e-3) for one in rewards
    ]


def test_sliced_scan_lists_newest_first_and_loses_none(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording of gigabytes is scanned in slices; here a slice is one frame, which holds one step."""
    monkeypatch.setattr("asyncrl.extensions.view.watch.episodes.SCAN_SECONDS", 0.0)
    early = get(client, "groups", step=1)["rows"]  # far behind the scan
    assert [(row["uid"], row["place"], row["staleness"]) for row in early[:1]] == [("g000007", "1", [1, 1, 1, 1])]
    page = get(client, "groups")
    found, shares = page["rows"], [page["scanned"]]
    assert [row["uid"] for row in found[:4]] == ["g000023", "g000022", "g000021", "g000020"]
    while page["cursor"] is not None:
        page = get(client, "groups", cursor=page["cursor"])
        found, shares = found + page["rows"], [*shares, page["scanned"]]
    assert [row["uid"] for row in found] == [f"g{number:06d}" for number in reversed(range(24))]
    assert [row["place"] for row in found] == [str(step) for step in reversed(range(6)) for _ in range(4)]
    assert shares[0] < shares[2] < shares[-1] == 1.0


def test_planted_straggler_is_found(client: TestClient) -> None:
    late = get(client, "anatomy", step=3)["straggler"]
    assert (late["uid"], late["episode"], late["phase"], late["name"]) == ("g000015", 3, "tool", "search")
    assert late["seconds"] > 0.5 * late["total"]
    other = get(client, "anatomy", step=2)["straggler"]
    assert other["phase"] == "decode"


def test_planted_slow_engine_is_found(client: TestClient) -> None:
    found = {one["rule"]: one for one in get(client, "advice")}
    assert "http://127.0.0.1:30001" in found["slow_engine"]["title"]
    assert found["slow_engine"]["figures"] == {"tokens/s of a request": 10.0, "of the others": 50.0}


def test_fleet_is_what_the_status_file_says(client: TestClient, run: Path) -> None:
    assert get(client, "fleet")["status"] == json.loads((run / "status.json").read_text())


TRACEBACK = """Traceback (most recent call last):
  File "asyncrl/rollout/scoring.py", line 9, in score
    value = reward(answer)
  File "mine.py", line 3, in reward
    return {"right": 1}[answer]
KeyError: 'wrong'
"""


CHAIN = """Traceback (most recent call last):
  unrelated
OSError: earlier
INFO: goes on
  + Exception Group Traceback (most recent call last):
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "mine.py", line 3, in reward
    | KeyError: 'wrong'
    |
    | The above exception was the direct cause of the following exception:
    |
    | Traceback (most recent call last):
    |   File "asyncrl/rollout/worker.py", line 139, in _fail
    | AsyncRLError: 2 groups in a row failed
    +------------------------------------
"""


def test_causes_of_the_last_traceback_alone_matter(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rollout.log").write_text(CHAIN)
    (tmp_path / "logs" / "trainer-0.log").write_text("step 1\n")
    lines = [line.strip() for line in log_lines(tmp_path, "the launcher was killed")]
    assert lines[:3] == [
        "logs/rollout.log:",
        "Traceback (most recent call last):",
        'File "mine.py", line 3, in reward',
    ]
    assert lines[-1] == "AsyncRLError: 2 groups in a row failed"
    (tmp_path / "logs" / "rollout.log").write_text("  File\n".join(["Traceback (most recent call last):\n"] * 2))
    assert log_lines(tmp_path, f"see {tmp_path}/logs/trainer-0.log") == ["logs/trainer-0.log:", "  step 1"]
    deep = "Traceback (most recent call last):\n" + "  File\n" * 100 + "RecursionError: deep\n"
    (tmp_path / "logs" / "rollout.log").write_text(deep)
    found = log_lines(tmp_path, "")
    assert (len(found), found[-1]) == (MOST_LINES + 2, "  RecursionError: deep")


def died(folder: Path) -> None:
    """Make a run look as the launcher leaves one whose reward raises."""
    (folder / "logs").mkdir()
    noise = "step 3 is done\n" * 5000
    (folder / "logs" / "rollout.log").write_text(f"{noise}{TRACEBACK}INFO: closing\n" + "cancelled\n" * 50)
    (folder / "logs" / "trainer-0.log").write_text("PeerFailed: the rollout process has failed\n")
    error = f"rollout died: exit code 1\nrollout: KeyError: 'wrong'\n  at mine.py:3\nits log: {folder}/logs/rollout.log"
    (folder / "end.json").write_text(json.dumps({"state": "died", "error": error, "time": 0.0}))


def test_dead_run_says_why_with_the_lines_that_matter(tmp_path: Path) -> None:
    died(make(tmp_path / "run", Plan(slow_engine=True)))
    with TestClient(app(RunFolder(tmp_path), TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}) as client:
        (one,) = client.get("/api/runs").json()
        assert (one["state"], one["reason"]) == ("died", "rollout died: exit code 1")
        first, *others = get(client, "advice")
        assert (first["rule"], first["level"]) == ("died", "alarm")
        assert {"rollout: KeyError: 'wrong'", "  at mine.py:3", "logs/rollout.log:"} <= set(first["lines"])
        assert first["lines"][-7:] == ["logs/rollout.log:", *(f"  {line}" for line in TRACEBACK.splitlines())]
        assert {"slow_engine", "lost_engine"}.isdisjoint(one["rule"] for one in others)
        told = get(client, "fleet")
        assert (told["state"], {one["state"] for one in told["status"]["engines"]}) == ("died", {"died"})


def test_killed_launcher_is_death_and_slow_loading_is_not(tmp_path: Path) -> None:
    """Only the launcher's lease tells them apart: neither has written a line for ten minutes."""
    for name in ("killed", "loads"):
        folder = make(tmp_path / name, Plan())
        (folder / "leases").mkdir()
        (folder / "leases" / "run.lease").write_text("{}")
        (folder / "progress").mkdir()
    cause = {"process": "engine-0", "time": 1.0, "error": "CUDA error: lost", "place": ""}
    (tmp_path / "killed" / "progress" / "engine-0.failure").write_text(json.dumps(cause))
    ago = time.time() - 600
    for file in tmp_path.glob("*/*.json*"):
        os.utime(file, (ago, ago))
    os.utime(tmp_path / "killed" / "leases" / "run.lease", (ago, ago))
    with TestClient(app(RunFolder(tmp_path), TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}) as client:
        assert [one["state"] for one in client.get("/api/runs").json()] == ["died", "running"]
        told = get(client, "advice", run="killed")[0]["lines"]
        assert told[0] == "engine-0: CUDA error: lost"
        assert "no sign of its launcher for 10 min" in told[1]
        assert RunFolder(tmp_path).run("killed").marks()["silent"] == 1.0


@pytest.mark.parametrize("state", ["ended", "paused", "stopped"])
def test_engines_of_a_run_that_is_over_do_not_serve(state: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Plan())
    name = "summary.json" if state == "ended" else "end.json"
    (folder / name).write_text(json.dumps({"reason": "all steps", "state": state, "error": "as asked", "time": 0.0}))
    with TestClient(app(RunFolder(tmp_path), TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}) as client:
        (one,) = client.get("/api/runs").json()
        assert (one["state"], one["reason"]) == (state, "all steps" if state == "ended" else "as asked")
        assert {one["state"] for one in get(client, "fleet")["status"]["engines"]} == {state}
        assert {"died", "lost_engine"}.isdisjoint(one["rule"] for one in get(client, "advice"))


def test_advice_counts_batches_and_steps_since_the_resume(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", Plan(slow_tool=3))
    run = RunFolder(tmp_path).run("run")
    assert [one.step for one in evidence(run).stragglers] == [0, 1, 2, 3, 4, 5]
    (folder / "addresses.json").write_text(json.dumps({"resume": str(tmp_path / "checkpoints" / "000004"), "gpus": 0}))
    found = evidence(run)
    assert ([one.step for one in found.stragglers], [row["step"] for row in found.recent]) == ([4, 5], [5, 6])


def test_runs_without_recording_or_timelines_say_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "metrics.jsonl").touch()
    with TestClient(app(RunFolder(tmp_path), TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}) as client:
        assert "record=true" in client.get("/api/groups?run=run").json()["error"]
        assert "timelines.record" in client.get("/api/anatomy?run=run&step=0").json()["error"]
        assert get(client, "batches") == get(client, "advice") == []
        nothing = {"state": "running", "status": None, "age": None, "processes": [], "restarts": [], "elastic": []}
        assert get(client, "fleet") == nothing
        decision = {"step": 7, "reason": "add engine: 1 -> 2", "done": "started an engine"}
        jsonl.append(tmp_path / "run" / "elastic.jsonl", decision | {"figures": {"length": 9.0}})
        assert get(client, "fleet") == nothing | {"elastic": [decision]}


def test_changes_are_told_within_two_seconds_and_once(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", Plan())

    async def follow() -> None:
        events = _events(RunFolder(tmp_path))
        first = json.loads((await anext(events)).removeprefix("data: "))["run"]
        run.advance()
        second = json.loads((await asyncio.wait_for(anext(events), 60)).removeprefix("data: "))["run"]
        assert POLL_SECONDS < 1
        assert {name for name in first if first[name] != second[name]} == {"metrics", "records", "timeline", "status"}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(events), 1)

    asyncio.run(follow())
    run.close()


# -- strangers' folders ---------------------------------------------------------------------------------------


def _nested(depth: int) -> str:
    return '{"run": ' + "[" * depth + "]" * depth + "}"


def _sparse(path: Path, size: int) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    """Put something else in the place of a file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    make(path)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a list for an object": (lambda run: (run / "config.json").write_text("[1]"), "config.json is damaged"),
    "a list in an object": (lambda run: (run / "config.json").write_text('{"run": [1]}'), "run: got [1]"),
    "no JSON": (lambda run: (run / "summary.json").write_text("{"), "summary.json is damaged"),
    "a list for the state": (lambda run: (run / "status.json").write_text("[]"), "status.json is damaged"),
    "nesting without end": (lambda run: (run / "config.json").write_text(_nested(100_000)), "config.json is damaged"),
    "a number of many digits": (
        lambda run: (run / "config.json").write_text('{"run": {"max_steps": ' + "9" * 5000 + "}}"),
        "config.json is damaged",
    ),
    "a list for the end": (lambda run: (run / "end.json").write_text("[1]"), "end.json is damaged"),
    "a text for a number": (lambda run: (run / "metrics.jsonl").write_text('{"step": "x"}\n'), "step: got 'x'"),
    "a last line that is no object": (lambda run: (run / "metrics.jsonl").write_text("[1]\n"), "the last line"),
    "a link to a device": (
        lambda run: _instead(run / "status.json", lambda path: path.symlink_to("/dev/zero")),
        "no regular file",
    ),
    "a link out of the folder": (
        lambda run: _instead(run / "config.json", lambda path: path.symlink_to("/proc/self/status")),
        "a link out of",
    ),
    "a folder elsewhere": (
        lambda run: _instead(run / "records", lambda path: path.symlink_to("/usr/share")),
        "a link out of",
    ),
    "a FIFO": (lambda run: _instead(run / "metrics.jsonl", os.mkfifo), "no regular file"),
    "a FIFO for the settings": (lambda run: _instead(run / "config.json", os.mkfifo), "no regular file"),
    "a folder for the settings": (lambda run: _instead(run / "config.json", os.mkdir), "no regular file"),
    "a file without end": (lambda run: _sparse(run / "status.json", 3 << 30), "more than"),
}
ODD: dict[str, Callable[[Path], object]] = {
    "NaN": lambda run: (run / "metrics.jsonl").write_text('{"step": NaN, "reward/mean": Infinity}\n'),
    "half a character": lambda run: (run / "config.json").write_text('{"run": {"name": "\\ud800"}}'),
    "bytes that are no text": lambda run: run.rename(os.fsdecode(os.fsencode(run.parent) + b"/bad\xff")),
    "a number of overrides": lambda run: (run / "overrides.json").write_text('{"names": 3}'),
    "lines without end": lambda run: _sparse(run / "metrics.jsonl", 3 << 30),
    "a FIFO for a frame": lambda run: _instead(run / "records" / "000000.frames", os.mkfifo),
    "a number that is none": lambda run: (run / "records" / "².frames").touch(),
}
"""What does not damage the list of runs, although the run itself cannot be shown, or looks odd."""
ENDPOINTS = ("metrics", "lines", "recording", "groups", "batches", "fleet", "advice", "settings")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("template") / "run", Plan(steps=1))


@pytest.mark.parametrize("kind", [*BAD, *ODD])
def test_bad_run_is_shown_with_a_reason_and_harms_none(kind: str, template: Path, tmp_path: Path) -> None:
    """Whatever is asked is answered: nothing is waited for, and at most some MiB are read."""
    for name in ("bad", "good"):
        shutil.copytree(template, tmp_path / name)
    harm, reason = BAD.get(kind) or (ODD[kind], "")
    harm(tmp_path / "bad")
    watched = RunFolder(tmp_path)
    with TestClient(
        app(watched, TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}, raise_server_exceptions=False
    ) as client:
        tracemalloc.start()
        good, bad = sorted(client.get("/api/runs").json(), key=lambda one: one["name"].startswith("bad"))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 100 << 20
        assert (good["name"], good["step"], good["state"]) == ("good", 1, "running")
        assert (bad["state"], reason in bad["reason"]) == ("bad" if reason else "running", True), bad
        for path in ENDPOINTS:
            answer = client.get(f"/api/{path}", params={"run": bad["name"], "file": "eval"})
            assert answer.status_code in (200, 404, 422), (path, answer.text)
            assert path == "settings" or answer.status_code == 200 or answer.json()["error"]
        assert get(client, "metrics", run="good")["columns"] == {"step": [1]}
    first = asyncio.run(anext(aiter(_events(watched))))
    assert set(json.loads(first.removeprefix("data: "))) == {"good", bad["name"]}


def test_strangers_logs_are_read_in_their_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("KeyError: the secret\n")
    logs = make(tmp_path / "runs" / "run", Plan(steps=1)) / "logs"
    logs.mkdir()
    os.mkfifo(logs / "a.log")
    (logs / "b.log").symlink_to(tmp_path / "secret")
    _sparse(logs / "c.log", 3 << 30)
    error = "/logs/a.log /logs/b.log /logs/c.log /logs/..log /logs/missing.log"
    (logs.parent / "end.json").write_text(json.dumps({"state": "<b>", "error": error, "time": []}))
    watched = RunFolder(tmp_path / "runs")
    with TestClient(app(watched, TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}) as client:
        assert client.get("/api/runs").json()[0]["state"] == "died"
        first = get(client, "advice")[0]
        assert (first["rule"], first["lines"][0]) == ("died", error)
        assert len(json.dumps(first)) < 1 << 20
        assert "the secret" not in json.dumps(first)


def test_files_through_links_of_a_strangers_run_are_not_shown(template: Path, tmp_path: Path) -> None:
    """Its owner could otherwise make the page read what only the page's owner may read."""
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"step": 1, "version_max": 1, "accuracy": 0.25}\n')
    shutil.copytree(template, tmp_path / "runs" / "run")
    _instead(tmp_path / "runs" / "run" / "eval.jsonl", lambda path: path.symlink_to(secret))
    with TestClient(
        app(RunFolder(tmp_path / "runs"), TOKEN, ["*"]), headers={"authorization": f"Bearer {TOKEN}"}
    ) as client:
        answer = client.get("/api/lines", params={"run": "run", "file": "eval"})
        assert (answer.status_code, "a link out of" in answer.json()["error"]) == (404, True)
