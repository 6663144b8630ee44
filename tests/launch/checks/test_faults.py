"""Every fault is found before anything starts, with its field and what to do, and what is right is no fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.checks.engines import check_sync
from asyncrl.launch.checks.findings import Finding, error, failed, ok, refused, rendered, warning
from asyncrl.launch.checks.machines import check_gpus, check_idle, check_ports
from asyncrl.launch.checks.model_files import Weight, check_model_files, read_model
from asyncrl.launch.checks.versions import check_gpu_engines, check_gpu_trainers, check_versions, pinned
from asyncrl.launch.placement import place
from tests.fakes import GIVEN
from tests.launch.checks.worlds import job, machine, nodes, placed, weights, write_model

MODEL = "model.path"


def versions(**changes: str) -> list[Finding]:
    return check_versions([machine(**changes)], pinned())


def gpu_engine(**changes: str | None) -> list[Finding]:
    return check_gpu_engines([machine(gpus=8), machine("node7", gpus=8, **changes)], pinned(gpu=True))  # type: ignore[arg-type]


def gpu_trainer(experts: bool = True, **changes: str | None) -> list[Finding]:
    return check_gpu_trainers([machine("node7", gpus=8, **changes)], pinned(gpu=True), experts=experts)  # type: ignore[arg-type]


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


def gpus(shown: int, used: int = 2) -> list[Finding]:
    return check_gpus(nodes(job(), 1, used), [machine(gpus=shown)])


def idle(machines: int, each: int, **changes: object) -> list[Finding]:
    config = job(**changes)
    return check_idle(nodes(config, machines, each), placed(config, machines, each))


def sync(transport: str, machines: int, **changes: object) -> list[Finding]:
    config = job(**{"weights.transport": transport, **changes})
    return check_sync(config, placed(config, machines, 0), weights(1e9), 0)


def too_many_ranks() -> list[Finding]:
    config = job(**{"trainer.data_parallel": 3})
    return refused(lambda: place(config, nodes(config, 1, 2)), "cluster")


FAULTS: dict[str, tuple[Callable[[Path], list[Finding]], str, str, str]] = {
    "a wrong version of what we reach into": (
        lambda _: versions(sglang="0.4.0"),
        *("versions", "sglang 0.4.0 is installed, but asyncrl requires", "asyncrl-install"),
    ),
    "a package that is missing": (
        lambda _: check_versions([machine()], {**pinned(), "xgrammar": "1.0"}),
        *("versions", "xgrammar is not installed", "asyncrl-install"),
    ),
    "versions that differ between machines": (
        lambda _: check_versions([machine(), machine("node7", torch="2.12.0")], pinned()),
        *("versions", "node0 and node7 differ: torch", "the same environment"),
    ),
    "an engine on a GPU without its kernels": (
        lambda _: gpu_engine(sglang_kernel=None),
        *("versions", "sglang-kernel is not installed on node7", "requirements/gpu.txt"),
    ),
    "an engine on a GPU without a compiler": (
        lambda _: gpu_engine(nvcc=""),
        *("nvcc", "node7 has no nvcc", "CUDA_HOME"),
    ),
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
    "a package that one machine alone has": (
        lambda _: check_versions([machine(), machine("node7", flashinfer="0.2")], pinned()),
        *("versions", "flashinfer missing and 0.2", "the same environment"),
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
    "fewer GPUs than are to be used": (
        lambda _: gpus(shown=1),
        *("cluster.gpus", "shows 1 of the 2 GPUs 0,1", "Lower cluster.gpus"),
    ),
    "GPUs by names that the machine does not know": (
        lambda _: check_gpus([replace(nodes(job(), 1, 2)[0], gpus=("6", "7"))], [machine(gpus=2)]),
        *("cluster.gpus", "shows 0 of the 2 GPUs 6,7", "Lower cluster.gpus"),
    ),
    "more ranks than GPUs": (
        lambda _: too_many_ranks(),
        *("cluster.nodes", "1", "trainer ranks must be divided evenly"),
    ),
    "too few ports": (
        lambda _: check_ports(nodes(job(), 1, 0), 99),
        *("cluster.host", "node0 has 6 free ports", "99 are needed"),
    ),
    "shared memory between machines": (
        lambda _: sync("tensor", 2),
        *("weights.transport", "tensor", "set auto"),
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
    "versions": lambda _: versions(),
    "a build of the right version": lambda _: versions(torch=f"{pinned()['torch']}+cpu"),
    "the same on two machines": lambda _: check_versions([machine(), machine("node1")], pinned()),
    "what engines on GPUs need": lambda _: gpu_engine(),
    "what trainers on GPUs need": lambda _: gpu_trainer(),
    "a model of one file": lambda tmp: files(tmp, shards=1),
    "a model of two files": files,
    "GPUs": lambda _: gpus(shown=2),
    "no GPUs": lambda _: gpus(shown=0, used=0),
    "a machine without GPUs beside one with": lambda _: check_gpus(
        [*nodes(job(), 1, 0), *nodes(job(), 1, 2)], [machine(), machine(gpus=2)]
    ),
    "GPUs that are all used": lambda _: idle(2, 2, **{"engine.count": 2, "trainer.data_parallel": 2}),
    "machines without GPUs that are all used": lambda _: idle(2, 0),
    "ports": lambda _: check_ports(nodes(job(), 2, 0), 6),
    "shared memory on one machine": lambda _: sync("tensor", 1),
    "auto over two": lambda _: sync("auto", 2),
}


@pytest.mark.parametrize("case", WELL)
def test_what_is_right_is_no_fault(case: str, tmp_path: Path) -> None:
    assert {one.level for one in WELL[case](tmp_path)} <= {"ok"}


WARNED: dict[str, tuple[Callable[[Path], list[Finding]], str]] = {
    "another version of what others keep stable": (lambda _: versions(transformers="5.0.0"), "versions"),
    "experts on GPUs without TransformerEngine": (
        lambda _: gpu_trainer(
            transformer_engine=None, transformer_engine_torch=None, transformer_engine_cu13=None, experts=True
        ),
        "transformer-engine",
    ),
    "half a TransformerEngine": (lambda _: gpu_trainer(transformer_engine_torch=None), "transformer-engine"),
    "another TransformerEngine": (lambda _: gpu_trainer(transformer_engine="2.1"), "transformer-engine"),
    "another flashinfer": (lambda _: gpu_engine(flashinfer_python="0.5"), "versions"),
    "no nvidia-smi": (lambda _: gpus(shown=0), "cluster.gpus"),
    "GPUs of two sizes": (
        lambda _: check_gpus(nodes(job(), 2, 2), [machine(gpus=2), machine("node1", gpus=2, gb=40)]),
        "cluster.gpus",
    ),
    "an idle GPU": (lambda _: idle(2, 2, **{"trainer.data_parallel": 2, "engine.count": 1}), "cluster.nodes"),
    "an idle machine": (lambda _: idle(3, 2, **{"trainer.data_parallel": 2, "engine.count": 2}), "cluster.nodes"),
    "an idle machine without GPUs": (lambda _: idle(4, 0), "cluster.nodes"),
}


@pytest.mark.parametrize("case", WARNED)
def test_what_may_go_wrong_is_a_warning_with_a_remedy(case: str, tmp_path: Path) -> None:
    check, field = WARNED[case]
    findings = check(tmp_path)
    assert not failed(findings)
    (found,) = [one for one in findings if one.level == "warning"]
    assert (found.field, bool(found.remedy)) == (field, True)


def test_what_is_used_of_the_gpus_is_told() -> None:
    assert [one.value for one in gpus(shown=0, used=0)] == ["no GPU is used"]
    assert [one.value for one in gpus(shown=4, used=0)] == ["no GPU is used; the 4 visible GPUs stay unused"]
    (two,) = check_gpus([*nodes(job(), 1, 0), *nodes(job(), 2, 2)], [machine(), *[machine(gpus=2)] * 2])
    assert two.value == "2 GPU(s) on each of 2 machine(s): NVIDIA H100 80GB HBM3"


def test_idle_gpus_and_machines_are_named() -> None:
    (one,) = idle(3, 2, **{"trainer.data_parallel": 1, "engine.count": 2})
    assert one.value == "no process uses 1 of the 2 GPUs of node1, 2 of the 2 GPUs of node2"
    (many,) = idle(9, 2, **{"trainer.data_parallel": 2, "engine.count": 2})
    assert many.value.endswith("2 of the 2 GPUs of node5, and 3 more")


def test_addresses_of_ports_are_bounded() -> None:
    (four,), (five,) = (check_ports(nodes(job(), count, 0), 6) for count in (4, 5))
    assert four.value.endswith("10.0.0.2, 10.0.0.3")
    assert five.value.endswith("10.0.0.2, 10.0.0.3, ...")


def test_findings_are_counted_and_paths_stay_whole() -> None:
    path = "/very-long-name" * 12
    findings = [ok("one", "well"), warning("two", f"look at {path}", "do"), error("three", "wrong", f"see {path}")]
    text = rendered([*findings, ok("four", "well")])
    assert text.endswith("preflight: 1 error(s), 1 warning(s), 2 ok")
    assert text.count(path) == 2
    assert "\n" + " " * 36 + "-> do\n" in text
    assert not failed(findings[:2])


def test_checks_that_raise_are_findings_by_their_field_or_that_of_the_check() -> None:
    def wrong() -> None:
        raise ConfigError("run.dir", 3, "Name one.")

    def fails() -> None:
        raise AsyncRLError("no answer")

    assert refused(wrong, "cluster") == [error("run.dir", "3", "Name one.")]
    assert refused(fails, "cluster") == [error("cluster", "no answer", "See the message.")]
    assert refused(lambda: None, "cluster") == []


def test_trainers_on_several_machines_send_weights_over_the_network() -> None:
    """Also where one of them is an engine's."""
    shape = {"trainer.data_parallel": 2, "cluster.trainer_nodes": 2}
    assert sync("auto", 2, **shape)[0].value.startswith("distributed")
    assert sync("auto", 1)[0].value.startswith("tensor")
    assert sync("auto", 1, **GIVEN) == []


def test_how_adapters_travel_is_told() -> None:
    adapted = {"trainer.lora.rank": 8, "weights.lora": "versions", "rollout.max_staleness": 1}
    assert sync("auto", 1, **adapted)[0].value.startswith("adapters in shared memory")
    shape = {"trainer.data_parallel": 2, "cluster.trainer_nodes": 2}
    found = sync("auto", 2, **shape, **adapted)[0].value
    assert found.startswith("adapters as PEFT folders")
    assert found.endswith("at most 4 in each engine")


def test_buckets_of_a_publish_are_told() -> None:
    config, megabytes = job(**{"weights.bucket_mb": 2}), [Weight(f"layer{number}", (1 << 18,)) for number in range(5)]
    assert check_sync(config, placed(config, 1, 0), megabytes, 0)[0].value.endswith("in about 3 bucket(s)")
