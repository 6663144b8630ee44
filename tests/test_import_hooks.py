"""Processes that import much do so without garbage collections, which they have again when they begin to work, and
without packages that they do not need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asyncrl.launch.checks.versions import pinned
from asyncrl.lookup import shipped

PLAYER = "asyncrl.extensions.processes.episodes"
PLAYS = "processes" in shipped()
"""Whether the extension is there."""


def test_collector_rests_until_all_is_imported() -> None:
    code = (
        "import gc; from asyncrl import import_hooks; assert not gc.isenabled(); import_hooks.done();"
        "assert gc.isenabled(); assert gc.get_freeze_count() > 1000; a = []; a.append(a); del a; assert gc.collect()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize(
    "entry",
    ["asyncrl.engine.serve", "asyncrl.rollout.__main__", "asyncrl.trainer.__main__", *([PLAYER] if PLAYS else [])],
)
def test_collector_rests_while_an_entry_imports(entry: str) -> None:
    code = f"""
import gc, importlib, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if gc.isenabled():
            awake.add(name)

awake = set()
known = set(sys.modules)
sys.meta_path.insert(0, Finder())
importlib.import_module({entry!r})
assert not gc.isenabled()
own = {{name for name in awake - known if name.startswith("asyncrl")}}
words = {entry!r}.split(".")
parents = {{"asyncrl.import_hooks", *(".".join(words[:count + 1]) for count in range(len(words)))}}
assert own <= parents, own - parents
assert not awake & {{"torch", "numpy", "sglang", "transformers", "asyncio"}}, awake
"""
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # as every engine on a CPU
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_trainer_collects_again_when_it_begins() -> None:
    code = """
import gc
from pathlib import Path
from asyncrl.trainer.__main__ import main

try:
    main(Path("/nowhere"))
except OSError:
    assert gc.isenabled()
else:
    raise SystemExit("it trained without a configuration")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_program_for_the_terminal_does_not_stop_the_collector() -> None:
    code = "import gc, asyncrl.launch.main; assert gc.isenabled()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_a_hidden_package_is_found_again_afterwards() -> None:
    code = (
        "import sys, importlib.util; from asyncrl.import_hooks import hidden\n"
        "with hidden('json.tool'):\n"
        "    assert importlib.util.find_spec('json.tool') is None\n"
        "    try: import json.tool\n"
        "    except ImportError: pass\n"
        "    else: raise SystemExit('it was imported')\n"
        "import json.tool\n"
        "with hidden('json.tool'): assert json.tool is importlib.import_module('json.tool')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_tokenizer_is_loaded_without_torch() -> None:
    """A rollout process needs no torch, but its agents and rewards may."""
    code = """
import sys
from pathlib import Path
from asyncrl.agents.template import ChatTemplate
from asyncrl.models import catalog
from asyncrl.rollout.parts import load_tokenizer

folder = catalog.resolve("builtin:tiny")
template = ChatTemplate(load_tokenizer(folder, None))
chat = [{"role": "user", "content": "2+2"}]
own = [template.begin(chat), template.extend(chat, last=None), template.encode("2+2", begins=True)]
assert template.decode(own[0]) and template.end
assert "torch" not in sys.modules and "transformers" not in sys.modules

from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(folder)
theirs = ChatTemplate(AutoTokenizer.from_pretrained(folder))
assert own == [theirs.begin(chat), theirs.extend(chat, last=None), theirs.encode("2+2", begins=True)]
import torch
assert model(torch.tensor([own[0]])).logits.isfinite().all()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "PyTorch was not found" not in done.stderr


@pytest.mark.parametrize("torch", [None, "2.11.0+cu130"], ids=["the lock's", "another"])
def test_engine_uses_libraries_only_with_their_torch(torch: str | None) -> None:
    torch = torch or f"{pinned()['torch']}+cpu"
    code = (
        "from importlib import metadata; found = metadata.version\n"
        f"metadata.version = lambda name: {torch!r} if name == 'torch' else found(name)\n"
        "import asyncrl.engine.serve\n"
        "from sglang.srt.environ import envs\n"
        "print(envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.get(), envs.SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK.get())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.split() == (["python", "True"] if torch == "2.11.0+cu130" else ["rust", "False"]), done.stderr


def test_engine_imports_no_megatron_and_few_exporters() -> None:
    """A debugging tool of SGLang would import Megatron, and on GPUs TransformerEngine with it."""
    code = (
        "import asyncrl.engine.serve, importlib.util, sys; assert importlib.util.find_spec('megatron') is None\n"
        "from sglang.srt.debug_utils import dumper; assert 'megatron.core' not in sys.modules\n"
        "from sglang.srt.observability import trace; assert not trace.opentelemetry_imported\n"
        "assert 'grpc' not in sys.modules"
    )
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # as every engine on a CPU
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
