"""What this folder adds: metrics of agents that use OpenAI's API."""

from __future__ import annotations

from asyncrl import extension


class OpenAIProxy(extension.Extension):
    """Agents are named by their import paths (asyncrl/extensions/proxy/README.md)."""

    metrics = {  # noqa: RUF012
        "proxy/turns": "number of answers that agents received",
        "proxy/contexts_begun": "number of these answers that did not continue an earlier answer of their episode; "
        "each one beyond the first of an episode costs an extra sample, caused by an edited history",
        "proxy/refused": "number of requests that were refused because they asked for something that would spoil "
        "training",
        "proxy/abandoned": "number of requests whose agent or episode ended before the answer",
        "proxy/malformed": "number of tool calls that could not be read, and stayed in the text of the answer",
    }
    """Counts since the start of the run."""


Own = OpenAIProxy
