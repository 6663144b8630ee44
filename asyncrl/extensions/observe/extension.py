"""What this folder adds: traces through engines and router, their export, /metrics of the rollout process, profiles of
training steps, and warnings: the log-probabilities of engines and trainer drift apart, or code blocks all episodes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import extension
from asyncrl.errors import ConfigError
from asyncrl.extensions.timelines.extension import settings_of
from asyncrl.settings import Count, Section
from asyncrl.user_code import can_import

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.engine.stream import Headers
    from asyncrl.extensions.observe.blocking import BlockWatch
    from asyncrl.launch.placement import Seat
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.network.addresses import Addresses
    from asyncrl.rollout.reporters import Warn
    from asyncrl.trainer.policy import Policy

NAME = "observe"
EXPORTERS = "opentelemetry.exporter.otlp.proto"
ROUTER_ENV = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc", "RUST_LOG": "warn,smg::otel-trace=info"}
"""What differs for the router, which knows only gRPC, and whose spans are entries of its log."""


class TraceSettings(Section):
    """OpenTelemetry traces of episodes, across all processes (asyncrl/extensions/observe/README.md)."""

    endpoint: str | None = None
    """Address of a collector that receives every span as OTLP over HTTP, as http://HOST:4318/v1/traces; headers and
    certificates are those of OpenTelemetry's own environment variables. Needs asyncrl[tracing]. unset: none; spans can
    still be made of the recorded timelines, by asyncrl-inspect RUN --trace FILE."""
    engines: bool = False
    """Make engines and router trace requests and send their spans to the rollout process, which records them in
    timeline/engines. Needs asyncrl[tracing], and costs the engines time for every request."""
    profile: list[Count] = []  # noqa: RUF012
    """Steps of which every rank writes a trace of torch's profiler into profile/ of the run folder, and on GPUs a
    snapshot of its memory: [3, 10]. With batch_parts it is of the last part."""


class TraceLaunch(extension.LaunchHooks):
    """What engines and router need to send their spans."""

    def __init__(self, settings: TraceSettings) -> None:
        self._engines = settings.engines

    def ports(self) -> int:
        """One at which the rollout process receives the router's spans."""
        return int(self._engines)

    def shared(self, ports: Sequence[Seat]) -> dict[str, str]:
        """That port, and the key of those who send spans."""
        return {"spans": f"127.0.0.1:{ports[0].port}", "key": secrets.token_hex(16)} if ports else {}

    def changed(self, config: Config, spec: ProcessSpec, addresses: Addresses, run_dir: Path) -> ProcessSpec:
        """Let an engine of the policy or the router send its spans to the rollout process. The address is passed
        through the environment, as all ports are (launch/plan.py)."""
        from asyncrl.network.addresses import ARGUMENTS
        from asyncrl.network.tls import signed

        told = addresses.extensions.get(NAME)
        if told is None or not (spec.name == "router" or spec.name.startswith("engine-")):
            return spec
        argv, environment = [*spec.argv, "--enable-trace"], {**spec.env, **_environment(told["key"])}
        if spec.name == "router":
            endpoint = told["spans"]
            environment |= ROUTER_ENV
        else:
            endpoint = f"{addresses.rollout}/v1/traces"
            argv += ["--otlp-service-name", spec.together or spec.name]
            if files := signed(run_dir, addresses.rollout):
                # requests prefers the variable of its own, if the environment has it, to what the exporter sets
                trusted = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "REQUESTS_CA_BUNDLE")
                environment |= dict.fromkeys(trusted, str(files.authority))
        environment[ARGUMENTS] = f"{spec.env[ARGUMENTS]} --otlp-traces-endpoint {endpoint}"
        return replace(spec, argv=argv, env=environment)


def _environment(key: str) -> dict[str, str]:
    """Return the environment in which engines and router may send their spans. The router logs no requests, but its
    spans pass through its log. OpenTelemetry's exporters use proxies from the environment, which are not for them."""
    from asyncrl.engine.server import NO_PROXY

    return {
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization=Bearer%20{key}",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        "SGLANG_TRACE_LEVEL": "1",  # not one span for each step of decoding
        **NO_PROXY,
    }


class ObservePlayer(extension.PlayerHooks):
    """The header with which engines continue a trace, and the watch over what blocks the event loop."""

    def __init__(self, settings: TraceSettings) -> None:
        self._engines = settings.engines
        self._watch: BlockWatch | None = None

    async def start(self, timeout: float, warn: Warn) -> None:
        """Begin to watch."""
        from asyncrl.extensions.observe.blocking import BlockWatch

        self._watch = BlockWatch(warn)

    async def close(self) -> None:
        """End it."""
        if self._watch:
            self._watch.close()

    def headers(self, config: Config, addresses: Addresses) -> Headers | None:
        """None if nobody would continue the trace."""
        if not self._engines:
            return None
        from asyncrl.extensions.observe.spans import trace_headers

        return partial(trace_headers, addresses.run_id, settings_of(config).share)


class Observe(extension.Extension):
    """Traces, metrics of episodes, and Prometheus."""

    Settings = TraceSettings
    trains = False
    metrics = {  # noqa: RUF012
        "episode_time/<phase>/<of>": "time that an episode spent in the phase: queued (held back for a publish, or "
        "waiting in an engine), prefill, decode, agent, tool, environment (without its tools), reward, teacher, retry, "
        "or waiting for its siblings",
        "tool_time/<tool>/<of>": "time of a call of the tool",
        "tool_calls/<tool>": "number of calls of the tool",
        "tool_failures/<tool>": "number of these calls that failed",
        "environment_time/<environment>/<of>": "time of a call of the environment, with the tools in it",
        "pass_rate/<task>": "fraction of the task's episodes whose reward is that of a correct answer",
        "difficulty/<solved>": "fraction of groups in which all episodes are correct, or at least two thirds (easy), a "
        "third (medium), one (hard), or none",
        "straggler/time": "time that the batch waited for its last group alone",
        "straggler/share": "the same, as a fraction of the time since the previous batch was taken",
        "straggler/task/<task>": "the same time, under the task of the last group",
        "straggler/tool/<tool>": "the same time, if the group's slowest episode spent most of its time in this tool",
        "straggler/phase/<phase>": "the same time, if it spent most of its time in this phase",
    }
    """They are over the training episodes that ended since the previous batch. <phase> is one of those of
    observability/intervals.py, <of> is mean, p50 or p99."""

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse a wrong address, traces of nothing, and those without OpenTelemetry's packages."""
        endpoint, engines = self.settings.endpoint, self.settings.engines
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            yield ConfigError("observe.endpoint", endpoint, "Must be as http://HOST:4318/v1/traces.")
        for field, value, package in (("endpoint", endpoint, "http"), ("engines", engines, "grpc")):
            if value and not settings_of(config).record:
                remedy = "Traces are made of timelines: set timelines.record=true."
                yield ConfigError(f"observe.{field}", value, remedy)
            if value and not can_import(f"{EXPORTERS}.{package}"):
                remedy = f"{EXPORTERS}.{package} is not installed: pip install 'asyncrl[tracing]'."
                yield ConfigError(f"observe.{field}", value, remedy)

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return TraceLaunch(self.settings)

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        from asyncrl.extensions.observe.hooks import ObserveRollout

        return ObserveRollout(self.settings)

    def steps(
        self, config: Config, run_dir: Path, model: Path, warn: Callable[[str, int], None], first: int | None
    ) -> extension.StepListener:
        """Return what warns of a gap that grows."""
        from asyncrl.extensions.observe.gap import GapWatch

        return GapWatch(warn)

    def trainer(self, policy: Policy) -> extension.TrainerHooks:
        """Return what writes profiles, if some are asked for."""
        from asyncrl.extensions.observe.profiles import Profiles

        steps = self.settings.profile
        return Profiles(steps, policy.parallel) if steps else extension.TrainerHooks()

    def player(self, config: Config, addresses: Addresses) -> extension.PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        return ObservePlayer(self.settings)


Own = Observe
