"""Calls in threads that nobody has to wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class ThreadPerCall(ThreadPoolExecutor):
    """An executor in which no call waits for another, and whose calls nobody waits for when the process ends. It is a
    ThreadPoolExecutor because asyncio takes no other as its default; it has no pool."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Call the function in a daemon thread of its own."""
        future = Future[Any]()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments, **named))
                except BaseException as error:  # noqa: BLE001  whoever waits for the call gets it
                    future.set_exception(error)

        threading.Thread(target=work, name=getattr(function, "__name__", "call"), daemon=True).start()
        return future
