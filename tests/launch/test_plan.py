"""Configuration and addresses give the process specifications."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.engine.router import UNREACHABLE
from asyncrl.launch.machine import count_gpus, this_node
from asyncrl.launch.placement import Node, place, ports_wanted
from asyncrl.launch.plan import ProcessSpec, plan
from asyncrl.network.ports import FIRST_PORT, LAST_PORT
from tests.fakes import JOB, addresses, tiny_config, with_scorer

PORTS = tuple(range(20000, 20100))
"""In the order of seats: the router's two, the rollout process's, the trainers', then two of each engine."""
RUN_DIR = Path("/runs/r")


def made(engines: int = 1, gpus: int = 0, **changes: object) -> dict[str, ProcessSpec]:
    config = tiny_config(**{"engine.count": engines, **changes})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(number) for number in range(gpus))
    placement = place(config, [Node("", "127.0.0.1", tuple(visible.split(",")) if gpus else (), PORTS)])
    specs = plan(config, replace(addresses(engines, gpus), **placement.urls()), placement, RUN_DIR)
    assert len({spec.name for spec in specs}) == len(specs)
    return {spec.name: spec for spec in specs}


def flags(spec: ProcessSpec) -> dict[str, str | bool]:
    """--name value pairs of a command line; a bare flag is True."""
    words = [*spec.argv[3:], *shlex.split(spec.env.get("ASYNCRL_ARGUMENTS", ""))]
    found: dict[str, str | bool] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:]] = True if after.startswith("--") else after
    return found


@pytest.fixture(autouse=True)
def _no_devices_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_run_is_engines_router_rollout_and_trainers() -> None:
    specs = made(3, **{"trainer.tensor_parallel": 2, "trainer.pipeline_parallel": 2, "trainer.data_parallel": 2})
    trainers = [f"trainer-{rank}" for rank in range(8)]
    assert list(specs) == ["engine-0", "engine-1", "engine-2", "router", "rollout", *trainers]
    assert [name for name, spec in specs.items() if spec.ends_the_run] == trainers
    assert all(spec.argv[:2] == [sys.executable, "-m"] for spec in specs.values())


def test_both_sides_go_on_where_there_are_checkpoints() -> None:
    alike = {"trainer-0", "rollout"}
    specs = made(**{"checkpoint.every": 4, "cluster.max_restarts": 7})
    assert {name for name, spec in specs.items() if spec.recovers} == alike
    assert {specs[name].restarts for name in alike} == {7}
    for changes in ({"trainer.lora.rank": 4, "weights.lora": "versions"}, {"cluster.placement": "shared"}):
        assert {name for name, spec in made(**{"checkpoint.every": 4, **changes}).items() if spec.recovers} == alike
    for changes in ({}, {"checkpoint.every": 4, "cluster.on_death": "end"}):
        assert not any(made(**changes)[name].restarts or made(**changes)[name].recovers for name in alike)


def test_no_command_line_names_a_port() -> None:
    specs = taught(**{"engine.count": 2})
    numbers = {str(port) for port in PORTS}
    assert any(numbers & set(shlex.split(spec.env.get("ASYNCRL_ARGUMENTS", ""))) for spec in specs.values())
    for spec in specs.values():
        assert not [word for word in spec.argv if any(number in word for number in numbers)], spec.argv


def test_same_inputs_give_the_same_plan() -> None:
    assert made(2, gpus=8) == made(2, gpus=8)


def test_processes_know_run_and_key_from_the_environment() -> None:
    for spec in made(2).values():
        assert spec.env["ASYNCRL_RUN_ID"] == "run0"
        assert spec.env["ASYNCRL_API_KEY"] == "key0"
        assert not any("key0" in word for word in spec.argv if spec.name != "router"), spec.name  # ps shows argv
        assert spec.env["OMP_NUM_THREADS"] == "1"
        assert spec.env["HF_HUB_OFFLINE"] == "1"


def test_engine_command_names_model_address_seed_version() -> None:
    specs = made(2, **{"run.seed": 7, "engine.stream_interval": 3})
    first, second = flags(specs["engine-0"]), flags(specs["engine-1"])
    assert first["model-path"] == "/model"
    assert (first["host"], first["port"], second["port"]) == ("127.0.0.1", "20004", "20006")
    assert (first["random-seed"], second["random-seed"]) == ("7", "8")  # engines must not answer alike
    assert first["weight-version"] == "0"
    assert first["stream-interval"] == "3"
    assert first["skip-tokenizer-init"] is first["incremental-streaming-output"] is True


def test_cpu_engines_take_the_pytorch_path_gpus_the_stock() -> None:
    assert flags(made()["engine-0"])["attention-backend"] == "torch_native"
    gpu = flags(made(gpus=2)["engine-0"])
    assert not {"device", "attention-backend", "sampling-backend", "disable-overlap-schedule"} & gpu.keys()


def test_cpu_engines_warm_up_before_listening_for_images() -> None:
    assert flags(made(1, gpus=2)["engine-0"])["warmups"] == "asyncrl"
    assert flags(made()["engine-0"])["warmups"] == "asyncrl_images"


def test_cache_fits_the_gpu_or_is_stated_on_a_cpu() -> None:
    unset = {"engine.max_total_tokens": None, "scorer.max_total_tokens": None}
    for name in ("engine-0", "scorer-0"):
        assert flags(taught(**unset)[name])["max-total-tokens"] == "16384"
        assert "max-total-tokens" not in flags(taught(4, **unset)[name])  # SGLang measures
    assert flags(taught(4, **{"engine.max_total_tokens": 99})["engine-0"])["max-total-tokens"] == "99"


def test_deterministic_engines_heed_seeds() -> None:
    settings = {"deterministic": True, "rollout.max_staleness": 0}
    cpu, gpu = (made(gpus=gpus, **settings)["engine-0"] for gpus in (0, 2))
    for engine in (cpu, gpu):
        assert flags(engine)["enable-deterministic-inference"] is True
        assert engine.env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (flags(cpu)["max-running-requests"], flags(cpu)["disable-radix-cache"]) == ("1", True)
    assert flags(gpu)["max-running-requests"] == str(tiny_config().engine.max_running_requests)
    assert "disable-radix-cache" not in flags(gpu)
    assert made(**settings)["trainer-0"].env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "enable-deterministic-inference" not in flags(made()["engine-0"])


def test_server_args_win_and_take_flags_numbers_and_absence() -> None:
    extra = {"log_level": "debug", "enable_metrics": True, "context_length": 4096, "skip_server_warmup": False}
    found = flags(made(**{"engine.server_args": extra})["engine-0"])
    assert found["log-level"] == "debug"
    assert found["enable-metrics"] is True
    assert found["context-length"] == "4096"
    assert "skip-server-warmup" not in found


def test_router_leaves_retries_to_the_client() -> None:
    found = flags(made(**{"engine.router_policy": "round_robin"})["router"])
    assert (found["host"], found["port"], found["prometheus-port"]) == ("127.0.0.1", "20000", "20001")
    assert found["prometheus-host"] == UNREACHABLE  # it would show anyone who asks the engines' addresses
    assert found["policy"] == "round_robin"
    assert found["disable-retries"] is found["disable-circuit-breaker"] is True


def test_rollout_and_router_see_no_gpu_that_they_could_take() -> None:
    assert made(gpus=4)["rollout"].env["CUDA_VISIBLE_DEVICES"] == ""


def test_trainers_stand_under_torchruns_contract() -> None:
    specs = made(**{"trainer.data_parallel": 2, "trainer.threads": 3})
    for rank in range(2):
        spec = specs[f"trainer-{rank}"]
        env = spec.env
        assert spec.argv[2:] == ["asyncrl.trainer", str(RUN_DIR)]
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "20003")
        assert env["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("changes", "trainers", "engines"),
    [
        ({"trainer.tensor_parallel": 2, "engine.tensor_parallel": 2}, "0,1", ["2,3", "4,5"]),
        ({"trainer.data_parallel": 4}, "0,1,2,3", ["4", "5"]),
        ({"trainer.device": "cpu", "engine.tensor_parallel": 2}, "", ["0,1", "2,3"]),
        ({"engine.device": "cpu", "trainer.data_parallel": 4}, "0,1,2,3", ["", ""]),
    ],
)
def test_no_gpu_is_given_twice(changes: dict, trainers: str, engines: list[str]) -> None:
    specs = made(2, gpus=8, **changes)
    assert specs["trainer-0"].env["CUDA_VISIBLE_DEVICES"] == trainers
    assert [specs[f"engine-{i}"].env["CUDA_VISIBLE_DEVICES"] for i in range(2)] == engines


def test_gpus_are_those_that_the_launcher_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    specs = made(1, gpus=3, **{"trainer.data_parallel": 2})
    assert specs["trainer-1"].env["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert specs["engine-0"].env["CUDA_VISIBLE_DEVICES"] == "7"


def test_cpu_engines_of_several_ranks_get_a_core_for_each() -> None:
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in made()["engine-0"].env
    assert made(**{"engine.tensor_parallel": 2})["engine-0"].env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"


@pytest.mark.parametrize("settings", [{}, {"deterministic": True, "rollout.max_staleness": 0}])
def test_cpu_engines_alone_compile_nothing(settings: dict) -> None:
    """A trainer on a GPU has to compile FlexAttention, also in a deterministic run."""
    cpu, gpu = made(**settings), made(gpus=4, **settings)
    assert cpu["engine-0"].env["TORCHDYNAMO_DISABLE"] == "1"
    for process in (cpu["trainer-0"], gpu["trainer-0"], gpu["engine-0"]):
        assert "TORCHDYNAMO_DISABLE" not in process.env


# --- the machine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("1,3", 2), ("GPU-a,GPU-b", 2)])
def test_visible_devices_are_counted(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus(None) == count
    assert count_gpus(5) == 5


def test_ports_are_distinct_and_below_the_ephemeral_range() -> None:
    numbers = this_node("127.0.0.1", None, 0, ports_wanted(tiny_config(**{"engine.count": 5}))).ports
    assert len(set(numbers)) == 14
    assert all(FIRST_PORT <= number < LAST_PORT for number in numbers)


def test_the_ranks_of_an_engine_meet_at_a_port_of_ours() -> None:
    """SGLang's own choice is ephemeral, and whoever connects somewhere in the seconds until it listens may get it."""
    specs = made(2)
    assert [flags(specs[f"engine-{i}"])["nccl-port"] for i in (0, 1)] == ["20005", "20007"]
    replicas = taught(**{"scorer.server_args": {"dp_size": 2}})  # each of these needs one of its own
    assert "nccl-port" not in flags(replicas["scorer-0"])


def test_engine_starts_in_its_shape_with_a_core_per_rank() -> None:
    shape = {"tensor_parallel": 4, "expert_parallel": 2, "data_parallel": 4, "pipeline_parallel": 2}
    engine = made(1, **{f"engine.{name}": size for name, size in shape.items()})["engine-0"]
    given = {"tp-size": "4", "ep-size": "2", "dp-size": "4", "pp-size": "2", "enable-dp-attention": True}
    assert given.items() <= flags(engine).items()
    assert engine.env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1|2|3|4|5|6|7"
    assert not given.keys() & (flags(made(1)["engine-0"]).keys() - {"tp-size"})


def test_addresses_are_private_and_read_back(tmp_path: Path) -> None:
    ours = addresses(2, gpus=1)
    ours.write(tmp_path)
    assert (tmp_path / "addresses.json").stat().st_mode & 0o777 == 0o600
    assert type(ours).read(tmp_path) == ours


def test_engines_see_trainer_gpus_only_for_cuda_ipc() -> None:
    apart = made(2, gpus=4, **{"trainer.data_parallel": 2})
    assert [apart[f"engine-{i}"].env["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["2", "3"]
    assert "base-gpu-id" not in flags(apart["engine-0"])
    shared = made(2, gpus=4, **{"trainer.data_parallel": 2, "weights.transport": "tensor"})
    assert {shared[f"engine-{i}"].env["CUDA_VISIBLE_DEVICES"] for i in (0, 1)} == {"0,1,2,3"}
    assert [flags(shared[f"engine-{i}"])["base-gpu-id"] for i in (0, 1)] == ["2", "3"]


@pytest.mark.parametrize(
    ("own", "args", "both"), [(None, {}, "0"), ("1", {}, "1"), ("0", {"enable_symm_mem": True}, "1")]
)
def test_trainers_and_engines_agree_on_cumem(
    own: str | None, args: dict, both: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang sets NCCL_CUMEM_ENABLE=0 if it is unset, and 1 for symmetric memory; peers that differ cannot open each
    other's memory."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if own is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", own)
    specs = made(2, gpus=4, **{"trainer.data_parallel": 2, "engine.server_args": args})
    parts = ("trainer-0", "trainer-1", "engine-0", "engine-1")
    assert {specs[name].env.get("NCCL_CUMEM_ENABLE") for name in parts} == {both}


def test_cpu_processes_keep_the_memory_that_they_free() -> None:
    for name, spec in made().items():
        assert ("MALLOC_MMAP_MAX_" in spec.env) == name.startswith(("engine", "trainer"))
    assert not any("MALLOC_MMAP_MAX_" in spec.env for spec in made(gpus=4).values())


def test_router_sends_no_request_of_the_run_to_a_proxy() -> None:
    assert made()["router"].env["no_proxy"] == "*"


# --- other models -------------------------------------------------------------------------------------------


def taught(gpus: int = 0, teachers: int = 2, **changes: object) -> dict[str, ProcessSpec]:
    config = with_scorer(**{"scorer.model": "/scorer", "scorer.count": teachers, "scorer.dtype": "bfloat16", **changes})
    placement = place(config, [Node("", "127.0.0.1", tuple(map(str, range(gpus))), PORTS)])
    ours = replace(addresses(config.engine.count, gpus, frozen_models={"scorer": Path("/scorer")}), **placement.urls())
    return {spec.name: spec for spec in plan(config, ours, placement, RUN_DIR)}


def test_other_models_have_unpublished_engines() -> None:
    specs = taught(**{"scorer.server_args": {"context_length": 64}, "scorer.max_running": 9})
    assert list(specs)[:4] == ["engine-0", "scorer-0", "scorer-1", "router"]
    found = flags(specs["scorer-1"])
    assert (found["model-path"], found["port"], found["nccl-port"]) == ("/scorer", "20008", "20009")
    assert (found["max-running-requests"], found["context-length"]) == ("9", "64")
    assert found["dtype"] == "bfloat16"  # its own, not the policy engines'
    assert not {"weight-version", "custom-weight-loader", "stream-interval"} & found.keys()
    assert flags(specs["engine-0"])["model-path"] == "/model"
    assert specs["scorer-0"].url == ""  # the router need not forget it, nor the trainer find it


def test_other_models_are_watched_and_started_again_like_engines() -> None:
    specs = taught(**{"cluster.max_restarts": 4, "weights.timeout": 77.0})
    engine, scorer = specs["engine-0"], specs["scorer-0"]
    assert (scorer.restarts, scorer.patience, scorer.stop_signal) == (4, 77.0, engine.stop_signal)
    assert scorer.watch == "https://127.0.0.1:20006/server_info"
    assert taught(**{"cluster.on_engine_death": "fail"})["scorer-0"].restarts == 0


def test_other_models_get_the_gpus_after_the_policys_engines() -> None:
    changes = {"trainer.data_parallel": 2, "engine.tensor_parallel": 2, "scorer.tensor_parallel": 2}
    specs = taught(8, **changes)
    seen = {name: specs[name].env["CUDA_VISIBLE_DEVICES"] for name in ("engine-0", "scorer-0", "scorer-1")}
    assert seen == {"engine-0": "2,3", "scorer-0": "4,5", "scorer-1": "6,7"}
    alone = taught(4, **{"trainer.device": "cpu", "engine.device": "cpu"})
    assert [alone[f"scorer-{i}"].env["CUDA_VISIBLE_DEVICES"] for i in (0, 1)] == ["0", "1"]
    on_cpu = taught(8, **{"scorer.device": "cpu"})["scorer-0"]
    assert on_cpu.env["CUDA_VISIBLE_DEVICES"] == ""
    assert flags(on_cpu)["device"] == "cpu"


def test_engines_elsewhere_are_not_started() -> None:
    specs = taught(**{"scorer.urls": ["http://gpu1:30000"]})
    assert not [name for name in specs if name.startswith("scorer")]
    assert not [name for name in made() if name.startswith("scorer")]


def test_other_models_have_ports_of_their_own() -> None:
    config = with_scorer(**{"scorer.model": "/scorer", "scorer.count": 3})
    seats = place(config, [Node("", "127.0.0.1", (), PORTS)])
    engines = [*(engine[0] for engine in seats.engines), *seats.frozen["scorer"], seats.router]
    assert len({number for seat in engines for number in (seat.port, seat.meeting)}) == 2 * len(engines) == 10
    assert place(with_scorer(**{"scorer.count": 3}), [Node("", "", (), PORTS)]).frozen["scorer"] == []


def test_addresses_of_other_models_are_read_back(tmp_path: Path) -> None:
    ours = addresses(1, frozen_models={"scorer": Path("/scorer")}, frozen={"scorer": ("http://gpu1:30000",)})
    ours.write(tmp_path)
    assert type(ours).read(tmp_path) == ours


# --- several machines ---------------------------------------------------------------------------------------


def test_spread_engine_is_a_process_per_machine() -> None:
    nodes = [Node(f"n{i}", f"10.0.0.{i}", ("0", "1"), PORTS, "ib0") for i in range(3)]
    config = tiny_config(**{"engine.tensor_parallel": 4, "trainer.data_parallel": 2, **JOB})
    placement = place(config, nodes)
    specs = {spec.name: spec for spec in plan(config, addresses(1, 2), placement, RUN_DIR)}
    first, second = flags(specs["engine-0"]), flags(specs["engine-0.1"])
    assert (specs["engine-0"].node, specs["engine-0.1"].node) == ("n1", "n2")
    assert first["dist-init-addr"] == second["dist-init-addr"] == f"10.0.0.1:{placement.engines[0][0].meeting}"
    assert [(one["nnodes"], one["node-rank"], one["tp-size"]) for one in (first, second)] == [
        ("2", "0", "4"),
        ("2", "1", "4"),
    ]
    assert "nccl-port" not in first
    assert specs["engine-0"].together == specs["engine-0.1"].together == "engine-0"
    assert (specs["engine-0.1"].url, specs["engine-0.1"].watch) == ("", "")  # its first has the server
    assert specs["engine-0.1"].env["ASYNCRL_HOST"] == "10.0.0.2"
    assert specs["engine-0"].env["NCCL_SOCKET_IFNAME"] == "ib0"
    assert specs["trainer-0"].env["MASTER_ADDR"] == "10.0.0.0"


def test_spread_replicas_meet_at_consecutive_ports() -> None:
    """SGLang adds to the number of their port, so the others must be free, too."""
    nodes = [Node(f"n{i}", f"10.0.0.{i}", ("0", "1"), PORTS, "ib0", 31000 + i) for i in range(3)]
    shape = {"engine.tensor_parallel": 4, "engine.data_parallel": 2, "trainer.data_parallel": 2}
    config = tiny_config(**shape, **JOB)
    specs = {spec.name: spec for spec in plan(config, addresses(1, 2), place(config, nodes), RUN_DIR)}
    assert {flags(specs[name])["dist-init-addr"] for name in ("engine-0", "engine-0.1")} == {"10.0.0.1:31001"}
