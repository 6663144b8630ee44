"""The platform of machines without GPUs: the pure-PyTorch path of SGLang, Megatron's own code on CPU tensors, and
attention over packs by torch's CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.errors import ConfigError
from asyncrl.platforms import Everywhere, Platform

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.pack import Pack
    from asyncrl.config import Config, EngineConfig
    from asyncrl.launch.precision import DtypeChoice


class CpuPlatform(Platform):
    """CPUs. Any number of ranks may share the cores."""

    # glibc returns every large tensor to the kernel and allocates it again, zeroed, page by page, at eight times the
    # cost of a copy into memory that was touched before. These settings make it reuse freed memory.
    environment: ClassVar[Mapping[str, str]] = {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
    }
    engine_arguments: ClassVar[Mapping[str, Any]] = {  # SGLang's defaults are CUDA backends
        "device": "cpu",
        "attention_backend": "torch_native",  # sglang_attention.py is registered under this name
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_overlap_schedule": True,
        "mm_processor_worker_num": 1,  # with two, a request never returns if it has more images than placeholders
        "sleep_on_idle": True,  # an idle scheduler would otherwise burn a core
    }
    # The last bits of a product depend on its number of rows: one request at a time, and every prompt in full.
    deterministic_arguments: ClassVar[Mapping[str, Any]] = {"max_running_requests": 1, "disable_radix_cache": True}

    def engine_environment(self, ranks: int) -> dict[str, str]:
        """Return the environment of an engine of so many ranks.

        Compilation is disabled: SGLang compiles the embedding of several ranks and the sampler of deterministic
        engines, which needs a C++ compiler on the machine and takes longer than it saves.
        """
        bind = "|".join(str(core) for core in range(ranks))
        several = {"SGLANG_CPU_OMP_THREADS_BIND": bind} if ranks > 1 else {}
        return {"TORCHDYNAMO_DISABLE": "1", **several}

    def check_engine(self, engine: EngineConfig) -> None:
        """Refuse what SGLang has on GPUs only: speculative decoding at a temperature (its path for CPUs verifies
        greedily), copies of caches to host memory, and other backends than those that this folder replaces."""
        if engine.speculates:
            algorithm, remedy = engine.server_args["speculative_algorithm"], "Engines on CPUs do not draft: remove it."
            raise ConfigError("engine.server_args.speculative_algorithm", algorithm, remedy)
        if engine.hicache:
            remedy = "Engines on CPUs have one cache: raise max_total_tokens."
            raise ConfigError("engine.hicache", engine.hicache, remedy)
        for name, own in self.engine_arguments.items():
            if name.endswith("_backend") and (value := engine.server_args.get(name, own)) != own:
                remedy = f"On CPUs engines have only {own}: remove it."
                raise ConfigError(f"engine.server_args.{name}", value, remedy)

    def choose(
        self,
        config: Config,
        choices: Sequence[DtypeChoice],
        models: Mapping[str, dict[str, Any]],
        machines: Mapping[str, Sequence[str]],
        everywhere: Everywhere,
    ) -> list[DtypeChoice]:
        """Choose the formats in which these machines multiply matrices faster (dtypes.py)."""
        from asyncrl.extensions.cpu import dtypes

        return dtypes.choose(config, choices, models, machines, everywhere)

    def prepare_engine(self) -> None:
        """Stand in for the kernel packages that SGLang imports."""
        from asyncrl.extensions.cpu import sglang_shim

        sglang_shim.install()

    def prepare_trainer(self) -> None:
        """Let Megatron's modules take a CPU for their device."""
        from asyncrl.extensions.cpu import megatron_shim

        megatron_shim.enable()

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend block by block (pack_attention.py)."""
        from asyncrl.extensions.cpu import pack_attention

        return pack_attention.attend(q, k, v, pack, scale, window, sinks)
