"""Commands in a fork of the test's process, which has imported them already and so saves a second of CPU time."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess


def forked(
    main: Callable[[], object], *arguments: str, cwd: Path, env: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Call a command's `main` in a fork, with these arguments, its own folder and its own output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                warnings.resetwarnings()  # pytest makes errors of them
                os.chdir(cwd)
                if env is not None:
                    os.environ.clear()
                    os.environ.update(env)
                sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
                sys.argv = ["asyncrl-train", *arguments]
                code = _status(main)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return CompletedProcess(arguments, status, out.read(), err.read())


def _status(main: Callable[[], object]) -> int:
    """Return the exit status that Python would give a process which calls `main`."""
    try:
        main()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001  # Python prints it, too
        traceback.print_exc()
        return 1
    return 0
