"""Addresses of a run's processes and files, which the launcher writes once and every process reads, and access to its
servers: the API key that they require, and the authority that signed their certificates."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import ssl
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

FILE = "addresses.json"
MACHINE = "machine.json"
"""File in which the launcher records which dtype it chose for each part and why, and how long the run should take."""
TUPLES = ("engines", "attached", "trainers")
END = "end.json"
"""File in which the launcher records how a run ended that did not finish: `state` (paused, stopped or died), `error`
and `time`."""
OVERRIDES = "overrides.json"
"""File in which the launcher records what the command line set: `names` of settings, and choices as NAME=OPTION."""
READY = "ready"
"""File that appears in the run folder when the router routes to every engine."""
STOP, STOPPED = "stop", "stopped"
"""Files in the run folder. The first asks the run to pause with a checkpoint, so that it can be resumed later. The
second confirms that it has."""
TRAINING = "training"
"""File in the run folder while the trainers use all memory of the GPUs that they share with engines."""
PAUSED = 75
"""Exit code of the command after a pause: EX_TEMPFAIL of sysexits.h."""
ARGUMENTS = "ASYNCRL_ARGUMENTS"
"""Environment variable of an engine or the router with further command-line arguments, in shell syntax."""
NODE = "ASYNCRL_NODE"
"""Environment variable with the name of the machine of a program that a cluster runs on each (Cluster.everywhere)."""
PEER_FAILED = 76
"""Exit code of a process that ends because another process of the run has failed: EX_PROTOCOL of sysexits.h."""
OUT_OF_MEMORY = "out_of_memory"
"""File in the run folder with the number of times that trainers were out of memory."""
LOST = "lost.jsonl"
"""File in which the trainer lists the engines that it has given up, for the launcher to restart."""
RESTARTED = "restart-"
"""Prefix of the version that an engine reports until it has weights of the run (engine/serve.py)."""


def times_restarted() -> int:
    """Return how often this process was started again."""
    return int(os.environ.get("ASYNCRL_INCARNATION", "").removeprefix(RESTARTED) or 0)


def node_name() -> str:
    """Return the name of this machine."""
    return os.environ.get(NODE) or os.uname().nodename


def times_out_of_memory(run_dir: Path) -> int:
    """Return how often the trainers of a run were out of memory."""
    file = run_dir / OUT_OF_MEMORY
    return int(file.read_text()) if file.exists() else 0


def metrics_key(api_key: str) -> str:
    """Return the key of /metrics of the rollout process and of the engines. It does not tell the run's API key."""
    return hmac.new(api_key.encode(), b"metrics", hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Access:
    """API key and certificate authority for clients of a run's servers.

    An empty key is not sent. `authority` is the PEM certificate that signed the servers' certificates (tls.py). If it
    is empty, the run's servers have no certificates, and clients do not ask for any.
    """

    key: str
    authority: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @cached_property
    def context(self) -> ssl.SSLContext:
        """TLS context. With an authority it accepts only the run's own servers, at the address that was requested."""
        if not self.authority:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.authority)
        return context

    @property
    def http(self) -> dict[str, Any]:
        """Arguments for httpx's clients. They ignore the environment's proxies, which are meant for other servers."""
        return {"headers": self.headers, "verify": self.context if self.authority else True, "trust_env": False}


@dataclass(frozen=True)
class Addresses:
    """URLs, the run's identity, and the resolved model folder."""

    run_id: str
    api_key: str
    model: Path
    engines: tuple[str, ...]  # engines that the launcher starts
    router: str
    rollout: str
    gpus: int
    started_at: float  # time.time() at the start of the command
    frozen_models: dict[str, Path] = field(default_factory=dict)  # folders of models that are not trained, by role
    frozen: dict[str, tuple[str, ...]] = field(default_factory=dict)  # their engines, started by the launcher or others
    attached: tuple[str, ...] = ()  # policy engines that were started by others (engine.urls)
    trainers: tuple[str, ...] = ()  # addresses of the machines that run trainer ranks
    resume: Path | None = None  # checkpoint from which the run resumes
    extensions: dict[str, dict[str, str]] = field(default_factory=dict)  # what the processes of an extension share
    authority: str = ""  # PEM certificate that signed its servers' certificates; empty if they have none

    def write(self, run_dir: Path) -> None:
        """Write the file, readable by the owner only, because it holds the run's API key."""
        descriptor = os.open(run_dir / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file, indent=2, default=str)

    @classmethod
    def read(cls, run_dir: Path) -> Addresses:
        """Read what `write` wrote."""
        values = json.loads((run_dir / FILE).read_text())
        resume = Path(values["resume"]) if values["resume"] else None
        frozen_models = {role: Path(folder) for role, folder in values["frozen_models"].items()}
        frozen = {role: tuple(urls) for role, urls in values["frozen"].items()}
        paths = {"model": Path(values["model"]), "resume": resume, "frozen_models": frozen_models, "frozen": frozen}
        return cls(**{**values, **paths, **{name: tuple(values[name]) for name in TUPLES}})

    @cached_property
    def access(self) -> Access:
        """Access to the run's servers."""
        return Access(self.api_key, self.authority)
