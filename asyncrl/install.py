"""`asyncrl-install`: install the pinned CPU system (trainer, SGLang, router, model) into an environment.

On a machine without a GPU this is the only command needed after `pip install asyncrl`. SGLang's own metadata requires
several GB of CUDA packages. This command therefore installs SGLang from a complete lock with `--no-deps`, which the
metadata of a wheel cannot request. It needs only the standard library, so it also runs after
`pip install --no-deps asyncrl`.

usage: asyncrl-install [--cpu] [--dry-run] [any arguments of pip install, such as --extra-index-url URL]
"""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

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

TORCH_REMEDY = """\
asyncrl-install: torch is installed but does not import. The usual reason is that the index offered the CUDA
build, whose libraries --no-deps leaves out. Name PyTorch's CPU index (its install page has it), run again:

    pip uninstall -y torch && asyncrl-install --cpu --extra-index-url <PyTorch's CPU index>"""


def lock_file() -> Path:
    """Return the path of requirements/cpu.txt: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package, package.parent):
        if (lock := folder / "requirements" / "cpu.txt").is_file():
            return lock
    raise SystemExit(f"asyncrl-install: no requirements/cpu.txt in {package} or beside it; reinstall asyncrl")


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run pip on the lock. Returns 0 when the environment is complete, otherwise 1 with a message on stderr."""
    parser = argparse.ArgumentParser(prog="asyncrl-install", description=(__doc__ or "").partition("\n\nusage")[0])
    parser.add_argument("--cpu", action="store_true", help="install the CPU system although there is a GPU")
    parser.add_argument("--dry-run", action="store_true", help="print the command and do nothing")
    options, pip_arguments = parser.parse_known_args(argv)

    if not options.cpu and has_gpu():
        print(GPU_REMEDY, file=sys.stderr)
        return 1
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "-r", str(lock_file()), *pip_arguments]
    if options.dry_run:
        print(shlex.join(pip))
        return 0
    if old := [name for name in REPLACED if _installed(name)]:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *old], check=False)
    if status := subprocess.run(pip, check=False).returncode:
        print(PIP_REMEDY.format(status=status, command=shlex.join(pip)), file=sys.stderr)
        return 1
    if subprocess.run([sys.executable, "-c", "import torch"], check=False).returncode:
        print(TORCH_REMEDY, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
