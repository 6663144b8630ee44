"""A Slurm of our own on this machine: the real controller, and a daemon for each of its virtual nodes.

Debian's packages, which `make slurm` unpacks into .venv/slurm where they are not installed (scripts/debian_tools.py).
Every user can have one: its daemons start that user's tasks. The nodes share the machine's loopback, or, `apart`, each
has a network of its own (a namespace, at a bridge in the first one, which only root can make): then nothing of one node
can be reached from another by 127.0.0.1.
"""

from __future__ import annotations

import getpass
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config import Config
from asyncrl.network.ports import free_ports
from scripts import debian_tools
from tests.fakes import tiny_config
from tests.integration.running import TIMEOUT, lines, pids_carrying

ROOT = Path(__file__).resolve().parents[3]
UNPACKED = ROOT / ".venv" / "slurm"
HOST = "127.0.0.1"
JOB = ("experiment=tiny", "cluster=slurm", "cluster.gpus=0", f"cluster.host={HOST}", "weights.transport=distributed")
SMALL = ("rollout.batch_groups=4", "rollout.group_size=8", "eval.questions=0")
DEADLINE = 60.0
"""Seconds for anything that the lab waits for."""
CONF = """\
ClusterName=lab
SlurmctldHost={host}({address})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
PluginDir={folder}/plugins
SlurmctldPort={controller}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
SlurmctldTimeout=60
SlurmdTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=300
JobRequeue=1
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs={cpus} RealMemory=8000 State=UNKNOWN\n"


def slurm_config(**changes: Any) -> Config:
    """The tiny experiment as a Slurm job, changed by dotted names."""
    return tiny_config(**{"cluster.launcher": "slurm", "slurm": {"container": {}}, **changes})


def missing() -> str:
    """Return why there can be no lab here, or an empty text."""
    if debian_tools.installed(debian_tools.SLURM) or debian_tools.complete(UNPACKED):
        return ""
    return "Slurm is not installed: `make slurm` unpacks it, or says why it cannot"


def missing_networks() -> str:
    """Return why the nodes cannot have networks of their own here, or an empty text."""
    if os.geteuid():
        return "only root can give nodes networks of their own"
    return "" if shutil.which("ip") else "nodes get networks of their own by `ip`: install iproute2"


class Lab:
    """Started and stopped as a context. `env` is what its commands need."""

    def __init__(
        self, folder: Path, nodes: Sequence[str] = ("node1", "node2"), cpus: int = 16, *, apart: bool = False
    ) -> None:
        """`cpus` of each node, as Slurm counts them; the machine's are shared by all."""
        self.folder, self.nodes, self._cpus = folder, list(nodes), cpus
        self.hosts = dict.fromkeys(nodes, HOST)
        self._spaces: dict[str, str] = {}
        if apart:
            self.hosts = {node: f"10.77.0.{number}" for number, node in enumerate(nodes, 1)}
            self._spaces = {node: f"{folder.name}-{node}" for node in nodes}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH", "SRUN"))}
        tools = f"{UNPACKED}/usr/bin:{UNPACKED}/usr/sbin:{plain['PATH']}:/usr/sbin"
        self.env = {**plain, "PATH": tools, "SLURM_CONF": str(folder / "slurm.conf")}
        if debian_tools.complete(UNPACKED):
            folders = [*map(str, debian_tools.library_folders(UNPACKED)), plain.get("LD_LIBRARY_PATH", "")]
            self.env["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))

    def on(self, node: str, *command: str) -> list[str]:
        """A command for this node's network. (`ip netns exec` would hide /sys/fs/cgroup.)"""
        return ["nsenter", f"--net=/run/netns/{self._spaces[node]}", *command] if self._spaces else list(command)

    def at_head(self, *command: str) -> list[str]:
        """A command where the controller is."""
        return self.on(self.nodes[0], *command)

    def __enter__(self) -> Lab:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        self._build_networks()
        controller, *ports = free_ports(HOST, 1 + len(self.nodes))
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        address = self.hosts[self.nodes[0]]
        facts = {"host": socket.gethostname().split(".")[0], "address": address, "user": getpass.getuser()}
        facts |= {"folder": self.folder, "controller": controller}
        (self.folder / "plugins").symlink_to(_plugins())  # slurm.conf cannot name a path with a space
        text = CONF.format(**facts)
        for node, port in zip(self.nodes, ports, strict=True):
            text += NODE.format(
                **{**facts, "name": node, "port": port, "cpus": self._cpus, "address": self.hosts[node]}
            )
        text += f"PartitionName=lab Nodes={','.join(self.nodes)} Default=YES MaxTime=60 State=UP\n"
        (self.folder / "slurm.conf").write_text(text)
        self._munge()
        self._start("slurmctld", self.nodes[0], "slurmctld", "-D", "-i")
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "idle nodes")

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.SubprocessError, AssertionError):
            self.run("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}")
            self.run("scancel", f"--user={getpass.getuser()}")
            self.wait_for(lambda: not self.run("squeue", "--noheader"), "an empty queue")
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            try:
                daemon.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                daemon.kill()
        for space in self._spaces.values():
            with suppress(subprocess.SubprocessError):
                _ip("netns", "delete", space)

    def _build_networks(self) -> None:
        first = next(iter(self._spaces.values()), "")
        for space in self._spaces.values():
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        if first:
            _ip("-n", first, "link", "add", "lab", "type", "bridge")
            _ip("-n", first, "link", "set", "lab", "up")
        for number, (node, space) in enumerate(self._spaces.items()):
            ends = ["eth0", "type", "veth", "peer", "name", f"port{number}", "netns", first]
            _ip("-n", space, "link", "add", *ends)
            _ip("-n", first, "link", "set", f"port{number}", "master", "lab", "up")
            _ip("-n", space, "addr", "add", f"{self.hosts[node]}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def run(self, *command: str, check: bool = True, timeout: float = DEADLINE) -> str:
        """A Slurm command's output."""
        words = self.at_head(*command)
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=timeout, check=False)
        assert not check or done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %t", check=False).splitlines()
        return dict(line.split() for line in lines)

    def start_node(self, name: str) -> None:
        """Its daemon."""
        words = ("slurmd", "-D", "-N", name)
        stepd = _tool("slurmstepd")
        self._start(name, name, *words, *(("-d", stepd) if debian_tools.complete(UNPACKED) and stepd else ()))

    def kill_node(self, name: str) -> None:
        """Kill a node like a loss of power: SIGKILL to its daemon, those of its steps, and what they started."""
        import psutil

        daemon = self._daemons.pop(name)
        ours = [p for p in psutil.process_iter(["cmdline"]) if any("slurmstepd" in w for w in p.info["cmdline"] or [])]
        spool = str(self.folder / f"spool-{name}")
        victims = []
        for stepd in ours:
            with suppress(psutil.Error):
                if any(spool in file.path for file in stepd.open_files()) or self._of_node(stepd, name):
                    victims += [stepd, *stepd.children(recursive=True)]
        daemon.kill()
        daemon.wait(DEADLINE)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # nobody hears of another's death, and says goodbye
            for victim in victims:
                with suppress(psutil.Error):
                    victim.send_signal(number)
        for script in (self.folder / f"spool-{name}").glob("job*"):  # else the job cannot come back to this node
            shutil.rmtree(script, ignore_errors=True)

    def _of_node(self, stepd: object, name: str) -> bool:
        """Return whether a step's daemon belongs to this node, and not to a node of that name in another lab."""
        import psutil

        ours = self.env["SLURM_CONF"]
        for child in stepd.children():  # type: ignore[attr-defined]
            with suppress(psutil.Error):
                environment = child.environ()
                if environment.get("SLURMD_NODENAME") == name and environment.get("SLURM_CONF", ours) == ours:
                    return True
        return False

    def wait_for(self, happened: object, what: str, timeout: float = DEADLINE) -> None:
        """Look again and again."""
        deadline = time.monotonic() + timeout
        while not happened():  # type: ignore[operator]
            assert time.monotonic() < deadline, f"no {what} within {timeout:.0f} s\n{self.told()}"
            time.sleep(0.2)

    def told(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in self.folder.glob("*.log"))

    def _munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.folder.chmod(0o755)  # munged looks at every folder above its files
        names = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        self._start("munged", self.nodes[0], "munged", "--foreground", "--force", *options)
        self.wait_for((self.folder / "munge.socket").exists, "munge.socket")

    def _start(self, name: str, node: str, *words: str) -> None:
        path = _tool(words[0])
        assert path
        with (self.folder / f"{name}.out.log").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                self.on(node, path, *words[1:]),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),  # slurmstepd may dump one here
            )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=DEADLINE)


def _tool(name: str) -> str | None:
    for folder in (f"{UNPACKED}/usr/sbin", f"{UNPACKED}/usr/bin") if debian_tools.complete(UNPACKED) else ():
        for known in (name, f"{name}-wlm"):
            if (path := Path(folder, known)).exists():
                return str(path)
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


def _plugins() -> str:
    root = UNPACKED if debian_tools.complete(UNPACKED) else Path("/")
    (folder,) = root.glob("usr/lib/*-linux-*/slurm-wlm")
    return str(folder)


class Submitted:
    """A run that was submitted as a job."""

    def __init__(self, lab: Lab, run_dir: Path, *overrides: str) -> None:
        self.lab, self.run_dir = lab, run_dir
        argv = [sys.executable, "-m", "asyncrl.launch.main", *JOB, f"run.dir={run_dir}", *overrides]
        done = subprocess.run(lab.at_head(*argv), env=lab.env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.partition("submitted job ")[2].partition(";")[0]

    @property
    def output(self) -> str:
        out = self.run_dir / "slurm" / f"{self.id}.out"
        return out.read_text() if out.exists() else ""

    def show(self) -> dict[str, str]:
        """Return Slurm's description of the job."""
        words = self.lab.run("scontrol", "show", "job", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def minutes(self) -> int:
        """Return the whole minutes for which the job has run."""
        hours, minutes, _ = self.show()["RunTime"].split(":")
        return 60 * int(hours) + int(minutes)

    def steps(self) -> list[dict[str, Any]]:
        return lines(self.run_dir / "metrics.jsonl")

    def wait_for_step(self, step: int) -> None:
        def there() -> bool:
            assert self.show()["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), self.output
            return len(self.steps()) >= step

        self.lab.wait_for(there, f"step {step} of {self.run_dir}", TIMEOUT)

    def wait_for_state(self, *states: str) -> dict[str, str]:
        self.lab.wait_for(lambda: self.show()["JobState"] in states, f"{states} in {self.output}", TIMEOUT)
        return self.show()

    def finishes(self) -> None:
        """Wait until the job ends with success."""
        shown = self.wait_for_state("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), self.output

    def is_queued_again(self, times: int, **changes: int) -> None:
        """Wait for the requeue, and start the job immediately with these changes, because Slurm would wait for two
        minutes."""
        self.lab.wait_for(lambda: int(self.show()["Restarts"]) >= times, "requeue", TIMEOUT)
        time.sleep(3)  # the credential of the start before is revoked, by its second

        def started() -> bool:
            changed = [f"{name}={value}" for name, value in changes.items()]
            self.lab.run("scontrol", "update", f"jobid={self.id}", "starttime=now", *changed, check=False)
            return self.show()["JobState"] == "RUNNING"

        self.lab.wait_for(started, f"start of {self.show()}", TIMEOUT)

    def nodes(self) -> dict[str, str]:
        """Return the node of each process of the job."""
        return nodes_of(self.run_dir)


def nodes_of(run_dir: Path) -> dict[str, str]:
    """Return the node of each process of a run."""
    run_id = json.loads((run_dir / "addresses.json").read_text())["run_id"]
    found = {}
    for pid in pids_carrying(run_id):
        environment = psutil.Process(pid).environ()
        if "ASYNCRL_TASK" in environment:
            found[environment["ASYNCRL_TASK"].partition("/")[2]] = environment["SLURMD_NODENAME"]
    return found
