"""Construction of a run's fleet, for the rank that decides which engines serve and for the ranks that follow it."""

from __future__ import annotations

import time
from pathlib import Path

from asyncrl import jsonl
from asyncrl.addresses import LOST, Addresses
from asyncrl.config import Config
from asyncrl.engine.control import Fleet
from asyncrl.engine.registry import Registry
from asyncrl.engine.router import RouterWorkers


def build_fleet(config: Config, addresses: Addresses, run_dir: Path, *, decides: bool) -> Fleet:
    """Build the fleet of one process.

    Exactly one process `decides`: only it talks to the router, and only it asks the launcher to restart lost engines.
    """
    timeout = config.weights.timeout
    router = RouterWorkers(addresses.router, addresses.access, timeout) if decides else None

    def note(url: str, incarnation: str, reason: str) -> None:
        if decides:
            lost = {"engine": url, "incarnation": incarnation, "reason": reason, "time": time.time()}
            jsonl.append(run_dir / LOST, lost)

    restart = config.cluster.on_engine_death == "restart"
    return Fleet(
        addresses.engines,
        addresses.access,
        timeout,
        attached=addresses.attached,
        router=router,
        register=Registry(run_dir) if decides else None,
        on_lost=note if restart else None,
    )
