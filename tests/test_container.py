"""The Dockerfile: pinned bases, a user, all that it copies; the GPU lock against pyproject.toml and the CPU lock."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from asyncrl.launch.checks.versions import MUST_MATCH, SHOULD_MATCH
from scripts.container_check import LAST, Image, Instruction, assignments, context, instructions, stages
from tests.pins import ROOT, lock, pins, project

TEXT = (ROOT / "Dockerfile").read_text()
VARIANTS = ("gpu", "cpu")
APART = {"protobuf"}
"""What SGLang's own metadata (grpcio-reflection, by way of smg-grpc-servicer) holds below the CPU lock's version."""


def steps(variant: str, stage: str = LAST) -> list[Instruction]:
    """Return the steps of a stage and of the stages that it is based on."""
    found, _ = stages(TEXT, {"VARIANT": variant})
    return steps(variant, found[stage].base) + found[stage].steps if stage in found else []


def runs() -> str:
    return "\n".join(step.text for step in instructions(TEXT) if step.word == "RUN")


# --- the Dockerfile -----------------------------------------------------------------------------------------


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"])))
    if program is None:
        pytest.skip("hadolint is not installed: requirements/dev.txt has it")
    command = [program, "--config", ROOT / ".hadolint.yaml", "--no-color", ROOT / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("variant", VARIANTS)
def test_bases_are_stages_or_images_of_one_version(variant: str) -> None:
    found, values = stages(TEXT, {"VARIANT": variant})
    outside = {stage.base for stage in found.values()} - found.keys()
    assert outside == {values["GPU_BASE"], values["CPU_BASE"]}
    assert all(re.search(r":\d+\.\d+\.\d+-", base) for base in outside)
    assert list(found)[-1] == LAST  # what `docker build` makes without --target


def test_gpu_is_what_is_built_unless_cpu_is_asked_for() -> None:
    found, values = stages(TEXT, {})
    assert values["VARIANT"] == "gpu"
    assert found[LAST].base == "base-gpu"
    assert stages(TEXT, {"VARIANT": "cpu"})[0][LAST].base == "base-cpu"


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_runs_as_a_user_with_a_home_and_a_folder(variant: str) -> None:
    words = [step.word for step in steps(variant)]
    (user,) = (step.text for step in steps(variant) if step.word == "USER")
    assert user == "1000:1000"
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert "--uid 1000 --create-home" in runs()
    (directory,) = (step.text for step in steps(variant) if step.word == "WORKDIR")
    assert f"--owner=asyncrl --group=asyncrl {directory}" in runs()


def test_every_copied_file_is_there_and_in_the_context(tmp_path: Path) -> None:
    context(tmp_path)
    copies = [step.text for step in instructions(TEXT) if step.word == "COPY" and "--from" not in step.text]
    named = [source for text in copies for source in text.split()[:-1]]
    sources = {source.replace("${VARIANT}", variant) for source in named for variant in VARIANTS}
    assert {
        "requirements/gpu.txt",
        "requirements/cpu.txt",
        "asyncrl/",
        "conf/",
    } <= sources
    assert [source for source in sources if not (ROOT / source).exists() or not (tmp_path / source).exists()] == []
    assert not list(tmp_path.rglob("__pycache__"))
    assert {path.name for path in tmp_path.iterdir()} <= {source.partition("/")[0] for source in sources}


def test_pip_resolves_nothing_and_keeps_no_cache() -> None:
    commands = [line for line in re.split(r"&&|\n", runs()) if re.search(r"pip (install|wheel)", line)]
    assert commands
    assert [line for line in commands if "--no-deps" not in line] == []
    found, _ = stages(TEXT, {})
    for stage in found.values():
        pip = [step for step in stage.steps if step.word == "RUN" and "pip install" in step.text]
        environment = dict(pair for step in stage.steps if step.word == "ENV" for pair in assignments(step.text))
        assert not pip or environment["PIP_NO_CACHE_DIR"] == "1", stage.name


def test_apt_takes_no_more_than_it_is_told_and_leaves_no_files() -> None:
    commands = [step.text for step in instructions(TEXT) if step.word == "RUN" and "apt-get install" in step.text]
    assert commands
    for command in commands:
        assert "--no-install-recommends" in command
        assert "&& apt-get clean && rm -rf /var/lib/apt/lists/*" in command


def test_build_tools_are_all_in_the_locks() -> None:
    for names in re.findall(r"grep -h?E '\^\(([^)]*)\)==' (?=requirements)", runs()):
        assert set(names.split("|")) <= (lock("cpu.txt") | lock("dev.txt")).keys()
    assert lock("gpu.txt").keys() >= {"setuptools", "wheel", "transformer-engine-torch"}
    assert "setuptools" in lock("cpu.txt")


# --- the lock of the GPU image ------------------------------------------------------------------------------


def test_gpu_lock_holds_all_that_pyproject_asks_of_it() -> None:
    table = project()["project"]
    extras = table["optional-dependencies"]
    locked = lock("gpu.txt")
    for line in table["dependencies"] + extras["gpu"] + extras["agents"]:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        assert wanted.specifier.contains(locked[name], prereleases=True), line
        assert all(f"{name}-torch" in locked for extra in wanted.extras if extra == "pytorch"), line


def test_gpu_lock_replaces_what_pypi_has_only_as_a_stub() -> None:
    """`scripts/lock.sh check` asks PyPI; here, the versions that its list of exceptions names are those of the lock."""
    script = (ROOT / "scripts" / "lock.sh").read_text()
    exceptions = {name: re.search(rf"^{name}=\((.*)\)$", script, re.MULTILINE) for name in ("OVERRIDES", "SDISTS")}
    overrides, sources = ((found[1] if found else "").split() for found in exceptions.values())
    assert dict(line.split("==") for line in overrides).items() <= lock("gpu.txt").items()
    assert set(sources) <= lock("gpu.txt").keys()
    assert "cuda-tile==1.6.0" in overrides


def test_gpu_lock_is_the_cpu_lock_and_more() -> None:
    cpu, gpu = lock("cpu.txt"), lock("gpu.txt")
    assert {name: (version, gpu.get(name)) for name, version in cpu.items() if gpu.get(name) != version}.keys() <= APART
    alike = (*MUST_MATCH, *SHOULD_MATCH)  # what the preflight compares with the CPU lock, on GPU machines too
    assert {name: gpu[name] for name in alike} == {name: cpu[name] for name in alike}
    assert {"sglang-kernel", "flashinfer-python", "triton", "nvidia-nccl-cu13"} <= gpu.keys()


def test_gpu_lock_is_for_the_cuda_of_the_base() -> None:
    _, values = stages(TEXT, {})
    base = re.search(r"cuda:(\d+\.\d+)\.", values["GPU_BASE"])
    assert base is not None
    assert lock("gpu.txt")["nvidia-cuda-runtime"].startswith(f"{base[1]}.")  # torch's own pin


def test_pins_refuse_a_line_that_is_not_one() -> None:
    with pytest.raises(AssertionError):
        pins(["torch>=2"])


# --- how the check reads it ---------------------------------------------------------------------------------


def test_instructions_join_continuations_and_leave_comments_out() -> None:
    text = "# first\nARG A=1\nFROM x:${A} AS y\nRUN one \\\n    # why\n    && two\n"
    assert [(step.word, " ".join(step.text.split())) for step in instructions(text)] == [
        ("ARG", "A=1"),
        ("FROM", "x:${A} AS y"),
        ("RUN", "one && two"),
    ]
    found, _ = stages(text, {"A": "2"})
    assert found["y"].base == "x:2"


def test_variables_are_filled_from_arguments_and_environment() -> None:
    image = Image(Path("/nowhere"), env={"PATH": "/bin"}, args={"VARIANT": "cpu"})
    assert image.filled("/opt/${VARIANT}:${PATH}") == "/opt/cpu:/bin"
    with pytest.raises(KeyError):
        image.filled("${UNKNOWN}")
    assert dict(assignments('A=1 B="two words" c.d=${X}')) == {"A": "1", "B": "two words", "c.d": "${X}"}
