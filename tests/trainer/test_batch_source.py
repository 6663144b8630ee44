"""Rank 0 at the rollout server's source: it asks until the batch is there, and says what it waited for."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from asyncrl.errors import DeadlineExceeded, EngineError, PeerFailed
from asyncrl.network.addresses import Access
from asyncrl.trainer.batch_source import RolloutClient

Answer = httpx.Response | Exception


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.trainer.batch_source.time.sleep", lambda seconds: None)


def source(*answers: Answer, timeout: float = 60.0) -> RolloutClient:
    """Gives these answers in turn, the last one for ever."""
    left = list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = RolloutClient("http://service", Access(""), timeout)
    made._http.close()
    made._http = httpx.Client(base_url="http://service", transport=httpx.MockTransport(handle))
    return made


def never() -> bool:
    return False


@pytest.mark.parametrize("broken", [httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError])
def test_batch_whose_transfer_broke_is_asked_for_again(broken: Callable[[str], Exception]) -> None:
    assert source(broken("reset"), httpx.Response(200, content=b"batch")).batch(0, interrupt=never) == b"batch"


def test_service_that_hangs_is_told_from_one_that_broke_off() -> None:
    with pytest.raises(EngineError, match="the rollout server closed the connection: ReadTimeout"):
        source(httpx.ReadTimeout("")).batch(0, interrupt=never)


def test_wait_that_ends_says_what_the_rollout_side_waited_for() -> None:
    with pytest.raises(DeadlineExceeded, match=r"batch 3: step 3: g0 waits 63 s for its agent"):
        source(httpx.Response(202, text="step 3: g0 waits 63 s for its agent"), timeout=0.0).batch(3, interrupt=never)


def test_error_of_the_service_ends_the_wait_with_its_text() -> None:
    text = "the ledger of tokens does not balance"
    with pytest.raises(EngineError, match=text):
        source(httpx.Response(500, text=text)).batch(0, interrupt=never)


def test_service_that_does_not_listen_yet_is_asked_again() -> None:
    assert source(httpx.ConnectError("refused"), httpx.Response(200, json={"a": 1})).status() == {"a": 1}


@pytest.mark.parametrize("answer", [httpx.ReadError("reset"), httpx.Response(500, text="KeyError: 'x'")])
def test_failure_of_the_service_is_told_from_the_trainers_own(answer: Answer) -> None:
    with pytest.raises(PeerFailed, match="the rollout server"):
        source(answer).hold()


def test_wait_ends_when_no_batch_will_come() -> None:
    assert source(httpx.Response(202)).batch(0, interrupt=lambda: True) == b""
