"""Import shim that lets the unmodified SGLang run on a machine without CUDA.

SGLang's kernel packages (triton, sgl_kernel) have no CPU wheels, but SGLang's modules import them. With stubs in their
place, every layer takes SGLang's own pure-PyTorch path on a CPU. `install` must run before sglang is imported, in every
process of a server (`serve.py` calls it at module level, so that spawned children call it too).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import platform
import sys
import types
from pathlib import Path
from typing import Any

from asyncrl.extensions.cpu import compiler
from asyncrl.import_hooks import after_import

PROCESSORS = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
}
"""Processors of images that load without torchvision, by model type."""
KEPT_MAPPINGS = 16
"""Number of shared-memory mappings to keep: enough for every bucket of a small model. Mappings of a dead trainer are
released once this many newer ones exist."""


def install() -> None:
    """Make `import sglang` work on a machine without CUDA. No-op where CUDA is available."""
    import torch

    if torch.cuda.is_available():
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    _without_compiler(torch)
    _stub_triton(torch)
    _stub_image_processors()
    sys.meta_path.append(_AbsentKernels())  # appended: a package that is really installed wins
    torch.cuda.synchronize = lambda *_: None  # /weights_checker calls it on every device
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]  # adapters are pinned everywhere
    _keep_mappings()
    _fork_children()
    after_import("sglang.srt.mem_cache.pool_host.common", _no_host_registration)
    after_import("sglang.srt.layers.attention.attention_registry", _register_attention)
    after_import("sglang.srt.arg_groups.choices", _allow_deterministic)
    after_import("sglang.srt.arg_groups.model_hook", _allow_sinks)
    after_import("sglang.srt.models.gpt_oss", _keep_sinks_exact)
    after_import("sglang.srt.batch_invariant_ops", _without_invariant_kernels)
    after_import("sglang.kernels.ops.sampling.murmur_hash", _hash_in_torch)
    after_import("sglang.srt.layers.sampler", _sample_by_inversion)
    after_import("sglang.srt.distributed.parallel_state", _reduce_without_nccl)
    after_import("sglang.srt.layers.moe.fused_moe_native", _skip_experts_of_others)
    after_import("sglang.srt.lora.layers", _create_unpinned)
    after_import("sglang.srt.lora.backend.torch_backend", _create_unpinned)
    after_import("sglang.srt.utils.hf_transformers.processor", _process_with_pillow)
    _name_operators(torch)


def _without_compiler(torch: Any) -> None:
    """Leave torch's compiler out, whose import takes a quarter of an engine's start-up: engines on a CPU run with
    TORCHDYNAMO_DISABLE, but transformers and SGLang use its decorators."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" and compiler.postpone():
        torch.compile = compiler.unchanged


def _stub_triton(torch: Any) -> None:
    """Install SGLang's triton stub for Apple machines by pretending that this is one."""
    if importlib.util.find_spec("triton") is not None:
        return
    package = next(Path(entry, "sglang") for entry in sys.path if Path(entry, "sglang", "_platform_stubs.py").is_file())
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", package / "_platform_stubs.py")
    assert spec is not None
    assert spec.loader is not None
    stubs: Any = importlib.util.module_from_spec(spec)  # loaded by path, because importing sglang already needs triton
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)

    saved = (
        sys.platform,
        platform.machine,
        torch.backends.mps.is_available,
        stubs._patch_non_blocking,
        torch.mps,
    )
    try:
        sys.platform, platform.machine, torch.backends.mps.is_available = (
            "darwin",
            lambda: "arm64",
            lambda: True,
        )
        stubs._patch_non_blocking, torch.mps = (
            lambda: None,
            types.SimpleNamespace(),
        )  # leave out what only Apple machines need
        stubs.install_platform_stubs()
    finally:
        (
            sys.platform,
            platform.machine,
            torch.backends.mps.is_available,
            stubs._patch_non_blocking,
            torch.mps,
        ) = saved


def _stub_image_processors() -> None:
    """Stub AutoImageProcessor: SGLang's vision configs call its `register` at import, which needs torchvision."""
    import transformers.processing_utils  # noqa: F401  (re-executes transformers/__init__, so it comes first)

    class AutoImageProcessor:
        @classmethod
        def register(cls, *_: Any, **__: Any) -> None:
            """Ignore the registration: no vision models run here."""

        @classmethod
        def from_pretrained(cls, *_: Any, **__: Any) -> None:
            raise ImportError("torchvision is not installed")

    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():
        sys.modules["transformers"].AutoImageProcessor = AutoImageProcessor  # type: ignore[attr-defined]


def _name_operators(torch: Any) -> None:
    """Define operators that the processor of every Qwen-VL reads at import, through the model file of Qwen3.5.

    They have no kernel: a call raises NotImplementedError.
    """
    for name in (
        "fused_sigmoid_mul_cpu",
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    ):
        _OPERATORS.append(library := torch.library.Library("sgl_kernel", "FRAGMENT"))
        library.define(f"{name}(Tensor x) -> Tensor")


_OPERATORS: list[Any] = []
"""Definitions of operators, which live as long as their libraries."""


def _process_with_pillow(module: Any) -> None:
    """Let SGLang load a processor of images for models that see, without torchvision.

    transformers has one on Pillow, but its automatic classes want torchvision for images and videos alike. Both give
    the same pixels for an image that they need not resize, and ours never need that (asyncrl/images).
    """
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return
    by_transformers = module.AutoProcessor

    class PillowProcessor:
        @classmethod
        def from_pretrained(cls, folder: str, *args: Any, **kwargs: Any) -> Any:
            kind = json.loads(Path(folder, "config.json").read_text()).get("model_type")
            if kind not in PROCESSORS:
                return by_transformers.from_pretrained(folder, *args, **kwargs)
            return _qwen_processor(folder, getattr(importlib.import_module("transformers"), PROCESSORS[kind]))

    module.AutoProcessor = PillowProcessor


def _qwen_processor(folder: str, by_transformers: Any) -> Any:
    """Return the processor of a Qwen-VL for images alone: it has no part for videos."""
    from transformers import AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    def check(self: Any, name: str, argument: Any) -> Any:
        """Accept that the part for videos is missing."""
        return (
            None if name == "video_processor" else by_transformers.check_argument_for_proper_class(self, name, argument)
        )

    kind = type(by_transformers.__name__, (by_transformers,), {"check_argument_for_proper_class": check})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return kind(images, tokenizer, None, chat_template=tokenizer.chat_template)


class _Absent:
    """A name in a missing kernel package. It can be imported. A call raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> _Absent:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Absent(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not available on this CPU-only machine")


class _AbsentKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder that provides sgl_kernel and torchvision as modules in which every name is an _Absent."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in ("sgl_kernel", "torchvision"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def attribute(name: str) -> _Absent:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Absent(f"{module.__name__}.{name}")

        module.__dict__.update(__version__="0.0.0", __getattr__=attribute)


def _register_attention(registry: Any) -> None:
    """Register our attention backend in SGLang's own registry.

    It takes the name of SGLang's CPU backend, because other modules make decisions by that name.
    """

    @registry.register_attention_backend("torch_native")
    def create(runner: Any) -> Any:
        from asyncrl.extensions.cpu.sglang_attention import BatchedAttention  # imports sglang; only schedulers need it

        return BatchedAttention(runner)


def _allow_deterministic(choices: Any) -> None:
    """Allow the CPU attention backend with --enable-deterministic-inference.

    SGLang honours sampling_seed only with that flag, and allows the flag with no CPU attention backend.
    """
    choices.add_deterministic_attention_backend_choices(["torch_native"])


def _allow_sinks(module: Any) -> None:
    """Allow our attention backend, which has windows and sinks, for gpt-oss. SGLang's check of the backend, the only
    one in this module, spares MLX."""
    module.is_mps = module.use_mlx = lambda: True


def _keep_sinks_exact(module: Any) -> None:
    """Give gpt-oss's sinks the type of its other weights. SGLang makes them bfloat16, for its kernels on GPUs."""
    build = module.GptOssAttention.__init__

    def build_exact(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.sinks.data = self.sinks.data.to(self.qkv_proj.weight.dtype)

    module.GptOssAttention.__init__ = build_exact


def _without_invariant_kernels(module: Any) -> None:
    """Disable the batch-invariant kernels, which are written in triton.

    On a CPU the last bits of a matrix product depend on its number of rows, so determinism needs one request at a time.
    """
    module.enable_batch_invariant_mode = lambda *_, **__: None


def _hash_in_torch(module: Any) -> None:
    """Replace SGLang's murmur_hash32, which is a compiled kernel, with our implementation in torch."""
    from asyncrl.extensions.cpu.sampling import murmur_hash32

    module.murmur_hash32 = murmur_hash32


def _sample_by_inversion(module: Any) -> None:
    """Sample by inverting the cumulative distribution; requests with a seed keep SGLang's own method.

    SGLang's method draws as many random numbers as the vocabulary has entries.
    """
    from asyncrl.extensions.cpu.sampling import sample

    by_sglang = module.sampling_from_probs_torch

    def sampling_from_probs(probs: Any, sampling_seed: Any = None, positions: Any = None) -> Any:
        return sample(probs) if sampling_seed is None else by_sglang(probs, sampling_seed, positions)

    module.sampling_from_probs_torch = sampling_from_probs


class _Unpinned(types.ModuleType):
    """The module torch, with factories that ignore `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        import torch

        found = getattr(torch, name)
        if name not in ("tensor", "zeros", "empty"):
            return found
        return lambda *args, pin_memory=False, **kwargs: found(*args, **kwargs)


def _reduce_without_nccl(module: Any) -> None:
    """Let replicas of attention sum up unequal numbers of tokens as deterministic engines do, without NCCL."""
    module.GroupCoordinator.reduce_scatterv = module.GroupCoordinator._deterministic_reduce_scatterv


def _skip_experts_of_others(module: Any) -> None:
    """Leave out experts that other ranks hold (expert parallelism), which are numbered -1. SGLang's loop over the
    experts, unlike its kernels, does not expect them."""
    forward = module.moe_forward_native

    def moe_forward_native(layer: Any, x: Any, chosen: Any, config: Any) -> Any:
        if layer.moe_ep_size == 1:
            return forward(layer, x, chosen, config)
        here, summed = chosen.topk_ids >= 0, x.new_zeros(x.shape)
        if here.any():  # each pair of a token and an expert as a token of its own
            tokens = here.nonzero()[:, 0]
            ids, weights = chosen.topk_ids[here][:, None], chosen.topk_weights[here][:, None]
            pairs = chosen._replace(topk_ids=ids, topk_weights=weights)
            summed.index_add_(0, tokens, forward(layer, x[tokens], pairs, config))
        return summed

    module.moe_forward_native = moe_forward_native


def _create_unpinned(module: Any) -> None:
    """Let a module of SGLang's LoRA layers create its tensors in ordinary memory. Pinned memory needs CUDA."""
    module.torch = _Unpinned("torch")


def _keep_mappings() -> None:
    """Keep the most recent shared-memory mappings alive.

    Weight buckets arrive in the same shared memory at every publish, and mapping it again costs more than reading it.
    torch itself reuses a mapping that is still alive.
    """
    from torch.multiprocessing import reductions

    rebuild = reductions.rebuild_storage_filename
    mapped: dict[Any, Any] = {}

    def keep(cls: Any, manager: Any, handle: Any, *rest: Any) -> Any:
        storage = rebuild(cls, manager, handle, *rest)
        mapped.pop(handle, None)
        mapped[handle] = storage
        while len(mapped) > KEPT_MAPPINGS:
            del mapped[next(iter(mapped))]
        return storage

    reductions.rebuild_storage_filename = keep


def _fork_children() -> None:
    """Fork SGLang's scheduler and detokenizer instead of spawning them.

    SGLang spawns them because of CUDA. Each would then import everything again, which takes most of an engine's
    start-up time on a CPU. A fork is safe here because no thread runs yet.
    """
    set_start_method = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = fork


def _no_host_registration(module: types.ModuleType) -> None:
    """Disable the registration of the routed-experts buffer with CUDA, which SGLang attempts even without CUDA."""
    module._cuda_host_register = lambda *_, **__: None  # type: ignore[attr-defined]
