"""The Slurm job that the launcher runs in: its machines, and the run's processes as its steps.

waits for     each machine's answer to a probe (slurm.start_timeout), and Slurm's commands (COMMAND_SECONDS)
on a hang     raises LaunchError, which names the machines that did not answer
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.extensions.slurm import probe, submit
from asyncrl.extensions.slurm.engines import SlurmEngineJobs
from asyncrl.extensions.slurm.extension import settings_of
from asyncrl.extensions.slurm.task import SlurmTask
from asyncrl.launch.cluster import OWN_PORTS, Cluster, EngineJobs
from asyncrl.launch.machine import MachineFacts
from asyncrl.launch.placement import Node, imagined, ports_wanted
from asyncrl.launch.plan import ProcessSpec
from asyncrl.network.addresses import NODE
from asyncrl.network.ports import REPLICA_PORTS
from asyncrl.progress import begin_file, end_file

COMMAND_SECONDS = 60.0
NAMED = ["sh", "-c", f'{NODE}="$SLURMD_NODENAME" exec "$0" "$@"']
"""Beginning of a program that is told the name of its machine, which may differ from that of the host."""
OVERRIDDEN = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPU_BIND", "SLURM_TRES_PER_TASK")
"""Variables of the batch script's own step, which srun would apply to ours."""


class SlurmJob(Cluster):
    """A Slurm allocation, or one that is still to be submitted."""

    def __init__(self, config: Config, env: Mapping[str, str] = os.environ) -> None:
        """Find the job of the environment. Raises LaunchError if Slurm does not list its machines, ConfigError if their
        number differs from cluster.nodes."""
        super().__init__(config)
        self.settings = settings_of(config)
        self.job = env.get("SLURM_JOB_ID", "")
        self.here = bool(self.job)
        self.requeues = bool(self.settings.requeues)
        self.groups: list[list[str]] = []
        """Names of its machines, by component: a heterogeneous job has several."""
        if not self.here:
            return
        size = int(env.get("SLURM_HET_SIZE", "0"))
        lists = [env[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"] for number in range(size)] or [env["SLURM_JOB_NODELIST"]]
        self.groups = [_output("scontrol", "show", "hostnames", names).split() for names in lists]
        wanted, found = config.cluster.nodes, sum(map(len, self.groups))
        if wanted is not None and wanted != found:
            remedy = f"The job has {found} machines: leave this setting unset, or set it to that number."
            raise ConfigError("cluster.nodes", wanted, remedy)

    @classmethod
    def surrounds(cls) -> bool:
        """Return whether this process runs in a job of Slurm."""
        return "SLURM_JOB_ID" in os.environ

    def probe(self, config: Config, ports: int | None = None) -> None:
        """Ask each machine for its facts, and imagine those of a job that has not been submitted. Raises LaunchError if
        one reports a problem or does not answer."""
        if not self.here:
            self.nodes = imagined(config, *submit.job_size(config))
            return
        cluster, seconds = config.cluster, self.settings.start_timeout
        gpus = "-" if cluster.gpus is None else str(cluster.gpus)
        # the ranks of an engine on several machines with replicas meet at consecutive ports of its first one
        block = REPLICA_PORTS if config.engine.data_parallel > 1 else 0
        wanted = (ports or ports_wanted(config)) + OWN_PORTS, block
        words = [cluster.host or "-", cluster.interface or "-", gpus, *map(str, wanted)]
        outputs = self.everywhere([sys.executable, "-m", probe.__name__, *words], 0.0)
        answered: dict[str, tuple[Node, MachineFacts]] = {}
        problems: list[str] = []
        for output in outputs:
            found, wrong = probe.heard(output)
            answered |= {node.name: (node, machine) for node, machine in found}
            problems += wrong
        if problems:
            raise LaunchError("; ".join(problems))
        names = [name for group in self.groups for name in group]
        if missing := [name for name in names if name not in answered]:
            said = "\n".join(output[-1000:] for output in outputs)
            raise LaunchError(f"no answer from {missing} within {seconds:.0f} s; srun said:\n{said}")
        self.nodes = [answered[name][0] for name in names]
        self._machines = [answered[name][1] for name in names]

    def everywhere(
        self, program: list[str], seconds: float, nodes: Sequence[str] | None = None, mounts: Sequence[Path] = ()
    ) -> list[str]:
        """Run a program once on every machine, or on these, concurrently. Return its output by component. Raises
        LaunchError if there is no srun, or srun does not end."""
        asked = []
        for number, names in enumerate(self.groups):
            chosen = [name for name in names if nodes is None or name in nodes]
            if chosen:
                argv = [*self._srun(number), f"--nodes={len(chosen)}", f"--ntasks={len(chosen)}", "--ntasks-per-node=1"]
                argv += [f"--nodelist={','.join(chosen)}"] if nodes is not None else []
                asked.append(_started([*argv, *self._contained(program, mounts, NAMED)]))
        return [_finished(one, self.settings.start_timeout + seconds) for one in asked]

    def steps(
        self,
        specs: Sequence[ProcessSpec],
        run_dir: Path,
        run_id: str,
        mounts: Sequence[Path],
        lease: Path,
        orphaned: Sequence[str],
    ) -> list[ProcessSpec]:
        """Return the processes as steps: each is an srun that ends when its process does. All trainer ranks form one
        step. Their tasks watch the launcher's `lease`; when it expires, one of them runs the command `orphaned`."""
        folder = run_dir / "slurm" / "steps"
        folder.mkdir(parents=True, exist_ok=True)
        for spec in specs:  # notes of an earlier incarnation; other launchers' notes may lie beside them
            for note in (begin_file, end_file):
                note(run_dir, spec.name).unlink(missing_ok=True)
                note(run_dir, spec.name).parent.mkdir(exist_ok=True)
        trainers = [spec for spec in specs if spec.name.startswith("trainer-")]
        watch = {"lease": str(lease), "lost_timeout": self.settings.lost_timeout, "orphaned": list(orphaned)}
        watch["run_dir"] = str(run_dir)
        others = [self._step(spec, folder, run_id, mounts, watch) for spec in specs if spec not in trainers]
        return [*others, *([self._ranks(trainers, folder, run_id, mounts, watch)] if trainers else [])]

    def restart(self) -> list[str]:
        """Return the command that requeues the job, or cancels it if it was requeued often enough."""
        again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) < self.settings.requeues
        return ["scontrol", "requeue", self.job] if again else self.cancellation()

    def cancellation(self) -> list[str]:
        """Return the command that cancels the job."""
        return ["scancel", self.job]

    def has(self, node: str) -> bool:
        """Return whether a machine still belongs to the job: Slurm removes failed ones. True if Slurm does not answer,
        since it will be queried again."""
        try:
            listed = _output("squeue", f"--jobs={self.job}", "--noheader", "--format=%N").split()
            return not listed or node in _output("scontrol", "show", "hostnames", ",".join(listed)).split()
        except LaunchError:
            return True

    def end_steps(self, run_id: str) -> None:
        """Kill the steps left by a launcher that was stopped in a hurry; Slurm would keep them until the job ends."""
        with suppress(LaunchError):
            listed = _output("squeue", "--steps", f"--jobs={self.job}", "--noheader", "--format=%i %j")
            for line in listed.splitlines():
                number, _, name = line.strip().partition(" ")
                if name.strip() == _step_name(run_id):
                    _output("scancel", "--signal=KILL", number)

    def submit(self, runs: Sequence[tuple[Path, Sequence[str]]]) -> str:
        """Write the script, and submit it to Slurm if slurm.submit is set."""
        return submit.submit(self.config, runs)

    def engine_jobs(self, run_dir: Path, gpus: int, command: Sequence[str]) -> EngineJobs:
        """Return what submits jobs of engines."""
        return SlurmEngineJobs(self.settings, run_dir, gpus, command)

    def _step(
        self, spec: ProcessSpec, folder: Path, run_id: str, mounts: Sequence[Path], watch: dict[str, Any]
    ) -> ProcessSpec:
        grace = self.config.cluster.stop_grace
        task = SlurmTask(spec.name, run_id, self._argv(spec), spec.env, spec.stop_signal, grace, **watch)
        task.write(folder / spec.name)
        argv = [*self._srun(self._group_of(spec.node), run_id), "--nodes=1", "--ntasks=1", f"--nodelist={spec.node}"]
        return _as_step(spec, [*argv, *self._contained(_program(folder / spec.name), mounts)])

    def _ranks(
        self, specs: list[ProcessSpec], folder: Path, run_id: str, mounts: Sequence[Path], watch: dict[str, Any]
    ) -> ProcessSpec:
        first = specs[0]
        shared = {key: value for key, value in first.env.items() if all(s.env.get(key) == value for s in specs)}
        own = [{key: value for key, value in spec.env.items() if key not in shared} for spec in specs]
        grace = self.config.cluster.stop_grace
        task = SlurmTask("trainer", run_id, self._argv(first), shared, first.stop_signal, grace, ranks=own, **watch)
        task.write(folder / "trainer")
        nodes = list(dict.fromkeys(spec.node for spec in specs))
        log = Path(watch["run_dir"], "logs", "trainer-%t.log")
        argv = [
            *self._srun(self._group_of(first.node), run_id),
            f"--nodes={len(nodes)}",
            f"--ntasks={len(specs)}",
            f"--ntasks-per-node={len(specs) // len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            "--distribution=block",
            f"--output={log}",
            f"--error={log}",
        ]
        step = _as_step(first, [*argv, *self._contained(_program(folder / "trainer"), mounts)])
        return replace(step, name="trainer", node=",".join(nodes))

    def _srun(self, group: int, run_id: str = "") -> list[str]:
        """Return the common part of all sruns. Steps share their machines: each has access to all CPUs and GPUs of the
        job there, and the run decides which process uses which."""
        return [
            "srun",
            "--export=ALL",
            "--overlap",
            "--overcommit",
            "--kill-on-bad-exit=1",
            "--cpu-bind=none",
            *([f"--het-group={group}"] if len(self.groups) > 1 else []),
            *([f"--job-name={_step_name(run_id)}", "--unbuffered"] if run_id else []),  # otherwise whole lines
            *self.settings.srun,
        ]

    def _group_of(self, node: str) -> int:
        return next(number for number, names in enumerate(self.groups) if node in names)

    def _argv(self, spec: ProcessSpec) -> list[str]:
        """Return the command of a process; in a container, with the container's Python."""
        container = self.settings.container
        first = container.python if container.kind != "none" and spec.argv[0] == sys.executable else spec.argv[0]
        return [first, *spec.argv[1:]]

    def _contained(self, program: list[str], mounts: Sequence[Path], before: Sequence[str] = ()) -> list[str]:
        """Return the last arguments of srun: with pyxis the image is an option, with apptainer a program. `before`
        stands in front of the program."""
        container = self.settings.container
        if container.kind == "none":
            return [*before, *program]
        folders = [f"{path}:{path}" for path in dict.fromkeys([Path.cwd(), *mounts])] + list(container.mounts)
        inside = [*before, container.python, *program[1:]]
        if container.kind == "pyxis":
            mounted = f"--container-mounts={','.join(folders)}"
            return [f"--container-image={container.image}", mounted, f"--container-workdir={Path.cwd()}", *inside]
        binds = [word for folder in folders for word in ("--bind", folder)]
        return ["apptainer", "exec", "--nv", "--pwd", str(Path.cwd()), *binds, str(container.image), *inside]


def _as_step(spec: ProcessSpec, argv: list[str]) -> ProcessSpec:
    """Convert a specification to a step. SIGTERM makes srun kill the step at once; SIGUSR1 reaches the task, which
    stops its process."""
    haste = spec.stop_signal == signal.SIGKILL
    return replace(spec, argv=argv, env={}, step=True, stop_signal=signal.SIGTERM if haste else signal.SIGUSR1)


def _program(file: Path) -> list[str]:
    return [sys.executable, "-m", SlurmTask.__module__, str(file)]


def _step_name(run_id: str) -> str:
    return f"asyncrl-{run_id[:8]}"


def _started(argv: list[str]) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key not in OVERRIDDEN}
    try:
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise LaunchError(f"cannot run {shlex.join(argv[:1])}: {error}") from None


def _finished(process: subprocess.Popen[str], seconds: float) -> str:
    """Return the output of a program. It is terminated after so many seconds, and killed if that does not suffice."""
    for end, patience in ((process.terminate, seconds), (process.kill, COMMAND_SECONDS)):
        try:
            return process.communicate(timeout=patience)[0]
        except subprocess.TimeoutExpired:
            end()
    raise LaunchError(f"srun did not end within {seconds + COMMAND_SECONDS:.0f} s of its start and was killed")


def _output(*argv: str) -> str:
    try:
        done: Any = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{argv[0]}: {error}") from None
    if done.returncode:
        raise LaunchError(f"{shlex.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}")
    return str(done.stdout)
