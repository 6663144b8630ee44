"""What this folder adds: the setting requests.fields."""

from __future__ import annotations

import ast
import difflib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from asyncrl import extension
from asyncrl.config.secret_values import Parameters
from asyncrl.errors import ConfigError
from asyncrl.settings import Section

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncrl.config import Config
    from asyncrl.launch.prepare import Preparation

OWN_FIELDS = {
    "sampling_params": "asyncrl sets them: see rollout.temperature, rollout.max_new_tokens and rollout.stop. Other "
    "sampling parameters would change the policy, and the trainer would not know of it: remove it.",
    **dict.fromkeys(
        (
            "rid",
            "text",
            "input_ids",
            "input_embeds",
            "image_data",
            "stream",
            "return_logprob",
            "extra_key",
            "lora_path",
            "routed_experts_start_len",
            "routed_dp_rank",
        ),
        "asyncrl sets it for each request: remove it.",
    ),
}
"""Fields of requests that requests.fields cannot set, and why."""


class RequestSettings(Section):
    """Requests to the engines of the policy (asyncrl/extensions/requests/README.md)."""

    fields: Parameters = Field(default_factory=dict)
    """Additional fields of every request to /generate, which the router forwards unchanged. Those that have a setting,
    that asyncrl sets for each request or that SGLang does not know are refused."""


class RequestChecks(extension.LaunchHooks):
    """Checks of the fields against SGLang."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Create the checks of these fields."""
        self._fields = fields

    def refuse(self, prepared: Preparation) -> None:
        """Refuse fields that SGLang does not know, and would ignore. They are read from its source, since its import
        takes seconds."""
        spec = find_spec("sglang") if self._fields else None
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            tree = ast.parse(Path(folder, "srt/managers/io_struct.py").read_text())
            (known,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "GenerateReqInput")
            names = [ast.unparse(one.target) for one in known.body if isinstance(one, ast.AnnAssign)]
            for name, value in self._fields.items():
                if name not in names:
                    near = difflib.get_close_matches(name, names, n=1)
                    end = f": did you mean {near[0]}?" if near else "."
                    remedy = f"Requests to SGLang's /generate have no such field{end}"
                    raise ConfigError(f"requests.fields.{name}", value, remedy)


class RequestPlayer(extension.PlayerHooks):
    """What every request gets."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Create the hooks of these fields."""
        self._fields = fields

    def fields(self, config: Config) -> Mapping[str, Any]:
        """Return what is set."""
        return self._fields


class Requests(extension.Extension):
    """Further fields of requests."""

    Settings = RequestSettings

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse fields that asyncrl sets."""
        for name, value in self.settings.fields.items():
            if remedy := OWN_FIELDS.get(name):
                yield ConfigError(f"requests.fields.{name}", value, remedy)

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return RequestChecks(self.settings.fields)

    def player(self, config: Config, addresses: object) -> extension.PlayerHooks:
        """Return the hooks in processes that play episodes."""
        return RequestPlayer(self.settings.fields)


Own = Requests
