"""Tests of routing replay on real Megatron in several layouts, and of replaying the experts of a real engine."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from asyncrl.config import load
from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.session import GenerationSession
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.extensions.routing_replay.answers import ReportedExperts
from asyncrl.extensions.routing_replay.encoding import RoutingShape, routing_shape, share_prompt
from asyncrl.extensions.vision import tiny as tiny_vision
from asyncrl.launch.checks.model import check_model
from asyncrl.launch.main import CONF
from asyncrl.models.architectures import flat
from asyncrl.models.families import known_families
from asyncrl.models.tiny import write_random_model
from asyncrl.schema import Completion, Group, Trajectory, Turn
from tests.integration.fleet import engines
from tests.integration.ranks import run_ranks
from tests.integration.updates import VOCAB, foreign
from tests.integration.vision import vision_groups
from tests.weights.models import as_published

pytestmark = pytest.mark.integration

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "tp2-sp-ep2": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel": 1,
        "expert_parallel": 2,
    },
    "pp2": {"pipeline_parallel": 2, "micro_batch_tokens": 60},
    "ep2": {"data_parallel": 2, "expert_parallel": 2, "micro_batch_tokens": 60},
}
MODEL = {"arch": "qwen3_moe", "vocab": VOCAB, "hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 48}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}


def write_model(folder: Path, **more: Any) -> RoutingShape:
    settings: dict[str, Any] = {**MODEL, "tied": False, "seed": 1, "dtype": "float32", "spread": 0.15, **more}
    write_random_model(folder / "model", **settings)
    shape = routing_shape(json.loads((folder / "model" / "config.json").read_text()))
    assert shape is not None
    return shape


def train(folder: Path, name: str, groups: list[Group], **settings: Any) -> dict[str, Any]:
    """Train the groups on real ranks (ranks/routing.py), and return the report of the first."""
    with initialize_config_dir(str(CONF), version_base=None):
        raw: Any = OmegaConf.to_container(compose("train", ["experiment=tiny"]), resolve=True)
    raw["trainer"].update(settings)
    raw["trainer"]["optimizer"].update({"eps": 1e-3})  # a smooth update: see test_trainer.py
    config = load(raw)
    check_model(config, flat(json.loads((folder / "model" / "config.json").read_text())))
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "groups.msgpack").write_bytes(msgspec.msgpack.encode(groups))
    ranks: list[dict[str, Any]] = run_ranks("routing:replayed", folder, name, world=config.trainer.world_size)
    return ranks[0]


# --- layouts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the reports of each layout's ranks, which have checked that their routers used the given experts."""
    found = {}
    for name, settings in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(name)
        shape = write_model(folder, fields={**EXPERTS, "moe_intermediate_size": 16})
        found[name] = train(folder, name, foreign(shape), **settings)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replayed_own_routing_changes_no_bit(layout: str, layouts: dict[str, Any]) -> None:
    assert layouts[layout]["own"] == {"router/differs": 0.0, "router/overlap": 1.0}


@pytest.mark.parametrize("kind", ["R2", "R3"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "single"])
def test_replay_is_the_same_in_every_layout(layout: str, kind: str, layouts: dict[str, Any]) -> None:
    for mine, single in zip(layouts[layout][kind]["figures"], layouts["single"][kind]["figures"], strict=True):
        for name in ("loss", "grad_norm", "logprob_gap/mean"):
            assert mine[name] == pytest.approx(single[name], rel=1e-3, abs=2e-6), name
        for name in ("router/differs", "router/overlap"):  # a token that packs share counts once in each
            assert mine[name] == pytest.approx(single[name], rel=0.05), name


@pytest.mark.parametrize("layout", ["single", "tp2-sp-ep2"])
def test_tokens_of_images_are_recorded_and_replayed(layout: str, tmp_path: Path) -> None:
    """A pass over the whole batch records them, and steps replay them. (Engines cannot report them: R3 is refused.)"""
    sizes = {"num_hidden_layers": 4, "moe_intermediate_size": 24}
    tiny_vision.write(tmp_path / "model", "qwen3_vl_moe", spread=0.15, **sizes)
    as_published(tmp_path / "model", "qwen3_vl_moe")
    found = train(tmp_path, layout, vision_groups(), **LAYOUTS[layout])
    assert found["own"] == {"router/differs": 0.0, "router/overlap": 1.0}
    start, plain = (found[kind]["figures"][0] for kind in ("R2", "none"))
    assert start["logprob_gap/mean"] == plain["logprob_gap/mean"]  # of the pass that records, which sees the images
    for recorded in found["R2"]["figures"]:
        assert recorded["router/differs"] < 0.2
        assert recorded["router/overlap"] > 0.9


def test_drawn_experts_are_used_and_matter(layouts: dict[str, Any]) -> None:
    """Two random experts of 8 equal the router's choice with probability 1/28, and a quarter of them is in its choice
    on average. Recorded ones differ only because of the batch's first optimizer steps."""
    for step, plain, recorded in zip(
        *(layouts["single"][kind]["figures"] for kind in ("R3", "none", "R2")), strict=True
    ):
        assert step["router/differs"] == pytest.approx(27 / 28, abs=0.03)
        assert step["router/overlap"] == pytest.approx(1 / 4, abs=0.05)
        assert abs(step["logprob_gap/mean"] - plain["logprob_gap/mean"]) > 1e-3
        assert "router/differs" not in plain
        assert recorded["router/differs"] < 0.2
        assert recorded["router/overlap"] > 0.9
    assert layouts["single"]["R3"]["compared"] > 1000


# --- a real engine ------------------------------------------------------------------------------------------


class Asking:
    """Builder of groups from the engine's answers, as rollouts build them."""

    def __init__(self, client: GenerationClient, abort: Any) -> None:
        self._client, self._abort = client, abort

    async def all(self) -> list[Group]:
        draw = random.Random(1)
        prompts = [[draw.randrange(VOCAB) for _ in range(length)] for length in (7, 12, 9)]
        groups = [await self._group(number, prompt, 4) for number, prompt in enumerate(prompts)]
        cut = await self._group(3, [draw.randrange(VOCAB) for _ in range(8)], 2, cut=True)
        return [share_prompt(group) for group in (*groups, cut)]

    async def _group(self, number: int, prompt: list[int], size: int, *, cut: bool = False) -> Group:
        sessions = [self._client.generate(group=f"g{number}") for _ in range(size)]
        asking = [asyncio.ensure_future(session(prompt)) for session in sessions]
        while cut and not any(session.received > 2 for session in sessions):  # noqa: ASYNC110  nothing tells
            await asyncio.sleep(0.01)
        if cut:
            await self._abort()
        answers = await asyncio.gather(*asking)
        members = [
            await self._later(session, prompt, answer, reward=float(place % 2))
            for place, (session, answer) in enumerate(zip(sessions, answers, strict=True))
        ]
        return Group(f"g{number}", number, prompt, members, "t")

    async def _later(
        self, session: GenerationSession, prompt: list[int], first: Completion, reward: float
    ) -> Trajectory:
        """Play one episode; every other sibling has a second turn."""
        turns = [Turn([], first)]
        if reward:
            seen = [3, 4, 5]
            turns.append(Turn(seen, await session([*prompt, *first.token_ids, *seen])))
        return Trajectory(turns, reward)


SERVED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"fields": {**EXPERTS, "num_experts_per_tok": 4, "num_experts": 16, "num_local_experts": 16}},
    # a sigmoid with a bias that chooses, shared experts, and a dense layer, which has no experts to report
    "glm4_moe": {"hidden": 64, "fields": {"n_routed_experts": 16, "moe_intermediate_size": 32}},
}
"""The families of which engines on CPUs report experts, with sizes that these serve."""


def test_every_family_with_reported_experts_is_asked() -> None:
    reporting = [family for family in known_families().values() if family.has(".router.weight") and not family.tower]
    told = {one.model_type for one in reporting if one.serving.reports_experts and one.serving.on_cpu}
    assert told == SERVED.keys()


@pytest.fixture(scope="module", params=SERVED)
def engines_groups(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Group], int]:
    """Return the folder of the model, the engine's groups, and the number of answers that were interrupted and
    continued."""
    folder = tmp_path_factory.mktemp("engine")
    shape = write_model(folder, arch=request.param, max_positions=256, **SERVED[request.param])
    overrides = (f"model.path={folder / 'model'}", "routing_replay.kind=R3", "engine.dtype=float32")
    with engines(folder, *overrides, "engine.stream_interval=1") as started:
        addresses = started.addresses

        async def ask(attempt: int) -> tuple[list[Group], int]:
            client = GenerationClient(
                GenerateEndpoint(addresses.router, addresses.access, 60.0, reads=ReportedExperts.reads),
                ClientSettings(
                    run=f"routing-{attempt}",  # another run's cache is not used
                    max_new_tokens=40,
                    temperature=1.0,
                    stop_token_ids=[10],
                    retry_timeout=30.0,
                    coalesce=True,
                    hooks=[ReportedExperts(shape)],
                ),
            )

            async def abort() -> None:
                async with httpx.AsyncClient(**addresses.access.http) as http:
                    await http.post(f"{addresses.engines[0]}/abort_request", json={"abort_all": True})

            groups = await Asking(client, abort).all()
            figures = client.inflight.take_figures()
            await client.close()
            return groups, figures.continued["aborted"]

        for attempt in range(10):  # on a busy machine an answer may end before it is aborted
            groups, aborted = asyncio.run(ask(attempt))
            if aborted:
                break
    return folder, groups, aborted


def test_an_engine_tells_the_experts_of_every_token_that_it_read(
    engines_groups: tuple[Path, list[Group], int],
) -> None:
    _, groups, aborted = engines_groups
    assert aborted > 0
    for group in groups:
        assert group.token_rows.end == len(group.prompt_ids)
        for trajectory in group.trajectories:
            end = len(group.prompt_ids)
            for number, turn in enumerate(trajectory.turns):
                assert turn.completion.token_rows.start == end - (number > 0)
                end += len(turn.observation) + len(turn.completion.token_ids)
                assert turn.completion.token_rows.end == end - 1


def test_the_trainer_routes_as_the_engine_did(engines_groups: tuple[Path, list[Group], int]) -> None:
    """The trainer's own routers would choose the same experts in the same precision, so every row belongs to the right
    token (including interrupted answers and later turns). In bfloat16 they would not, and replay reduces the gap."""
    folder, groups, _ = engines_groups
    same = train(folder, "engine-float32", groups)
    figures = same["R3"]["figures"][0]
    assert figures["router/differs"] < 0.002
    assert figures["logprob_gap/max"] < 1e-4
    rough = train(folder, "engine-bfloat16", groups, dtype="bfloat16")
    replayed, own = rough["R3"]["figures"][0], rough["none"]["figures"][0]
    assert replayed["router/differs"] > 0.005
    assert replayed["logprob_gap/mean"] <= own["logprob_gap/mean"]
    assert replayed["logprob_gap/kl"] <= own["logprob_gap/kl"]
    print({name: (replayed[name], own[name]) for name in replayed if name.startswith("logprob_gap") and name in own})
    print(replayed["router/differs"], replayed["router/overlap"], rough["R3"]["seconds"], rough["none"]["seconds"])
