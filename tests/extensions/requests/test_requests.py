"""Further fields of requests: those that asyncrl sets, or that SGLang does not know, are refused."""

from __future__ import annotations

from typing import Any, cast

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.requests.extension import RequestChecks
from asyncrl.lookup import active
from tests.fakes import addresses, tiny_config


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("sampling_params", "rollout.stop"), ("rid", "asyncrl sets it"), ("stream", "asyncrl sets it")],
)
def test_request_fields_that_would_be_replaced_are_refused(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"requests.fields.{name}: got .*{remedy}"):
        tiny_config(**{"requests.fields": {name: {"stop": "x"}}})


def test_request_fields_unknown_to_sglang_are_refused() -> None:
    prepared = cast(Any, None)  # the check reads SGLang's source alone
    RequestChecks({"return_routed_experts": True, "priority": 1}).refuse(prepared)
    with pytest.raises(ConfigError, match=r"requests.fields.priorit: got 1. .*did you mean priority"):
        RequestChecks({"priorit": 1}).refuse(prepared)


def test_fields_reach_every_request_and_secrets_stay_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "sk-what-nobody-may-read")
    config = tiny_config(**{"requests.fields": {"priority": 2, "key": {"env": "A_KEY"}}})
    (found,) = [fields for one in active(config).values() if (fields := one.player(config, addresses()).fields(config))]
    assert dict(found) == {"priority": 2, "key": "sk-what-nobody-may-read"}
    assert "sk-what" not in config.model_dump_json()
