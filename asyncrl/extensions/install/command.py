"""`asyncrl-install`: install the pinned CPU system (trainer, SGLang, router, model) into an environment.

On a machine without a GPU this is the only command needed after `pip install asyncrl`. SGLang's own metadata requires
several GB of CUDA packages. This command therefore installs SGLang from a complete lock with `--no-deps`, which the
metadata of a wheel cannot request. It takes PyTorch's CPU build if pip's indexes have it; otherwise it takes the CUDA
build, which PyPI has, with the libraries that this build loads. It needs only the standard library, so it also runs
after `pip install --no-deps asyncrl`.

With --bundle and --from, it carries the system to machines without a network (bundle.py).

usage: asyncrl-install [--cpu] [--dry-run] [any arguments of pip install, such as --extra-index-url URL]
"""

import argparse
import importlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires

from asyncrl import lock_file
from asyncrl.extensions.install import bundle

PIP = (sys.executable, "-m", "pip", "install")

REPLACED = ("sglang-router",)
"""Packages of an earlier lock that conflict with a package of this one: both install a program `smg`."""

GPU_REMEDY = """\
This machine has an NVIDIA GPU: install the stock SGLang and TransformerEngine with

    pip install "asyncrl[gpu]"

or give --cpu to install the system that runs without it."""

PIP_REMEDY = """\
asyncrl-install: pip ended with status {status}; its own message is above.
The lock needs Linux (x86_64 or aarch64, glibc 2.34 or newer), Python 3.11 or newer, about 2.5 GB of disk,
and an index that pip is configured to reach. The command was:

    {command}"""

LIBRARIES = (
    "cublas",
    "cuda-cupti",
    "cuda-nvrtc",
    "cuda-runtime",
    "cudnn-cu13",
    "cufft",
    "cufile",
    "curand",
    "cusolver",
    "cusparse",
    "cusparselt-cu13",
    "nccl-cu13",
    "nvjitlink",
    "nvshmem-cu13",
)
"""NVIDIA's packages whose libraries the CUDA build of torch loads when it is imported, with or without a GPU."""

CPU_INDEX = "<address of PyTorch's CPU index, from its installation page>"

CUDA_NOTICE = f"""\
asyncrl-install: pip's indexes do not have the CPU build of {{torch}} for Python {bundle.PYTHON}. It
installs the CUDA build and the libraries that this build loads, which take about 4 GB of disk; no GPU is needed. To
save them, stop it, name PyTorch's index of CPU builds, and run the command again:

    export PIP_EXTRA_INDEX_URL="{CPU_INDEX}"
"""

TORCH_REMEDY = f"""\
asyncrl-install: torch is installed but does not import; Python's own message is above. Remove it, name PyTorch's index
of CPU builds, and run the command again:

    {shlex.quote(sys.executable)} -m pip uninstall -y torch && export PIP_EXTRA_INDEX_URL="{CPU_INDEX}\""""


def _pins(lock: str, names: Sequence[str]) -> list[str]:
    """Return the lines of a lock that pin these packages."""
    return [line for line in lock_file(lock).read_text().splitlines() if line.partition("==")[0] in names]


def _torch() -> str:
    (pin,) = _pins("cpu.txt", ["torch"])
    return pin


def libraries() -> list[str]:
    """Return the pinned packages without which the CUDA build of torch does not import."""
    return _pins("cuda.txt", [f"nvidia-{name}" for name in LIBRARIES])


def cpu_build(pip_arguments: Sequence[str]) -> str | None:
    """Return the requirement of torch's CPU build, or None if pip finds no such build with these arguments."""
    wanted = f"{_torch()}+cpu"
    ask = [*PIP, "--dry-run", "--quiet", "--no-deps", *pip_arguments, wanted]
    return None if subprocess.run(ask, capture_output=True, check=False).returncode else wanted


def needs_libraries() -> bool:
    """Return whether the installed torch is a CUDA build, by what its metadata requires."""
    importlib.invalidate_caches()
    try:
        return any(one.startswith("nvidia-") for one in requires("torch") or ())
    except PackageNotFoundError:
        return False


def has_gpu() -> bool:
    """Return whether nvidia-smi lists a GPU. The program may also be installed on machines without one."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _install(command: Sequence[str]) -> bool:
    """Run pip. Returns whether it succeeded, and otherwise prints what it needs to stderr."""
    status = subprocess.run(command, check=False).returncode
    if status:
        print(PIP_REMEDY.format(status=status, command=shlex.join(command)), file=sys.stderr)
    return not status


def main(argv: Sequence[str] | None = None) -> int:
    """Run pip on the lock. Returns 0 when the environment is complete, otherwise 1 with a message on stderr."""
    parser = argparse.ArgumentParser(prog="asyncrl-install", description=(__doc__ or "").partition("\n\nusage")[0])
    parser.add_argument("--cpu", action="store_true", help="install the CPU system although there is a GPU")
    parser.add_argument("--dry-run", action="store_true", help="print the command and do nothing")
    bundle.add_arguments(parser)
    options, pip_arguments = parser.parse_known_args(argv)

    if options.bundle:
        return bundle.make(options, pip_arguments, lock_file().parent)
    if options.source:
        return bundle.install(options, pip_arguments)
    if given := [name for name in ("torch", "arch", "with", "without") if getattr(options, name)]:
        parser.error(f"--{given[0]} is an option of bundles: give --bundle FOLDER or --from FOLDER, too")
    if not options.cpu and has_gpu():
        print(GPU_REMEDY, file=sys.stderr)
        return 1
    pip = [*PIP, "--no-deps", "-r", str(lock_file()), *pip_arguments]
    if options.dry_run:
        print(shlex.join(pip))
        return 0
    if wanted := cpu_build(pip_arguments):
        pip.append(wanted)
    else:
        print(CUDA_NOTICE.format(torch=_torch()), file=sys.stderr, flush=True)
    if old := [name for name in REPLACED if _installed(name)]:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *old], check=False)
    if not _install(pip) or (needs_libraries() and not _install([*PIP, "--no-deps", *pip_arguments, *libraries()])):
        return 1
    if subprocess.run([sys.executable, "-c", "import torch"], check=False).returncode:
        print(TORCH_REMEDY, file=sys.stderr)
        return 1
    return 0
