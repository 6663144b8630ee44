"""Reward model behind HTTP, in one of four request formats.

form       request                                             answer
batch      {"answers": [{"prompt", "answer", "question"}...]}  {"rewards": [...]}, one for each
single     {"prompt", "answer", "question"}                    {"reward": ...}
slime      {"prompt", "response", "label"}                     a number, or an object with `reward_key` (its `--rm-url`,
                                                               slime/rollout/rm_hub/__init__.py)
openrlhf   {"query": [...], "prompts": [...],                  {"rewards": [...]}, one for each (its remote_rm_url,
           "labels": [...]}                                    openrlhf/cli/serve_rm.py); query is prompt and answer

`prompt` is the list of messages (for openrlhf their texts, joined by newlines: no chat template is applied), `question`
is the record, `label` is its field `answer_key`. A batch that is refused is sent again item by item, so that one answer
that is too long does not fail the others.

waits for     a batch (batches.py), then a server (endpoints.py)
on a failure  EpisodeFailed("reward_model")
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import httpx

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.combine.calls import together
from asyncrl.extensions.judge.batches import RequestBatcher
from asyncrl.extensions.judge.endpoints import Endpoints, RefusedError, ServerSettings
from asyncrl.rewards.parameters import Count, Name, Seconds
from asyncrl.rewards.reward import RewardInput
from asyncrl.settings import NonNegative

REASON = "reward_model"
BATCHED, LABELLED = ("batch", "openrlhf"), ("slime", "openrlhf")
Sample = dict[str, Any]


class RewardModelSettings(ServerSettings):
    """The servers of a reward model, and what they are sent. `urls` are complete."""

    form: Literal["batch", "single", "slime", "openrlhf"] = "batch"
    answer_key: Name = "answer"
    reward_key: Name = "reward"
    max_batch: Count = 64
    max_wait: NonNegative = 0.01
    """Seconds for a batch to fill."""
    max_running: Count = 16
    request_timeout: Seconds = 60.0
    deadline: Seconds = 180.0


class RewardModel:
    """Reward that a reward model gives to the last completion."""

    inline = pure = True
    Settings = RewardModelSettings

    def __init__(self, settings: RewardModelSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        if not settings.urls:
            raise ConfigError("urls", settings.urls, "Must name at least one server.")
        self._form = settings.form
        self._answer_key = settings.answer_key
        self._reward_key = settings.reward_key
        self._servers = Endpoints(settings, REASON, transport=transport)
        self._batches: RequestBatcher[Sample, float] = RequestBatcher(
            self._send,
            max_batch=settings.max_batch if settings.form in BATCHED else 1,
            max_wait=settings.max_wait,
        )

    async def __call__(self, answer: RewardInput) -> float:
        """Score an answer. Raises EpisodeFailed("reward_model")."""
        sample = {
            "prompt": list(answer.question.get("messages", ())),
            "answer": answer.text,
            "question": answer.record,
        }
        if self._form in LABELLED:
            sample["label"] = answer.field(self._answer_key)
        return await self._batches.ask(sample)

    async def close(self) -> None:
        """Close the connections."""
        await self._batches.close()
        await self._servers.close()

    async def _send(self, samples: Sequence[Sample]) -> Sequence[float | EpisodeFailed]:
        try:
            found = await self._servers.post("", self._request(samples))
        except RefusedError as error:
            if len(samples) == 1:
                return [error]
            return [one for found in await together([self._send([each]) for each in samples]) for one in found]
        return [_reward(one) for one in self._rewards(found, len(samples))]

    def _request(self, samples: Sequence[Sample]) -> Mapping[str, Any]:
        if self._form == "batch":
            return {"answers": samples}
        if self._form == "openrlhf":
            prompts = ["\n".join(str(message["content"]) for message in one["prompt"]) for one in samples]
            return {
                "query": [f"{prompt}\n{one['answer']}" for prompt, one in zip(prompts, samples, strict=True)],
                "prompts": prompts,
                "labels": [one["label"] for one in samples],
            }
        (sample,) = samples
        if self._form == "single":
            return sample
        return {"prompt": sample["prompt"], "response": sample["answer"], "label": sample["label"]}

    def _rewards(self, found: Any, count: int) -> Sequence[object]:
        if self._form in BATCHED:
            rewards = found.get("rewards") if isinstance(found, dict) else None
            if not isinstance(rewards, list) or len(rewards) != count:
                raise EpisodeFailed(REASON, f"instead of {count} rewards, the server returned {_cut(found)}")
            return rewards
        if isinstance(found, dict):
            return [found.get(self._reward_key if self._form == "slime" else "reward")]
        return [found if self._form == "slime" else None]


def _reward(value: object) -> float | EpisodeFailed:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return EpisodeFailed(REASON, f"the server returned something other than a finite number: {_cut(value)}")
    return float(value)


def _cut(value: object) -> str:
    return repr(value)[:200]
