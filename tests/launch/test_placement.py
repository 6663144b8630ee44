"""Every process has a place, no GPU and no port is given twice, and what does not fit is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.placement import Placement, Seat, imagined, place
from tests.fakes import ALONE, GIVEN, JOB, with_scorer


def placed(nodes: int, gpus: int, **changes: Any) -> Placement:
    config = with_scorer(**JOB, **changes)
    return place(config, imagined(config, nodes, gpus))


def where(seats: list[Seat]) -> list[tuple[str, tuple[int, ...]]]:
    return [(seat.node.name, seat.gpus) for seat in seats]


def all_seats(found: Placement) -> list[Seat]:
    engines = [seat for seats in found.engines for seat in seats]
    return [*dict.fromkeys(found.trainers), *engines, *(seat for seats in found.frozen.values() for seat in seats)]


def test_trainers_fill_first_nodes_and_engines_the_rest() -> None:
    found = placed(3, 4, **{"trainer.tensor_parallel": 2, "trainer.data_parallel": 3, "engine.count": 6})
    assert [seat.node.name for seat in found.trainers] == ["node0"] * 3 + ["node1"] * 3
    assert [found.local_rank(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert where([seats[0] for seats in found.engines]) == [
        ("node0", (3,)),
        ("node1", (3,)),
        *(("node2", (gpu,)) for gpu in range(4)),
    ]
    assert found.router.node.name == found.rollout.node.name == "node0"


def test_trainers_may_have_nodes_to_themselves() -> None:
    shape = {"trainer.data_parallel": 2, "engine.count": 4, "cluster.trainer_nodes": 1}
    assert {seats[0].node.name for seats in placed(2, 4, **shape).engines} == {"node1"}
    with pytest.raises(ConfigError, match=r"engine.count × engine.tensor_parallel"):
        placed(1, 4, **shape | {"engine.count": 5})


def test_an_engine_that_does_not_fit_takes_whole_nodes() -> None:
    found = placed(4, 4, **{"trainer.data_parallel": 4, "engine.tensor_parallel": 8, "cluster.cpu_nodes": 1})
    ((head, second),) = found.engines
    assert where([head, second]) == [("node2", (0, 1, 2, 3)), ("node3", (0, 1, 2, 3))]
    assert head.port > 0
    assert second.port > 0
    assert head.meeting > 0  # where its ranks find each other
    assert found.router.node.name == "node0"  # without GPUs
    assert found.trainers[0].node.name == "node1"


def test_an_engine_has_gpus_for_all_of_its_stages() -> None:
    shape = {"engine.tensor_parallel": 2, "engine.expert_parallel": 2, "engine.pipeline_parallel": 2}
    found = placed(2, 8, **{"trainer.data_parallel": 4, "engine.count": 3, **shape})
    assert [seats[0].gpus for seats in found.engines] == [(4, 5, 6, 7), (0, 1, 2, 3), (4, 5, 6, 7)]
    with pytest.raises(ConfigError, match=r"engine.count × engine.tensor_parallel × engine.pipeline_parallel.*4 × 4"):
        placed(2, 8, **{"trainer.data_parallel": 4, "engine.count": 4, **shape})


def test_engines_of_another_model_stand_on_one_machine() -> None:
    with pytest.raises(ConfigError, match=r"scorer.count × scorer.tensor_parallel.*No machine has 8 free GPUs"):
        placed(4, 4, **{"scorer.model": "/t", "scorer.tensor_parallel": 8})
    assert len(placed(2, 8, **{"scorer.model": "/t", "scorer.tensor_parallel": 8}).frozen["scorer"][0].gpus) == 8


def test_without_gpus_trainers_take_half_and_engines_turns() -> None:
    found = placed(4, 0, **{"trainer.data_parallel": 4, "engine.count": 3})
    assert [seat.node.name for seat in found.trainers] == ["node0", "node0", "node1", "node1"]
    assert [seats[0].node.name for seats in found.engines] == ["node2", "node3", "node2"]
    alone = placed(1, 0, **{"trainer.data_parallel": 4, "engine.count": 3})
    assert {seat.node.name for seat in all_seats(alone)} == {"node0"}


def test_modes_without_a_side_leave_its_places_out() -> None:
    generating = placed(1, 2, **{**ALONE, "engine.count": 2})
    assert (generating.trainers, len(generating.engines)) == ([], 2)
    training = placed(1, 2, **{**GIVEN, "trainer.data_parallel": 2})
    assert (len(training.trainers), training.engines) == (2, [])
    without_gpus = placed(2, 0, **{**GIVEN, "trainer.data_parallel": 2})
    assert [seat.node.name for seat in without_gpus.trainers] == ["node0", "node1"]  # no half is kept for engines


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer.data_parallel": 9}, "cluster.nodes"),
        ({"trainer.data_parallel": 3, "cluster.trainer_nodes": 2}, "cluster.trainer_nodes"),
        ({"trainer.data_parallel": 8, "cluster.trainer_nodes": 1}, "cluster.trainer_nodes"),
        ({"engine.count": 8}, "engine.count × engine.tensor_parallel"),
        ({"engine.tensor_parallel": 6}, "engine.count × engine.tensor_parallel"),
        ({"cluster.cpu_nodes": 2}, "cluster.nodes"),
        ({"engine.device": "cuda", "trainer.device": "cpu", "gpus": 0}, "engine.device"),
        ({"trainer.device": "cuda", "gpus": 0}, "trainer.device"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        placed(2, **{"gpus": 4, **changes})
    assert caught.value.field == field


def test_ports_of_a_machine_are_enough_for_everything_on_it() -> None:
    fleets = {"engine.count": 2, "scorer.model": "/t", "scorer.count": 5}
    found = placed(1, 0, **fleets)
    seats = [found.router, found.rollout, *all_seats(found)]
    ports = [port for seat in seats for port in (seat.port, seat.meeting) if port]
    assert len(ports) == len(set(ports)) == 2 * 7 + 4
