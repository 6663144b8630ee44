"""Building a reward from its configuration: `use`, a registered name or an import path, and `params`.

An import path module:name may lead to

    a function (text, record) -> float     sync or async; params are passed by name with every call. It may declare
                                           itself with attributes `inline` and `pure` (asyncrl/rewards/reward.py)
    a class                                instantiated with the params, or, if it has a model `Settings` of them, with
                                           an object of that
    a function without positional          a factory: called with the params, it returns a reward
    parameters
    a reward                               used as it is
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from asyncrl import lookup, user_code
from asyncrl.errors import ConfigError
from asyncrl.rewards.parameters import check, settings_of
from asyncrl.rewards.reward import Result, Reward, RewardInput

REGISTERED = {
    "exact": "asyncrl.rewards.matching:ExactMatch",
    "contains": "asyncrl.rewards.matching:ContainsMatch",
    "number": "asyncrl.rewards.matching:NumberMatch",
}
"""Rewards of the core by name."""
FORMS = "Must be a function (text, record), a class, a factory that takes its params by name, or a reward"
Spec = Mapping[str, Any]
"""Specification of a reward within the params of another: {"use": ..., "params": {...}}."""


class FunctionReward:
    """Reward that calls a function (text, record) -> float. Unless it declares otherwise it may hang and is not
    pure."""

    def __init__(self, function: Callable[..., float | Awaitable[float]], params: Mapping[str, Any]) -> None:
        self._function, self._params = function, params
        self.inline = bool(getattr(function, "inline", False)) or inspect.iscoroutinefunction(function)
        self.pure = bool(getattr(function, "pure", False))

    def __call__(self, answer: RewardInput) -> Result:
        """Call the function with the last completion and the record."""
        return self._function(answer.text, answer.record, **self._params)


def registered() -> dict[str, str]:
    """Return the import paths of rewards by name: those of the core and of extensions."""
    return REGISTERED | lookup.offered("rewards")


def build(use: str, params: Mapping[str, Any] | None = None, field: str = "reward") -> Reward:
    """Build a reward. Raises ConfigError for `field` and the settings below it: `field`.use, `field`.params.NAME."""
    params = params or {}
    below = f"{field}.params"
    known = registered()
    if use not in known and ":" not in use:
        raise ConfigError(f"{field}.use", use, f"Must be one of {sorted(known)} or an import path, module:name.")
    found = user_code.load(known.get(use, use), f"{field}.use")
    if inspect.isclass(found):
        return _reward(_made(found, params, use, field), use, field)
    if hasattr(found, "inline") and hasattr(found, "pure") and not inspect.isroutine(found):
        if params:
            raise ConfigError(below, params, f"{use} is already a reward and takes no params: remove them.")
        return _reward(found, use, field)
    positional = _required_positional(found, use, field)
    if positional == 2:
        check(found, params, below, given=2)
        return FunctionReward(found, params)
    if positional == 0:
        return _reward(_made(found, params, use, field), use, field)
    raise ConfigError(f"{field}.use", use, f"{FORMS}; this one takes {positional} positional arguments.")


def part(spec: Spec | Reward, field: str) -> Reward:
    """Build a reward that is given in the params of another. Raises ConfigError if it is not one."""
    if not isinstance(spec, Mapping):
        return _reward(spec, type(spec).__name__, field)
    if "use" not in spec or spec.keys() - {"use", "params"}:
        raise ConfigError(field, dict(spec), "Must be a mapping of use and params.")
    use, params = spec["use"], spec.get("params") or {}
    if not isinstance(use, str) or not isinstance(params, Mapping):
        raise ConfigError(field, dict(spec), "use must be a name, and params a mapping.")
    return build(use, params, field)


def _made(maker: Callable[..., Any], params: Mapping[str, Any], use: str, field: str) -> Any:
    below, use_field = f"{field}.params", f"{field}.use"
    if settings := getattr(maker, "Settings", None):
        params = {"settings": settings_of(settings, params, below)}
    else:
        check(maker, params, below)
    try:
        return user_code.made(maker, params, use_field, use)
    except ConfigError as error:  # about a parameter: its field is relative to the params
        place = error.field if error.field == use_field else f"{below}.{error.field}"
        raise ConfigError(place, error.value, error.remedy) from error.__cause__


def _required_positional(found: Any, use: str, field: str) -> int:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"{field}.use", use, f"{FORMS}; it is a {type(found).__name__}.") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in kinds and one.default is one.empty for one in parameters)


def _reward(found: Any, use: str, field: str) -> Reward:
    if not callable(found) or not hasattr(found, "inline") or not hasattr(found, "pure"):
        raise ConfigError(f"{field}.use", use, "Must be a reward: callable with an answer, with `inline` and `pure`.")
    reward: Reward = found
    return reward
