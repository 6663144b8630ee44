"""What Prometheus reads says the same as the run's files, and its key opens nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from asyncrl.extensions.observe.exposition import TOKEN, exposed
from asyncrl.jsonl import append
from asyncrl.metrics import fields
from asyncrl.observability.intervals import Interval
from asyncrl.observability.timeline import BatchTimeline, PublishTimeline
from tests.extensions.observe.observing import observing
from tests.extensions.timelines.made import DECODE, TOOL, episode, group
from tests.fakes import addresses
from tests.rollout.machinery import KEY
from tests.rollout.service import Site, at, file_of


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_hold_state_timelines_and_newest_step(tmp_path: Path) -> None:
    hooks = observing(tmp_path)
    metrics = hooks.exposed
    metrics(group("a", episode(1.0, Interval(DECODE, 0.0, 2.0), Interval(TOOL, 2.0, 4.0, "search", outcome="down"))))
    metrics(group("b", outcome="agent"))
    metrics(BatchTimeline(1, asked=5.0, taken=7.0, uids=["a"]))
    metrics(PublishTimeline(1, held=8.0, released=8.5))
    append(tmp_path / "metrics.jsonl", {"reward/mean": 0.25, "tool_time/search/p50": 3.0})
    append(tmp_path / "metrics.jsonl", {"reward/mean": 0.5, "tool_time/search/p50": 4.0})
    append(tmp_path / "eval.jsonl", {"set": "sum", "accuracy": 0.75, "pass@2": 1.0})
    append(tmp_path / "warnings.jsonl", {"version": 1, "warning": "x"})

    async def play(site: Site) -> None:
        site.begin(await site.groups.ticket())
        status = file_of(site, tmp_path)
        site.server.more = list(hooks.routes(site.server, lambda: status.now(status_loads)))
        site.connect()
        status_loads = await status._loads.recent(0.0)
        token = (tmp_path / TOKEN).read_text()
        answer = await site.http.get("/metrics", headers={"authorization": f"Bearer {token}"})
        found = samples(answer.text)
        engine, dead = (("engine", url) for url in addresses(engines=2).engines)
        expected: dict[Any, float] = {
            ("asyncrl_run", (("model", "model"), ("name", "a run"), ("run_id", "run0"))): 1,
            ("asyncrl_episodes_running", (("phase", "agent"),)): 2,
            ("asyncrl_groups", (("state", "running"),)): 1,
            ("asyncrl_tokens_generated_total", ()): 0,
            ("asyncrl_engine_up", (engine,)): 1,
            ("asyncrl_engine_up", (dead,)): 0,
            ("asyncrl_engine_requests_queued", (engine,)): 1,
            ("asyncrl_episode_phase_seconds_sum", (("phase", "tool"), ("purpose", "training"))): 2.0,
            ("asyncrl_call_seconds_count", (("kind", "tool"), ("name", "search"))): 1,
            ("asyncrl_call_failures_total", (("kind", "tool"), ("name", "search"))): 1,
            (
                "asyncrl_groups_ended_total",
                (("outcome", "agent"), ("purpose", "training"), ("task", "sum")),
            ): 1,
            ("asyncrl_batch_wait_seconds_sum", ()): 2.0,
            ("asyncrl_batch_wait_seconds_bucket", (("le", "1"),)): 0,
            ("asyncrl_batch_wait_seconds_bucket", (("le", "3"),)): 1,
            ("asyncrl_batch_wait_seconds_bucket", (("le", "+Inf"),)): 1,
            ("asyncrl_publish_hold_seconds_sum", ()): 0.5,
            ("asyncrl_step_reward_mean", ()): 0.5,
            ("asyncrl_step_tool_time_by_tool_and_of", (("of", "p50"), ("tool", "search"))): 4.0,
            ("asyncrl_eval_pass_at_2", (("set", "sum"),)): 1.0,
            ("asyncrl_warnings_total", ()): 1,
        }
        assert {key: found.get(key) for key in expected} == expected
        assert (await site.http.get("/metrics", headers=KEY)).text == answer.text
        for path in ("/status", "/batch?version=0"):
            assert (await site.http.get(path, headers={"authorization": f"Bearer {token}"})).status_code == 401
        assert (await site.http.get("/metrics", headers={"authorization": "Bearer x"})).status_code == 401

    at(play)
    assert (tmp_path / TOKEN).stat().st_mode & 0o077 == 0


def test_every_documented_field_has_a_name_of_its_own() -> None:
    documented = fields.of_steps()
    names = {field: exposed(field.replace("<", "").replace(">", "")) for field in documented}
    families = [name for name, _ in names.values()]
    assert len(set(families)) == len(families)
    assert names["straggler/tool/<tool>"] == ("straggler_tool_by_tool", {"tool": "tool"})
    assert exposed("reward/mean/sort/x") == ("reward_mean_by_task", {"task": "sort/x"})
