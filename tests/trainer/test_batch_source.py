"""Rank 0 at the rollout server's source: it asks until the batch is there, and says what it waited for."""

from __future__ import annotations

import httpx
import pytest

from asyncrl.errors import DeadlineExceeded, PeerFailed
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


DEATHS = [
    httpx.ConnectError("refused"),
    httpx.ReadError("reset"),
    httpx.RemoteProtocolError("disconnected"),
    httpx.ReadTimeout("stopped"),
    httpx.Response(500, text="a bug"),
]


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: type(death).__name__)
def test_requests_repeat_to_the_process_replacing_a_dead_one(death: Answer) -> None:
    assert source(death, death, httpx.Response(200, content=b"batch")).batch(0, interrupt=never) == b"batch"
    assert source(death, httpx.Response(200, content=b"state")).snapshot(0) == b"state"
    assert source(death, httpx.Response(200, json=[{}])).evaluate(never) == [{}]
    assert source(death, httpx.Response(200, json={"versions": [], "past": {}})).announce(1).versions == []
    source(death, httpx.Response(202), death, httpx.Response(200)).hold()
    # by which trainers that start again learn where to go on, while the rollout process is started again, too
    assert source(death, httpx.Response(200, json={"version": 5})).status() == {"version": 5}


@pytest.mark.parametrize("death", DEATHS, ids=lambda death: type(death).__name__)
def test_death_without_a_successor_is_told_at_the_deadline(death: Answer) -> None:
    found = source(death, timeout=0.0)
    with pytest.raises(DeadlineExceeded, match="batch 0: the rollout server"):
        found.batch(0, interrupt=never)
    with pytest.raises(DeadlineExceeded, match=r"the answers in flight .*: the rollout server"):
        found.hold()
    with pytest.raises(DeadlineExceeded, match="the status of the rollout process: the rollout server"):
        found.status()


def test_wait_that_ends_says_what_the_rollout_side_waited_for() -> None:
    with pytest.raises(DeadlineExceeded, match=r"batch 3: step 3: g0 waits 63 s for its agent"):
        source(httpx.Response(202, text="step 3: g0 waits 63 s for its agent"), timeout=0.0).batch(3, interrupt=never)


def test_refusal_of_the_service_ends_the_wait_with_its_text() -> None:
    text = "batch 3 was requested, but the next one is 5"
    with pytest.raises(PeerFailed, match=text):
        source(httpx.Response(409, text=text)).batch(3, interrupt=never)
    with pytest.raises(PeerFailed, match="/snapshot with 409"):
        source(httpx.Response(409, text=text)).snapshot(3)


def test_waits_end_when_nothing_will_come() -> None:
    assert source(httpx.Response(202)).batch(0, interrupt=lambda: True) == b""
    assert source(httpx.Response(202)).evaluate(lambda: True) is None
