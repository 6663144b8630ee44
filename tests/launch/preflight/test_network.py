"""Two processes on this machine stand for two machines: they meet, or tell within their deadline why not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.launch.preflight.allreduce import AllReduce
from asyncrl.launch.preflight.network import check_allreduce, check_reach, unseen
from asyncrl.launch.preflight.reach import Reach
from asyncrl.launch.preflight.telling import MARK, heard
from asyncrl.ports import free_port

HERE = "127.0.0.1"
NOT_OURS = "192.0.2.1"  # of documentation (RFC 5737): no machine's


def answers(told: Reach | AllReduce, *names: str) -> dict[str, dict[str, Any]]:
    """Of one process for each name, as Slurm would start them."""
    started = [
        subprocess.Popen(
            [sys.executable, *told.argv()],
            env={**os.environ, "SLURMD_NODENAME": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names
    ]
    return heard([one.communicate(timeout=60)[0] for one in started])


def reach(**changes: Any) -> Reach:
    return replace(Reach("a", HERE, free_port(HERE), ["b"], 10.0, {}, {}), **changes)


def test_machines_that_reach_the_first_say_so(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.write_text("mark")
    told = reach(others=["b", "c"], folders={str(tmp_path): str(mark)})
    found = answers(told, "c", "a", "b")
    assert {name: answer["problem"] for name, answer in found.items()} == {"a": "", "b": "", "c": ""}
    assert [one.level for one in check_reach(told, found)] == ["ok"]
    assert unseen(found) == {}


def test_a_folder_that_is_another_one_there_is_told(tmp_path: Path) -> None:
    (tmp_path / "mark").write_text("of another file system")
    (tmp_path / "config.json").write_text("{}")
    models = {str(tmp_path): 2, "/models": 2}
    folders = {"/shared": str(tmp_path / "mark"), "/gone": "/gone/mark"}
    found = answers(reach(folders=folders, models=models), "a", "b")
    assert unseen(found) == {name: ["/shared", "/gone", "/models"] for name in "ab"}


def test_a_port_that_nobody_listens_on_is_told_within_the_deadline() -> None:
    told, began = reach(seconds=1.0), time.monotonic()
    found = answers(told, "b")
    assert time.monotonic() - began < 8
    (finding,) = check_reach(told, found)
    assert (finding.level, finding.field) == ("error", "cluster.interface")
    assert f"b to a ({HERE}:{told.port}): cannot reach" in finding.value


def test_a_machine_that_never_comes_is_told_by_the_first_and_waited_for_no_longer_than_said() -> None:
    told = reach(seconds=1.0)
    found = answers(told, "a")
    assert found["a"]["problem"] == "nothing came from ['b']"
    (finding,) = check_reach(told, found)
    assert "b to a" in finding.value
    assert "no answer" in finding.value


def test_an_address_of_no_machine_cannot_be_listened_on() -> None:
    found = answers(reach(address=NOT_OURS, seconds=1.0), "a")
    assert NOT_OURS in found["a"]["problem"]


def allreduce(**changes: Any) -> AllReduce:
    return replace(AllReduce("gloo", ["a", "b"], HERE, free_port(HERE), {"a": "lo", "b": "lo"}, 30.0), **changes)


def test_machines_sum_over_gloo() -> None:
    told = allreduce()
    found = answers(told, "a", "b")
    assert {name: answer["problem"] for name, answer in found.items()} == {"a": "", "b": ""}
    (finding,) = check_allreduce(told, found)
    assert finding.level == "ok"
    assert "over gloo between 2 machines" in finding.value


def test_an_interface_that_is_not_there_fails_and_is_named_with_its_machine() -> None:
    told = allreduce(interfaces={"a": "lo", "b": "nosuch0"}, seconds=5.0)
    found = answers(told, "a", "b")
    (finding,) = check_allreduce(told, found)
    assert (finding.level, finding.field) == ("error", "cluster.interface")
    assert "b: " in finding.value
    assert "b by nosuch0" in finding.remedy


def test_a_rank_that_waits_for_nobody_ends_within_its_deadline() -> None:
    told = allreduce(seconds=1.0)
    found = answers(told, "a")  # which waits a minute at most
    assert found["a"]["problem"]
    (finding,) = check_allreduce(told, found)
    assert "a: " in finding.value
    assert "b: no answer" in finding.value


@pytest.mark.parametrize("noise", ["", "Lmod: loaded cuda\n", f"{MARK.strip()}\n"])
def test_answers_are_found_among_what_modules_print(noise: str) -> None:
    line = MARK + '{"node": "a", "problem": ""}\n'
    assert heard([noise + line + noise]) == {"a": {"node": "a", "problem": ""}}


def test_a_machine_without_an_answer_gets_the_last_words_that_were_heard() -> None:
    cut = MARK + '{"node": "b", "pro'
    found = heard(["Lmod: loaded\nModuleNotFoundError: No module named 'asyncrl'\n", cut], ["a", "b"])
    assert "No module named 'asyncrl'" in found["a"]["problem"]
    assert found["b"]["problem"].startswith("no answer; ")
    assert heard([], ["a"]) == {"a": {"node": "a", "problem": "no answer"}}
