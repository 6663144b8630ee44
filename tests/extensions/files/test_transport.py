"""A version's files appear when all are whole, in a folder that belongs to this user."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.engine.fleet import Fleet
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.extensions.files.transport import KEPT, DiskTransport
from asyncrl.network.addresses import Access
from asyncrl.weights.bucket import plan_buckets
from tests.fakes import tiny_config

HERE = "http://127.0.0.1:20000"


class Loaded(Fleet):
    """Engines that load every folder; notes which were whole when they did."""

    def __init__(self) -> None:
        super().__init__([HERE], Access(""), 1.0)
        self.folders: list[list[str]] = []

    def call(self, path: str, body: dict | None = None) -> dict:
        assert body is not None
        self.folders.append(sorted(file.name for file in Path(body["model_path"]).iterdir()))
        return {}


def test_a_version_appears_when_it_is_whole_and_old_ones_go(tmp_path: Path) -> None:
    fleet = Loaded()
    transport = DiskTransport(fleet, tmp_path / "weights", stage=0)
    (bucket,) = plan_buckets([("a", torch.float32, torch.Size([2]))], 100)
    for version in range(1, 5):
        transport.start(version)
        transport.send(torch.zeros(8, dtype=torch.uint8), bucket)
        transport.send(torch.zeros(8, dtype=torch.uint8), bucket)
        assert not (tmp_path / "weights" / f"v{version:06d}").exists()
        assert transport.deliver(version)
    assert fleet.folders == [["model-stage0-00001.safetensors", "model-stage0-00002.safetensors"]] * 4
    assert sorted(folder.name for folder in (tmp_path / "weights").iterdir()) == ["v000003", "v000004"][-KEPT:]


def test_what_a_dead_trainer_left_half_written_is_not_delivered(tmp_path: Path) -> None:
    fleet = Loaded()
    (bucket,) = plan_buckets([("a", torch.float32, torch.Size([2]))], 100)
    for _ in range(2):  # the first dies before it delivers
        transport = DiskTransport(fleet, tmp_path, stage=0)
        transport.start(7)
        transport.send(torch.zeros(8, dtype=torch.uint8), bucket)
    transport.deliver(7)
    assert fleet.folders == [["model-stage0-00001.safetensors"]]


def test_no_version_is_written_through_a_link_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match=r"set another weights\.folder"):
        DiskTransport(Loaded(), tmp_path / "link", stage=0).start(1)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_files_fit_no_draft_model() -> None:
    assert tiny_config(**{"weights.transport": "disk"}).sends_files
    drafts = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/draft"}
    with pytest.raises(ConfigError, match="set auto, tensor or distributed") as caught:
        tiny_config(**{"weights.transport": "disk", "engine.server_args": drafts})
    assert caught.value.field == "weights.transport"
