"""Publication of versions as adapters, on engines that keep SGLang's rules about names: the order of loading and
unloading, and how many adapters there are."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from asyncrl.config.roles import PastConfig
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.served import InUse
from asyncrl.engine.update import Update
from asyncrl.errors import WeightsError
from asyncrl.extensions.lora import publish, roles
from asyncrl.extensions.lora.peft import read_peft
from asyncrl.extensions.lora.peft_config import user_config
from asyncrl.extensions.lora.publish import (
    AdapterFolder,
    AdapterPublisher,
    PastAdapters,
    SharedAdapter,
    build_adapters,
    checksums,
)
from asyncrl.extensions.lora.rules import resident_adapters
from asyncrl.extensions.lora.served import ServedAdapters, adapter_names
from asyncrl.network.addresses import Access
from asyncrl.parallel import Parallel
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.snapshot import ResumableBuffer
from asyncrl.schema import POLICY
from tests.examples import examples
from tests.fakes import group, tiny_config
from tests.integration.adapters import NO_PAST
from tests.integration.publisher import ALONE

CONFIG = tiny_config(**{"trainer.lora.rank": 2, "weights.lora": "versions"})
MODULE = "model.layers.0.self_attn.o_proj"


PEFT = user_config(CONFIG.trainer.lora, [f"{MODULE}.lora_A.weight"], "base")


def tensors() -> Iterator[tuple[str, Tensor]]:
    yield f"{MODULE}.lora_A.weight", torch.ones(2, 8)
    yield f"{MODULE}.lora_B.weight", torch.ones(8, 2)


class AdapterServer:
    """An engine's adapters by name, with SGLang's rules: it refuses a name that is taken, and an unknown one."""

    def __init__(self, label: str = "0") -> None:
        self.label, self.held, self.faults = label, dict[str, bool](), set[str]()
        self.calls: list[str] = []
        self.compared: list[str] = []
        """Adapters whose checksums it was told to compare."""
        self.paused = False

    def answer(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        name = body.get("lora_name", "")
        if request.method == "POST":
            self.calls.append(f"{path} {name or body.get('new_version', '')}")
        if path in self.faults:
            return httpx.Response(400, json={"success": False, "error_message": "no"})
        if path == "/model_info":
            return httpx.Response(200, json={"weight_version": self.label})
        if path == "/v1/models":
            cards = [{"id": one, "parent": "base"} for one in self.held]
            return httpx.Response(200, json={"data": [{"id": "base", "parent": None}, *cards]})
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path.startswith("/load"):
            if name in self.held:
                return httpx.Response(400, json={"error_message": f"{name} is already loaded"})
            self.held[name] = True
            if body.get("expected_checksums"):
                self.compared.append(name)
        elif path.startswith("/unload") and not self.held.pop(name, False):
            return httpx.Response(400, json={"error_message": f"{name} is not loaded"})
        return httpx.Response(200, json={"success": True})


class Servers:
    """Engines by URL, a router that notes its workers, and the fleet of a trainer in front of them."""

    def __init__(self, count: int) -> None:
        self.engines = {f"http://engine-{number}": AdapterServer() for number in range(count)}
        self.routed = list(self.engines)
        self.start_trainers()

    def start_trainers(self) -> None:
        """Replace the fleet by that of trainers that have just started."""
        self.fleet = Fleet(list(self.engines), Access(""), 5.0, router=self, on_lost=lambda *_: None)
        self.fleet._http = httpx.Client(transport=httpx.MockTransport(self._answer))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        return self.engines[f"http://{request.url.host}"].answer(request)

    def restart(self, url: str, label: str) -> None:
        """Replace an engine by a new process, which the launcher has removed from the router before."""
        self.remove(url)
        self.engines[url] = AdapterServer(label)

    def add(self, url: str) -> None:
        self.routed.append(url)

    def remove(self, url: str) -> None:
        if url in self.routed:
            self.routed.remove(url)

    def keep(self, urls: Any) -> None:
        self.routed += [url for url in urls if url not in self.routed]


def publisher(
    servers: Servers,
    announce: Callable[[int], InUse],
    *,
    run: str = "run0",
    base: Callable[[Update], Any] | None = None,
    adapters: Sequence[str] = (POLICY,),
    past: PastAdapters | None = None,
    **changes: Any,
) -> AdapterPublisher:
    build, _ = build_adapters(CONFIG, servers.fleet, host="", folder=Path("/nowhere"))
    names = adapter_names(CONFIG, run)
    assert names
    weights = CONFIG.weights.model_copy(update=changes)
    rank = Parallel(**ALONE)
    told: dict[str, Any] = {"names": names, "announce": announce, "base": base, "past": past or NO_PAST}
    given = dict.fromkeys(adapters, tensors)
    return AdapterPublisher(rank, servers.fleet, given, build, weights, **told)


@contextmanager
def served(count: int = 2) -> Iterator[Servers]:
    servers = Servers(count)
    try:
        yield servers
    finally:
        servers.fleet.close()


@pytest.fixture(autouse=True)
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on any host share memory with the trainer."""
    monkeypatch.setattr(publish, "choose", lambda *_, **__: ("tensor", "for the test"))


def test_every_engine_has_an_adapter_before_it_is_announced() -> None:
    seen: list[list[set[str]]] = []
    with served() as servers:

        def announce(version: int) -> InUse:
            seen.append([set(engine.held) for engine in servers.engines.values()])
            return InUse([1] if version < 3 else [], {})

        made = publisher(servers, announce)
        figures = [made.publish(version) for version in (1, 2, 3)]
        calls = servers.engines["http://engine-0"].calls
    v1, v2, v3 = (f"run0-v{version}" for version in (1, 2, 3))
    assert seen == [[{v1}] * 2, [{v1, v2}] * 2, [{v1, v2, v3}] * 2]
    assert [one["adapters/resident"] for one in figures] == [1, 2, 3]
    assert figures[0]["bytes"] == 2 * 16 * 4
    load = "/load_lora_adapter_from_tensors"
    assert calls == [
        *(f"{load} {v1}", "/update_weight_version 1", f"{load} {v2}", "/update_weight_version 2"),
        *(f"{load} {v3}", "/update_weight_version 3", f"/unload_lora_adapter {v1}", f"/unload_lora_adapter {v2}"),
    ]


def test_joining_engine_compares_checksums() -> None:
    """However rarely the others compare them (weights.verify_every)."""
    with served() as servers:
        made = publisher(servers, lambda version: InUse([1], {}), verify_every=100)
        made.publish(1)
        made.publish(2)
        assert [engine.compared for engine in servers.engines.values()] == [["run0-v1"]] * 2
        servers.restart("http://engine-1", "restart-1")
        made.publish(3)
        assert set(servers.engines["http://engine-1"].compared) == {"run0-v1", "run0-v2", "run0-v3"}


def test_restarted_engine_gets_live_adapters_before_joining() -> None:
    with served() as servers:
        made = publisher(servers, lambda version: InUse([1], {}))
        made.publish(1)
        made.publish(2)
        url = "http://engine-1"
        servers.restart(url, "restart-1")
        servers.engines[url].held["left"] = True  # by whoever used the engine before
        joined: list[set[str]] = []
        servers.add = lambda url: joined.append(set(servers.engines[url].held))  # type: ignore[method-assign]
        made.publish(2)
        assert joined == [{"run0-v1", "run0-v2"}]
        assert servers.engines[url].label == "2"
        assert not servers.engines[url].paused
        assert [call.split()[0] for call in servers.engines["http://engine-0"].calls].count(
            "/update_weight_version"
        ) == 3


def test_engine_that_lost_adapters_gets_all_with_the_next() -> None:
    """It restarted after the fleet was reconciled, so that it never joined."""
    with served() as servers:
        made = publisher(servers, lambda version: InUse([1, 2], {}))
        made.publish(1)
        servers.engines["http://engine-1"].held.clear()
        made.publish(2)
        assert set(servers.engines["http://engine-1"].held) == {"run0-v1", "run0-v2"}


def test_engine_refusing_an_adapter_is_lost_before_requests() -> None:
    routed: list[list[str]] = []
    with served() as servers:
        servers.engines["http://engine-1"].faults.add("/load_lora_adapter_from_tensors")

        def announce(version: int) -> InUse:
            routed.append(list(servers.routed))
            return InUse([], {})

        made = publisher(servers, announce)
        assert made.publish(1)["engines"] == 1
    assert routed == [["http://engine-0"]]


def test_version_is_all_adapters_and_played_past_ones_stay() -> None:
    seen: list[set[str]] = []
    with served(1) as servers:
        engine = servers.engines["http://engine-0"]

        def announce(version: int) -> InUse:
            seen.append(set(engine.held))
            return InUse([2] if version == 3 else [], {"solver": [1]})

        made = publisher(servers, announce, adapters=(POLICY, "solver"))
        figures = [made.publish(version) for version in (1, 2, 3, 4)]
        servers.restart("http://engine-0", "restart-1")
        made.publish(4)
    versions = [{f"run0-v{version}", f"run0-solver-v{version}"} for version in range(5)]
    old = {"run0-solver-v1"}
    assert seen == [
        *(versions[1], versions[1] | versions[2], versions[2] | versions[3] | old),
        *(versions[2] | versions[3] | versions[4] | old, versions[4] | old),
    ]
    assert [one["adapters/resident"] for one in figures] == [2, 4, 5, 7]
    assert figures[0]["bytes"] == 2 * 2 * 16 * 4


def past_adapters(folder: Path, name: str, checkpoints: list[int], origin: Path | None = None) -> PastAdapters:
    past = PastConfig(every=2, keep=2)
    return PastAdapters(
        folder / name,
        origin,
        lambda version: {"solver": roles.needed(past, version, 1)},
        lambda: checkpoints,
        lambda tensors: user_config(CONFIG.trainer.lora, tensors, "base"),
    )


def test_past_versions_are_kept_as_peft_folders(tmp_path: Path) -> None:
    """A run that is resumed, in its own folder or in another, loads them again."""
    made: list[int] = []
    names = {"adapters": (POLICY, "solver")}
    past = PastConfig(every=2, keep=2)

    def folders(run: str) -> list[str]:
        return sorted(str(path.relative_to(tmp_path / run)) for path in tmp_path.glob(f"{run}/*/*/*"))

    def announce(version: int) -> InUse:
        return InUse([], {"solver": roles.needed(past, version, 1)})

    with served(1) as servers:
        first = publisher(servers, announce, past=past_adapters(tmp_path, "run", made), **names)
        for version in range(1, 12):
            first.publish(version)
            made += [version] if version == 5 else []
    held = ["past/solver/v000002", "past/solver/v000004"]
    assert folders("run") == [*held, "past/solver/v000008", "past/solver/v000010"]
    kept = read_peft(tmp_path / "run" / held[0])
    assert all(kept[name].equal(tensor) for name, tensor in tensors())
    moved = tmp_path / "run" / held[1]
    moved.rename(tmp_path / "moved")
    for run, origin in (("run", None), ("other", tmp_path / "run")):
        with served(1) as servers:
            again = publisher(servers, announce, run="run1", past=past_adapters(tmp_path, run, [5], origin), **names)
            with pytest.raises(WeightsError, match=r"agents.roles.*v000004.*Copy the folder"):
                again.publish(5)
            shutil.copytree(tmp_path / "moved", moved)
            again = publisher(servers, announce, run="run1", past=past_adapters(tmp_path, run, [5], origin), **names)
            again.publish(5)
            new = {f"run1-{name}" for name in ("v5", "solver-v5", "solver-v2", "solver-v4")}
            assert servers.engines["http://engine-0"].held.keys() == new
            assert checksums(again._live[2, "solver"].held()) == checksums(dict(tensors()))
        assert folders(run) == held
        shutil.rmtree(moved)


def test_version_0_is_the_base_and_needs_no_adapter() -> None:
    with served() as servers:
        made = publisher(servers, lambda version: InUse([], {}))
        made.publish(0)
        assert [call for engine in servers.engines.values() for call in engine.calls] == [
            "/update_weight_version 0"
        ] * 2
        assert made.publish(1)["verify"] > 0  # still the first that can be verified


def test_restarted_trainers_unload_what_dead_ones_left() -> None:
    """Those died after one engine had loaded version 4, and only the other had unloaded version 1."""
    in_use = [2]
    with served() as servers:
        first, second = servers.engines.values()
        made = publisher(servers, lambda version: InUse([*range(1, version)], {}))
        for version in (1, 2, 3):
            made.publish(version)
        del second.held["run0-v1"]
        first.held["run0-v4"] = True
        first.calls.clear()
        servers.fleet.close()
        servers.start_trainers()
        made = publisher(servers, lambda version: InUse(in_use, {}))
        figures = [made.publish(3), made.publish(4)]
        assert set(first.held) == set(second.held) == {"run0-v2", "run0-v4"}
        servers.restart("http://engine-1", "restart-1")
        figures.append(made.publish(4))
        assert set(servers.engines["http://engine-1"].held) == {"run0-v4"}  # version 2 was in engines alone
        in_use.clear()
        figures.append(made.publish(5))
        assert set(first.held) == {"run0-v5"}
    assert [one["engines"] for one in figures] == [2, 2, 2, 2]
    load, unload = "/load_lora_adapter_from_tensors run0-v", "/unload_lora_adapter run0-v"
    assert first.calls[:5] == [
        *(f"{unload}4", "/update_weight_version 3", f"{unload}1", f"{load}4", "/update_weight_version 4"),
    ]


def test_folders_of_dead_trainers_serve_joining_engines(tmp_path: Path) -> None:
    left = AdapterFolder("run0-v1", tmp_path)
    assert not left.loadable
    AdapterFolder("run0-v1", tmp_path, PEFT, dict(tensors()))
    assert left.loadable
    assert left.load(verify=True)[1]["lora_path"] == str(tmp_path / "run0-v1")
    left.drop()
    assert list(tmp_path.iterdir()) == []


class BasePublisher:
    """Publishes the base alone, with the calls that matter here (weights/publish.py)."""

    def __init__(self, servers: Servers, update: Update) -> None:
        self._servers, self._update = servers, update

    def publish(self, version: int) -> None:
        self._servers.fleet.call("/base")
        self._update.label(version)
        self._servers.fleet.admit()


def test_engines_get_a_foreign_base_at_first_and_on_joining() -> None:
    with served() as servers:
        made = publisher(servers, lambda version: InUse([1, 2], {}), base=lambda update: BasePublisher(servers, update))
        for version in (1, 2):
            made.publish(version)
        servers.restart("http://engine-1", "restart-1")
        made.publish(2)
        first, second = (engine.calls for engine in servers.engines.values())
    load = "/load_lora_adapter_from_tensors run0-v"
    assert second == ["/base ", f"{load}1", f"{load}2", "/update_weight_version 2"]
    assert first == [
        *("/base ", f"{load}1", "/update_weight_version 1", f"{load}2", "/update_weight_version 2"),
        *("/base ", "/update_weight_version 2"),
    ]


def test_wrong_bytes_are_found_before_any_engine_gets_them() -> None:
    """A checksum that differs in the engine ends its process."""

    class Torn(SharedAdapter):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._flat[5] += 1

    with served() as servers:
        made = publisher(servers, lambda version: InUse([], {}))
        made._make = lambda name, given: Torn(name, {}, given, 1)
        with pytest.raises(WeightsError, match=r"run0-v1 is not what was trained.*lora_A"):
            made.publish(1)
        assert not any(engine.calls for engine in servers.engines.values())


def test_checksums_are_sent_when_they_are_due() -> None:
    adapter = SharedAdapter("run0-v1", {}, dict(tensors()), 2)
    path, body = adapter.load(verify=True)
    assert path == "/load_lora_adapter_from_tensors"
    assert len(body["serialized_named_tensors"]) == 2
    assert body["expected_checksums"] == checksums(dict(tensors()))
    assert adapter.load(verify=False)[1]["expected_checksums"] is None


def test_a_folder_holds_what_was_trained_until_it_is_dropped(tmp_path: Path) -> None:
    adapter = AdapterFolder("run0-v1", tmp_path, PEFT, dict(tensors()))
    assert checksums(adapter.held()) == checksums(dict(tensors()))
    assert adapter.load(verify=True) == (
        "/load_lora_adapter",
        {"lora_name": "run0-v1", "lora_path": str(tmp_path / "run0-v1")},
    )
    adapter.drop()
    assert list(tmp_path.iterdir()) == []


class Residency(RuleBasedStateMachine):
    """Any order of admissions, turns, ends, rejections, publishes, restarts of engines, deaths of trainers and resumes,
    with one adapter or two, and with roles that past versions play."""

    @initialize(
        staleness=st.integers(0, 3),
        back=st.integers(0, 3),
        per_episode=st.booleans(),
        engines=st.integers(1, 3),
        drops=st.booleans(),
        names=st.sampled_from([(POLICY,), (POLICY, "solver")]),
        past=st.none() | st.builds(PastConfig, every=st.integers(1, 3), keep=st.integers(1, 3)),
    )
    def start(
        self,
        staleness: int,
        back: int,
        per_episode: bool,
        engines: int,
        drops: bool,
        names: tuple[str, ...],
        past: PastConfig | None,
    ) -> None:
        self.names, self.past, self.folder = names, past, tempfile.TemporaryDirectory()
        self.bound, self.per_episode, self.starts = staleness, per_episode, 0
        over_age = "drop" if drops else "wait"
        self.settings = {"max_staleness": staleness, "lead": max(0, staleness - back), "over_age": over_age}
        self.servers = Servers(engines)
        self.buffer = ResumableBuffer(2, **self.settings)  # type: ignore[arg-type]
        self.playing: dict[Ticket, int | None] = {}
        self.evaluated: int | None = None
        self.evaluated_before = False
        self.left, self.without = set[str](), set[str]()  # what trainers cannot give again, and the engines without it
        self.saved: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self.starts += 1
        self.run = f"run{self.starts}"
        self.use = ServedAdapters(past_versions=self._past_versions)
        self.left.clear()
        self.without.clear()
        self._start_trainers()

    def _start_trainers(self) -> None:
        past = PastAdapters(Path(self.folder.name), None, self._past_versions, lambda: self.saved, lambda _: PEFT)
        told: dict[str, Any] = {"run": self.run, "adapters": self.names, "past": past if self.past else None}
        self.publisher = publisher(self.servers, self._announce, **told, verify=False)

    def _past_versions(self, version: int) -> dict[str, list[int]]:
        return {POLICY: roles.needed(self.past, version, self.bound)} if self.past else {}

    def _announce(self, version: int) -> InUse:
        for url in self.servers.routed:
            held = self.servers.engines[url].held
            assert self._named([version]) <= held.keys(), "announced before it was loaded"
        self._check_number()
        self.evaluated_before = self.evaluated is not None
        if version != self.buffer.version:
            self.buffer.publish(version)
        for ticket, reason in self.buffer.unwanted():
            self._end(ticket)
            self.buffer.reject(ticket, reason)
        return self.use.in_use(version)

    def _end(self, ticket: Ticket) -> None:
        self.use.release(self.playing.pop(ticket))

    @rule(most=st.integers(1, 9))
    def admit(self, most: int = 9) -> None:
        for ticket in iter(self.buffer.admit, None):
            self.buffer.begin(ticket, f"p{ticket.slot}", 1)
            self.playing[ticket] = None if self.past else self.buffer.version  # where a past version has the first turn
            self.use.acquire(self.playing[ticket])
            most -= 1
            if not most:
                return

    @precondition(lambda self: bool(getattr(self, "playing", ())))
    @rule(data=st.data(), then=st.sampled_from(["turn", "commit", "reject"]))
    def go_on(self, data: st.DataObject, then: str) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.playing, key=lambda one: one.slot)))
        if then == "turn":
            if not self.per_episode or self.playing[ticket] is None:
                self.use.release(self.playing[ticket])
                self.use.acquire(self.buffer.version)
                self.playing[ticket] = self.buffer.version
            return
        self._end(ticket)
        if then == "commit":
            self.buffer.commit(ticket, group(ticket.slot))
        else:
            self.buffer.reject(ticket, "agent_error")

    @rule(steps=st.integers(1, 3))
    def train(self, steps: int) -> None:
        """Train batches as soon as they are ready: the oldest groups end, and the others go on."""
        for _ in range(steps):
            while self.buffer.take() is None:
                self.admit()
                ticket = min(self.playing, key=lambda one: (one.cohort, one.slot))
                self._end(ticket)
                self.buffer.commit(ticket, group(ticket.slot))
            self.admit()
            self.publisher.publish(self.buffer.version + 1)

    @rule()
    def evaluate(self) -> None:
        """Begin an evaluation, or end the one that is running."""
        self.use.release(self.evaluated)
        self.evaluated = self.buffer.version if self.evaluated is None else None
        self.use.acquire(self.evaluated)

    @rule(data=st.data())
    def restart_engine(self, data: st.DataObject) -> None:
        url = data.draw(st.sampled_from(sorted(self.servers.engines)))
        self.servers.restart(url, f"restart-{data.draw(st.integers(0, 1 << 30))}")
        self.without.add(url)

    @rule(data=st.data())
    def trainers_die(self, data: st.DataObject) -> None:
        """They had begun to load the next version, and start again with this one."""
        version, names = self.buffer.version, sorted(self._named([self.buffer.version + 1]))
        for engine in self.servers.engines.values():
            engine.held |= dict.fromkeys(data.draw(st.lists(st.sampled_from(names))), True)
        had = {adapter.name for adapter in self.publisher._live.values()}  # every engine may have lost them, too
        held = {name for engine in self.servers.engines.values() for name in engine.held}
        self.left = (had | held) - self._named([version])
        self.without |= {url for url, engine in self.servers.engines.items() if not engine.label.isdigit()}
        self.servers.fleet.close()
        self.servers.start_trainers()
        self._start_trainers()
        self.publisher.publish(version)

    @rule()
    def publish_again(self) -> None:
        """As the trainer does when no engine serves."""
        self.publisher.publish(self.buffer.version)

    @rule()
    def resume(self) -> None:
        """A new trainer and a new rollout process; the engines are those of engine.urls, or new ones."""
        if self.buffer.training:
            return
        state, self.saved = self.buffer.state(), [self.buffer.version]
        self.buffer = ResumableBuffer(2, **self.settings)  # type: ignore[arg-type]
        self.buffer.restore(state)
        self.playing, self.evaluated = dict.fromkeys(self.playing), None
        for url in self.servers.engines:
            self.servers.restart(url, f"restart-{self.starts}")
        self._begin()
        self.publisher.publish(self.buffer.version)

    def _check_number(self) -> None:
        """An engine holds no more than the bound allows; most of all between loading and unloading."""
        most = (self.bound + 2 + self.evaluated_before) * len(self.names)
        most += self.past.keep + self.evaluated_before if self.past else 0
        assert all(len(engine.held) <= most for engine in self.servers.engines.values())

    @invariant()
    def engines_that_get_requests_hold_every_adapter_that_is_in_use(self) -> None:
        if hasattr(self, "servers"):
            needed = self._named(self.use.versions())
            if self.past:  # any of them may have been drawn
                drawn = {version for ticket in self.playing for version in roles.drawn(self.past, ticket.born)}
                drawn |= set() if self.evaluated is None else {roles.drawn(self.past, self.evaluated)[-1]}
                needed |= self._named(drawn) & {f"{self.run}-v{version}" for version in drawn}
            for url in self.servers.routed:
                missing = needed - self.servers.engines[url].held.keys()
                assert not missing or (url in self.without and missing <= self.left)
                assert not self.servers.engines[url].paused

    def _named(self, versions: Iterable[int]) -> set[str]:
        """Return the names of all adapters of these versions."""
        prefixes = [self.run if name == POLICY else f"{self.run}-{name}" for name in self.names]
        return {f"{prefix}-v{version}" for prefix in prefixes for version in versions if version}

    def teardown(self) -> None:
        if hasattr(self, "servers"):
            self.servers.fleet.close()
            self.folder.cleanup()


TestResidency = Residency.TestCase
TestResidency.settings = settings(max_examples=examples(20), stateful_step_count=25, deadline=None)


def test_pool_of_an_engine_holds_all_adapters_and_the_base() -> None:
    config = tiny_config(**{"rollout.max_staleness": 3, "eval.questions": 0})
    assert resident_adapters(config) == 5
    assert resident_adapters(tiny_config(**{"rollout.max_staleness": 3})) == 6


def test_no_version_is_written_through_a_link_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match=r"set another weights\.folder"):
        AdapterFolder("v1", tmp_path / "link", {}, {})
    assert list((tmp_path / "elsewhere").iterdir()) == []
