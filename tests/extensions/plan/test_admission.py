"""The lead and the number of groups in flight, changed while a run goes on."""

from __future__ import annotations

import asyncio

from asyncrl.extensions.plan.admission import AdmissionRoute
from asyncrl.schema import decode_batch
from tests.rollout.service import Site, at


def test_raised_lead_admits_more_groups_at_once() -> None:
    async def play(site: Site) -> None:
        site.server.more = list(AdmissionRoute().routes(site.server, dict))
        site.connect()
        await site.fill(2)
        waiting = asyncio.ensure_future(site.groups.ticket())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        for wrong in (b'{"lead": -1}', b'{"lead": 2}', b'{"lead": "1"}', b'{"max_running_groups": 0}', b"[]", b"{"):
            refused = await site.http.post("/admission", content=wrong)
            assert (refused.status_code, refused.text[:24]) == (400, "/admission takes lead >=")
        unknown = await site.http.post("/admission", json={"lead": 1}, headers={"authorization": ""})
        assert unknown.status_code == 401
        changed = await site.http.post("/admission", json={"lead": 1})
        assert changed.status_code == 200
        assert (await asyncio.wait_for(waiting, 30)).cohort == 1
        batch = decode_batch((await site.http.get("/batch?version=0")).content)
        assert batch.rollout["admission/lead"] == 1

    at(play, bound=1, lead=0)
