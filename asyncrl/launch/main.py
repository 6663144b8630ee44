"""Entry point of `asyncrl-train`: compose -> validate -> plan -> supervise.

Imports are deferred until they are needed, because they dominate the time until the first output. `--help` only needs
the standard library. Hydra is imported to compose the settings; pydantic, httpx, rich and the rest of the launcher
(launch/run.py) are imported once there is a run. tests/test_imports.py checks this.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from asyncrl import CONF
from asyncrl.errors import AsyncRLError, CompositionError, ConfigError, Paused, Stopped, visible
from asyncrl.launch import help
from asyncrl.network.addresses import PAUSED

STARTED_AT = time.time()
CHECK = "--check"


def main() -> None:
    """Run the command. Exits with 0 on success, 1 if a run failed, 2 for a wrong setting, PAUSED if a run was asked to
    stop and can be resumed, 128 + n after signal n."""
    asked = {"--help", "-h"} & set(sys.argv[1:])
    if asked:
        following = sys.argv[sys.argv.index(asked.pop()) + 1 :]
        print(help.render(CONF, following[0] if following else ""))
        return
    checking = CHECK in sys.argv
    sys.argv = [word for word in sys.argv if word != CHECK]  # the remaining arguments are for Hydra
    # A user's modules are found from the current folder, as by the run's processes (python -m).
    if "" not in sys.path:
        sys.path.insert(0, "")
    os.umask(0o077)  # files of a run are private to their owner: keys, rollouts, weights (launch/run_folder.py)
    try:
        from asyncrl.launch.compose import compose, load

        if composed := compose(CONF):
            from asyncrl.launch import run

            loaded = load(composed)
            if checking:
                sys.exit(run.check(loaded))
            run.start(loaded, STARTED_AT)
    except (ConfigError, CompositionError) as error:
        _fail(2, f"invalid setting\n{error}")
    except AsyncRLError as error:
        _fail(1, str(error))
    except Paused as paused:
        _fail(PAUSED, f"{paused}\nwith checkpoint.every and resume=auto, the same command continues the run")
    except Stopped as stopped:
        _fail(128 + stopped.number, f"stopped by {stopped}{stopped.advice}")
    except KeyboardInterrupt:  # before the supervisor has installed its signal handlers
        _fail(128 + signal.SIGINT, "stopped by SIGINT")


def _fail(code: int, message: str) -> None:
    print(visible(f"asyncrl-train: {message}"), file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
