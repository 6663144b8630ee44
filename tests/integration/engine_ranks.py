"""Loads models as an engine does, by SGLang's own model runner, but without a server.

    python -m tests.integration.engine_ranks JOBS.json

A job is {"args": of the server, "env": for it, "out": a file for the checksums of each rank}, and perhaps

    "published"   files of safetensors, whose metadata has the names of each bucket: they are loaded one after the
                  other, bucket by bucket, as publishes are, before the checksums are taken. What latent attention
                  multiplies with is written to OUT.RANK.absorbed.
    "fused"       store the shared expert as the last of the routed ones, as on a GPU

Imports once and forks a process for each rank, which takes a second or two where a server takes a minute. A job that
fails says so on stderr and writes nothing; the others go on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from asyncrl.lookup import install_in_engine
from asyncrl.network.ports import free_port
from asyncrl.platforms import here

here().prepare_engine()
install_in_engine(["dummy"])

from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import bootstrap  # noqa: E402
from sglang.srt.entrypoints.engine import _set_envs_and_config  # noqa: E402
from sglang.srt.layers.moe import initialize_moe_config  # noqa: E402
from sglang.srt.layers.quantization import fp8, w8a8_int8  # noqa: E402
from sglang.srt.model_executor.model_runner import ModelRunner  # noqa: E402
from sglang.srt.models import deepseek_v2, glm4_moe  # noqa: E402
from sglang.srt.models.deepseek_common import deepseek_weight_loader  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import PortArgs, prepare_server_args  # noqa: E402


def forked(work: Callable[[], Any]) -> int:
    """Fork a child that does the work and ends. Return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 (a child must never run on into its parent's code)
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def wait_for(pids: list[int]) -> None:
    """Wait for all ranks. If one fails, kill the others, which would wait for it."""
    failed = False
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        for other in pids if status and not failed else []:
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        failed |= status != 0
    if failed:
        raise RuntimeError("a rank failed")


def as_on_a_gpu(*, fused: bool) -> None:
    """Let SGLang take its path for CUDA after loading quantized weights; the one for CPUs wants AMX. Nothing is
    multiplied here."""
    fp8._is_cpu = w8a8_int8._is_cpu = False
    deepseek_weight_loader._is_cuda = True
    if fused:
        for model in (glm4_moe.Glm4MoeForCausalLM, deepseek_v2.DeepseekV2ForCausalLM):
            model.shared_experts_fusion_disable_reason = classmethod(lambda *_: None)


def receive(runner: ModelRunner, file: str) -> None:
    """Load a publish as an engine's scheduler does, which leaves it to `load_weights` to derive further tensors."""
    runner.weight_updater.begin_weight_update()
    with safe_open(file, "pt") as held:
        for bucket in json.loads(held.metadata()["buckets"]):
            loaded = runner.weight_updater.load_weights_from_distributed([(n, held.get_tensor(n)) for n in bucket])
            assert loaded == (True, "Succeeded to update parameter online."), loaded
    runner.weight_updater.end_weight_update(run_post_load=False)


def load_rank(job: dict[str, Any], args: Any, ports: Any, rank: int, out: Path) -> None:
    """Compute the checksums of one rank and write them as JSON."""
    published = job.get("published", [])
    if published:
        as_on_a_gpu(fused=job.get("fused", False))
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    initialize_moe_config()
    model = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device="cpu", dist_port=ports.nccl_port)
    bootstrap.init_layer_runtime(model_config=model)
    runner = ModelRunner(
        model_config=model,
        mem_fraction_static=0.5,
        gpu_id=rank,
        nccl_port=ports.nccl_port,
        server_args=args,
    )
    for file in published:
        receive(runner, file)
    absorbed = {
        f"{name}.{kind}": getattr(module, kind).contiguous()
        for name, module in runner.model.named_modules()
        for kind in ("w_kc", "w_vc")
        if getattr(module, kind, None) is not None
    }
    save_file(absorbed, out.with_name(f"{out.name}.absorbed"))
    out.write_text(json.dumps(runner.check_weights(action="checksum", role="target")["checksums"]))


def load(job: dict[str, Any]) -> None:
    """Run all ranks of one model."""
    os.environ.update(job["env"])
    args = prepare_server_args([*job["args"], "--nccl-port", str(free_port("127.0.0.1"))])
    _set_envs_and_config(args)
    ports, ranks = PortArgs.init_new(args), range(args.tp_size * args.pp_size)
    outs = [Path(f"{job['out']}.{rank}") for rank in ranks]
    wait_for([forked(lambda rank=rank: load_rank(job, args, ports, rank, outs[rank])) for rank in ranks])
    Path(job["out"]).write_text(json.dumps([json.loads(out.read_text()) for out in outs]))


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        with suppress(RuntimeError):
            wait_for([forked(lambda job=one: load(job))])
