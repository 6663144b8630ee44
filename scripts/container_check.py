"""Runs the steps of the Dockerfile's CPU variant in a clean root, then asyncrl-train there as the image's user.

    sudo python3 scripts/container_check.py [--bind PATH ...] [--base DIR] [--keep]

It needs no container engine and no image registry: it reads the stages, variables, COPYs and RUNs from the Dockerfile.
The base is the Debian release that CPU_BASE names, made by debootstrap, with Debian's Python instead of that of the
official image (docs/quickstart.md lists the other differences). Each RUN has its own namespaces (clean_root.py), so no
mount or process is left. The RUNs see PIP_* and *_proxy of the environment and, with --bind, the files that pip is
configured with on this machine; the final runs see neither, and have no network.

It needs root, debootstrap, iproute2 and 6 GB for temporary files. It imports only the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import clean_root  # noqa: E402

LAST = "image"
BASE_PACKAGES = "python3,python3-venv,python3-dev,ca-certificates"
"""Packages that replace python:…-slim, whose Python has pip, venv and headers."""
TRAIN = (["--check", "experiment=tiny"], ["experiment=tiny", "run.max_steps=2"])


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, with continuation lines joined."""

    word: str
    text: str


@dataclass
class Stage:
    """A stage of a Dockerfile (FROM base AS name) with its instructions."""

    name: str
    base: str
    steps: list[Instruction]


@dataclass(frozen=True)
class Image:
    """State of a stage: its files, and the settings with which later instructions and `docker run` start."""

    root: Path
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": clean_root.PATH})
    args: Mapping[str, str] = field(default_factory=dict)  # ARGs of this stage only
    user: str = "0:0"
    directory: str = "/"
    entrypoint: tuple[str, ...] = ()

    def filled(self, text: str) -> str:
        """Return the text with variables replaced, as in all instructions except RUN."""
        return Template(text).substitute({**self.args, **self.env})


def instructions(text: str) -> list[Instruction]:
    """Return all instructions of a Dockerfile in order."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = (line.strip() for line in re.sub(r"\\\n", " ", kept).splitlines())
    parts = (line.split(maxsplit=1) for line in joined if line)
    return [Instruction(word.upper(), rest) for word, rest in parts]


def stages(text: str, build_args: Mapping[str, str]) -> tuple[dict[str, Stage], dict[str, str]]:
    """Return the stages by name, and the values of the ARGs before the first stage."""
    found: dict[str, Stage] = {}
    values: dict[str, str] = {}
    for step in instructions(text):
        if step.word == "FROM":
            base, _, name = Template(step.text).substitute(values).split()
            found[name] = Stage(name, base, [])
        elif found:
            found[name].steps.append(step)
        else:
            variable, _, default = step.text.partition("=")
            values[variable] = build_args.get(variable, default)
    return found, values


def assignments(text: str) -> Iterator[tuple[str, str]]:
    """Yield the assignments of ENV and LABEL, such as A=1 B="two words"."""
    for name, quoted, plain in re.findall(r'([\w.]+)=(?:"([^"]*)"|(\S*))', text):
        yield name, quoted or plain


def context(destination: Path) -> None:
    """Copy the files that .dockerignore admits. Only one form of it is supported: an allow list, minus some names."""
    first, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    without = shutil.ignore_patterns(*(line.removeprefix("**/") for line in lines if line.startswith("**/")))
    for line in lines:
        if line.startswith("!"):
            source, target = ROOT / line[1:], destination / line[1:]
            if source.is_dir():
                shutil.copytree(source, target, ignore=without)
            else:
                shutil.copy(source, target)


def enter(image: Image, command: Sequence[str], binds: Sequence[str] = (), network: str = "host") -> None:
    """Run a command in the image's root. Raises CalledProcessError if it fails."""
    clean_root.enter(
        image.root,
        command,
        environment=image.env,
        user=image.user,
        directory=image.directory,
        binds=binds,
        network=network,
    )


class Build:
    """Builder of a stage and of all stages that it needs, each once, below a folder."""

    def __init__(self, work: Path, base: Path, binds: Sequence[str], build_args: Mapping[str, str]) -> None:
        self.stages, self.values = stages((ROOT / "Dockerfile").read_text(), build_args)
        self.work, self.base, self.build_args = work, base, build_args
        self.binds = ["/etc/resolv.conf", *binds]
        self.passed = clean_root.index_variables(os.environ)
        self.built: dict[str, Image] = {}
        (work / "context").mkdir()
        context(work / "context")

    def stage(self, name: str) -> Image:
        """Return the finished image of a stage; for any other name, the clean root."""
        if name not in self.stages:
            return Image(self.base)
        if name not in self.built:
            stage = self.stages[name]
            parent = self.stage(stage.base)
            root = self.work / name
            clean_root.copy_root(parent.root, root)
            image = replace(parent, root=root, args={})
            for step in stage.steps:
                print(f"[{name}] {step.word} {step.text}", flush=True)
                image = self.step(image, step)
            self.built[name] = image
        return self.built[name]

    def step(self, image: Image, step: Instruction) -> Image:
        """Apply one instruction and return the resulting image. Files change in place."""
        if step.word == "ARG":
            default = self.values.get(step.text, "")
            return replace(image, args={**image.args, step.text: self.build_args.get(step.text, default)})
        if step.word == "ENV":
            pairs = {key: image.filled(value) for key, value in assignments(step.text)}
            return replace(image, env={**image.env, **pairs})
        if step.word == "RUN":
            given = {
                name: value for name, value in image.args.items() if value
            }  # as in docker, an ARG without a value is not set
            seen = replace(image, env={"HOME": "/root", **self.passed, **given, **image.env})
            enter(seen, ["sh", "-c", step.text], self.binds)
        elif step.word == "COPY":
            self.copy(image, image.filled(step.text).split())
        elif step.word == "WORKDIR":
            (image.root / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
            return replace(image, directory=step.text)
        elif step.word == "USER":
            return replace(image, user=step.text)
        elif step.word == "ENTRYPOINT":
            return replace(image, entrypoint=tuple(json.loads(step.text)))
        elif step.word != "LABEL":
            raise SystemExit(f"container_check: it does not know {step.word}")
        return image

    def copy(self, image: Image, words: list[str]) -> None:
        """Copy files as docker does: the content of a folder goes into the destination, owned by root."""
        origin = self.work / "context"
        if words[0].startswith("--from="):
            origin = self.stage(words.pop(0).removeprefix("--from=")).root
        *sources, destination = words
        target = image.root / os.path.join(image.directory, destination).lstrip("/")
        (target if destination.endswith("/") else target.parent).mkdir(parents=True, exist_ok=True)
        for source in (origin / word.lstrip("/") for word in sources):
            content = f"{source}/." if source.is_dir() else str(source)
            command = ["cp", "-r", "--no-dereference", "--preserve=mode,timestamps,links", content, str(target)]
            subprocess.run(command, check=True)


def leftovers(root: Path) -> list[str]:
    """Return caches, package lists and temporary files that an image must not contain."""
    patterns = ("root/.cache/*", "home/*/.cache/*", "var/lib/apt/lists/*", "var/cache/apt/archives/*.deb", "tmp/*")
    return [str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern)]


def home(image: Image) -> str:
    """Return the user's home from the image's own passwd, as docker does."""
    users = [line.split(":") for line in (image.root / "etc/passwd").read_text().splitlines()]
    (found,) = (user[5] for user in users if user[2] == image.user.partition(":")[0])
    return found


def check(image: Image) -> None:
    """Check the finished image, and run two commands in it."""
    assert image.user == "1000:1000", image.user
    assert not leftovers(image.root), leftovers(image.root)
    size = subprocess.run(["du", "-sh", str(image.root)], check=True, capture_output=True, text=True).stdout.split()[0]
    print(f"image: {size}, user {image.user}, in {image.directory}, {' '.join(image.entrypoint)}", flush=True)
    image = replace(image, env={**image.env, "HOME": home(image)})
    rights = "id && python3 --version && touch ~/mine ./mine && ! touch /opt/venv/mine 2>/dev/null"
    enter(image, ["sh", "-c", rights], network="none")
    for arguments in TRAIN:
        print("$", *image.entrypoint, *arguments, flush=True)
        enter(image, [*image.entrypoint, *arguments], network="none")


def main() -> None:
    """Build, check and run the image. The temporary folder is always removed, except with --keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--bind", action="append", default=[], metavar="PATH", help="a file or folder that RUNs see, read-only"
    )
    parser.add_argument("--base", type=Path, help="a clean root, instead of debootstrap's; it is copied, not changed")
    parser.add_argument("--keep", action="store_true", help="keep the roots")
    options = parser.parse_args()
    clean_root.require_root("container_check")

    started = time.monotonic()
    with clean_root.workspace("asyncrl-container-", keep=options.keep) as work:
        build = Build(work, options.base or work / "base", options.bind, {"VARIANT": "cpu", **indexes()})
        if options.base is None:
            suite = build.values["CPU_BASE"].rpartition("-")[2]
            print(f"debootstrap {suite}, for {build.values['CPU_BASE']}", flush=True)
            clean_root.debootstrap(suite, build.base, BASE_PACKAGES)
        check(build.stage(LAST))
        print(f"container_check: all is well, {time.monotonic() - started:.0f} s")


def indexes() -> dict[str, str]:
    """Return --build-arg PIP_EXTRA_INDEX_URL from the environment."""
    return {name: os.environ[name] for name in ("PIP_EXTRA_INDEX_URL",) if name in os.environ}


if __name__ == "__main__":
    main()
