"""A fake engine behind HTTP that holds a model's HF tensors, and loses them when it releases its memory.

It keeps SGLang's rules (managers/scheduler_components/weight_updater.py): memory is released only while nothing runs,
and only a released tag is resumed; by our hook, what is released is not released again. A broken rule ends SGLang's
scheduler; here it is noted in `broken`, and every later call fails.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.parallel import EngineParallel
from asyncrl.weights.checksum import ExpectedChecksums
from tests.fakes import JsonHandler

TAGS = {"weights", "kv_cache"}


class ScramblingEngine:
    """Serves the control endpoints. `at_first_token` gets its version and weights whenever it continues."""

    def __init__(self, model: Path, at_first_token: Callable[[str, dict[str, Tensor]], None]) -> None:
        self._hf = json.loads((model / "config.json").read_text())
        self._model, self._at_first_token = model, at_first_token
        self.calls: list[str] = []
        self.broken: list[str] = []
        self.fails: set[str] = set()
        """Paths that are answered with an error."""
        self.hangs: dict[str, float] = {}
        """Paths that are answered late, by this many seconds."""
        self._routes = {
            "/pause_generation": self._pause,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
            "/update_weights_from_disk": self._load,
            "/weights_checker": self._checksums,
            "/update_weight_version": self._label,
            "/continue_generation": self._continue,
        }
        self.start("0")

    def start(self, version: str) -> None:
        """Start its process, again if it ran: with all of its memory and the weights of its model folder."""
        self.version, self.paused, self.released = version, False, set[str]()
        files = sorted(self._model.glob("*.safetensors"))
        self.weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        engine = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.answer(200, {"weight_version": engine.version})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                engine.calls.append(self.path)
                time.sleep(engine.hangs.get(self.path, 0.0))
                try:
                    assert not engine.broken, engine.broken
                    assert self.path not in engine.fails, "as the test demands"
                    answer = engine._routes[self.path](body)
                except AssertionError as broken:
                    engine.broken += [str(broken)] if self.path not in engine.fails else []
                    self.answer(500, {"message": str(broken)})
                else:
                    self.answer(200, {"success": True, **answer})

        port = self._server.server_port if hasattr(self, "_server") else 0
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def die(self) -> None:
        """End its process."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["mode"] in ("retract", "abort"), body
        self.paused = True
        return {}

    def _flush(self, _: dict[str, Any]) -> dict[str, Any]:
        assert self.paused, "flushed while requests run"
        return {}

    def _release(self, body: dict[str, Any]) -> dict[str, Any]:
        tags = set(body["tags"])
        assert self.paused, "released while requests run"
        assert tags <= TAGS, f"{tags} released"
        tags -= self.released
        self.released |= tags
        if "weights" in tags:
            for tensor in self.weights.values():
                tensor.fill_(torch.nan)
        return {}

    def _resume(self, body: dict[str, Any]) -> dict[str, Any]:
        tags = set(body["tags"])
        assert tags <= self.released, f"{tags} resumed, but not released"
        self.released -= tags
        return {}

    def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        assert "weights" not in self.released, "weights loaded into released memory"
        for file in Path(body["model_path"]).glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                self.weights[name].copy_(tensor)
        return {}

    def _checksums(self, _: dict[str, Any]) -> dict[str, Any]:
        checksums = ExpectedChecksums(self._hf, EngineParallel(), dtype=torch.float32)
        for name, tensor in self.weights.items():
            checksums.add(name, tensor)
        return {"ranks": [{"parallelism_info": [{"tp_rank": 0}], "checksums": checksums.result()[0]}]}

    def _label(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version = body["new_version"]
        return {}

    def _continue(self, _: dict[str, Any]) -> dict[str, Any]:
        assert not self.released, f"continued without {self.released}"
        self.paused = False
        self._at_first_token(self.version, self.weights)
        return {}
