"""Entry point of the rollout process: python -m asyncrl.rollout RUN_DIR."""

from __future__ import annotations

from asyncrl import import_hooks  # noqa: F401  # first: see there

# isort: split
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from asyncrl.config import read
from asyncrl.network.addresses import Addresses
from asyncrl.network.tls import signed
from asyncrl.progress import Progress, failing
from asyncrl.rollout.build import RolloutParts
from asyncrl.rollout.serving import contain, serve


async def main(run_dir: Path, work: Callable[[RolloutParts], Coroutine[Any, Any, None]]) -> None:
    """Serve, and do this work with the parts, until the launcher sends SIGTERM or a component fails."""
    contain(asyncio.get_running_loop())
    config, addresses = read(run_dir), Addresses.read(run_dir)
    progress = Progress(run_dir, "rollout", config.cluster.stall_timeout)
    progress.doing("starting", within=config.rollout.batch_timeout)
    progress.watch()
    parts = RolloutParts(config, addresses, run_dir)
    following = asyncio.create_task(progress.follow())
    try:
        with failing(run_dir, "rollout"):
            await serve(parts.server, addresses.rollout, work(parts), signed(run_dir, addresses.rollout))
    finally:
        following.cancel()
        progress.doing("ending", within=config.cluster.stop_grace)
        await parts.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher ends them in order
    with failing(Path(sys.argv[1]), "rollout"):
        asyncio.run(main(Path(sys.argv[1]), RolloutParts.roll_out))
