"""Another user of the machine inspects a running training, and obtains no key, batch, weight or file."""

from __future__ import annotations

import encodings.idna  # noqa: F401  the other user cannot import
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.engine.router import UNREACHABLE
from asyncrl.network.addresses import Addresses
from asyncrl.network.ports import FIRST_PORT, LAST_PORT
from tests.integration.running import descendants, finish, nothing_is_left, processes_of, start, wait_for_step

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]
NOBODY = 65534
SETTINGS = (
    *("trainer.data_parallel=2", "engine.tensor_parallel=2", "record=true", "checkpoint.every=1"),
    "cluster.on_engine_death=fail",
    *("rollout.batch_groups=4", "rollout.group_size=2", "run.max_steps=100000", "eval.questions=0"),
)
ASKED = {  # of every server, whatever it is; what may be answered with 200 says nothing of the run
    "GET": (
        *("/batch", "/status", "/workers", "/server_info", "/get_server_info", "/get_model_info", "/v1/models"),
        *("/loads", "/get_loads", "/engine_metrics"),
    ),
    "POST": (
        *("/generate", "/hold", "/version", "/snapshot", "/evaluate", "/flush_cache", "/pause_generation"),
        *("/get_weights_by_name", "/update_weights_from_tensor", "/update_weights_from_disk", "/workers"),
        *("/abort_request", "/v1/chat/completions", "/release_memory_occupation", "/init_weights_update_group"),
    ),
}
KEYS: tuple[dict[str, str], ...] = ({}, {"Authorization": "Bearer guessed"})


def as_nobody(look: Any, *arguments: Any) -> Any:
    """Run a function in a process of that user, which has only this program's code, and return its result."""
    ours, theirs = multiprocessing.Pipe()

    def run() -> None:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        try:
            theirs.send(look(*arguments))
        except BaseException as error:
            theirs.send(error)
            raise

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    assert ours.poll(600), "no answer"
    found = ours.recv()
    process.join(60)
    if isinstance(found, BaseException):
        raise found
    return found


def readable(paths: list[str]) -> list[str]:
    """Return the paths that can be opened for reading or writing."""
    return [path for path in paths if opens(path, os.O_RDONLY) or opens(path, os.O_WRONLY | os.O_APPEND)]


def opens(path: str, flags: int) -> bool:
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def of_processes(pids: list[int]) -> tuple[list[str], str]:
    """Return the processes' files that can be opened but should not be, and the content that is open to all."""
    private = [f"/proc/{pid}/{name}" for pid in pids for name in ("environ", "mem", "maps", "fd", "cwd/", "root/")]
    public = ""
    for pid in pids:
        with suppress(OSError):
            public += Path(f"/proc/{pid}/cmdline").read_text(errors="replace") + "\n"
    return readable(private), public


def answers(ports: list[int], servers: set[int]) -> list[tuple[int, str, int, bytes]]:
    """Return (port, path, status, body) of all requests to ports that speak HTTP, with and without TLS."""
    found = []
    for port in ports:
        seconds = 60.0 if port in servers else 2.0  # of the others, some do not answer at all
        kinds = (HTTPSConnection, HTTPConnection)
        ways = [kind for kind in kinds if answer(kind, port, "GET", "/health", {}, seconds=seconds)]
        for kind in ways:
            asked = [(method, path) for method, paths in ASKED.items() for path in paths]
            asked += [("GET", "/metrics")]
            for (method, path), headers in product(asked, KEYS):
                if said := answer(kind, port, method, path, headers):
                    found.append((port, path, *said))
    return found


def answer(
    kind: type[HTTPConnection], port: int, method: str, path: str, headers: dict[str, str], seconds: float = 20.0
) -> tuple[int, bytes] | None:
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    options = {"context": trusting} if issubclass(kind, HTTPSConnection) else {}
    connection = kind("127.0.0.1", port, timeout=seconds, **options)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None, headers)
        said = connection.getresponse()
        return said.status, said.read()
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()


def met(places: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the addresses that accept a connection."""
    found = []
    for place in places:
        with suppress(OSError), socket.create_connection(place, timeout=5.0):
            found.append(place)
    return found


def listening(processes: list[psutil.Process]) -> Iterator[tuple[str, int]]:
    for process in processes:
        with suppress(psutil.Error):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    yield one.laddr.ip, one.laddr.port


def shared_memory(processes: list[psutil.Process]) -> list[str]:
    found = set()
    for process in processes:
        with suppress(OSError):
            found |= set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))
    return sorted(found)


def sockets(processes: list[psutil.Process]) -> list[str]:
    """Return the names of the processes' Unix sockets."""
    inodes = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process.pid}/fd").glob("*"):
            with suppress(OSError):
                inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor)))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({words[7] for words in lines if len(words) > 7 and words[6] in inodes})


def connected(paths: list[str]) -> list[str]:
    found = []
    for path in paths:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_UNIX, kind) as one, suppress(OSError):
                one.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)
                found.append(path)
    return found


@pytest.fixture
def public() -> Iterator[Path]:
    """Yield a folder that every user can enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="asyncrl-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_nothing_of_a_run_is_anybody_elses(public: Path) -> None:
    """Then an engine dies, which ends this run with a diagnosis (cluster.on_engine_death=fail)."""
    run_dir = public / "run"
    with start(run_dir, *SETTINGS) as process:
        wait_for_step(process, run_dir, 2)
        addresses = Addresses.read(run_dir)
        processes = descendants(process)
        files = [str(path) for path in (run_dir, *run_dir.rglob("*"))]
        assert {"config.json", "addresses.json", "records", "checkpoints", "tls", "logs"} <= set(os.listdir(run_dir))
        assert as_nobody(os.listdir, str(public))  # it gets so far
        assert as_nobody(readable, files) == []
        modes = set()
        for path in files:
            with suppress(FileNotFoundError):  # an older checkpoint, pruned meanwhile
                modes.add(stat.S_IMODE(os.stat(path).st_mode) & 0o077)
        assert modes == {0}

        private, told = as_nobody(of_processes, [one.pid for one in processes])
        assert private == []
        assert "asyncrl" in told
        assert addresses.api_key not in told
        places = set(listening(processes))
        assert len(places) >= 5
        assert {address for address, _ in places} == {"127.0.0.1", UNREACHABLE}
        assert as_nobody(met, [place for place in places if place[0] == UNREACHABLE]) == []
        assert not [port for _, port in places if str(port) in told]

        assert as_nobody(readable, shared_memory(processes)) == []
        assert as_nobody(connected, sockets(processes)) == []

        given = sorted({port for _, port in places if FIRST_PORT <= port < LAST_PORT})  # the others are gloo's
        servers = {int(url.rpartition(":")[2]) for url in (*addresses.engines, addresses.router, addresses.rollout)}
        router = int(addresses.router.rpartition(":")[2])
        told = as_nobody(answers, given, servers)
        assert servers <= {port for port, *_ in told}  # all of them have been asked
        open_to_all = {
            "/v1/models",
            "/loads",
            "/engine_metrics",
        }  # of the router: the names of its models, no loads, nothing
        assert [said for said in told if said[2] < 400 and said[1] not in open_to_all] == []
        assert {port for port, path, status, _ in told if path == "/engine_metrics" and status < 400} <= {router}
        assert {body for _, path, status, body in told if path == "/engine_metrics" and status < 400} <= {b""}
        assert {
            tuple(json.loads(body)["loads"]) for _, path, status, body in told if path == "/loads" and status < 400
        } <= {()}
        assert not [body for *_, body in told if addresses.api_key.encode() in body or b"token" in body.lower()]
        assert process.poll() is None
        os.kill(processes_of(process, run_dir)["engine-0"], signal.SIGKILL)
        code, text = finish(process, run_dir)
    assert code == 1, text
    assert "engine-0 died: killed by SIGKILL" in text
    nothing_is_left(run_dir, processes)
    assert json.loads((run_dir / "config.json").read_text())["record"]
