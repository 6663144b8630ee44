"""Two processes on this machine stand for two machines: they meet, or tell within their deadline why not."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import LaunchError
from asyncrl.extensions.reach.network import ask_allreduce, ask_reach, check_allreduce, check_reach, unseen
from asyncrl.extensions.reach.programs import MARK, AllReduce, Reach, _connect, end_after, parse
from asyncrl.launch.placement import place
from asyncrl.network.addresses import NODE
from asyncrl.network.ports import free_port
from tests.fakes import Machines
from tests.launch.checks.worlds import job, nodes

HERE = "127.0.0.1"
NOT_OURS = "192.0.2.1"  # of documentation (RFC 5737): no machine's


def answers(told: Reach | AllReduce, *names: str) -> dict[str, dict[str, Any]]:
    """Return the answers of one process per name, as a cluster would start them."""
    started = [
        subprocess.Popen(
            [sys.executable, *told.argv()],
            env={**os.environ, NODE: name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names
    ]
    outputs = [one.communicate(timeout=120)[0] for one in started]
    assert {one.returncode for one in started} == {0}  # else a cluster might kill those that have not told yet
    return parse(outputs)


def reach(**changes: Any) -> Reach:
    return replace(Reach("a", HERE, free_port(HERE), ["b"], 60.0, {}, {}), **changes)


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
    for model in ("same", "other"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text("{}")
    models = {str(tmp_path / "same"): 2, str(tmp_path / "other"): 3, "/models": 2}
    folders = {"/shared": str(tmp_path / "mark"), "/gone": "/gone/mark"}
    found = answers(reach(folders=folders, models=models), "a", "b")
    assert unseen(found) == {name: ["/shared", "/gone", str(tmp_path / "other"), "/models"] for name in "ab"}


def test_early_machine_tries_again_until_the_first_listens() -> None:
    told = reach(seconds=30.0)
    with ThreadPoolExecutor() as pool:
        early = pool.submit(answers, told, "b")
        time.sleep(1.0)
        assert answers(told, "a")["a"]["problem"] == ""
        assert early.result()["b"]["problem"] == ""


def test_strangers_at_the_port_are_no_machines() -> None:
    """One that goes at once, one that says nothing of use: the machine that comes after them is heard."""
    told = reach(seconds=60.0)
    with ThreadPoolExecutor() as pool:
        listening = pool.submit(answers, told, "a")
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"c\n"):
            connected(told.port, words)
        assert answers(told, "b")["b"]["problem"] == ""
        assert listening.result()["a"]["problem"] == ""


def connected(port: int, words: bytes) -> None:
    """Wait for a listener, send it this, and break the connection."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection((HERE, port), timeout=1.0) as end:
                end.sendall(words)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_another_server_at_the_port_is_told() -> None:
    with ThreadPoolExecutor() as pool, socket.create_server((HERE, 0)) as server:

        def answer() -> None:
            with suppress(OSError):  # it is closed
                while True:
                    end, _ = server.accept()
                    with end:
                        end.recv(100)
                        end.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        pool.submit(answer)
        found = answers(reach(port=server.getsockname()[1], seconds=5.0), "b")
        server.shutdown(socket.SHUT_RDWR)
    assert found["b"]["problem"].endswith("another server answers there")


def test_findings_are_told_though_the_last_try_had_no_time() -> None:
    with socket.create_server((HERE, 0)) as server, ThreadPoolExecutor() as pool:
        found = pool.submit(_connect, reach(port=server.getsockname()[1]), b"b", time.monotonic() + 3.0)
        end, _ = server.accept()
        with end:
            end.recv(100)
            end.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        assert found.result().endswith("another server answers there")  # nobody answers the later attempts


class Alone(Machines):
    """A job of two machines, of which none runs anything."""

    def __init__(self, answer: str = "") -> None:
        config = job(**{"trainer.data_parallel": 2, "cluster.trainer_nodes": 2})
        super().__init__(config, nodes(config, 2, 0), answer=answer)

    def everywhere(self, program: list[str], *how: Any, **more: Any) -> list[str]:
        output = super().everywhere(program, *how, **more)
        marks = [Path(file) for file in json.loads(program[-1]).get("folders", {}).values()]
        assert all(mark.read_text() == mark.name for mark in marks)
        if output == ["fails"]:
            raise LaunchError("cannot start it")
        return output


@pytest.mark.parametrize("answer", ["", "fails"])
def test_folders_are_marked_meanwhile_and_left_as_they_were(tmp_path: Path, answer: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    alone = Alone(answer)
    folders = [tmp_path, Path("/proc/self")]  # where nobody writes
    try:
        told, found = ask_reach(alone, folders, [tmp_path], "0123")
        assert found == {name: {"node": name, "problem": "no answer"} for name in ("node0", "node1")}
        assert told.port == alone.nodes[0].ports[-1]
    except LaunchError:
        assert answer == "fails"
    (asked,) = alone.asked
    told = json.loads(asked["program"][-1])
    assert list(told["folders"]) == [str(tmp_path)]
    assert told["models"] == {str(tmp_path): 2}
    assert set(asked["mounts"]) == {tmp_path}
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(("gpu", "backend"), [(False, "gloo"), (True, "nccl")])
def test_the_trainers_machines_sum_by_what_their_ranks_will_use(gpu: bool, backend: str) -> None:
    alone = Alone()
    told, found = ask_allreduce(alone, place(alone.config, alone.nodes), gpu=gpu)
    assert (told.backend, told.names, told.address) == (backend, ["node0", "node1"], "10.0.0.0")
    assert told.port not in (alone.nodes[0].ports[-1], alone.nodes[0].ports[0])  # the other check's, and the router's
    assert alone.asked[0]["nodes"] == ["node0", "node1"]
    assert {one["problem"] for one in found.values()} == {"no answer"}


def test_silent_port_is_told_within_the_deadline() -> None:
    told, began = reach(seconds=1.0), time.monotonic()
    found = answers(told, "b")
    assert time.monotonic() - began < 60
    (finding,) = check_reach(told, found)
    assert (finding.level, finding.field) == ("error", "cluster.interface")
    assert f"b to a ({HERE}:{told.port}): cannot reach" in finding.value


def test_absent_machine_is_told_and_awaited_no_longer() -> None:
    told = reach(seconds=1.0)
    found = answers(told, "a")
    assert found["a"]["problem"] == "no connection came from ['b']"
    (finding,) = check_reach(told, found)
    assert "from b to a" in finding.value
    assert "no answer" in finding.value


def test_an_address_of_no_machine_cannot_be_listened_on() -> None:
    found = answers(reach(address=NOT_OURS, seconds=1.0), "a")
    assert NOT_OURS in found["a"]["problem"]


def allreduce(**changes: Any) -> AllReduce:
    return replace(AllReduce("gloo", ["a", "b"], HERE, free_port(HERE), {"a": "lo", "b": "lo"}, 60.0), **changes)


def test_machines_sum_over_gloo() -> None:
    told = allreduce()
    found = answers(told, "a", "b")
    assert {name: answer["problem"] for name, answer in found.items()} == {"a": "", "b": ""}
    (finding,) = check_allreduce(told, found)
    assert finding.level == "ok"
    assert "over gloo between 2 machines" in finding.value


def test_missing_interface_is_named_with_its_machine() -> None:
    told = allreduce(interfaces={"a": "lo", "b": "nosuch0"}, seconds=2.0)
    found = answers(told, "a", "b")
    (finding,) = check_allreduce(told, found)
    assert (finding.level, finding.field) == ("error", "cluster.interface")
    assert "b: " in finding.value
    assert "b: nosuch0" in finding.remedy


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
    assert parse([noise + line + noise]) == {"a": {"node": "a", "problem": ""}}


def test_silent_machine_gets_the_last_words_heard() -> None:
    cut = MARK + '{"node": "b", "pro'
    found = parse(["Lmod: loaded\nModuleNotFoundError: No module named 'asyncrl'\n", cut], ["a", "b"])
    assert "No module named 'asyncrl'" in found["a"]["problem"]
    assert found["b"]["problem"].startswith("no answer; ")
    assert parse([], ["a"]) == {"a": {"node": "a", "problem": "no answer"}}
    long = parse(["first words " + "x " * 300 + "last words"], ["a"])["a"]["problem"]
    assert long.endswith("last words")
    assert "first words" not in long


def test_endless_program_answers_and_ends_in_its_time() -> None:
    code = f"import time; from {end_after.__module__} import end_after; end_after(0.2, {{'node': 'a'}}); time.sleep(60)"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert time.monotonic() - began < 30
    assert parse([done.stdout]) == {"a": {"node": "a"}}
