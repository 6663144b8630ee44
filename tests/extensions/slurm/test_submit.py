"""A job that has not been submitted asks for the fewest machines that hold its run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.extensions.slurm.job import SlurmJob
from asyncrl.extensions.slurm.submit import nodes_wanted
from asyncrl.launch.placement import imagined, place
from tests.extensions.slurm.lab import slurm_config
from tests.fakes import JOB, with_scorer


@given(
    each=st.sampled_from([1, 2, 4, 8]),
    world=st.integers(1, 32),
    engines=st.integers(1, 12),
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    teachers=st.integers(0, 2),
    cpu_nodes=st.integers(0, 2),
)
def test_the_fewest_nodes_hold_everything_once(
    each: int, world: int, engines: int, tensor: int, teachers: int, cpu_nodes: int
) -> None:
    """One node less is too few."""
    config = _config(world, engines, tensor, teachers, cpu_nodes)
    try:
        count = nodes_wanted(config, each)
    except ConfigError:
        return  # ranks that no number of such nodes shares evenly
    found = place(config, imagined(config, count, each))
    served = [seat for seats in (*found.engines, *found.frozen.values()) for seat in seats]
    seats = [*dict.fromkeys(found.trainers), *served]
    taken = [(seat.node.name, gpu) for seat in seats for gpu in seat.gpus]
    assert len(taken) == len(set(taken)) == world + engines * tensor + teachers
    listening = [found.router, found.rollout, *seats]
    ports = [(seat.node.name, port) for seat in listening for port in (seat.port, seat.meeting) if port]
    assert len(ports) == len(set(ports))
    assert [found.trainers.count(seat) for seat in found.trainers] == [world // len(set(found.trainers))] * world
    if count > 1 + cpu_nodes:
        with pytest.raises(ConfigError):
            place(config, imagined(config, count - 1, each))


def _config(world: int, engines: int, tensor: int, teachers: int, cpu_nodes: int) -> Config:
    shape = {"trainer.data_parallel": world, "engine.count": engines, "engine.tensor_parallel": tensor}
    teaching = {"scorer.model": "/t", "scorer.count": teachers} if teachers else {}
    return with_scorer(**JOB, **shape, **teaching, **{"cluster.cpu_nodes": cpu_nodes})


def test_machines_of_a_job_to_come_are_imagined_and_unknown() -> None:
    config = slurm_config(**{"cluster.gpus": 8, "trainer.data_parallel": 8, "engine.count": 8})
    job = SlurmJob(config, {})
    job.probe(config)
    assert [(node.name, len(node.gpus)) for node in job.nodes] == [("node0", 8), ("node1", 8)]
    assert not job.machines
    with pytest.raises(ConfigError, match="number of GPUs of each machine") as refused:
        job.probe(slurm_config(**{"cluster.gpus": None}))
    assert refused.value.field == "cluster.gpus"
