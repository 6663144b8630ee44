"""Resources that episodes share are created once per event loop and end with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.tools.extension import Tools
from asyncrl.extensions.tools.shared import check_sandboxes, close_shared, sandboxes, shared
from asyncrl.settings import Section
from tests.extensions.tools.sandboxes import Folders

PATH = "tests.extensions.tools.sandboxes:Folders"


class Held:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.closed = fails, 0

    async def close(self) -> None:
        self.closed += 1
        if self.fails:
            raise OSError("does not close")


def test_one_specification_has_one_thing_in_each_loop() -> None:
    async def main() -> list[Any]:
        return [shared("k", {"a": 1, "b": 2}, Held), shared("k", {"b": 2, "a": 1}, Held), shared("k", {"a": 1}, Held)]

    first, same, other = asyncio.run(main())
    assert first is same
    assert other is not first
    assert asyncio.run(main())[0] is not first


def test_all_is_closed_even_if_one_fails_and_made_anew() -> None:
    async def main() -> None:
        bad, good = shared("k", 1, lambda: Held(True)), shared("k", 2, Held)
        with pytest.raises(OSError, match="does not close"):
            await close_shared()
        assert (bad.closed, good.closed) == (1, 1)
        await close_shared()
        assert shared("k", 2, Held) is not good

    asyncio.run(main())


def test_sandboxes_are_shared_by_their_arguments_and_closed() -> None:
    Folders.ended.clear()

    async def main() -> None:
        assert sandboxes(PATH, {"name": "a"}) is sandboxes(PATH, {"name": "a"})
        sandboxes(PATH, {"name": "b"})
        await Tools(Section()).player(None, None).close()

    asyncio.run(main())
    assert sorted(Folders.ended) == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "params", "field"),
    [("tests.nowhere:Folders", {}, "x.sandbox"), (PATH, {"colour": 1}, "x.sandbox_params")],
)
def test_backend_that_cannot_be_made_is_refused_by_its_field(path: str, params: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_sandboxes(path, params, "x.sandbox")
    assert caught.value.field == field
