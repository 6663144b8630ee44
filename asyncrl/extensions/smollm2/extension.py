"""What this folder adds: the model `builtin:smollm2-135m`."""

from __future__ import annotations

from asyncrl import extension


class SmolLM2(extension.Extension):
    """A model whose weights come from a package."""

    builtin = {"smollm2-135m": "asyncrl.extensions.smollm2.model:BUILTIN"}  # noqa: RUF012


Own = SmolLM2
