"""What is read is acknowledged at once, or a peer that waits for that holds the next piece back."""

from __future__ import annotations

import socket

import pytest

from asyncrl.engine import sockets


def conversation(ours: socket.socket, peer: socket.socket, turns: int = 4) -> list[int]:
    """Question and answer, as between client and router: whether the kernel acknowledges at once, after each answer."""
    found = []
    for _ in range(turns):
        ours.sendall(b"question")
        peer.recv(100)
        peer.sendall(b"answer")
        assert ours.recv(100) == b"answer"
        found.append(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK))
    return found


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux alone has it")
def test_every_read_is_acknowledged_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        for opened, expected in ((sockets._open, {1}), (lambda address: socket.socket(*address[:3]), {0})):
            with opened((socket.AF_INET, socket.SOCK_STREAM, 0, "", ())) as ours:
                ours.setblocking(True)
                ours.connect(server.getsockname())
                peer, _ = server.accept()
                with peer:
                    assert set(conversation(ours, peer)[1:]) == expected
