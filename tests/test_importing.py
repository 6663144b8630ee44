"""Processes that import much do so without garbage collections, which they have again when they begin to work, and
without packages that they do not need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "asyncrl"


def test_collector_rests_until_all_is_imported_and_then_passes_over_it() -> None:
    code = (
        "import gc; from asyncrl import importing; assert not gc.isenabled(); importing.done();"
        "assert gc.isenabled(); assert gc.get_freeze_count() > 1000; a = []; a.append(a); del a; assert gc.collect()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@pytest.mark.parametrize("entry", ["engine/serve.py", "rollout/__main__.py", "trainer/__main__.py"])
def test_each_entry_imports_it_first_and_says_when_it_is_done(entry: str) -> None:
    lines = [line.strip() for line in (PACKAGE / entry).read_text().splitlines()]
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert next(line for line in imports if "__future__" not in line) == "from asyncrl import importing"
    assert lines.count("importing.done()") == 1


def test_nothing_else_stops_the_collector() -> None:
    users = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "importing" in path.read_text()}
    entries = {path for path in users if "import importing" in (PACKAGE / path).read_text()}
    assert entries == {"engine/serve.py", "rollout/__main__.py", "rollout/episodes.py", "trainer/__main__.py"}


def test_a_hidden_package_is_found_again_afterwards() -> None:
    code = (
        "import sys, importlib.util; from asyncrl.importing import hidden\n"
        "with hidden('json.tool'):\n"
        "    assert importlib.util.find_spec('json.tool') is None\n"
        "    try: import json.tool\n"
        "    except ImportError: pass\n"
        "    else: raise SystemExit('it was imported')\n"
        "import json.tool\n"
        "with hidden('json.tool'): assert json.tool is importlib.import_module('json.tool')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_the_tokenizer_is_loaded_without_torch_and_models_of_users_with_it() -> None:
    """A rollout process needs no torch, but its agents and rewards may."""
    code = """
import sys
from pathlib import Path
from asyncrl.agents.template import ChatTemplate
from asyncrl.models import catalog
from asyncrl.rollout.prompts import load_tokenizer

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


def test_an_engine_imports_nothing_of_megatron_and_no_exporters_unless_it_traces() -> None:
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
