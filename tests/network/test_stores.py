"""Stores of torch listen at their host, and nowhere else."""

from __future__ import annotations

import multiprocessing
import os
import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from asyncrl.network import stores
from asyncrl.network.ports import free_port

ELSEWHERE = "127.0.0.2"
"""Another address of this machine: whoever listens on all interfaces answers there, too."""


def join(rank: int, world: int, port: int, by: str, ends: list[multiprocessing.connection.Connection]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    stores.bind()
    stores.bind()
    url = "env://" if by == "env" else f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world, timeout=timedelta(seconds=240))
    dist.barrier()
    addresses = {one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    with socket.socket() as knocking:
        answered = knocking.connect_ex((ELSEWHERE, port)) == 0
    dist.barrier()
    ends[rank].send((sorted(addresses), answered))
    dist.destroy_process_group()


@pytest.mark.parametrize("by", ["env", "tcp"])
def test_ranks_meet_and_nobody_listens_on_all_interfaces(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port = free_port("127.0.0.1")
    ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(2)), strict=True)
    # A fork would have this process's sockets, and groups of tests before this one.
    ranks = [
        multiprocessing.get_context("spawn").Process(target=join, args=(rank, 2, port, by, list(theirs)), daemon=True)
        for rank in range(2)
    ]
    for one in ranks:
        one.start()
    for end in ours:
        assert end.poll(240)
        addresses, answered = end.recv()
        assert addresses == ["127.0.0.1"]
        assert not answered
    for one in ranks:
        one.join(240)
        assert one.exitcode == 0


def test_host_that_is_elsewhere_is_refused_in_words() -> None:
    with pytest.raises(OSError, match=r"a store of torch cannot listen at 192\.0\.2\.1:"):
        stores._listening("192.0.2.1", free_port("127.0.0.1"))
