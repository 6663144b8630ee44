"""`asyncrl-watch`: serve a live page of a run, or of all runs below a folder.

    asyncrl-watch RUN                                   print the address of the page, and serve it
    asyncrl-watch RUNS --port 8080                      all runs below a folder, on a port of your choice
    asyncrl-watch RUN --host 0.0.0.0 --token-file FILE  to other machines too

The page reads files alone, so runs may be on other machines of a shared file system, and may have ended. It shows
episodes of runs with record=true, and batches of runs with timelines.record=true. From another machine, forward the
port: ssh -L 8080:127.0.0.1:8080 MACHINE.

The address holds a token, which the browser keeps as a cookie. It is drawn at random, unless --token-file names a file
with one, which any host but loopback requires. Traffic is not encrypted: outside of loopback, use a trusted network.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import AsyncRLError, ConfigError, visible

LOOPBACK = ("127.0.0.1", "localhost", "::1")
TOKEN_CHARACTERS = 16
"""Least length of a token that is given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Returns 0, or 1 after one line on stderr."""
    options = _parser().parse_args(argv)
    try:
        token = _token(options.host, options.token_file)
        if not options.folder.is_dir():
            raise ConfigError("RUN_OR_FOLDER", str(options.folder), "There is no such folder.")
        listening = _listen(options.host, options.port)
    except (AsyncRLError, OSError) as error:
        print(visible(f"asyncrl-watch: {error}"), file=sys.stderr)
        return 1
    _serve(options.folder, options.host, token, listening)
    return 0


def _serve(folder: Path, host: str, token: str, listening: socket.socket) -> None:
    import uvicorn  # imported late, because --help does not need it

    from asyncrl.extensions.view.watch.runs import RunFolder
    from asyncrl.extensions.view.watch.server import app

    port = listening.getsockname()[1]
    hosts = LOOPBACK if _is_loopback(host) else ("*",)  # elsewhere, the token alone protects
    shown = f"[{host}]" if ":" in host else host
    print(f"watching {folder}: http://{shown}:{port}/?token={token}", flush=True)
    watched = app(RunFolder(folder), token, hosts, ended=lambda: server.should_exit)
    config = uvicorn.Config(watched, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        remedy = f"Nothing can listen on {host}:{port} ({error.strerror}): choose another one."
        raise ConfigError("--port" if error.errno == errno.EADDRINUSE else "--host", port, remedy) from None
    return listening


def _token(host: str, file: Path | None) -> str:
    """Return the token of the file, or a random one. Raises ConfigError if none is given for a host that needs one."""
    if file is None:
        if _is_loopback(host):
            return secrets.token_urlsafe(24)
        raise ConfigError("--host", host, "Other machines reach this address: protect it with --token-file FILE.")
    token = file.read_text().strip()
    if len(token) < TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise ConfigError("--token-file", str(file), f"It must hold at least {TOKEN_CHARACTERS} ASCII characters.")
    return token


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="RUN_OR_FOLDER", help="folder of a run, or of several runs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token of the page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
