"""Every fault is found before anything starts, with its field and what to do, and what is right is no fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.checks.findings import Finding, error, failed, ok, refused, rendered, warning
from asyncrl.launch.checks.model_files import check_model_files, read_model
from asyncrl.launch.placement import place
from tests.launch.checks.worlds import job, nodes, write_model

MODEL = "model.path"


def files(folder: Path, break_it: Callable[[Path], None] = lambda folder: None, shards: int = 2) -> list[Finding]:
    model = write_model(folder / "model", shards=shards)
    break_it(model)
    return check_model_files(model, read_model(model, MODEL), MODEL)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def no_index(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weights": []}')


def header_of(path: Path, header: object) -> None:
    """Return a header that replaces the file's own."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def other_index(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    told = json.loads(index.read_text())
    told["weight_map"]["lost.weight"] = "model-1-of-2.safetensors"
    index.write_text(json.dumps(told))


def too_many_ranks() -> list[Finding]:
    config = job(**{"trainer.data_parallel": 3})
    return refused(lambda: place(config, nodes(config, 1, 2)), "cluster")


FAULTS: dict[str, tuple[Callable[[Path], list[Finding]], str, str, str]] = {
    "a shard that is missing": (
        lambda tmp: files(tmp, lambda model: (model / "model-2-of-2.safetensors").unlink()),
        *(MODEL, "model-2-of-2.safetensors is missing", "again"),
    ),
    "a shard that was cut short": (
        lambda tmp: files(tmp, lambda model: cut(model / "model-1-of-2.safetensors")),
        *(MODEL, "model-1-of-2.safetensors is no complete", "again"),
    ),
    "a shard that is longer than it says": (
        lambda tmp: files(tmp, lambda model: grow(model / "model-1-of-2.safetensors")),
        *(MODEL, "file not fully covered", "again"),
    ),
    "a shard whose header is of another kind": (
        lambda tmp: files(tmp, lambda model: header_of(model / "model.safetensors", {"a": {"shape": 3}}), 1),
        *(MODEL, "invalid type: integer", "again"),
    ),
    "a shard whose tensors have no place": (
        lambda tmp: files(
            tmp, lambda m: header_of(m / "model.safetensors", {"a": {"shape": [], "data_offsets": []}}), 1
        ),
        *(MODEL, "/model.safetensors is no complete .safetensors file", "again"),
    ),
    "an index that is none": (
        lambda tmp: files(tmp, no_index),
        *(MODEL, "cannot be read as an index", "again"),
    ),
    "a config that is a list": (
        lambda tmp: files(tmp, lambda model: (model / "config.json").write_text("[1]")),
        *(MODEL, "/config.json is missing or not valid JSON", "again"),
    ),
    "half a tokenizer": (
        lambda tmp: files(tmp, lambda model: (model / "tokenizer.json").rename(model / "vocab.json")),
        *(MODEL, "has no tokenizer (tokenizer.json", "again"),
    ),
    "a shard that is none": (
        lambda tmp: files(tmp, lambda model: (model / "model-1-of-2.safetensors").write_text("<html>")),
        *(MODEL, "no complete .safetensors file", "again"),
    ),
    "a pointer in the place of a file": (
        lambda tmp: files(
            tmp, lambda m: (m / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"), 1
        ),
        *(MODEL, "no complete .safetensors file", "again"),
    ),
    "an index that names what is nowhere": (
        lambda tmp: files(tmp, other_index),
        *(MODEL, "lost.weight", "again"),
    ),
    "no weights": (
        lambda tmp: files(tmp, lambda model: (model / "model.safetensors").unlink(), 1),
        *(MODEL, "holds no .safetensors", "Convert"),
    ),
    "no tokenizer": (
        lambda tmp: files(tmp, lambda model: (model / "tokenizer.json").unlink()),
        *(MODEL, "has no tokenizer", "again"),
    ),
    "a config that is no JSON": (
        lambda tmp: files(tmp, lambda model: (model / "config.json").write_text("{")),
        *(MODEL, "config.json is missing or not valid JSON", "again"),
    ),
    "more ranks than GPUs": (
        lambda _: too_many_ranks(),
        *("cluster.nodes", "1", "trainer ranks must be divided evenly"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_with_field_and_remedy(fault: str, tmp_path: Path) -> None:
    check, field, value, remedy = FAULTS[fault]
    findings = check(tmp_path)
    assert failed(findings)
    (found,) = {one for one in findings if one.level == "error"}
    assert found.field == field
    assert value in found.value
    assert remedy in found.remedy
    text = " ".join(rendered(findings).split())
    assert " ".join(found.value.split()) in text
    assert found.remedy in text


def test_faults_are_told_apart() -> None:
    assert len(FAULTS) >= 10
    assert len({(field, value) for _, field, value, _ in FAULTS.values()}) >= len(FAULTS) - 1


WELL: dict[str, Callable[[Path], list[Finding]]] = {
    "a model of one file": lambda tmp: files(tmp, shards=1),
    "a model of two files": files,
}


@pytest.mark.parametrize("case", WELL)
def test_what_is_right_is_no_fault(case: str, tmp_path: Path) -> None:
    assert {one.level for one in WELL[case](tmp_path)} <= {"ok"}


def test_findings_are_counted_and_paths_stay_whole() -> None:
    path = "/very-long-name" * 12
    findings = [ok("one", "well"), warning("two", f"look at {path}", "do"), error("three", "wrong", f"see {path}")]
    text = rendered([*findings, ok("four", "well")])
    assert text.endswith("preflight: 1 error(s), 1 warning(s), 2 ok")
    assert text.count(path) == 2
    assert "\n" + " " * 36 + "-> do\n" in text
    assert not failed(findings[:2])


def test_raising_checks_are_findings_by_field() -> None:
    def wrong() -> None:
        raise ConfigError("run.dir", 3, "Name one.")

    def fails() -> None:
        raise AsyncRLError("no answer")

    assert refused(wrong, "cluster") == [error("run.dir", "3", "Name one.")]
    assert refused(fails, "cluster") == [error("cluster", "no answer", "See the message.")]
    assert refused(lambda: None, "cluster") == []
