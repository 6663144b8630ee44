"""Runs the steps of the Dockerfile's CPU variant in a clean root, then asyncrl-train there as the image's user.

    sudo python3 scripts/container_check.py [--bind PATH ...] [--base DIR] [--keep]

No container engine and no image registry: the stages, variables, COPYs and RUNs are taken out of the Dockerfile itself.
The base is Debian of the release that CPU_BASE names, made by debootstrap, with Debian's Python in place of the
official image's (docs/container.md tells what else differs). Each RUN has namespaces of its own (clean_root.py):
nothing stays mounted, nothing stays running. PIP_* and *_proxy of the environment reach the RUNs, and so
do, with --bind, the files that pip is configured with here; the runs at the end have neither them nor a network.

Needs root, debootstrap, iproute2 and 6 GB where temporary files go. Only the standard library is imported.
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
"""What python:…-slim brings; its Python has pip, venv and headers."""
TRAIN = (["--check", "experiment=tiny"], ["experiment=tiny", "run.max_steps=2"])


@dataclass(frozen=True)
class Instruction:
    """One line of a Dockerfile, continuations joined."""

    word: str
    text: str


@dataclass
class Stage:
    """FROM base AS name, and what follows it."""

    name: str
    base: str
    steps: list[Instruction]


@dataclass(frozen=True)
class Image:
    """What a stage has come to: its files, and the state that later instructions and `docker run` start from."""

    root: Path
    env: Mapping[str, str] = field(default_factory=lambda: {"PATH": clean_root.PATH})
    args: Mapping[str, str] = field(default_factory=dict)  # of this stage alone
    user: str = "0:0"
    directory: str = "/"
    entrypoint: tuple[str, ...] = ()

    def filled(self, text: str) -> str:
        """Variables in place of their names, as in all instructions but RUN."""
        return Template(text).substitute({**self.args, **self.env})


def instructions(text: str) -> list[Instruction]:
    """All of a Dockerfile's, in order."""
    kept = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = (line.strip() for line in re.sub(r"\\\n", " ", kept).splitlines())
    parts = (line.split(maxsplit=1) for line in joined if line)
    return [Instruction(word.upper(), rest) for word, rest in parts]


def stages(text: str, build_args: Mapping[str, str]) -> tuple[dict[str, Stage], dict[str, str]]:
    """The stages by name, and the values of the ARGs before the first of them."""
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
    """A=1 B="two words" of ENV and LABEL."""
    for name, quoted, plain in re.findall(r'([\w.]+)=(?:"([^"]*)"|(\S*))', text):
        yield name, quoted or plain


def context(destination: Path) -> None:
    """The files that .dockerignore lets through. It reads one form of it: all but these, without those names."""
    first, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert first == "*"
    without = shutil.ignore_patterns(*(line.removeprefix("**/") for line in lines if line.startswith("**/")))
    for line in lines:
        if line.startswith("!"):
            source = ROOT / line[1:]
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, destination / line[1:], **({"ignore": without} if source.is_dir() else {}))


def enter(image: Image, command: Sequence[str], binds: Sequence[str] = (), network: str = "host") -> None:
    """Run a command in the image's root; raise CalledProcessError if it fails."""
    where = {"user": image.user, "directory": image.directory, "binds": binds, "network": network}
    clean_root.enter(image.root, command, environment=image.env, **where)


class Build:
    """Builds the stages that one of them needs, each once, below a folder."""

    def __init__(self, work: Path, base: Path, binds: Sequence[str], build_args: Mapping[str, str]) -> None:
        self.stages, self.values = stages((ROOT / "Dockerfile").read_text(), build_args)
        self.work, self.base, self.build_args = work, base, build_args
        self.binds = ["/etc/resolv.conf", *binds]
        self.passed = clean_root.index_variables(os.environ)
        self.built: dict[str, Image] = {}
        (work / "context").mkdir()
        context(work / "context")

    def stage(self, name: str) -> Image:
        """The finished image of a stage; of anything that is no stage, the clean root."""
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
        """The image after one instruction; files change in place."""
        if step.word == "ARG":
            default = self.values.get(step.text, "")
            return replace(image, args={**image.args, step.text: self.build_args.get(step.text, default)})
        if step.word == "ENV":
            pairs = {key: image.filled(value) for key, value in assignments(step.text)}
            return replace(image, env={**image.env, **pairs})
        if step.word == "RUN":
            given = {
                name: value for name, value in image.args.items() if value
            }  # as docker: an ARG without value is not set
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
        """A folder's content goes into the destination, as docker has it; owned by root."""
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
    """Caches, package lists and temporary files that an image must not carry."""
    patterns = ("root/.cache/*", "home/*/.cache/*", "var/lib/apt/lists/*", "var/cache/apt/archives/*.deb", "tmp/*")
    return [str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern)]


def home(image: Image) -> str:
    """As docker finds it: in the image's own passwd."""
    users = [line.split(":") for line in (image.root / "etc/passwd").read_text().splitlines()]
    (found,) = (user[5] for user in users if user[2] == image.user.partition(":")[0])
    return found


def check(image: Image) -> None:
    """What the finished image must be, and two commands in it."""
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
    """Build, look, run; the temporary folder goes in any case, unless --keep."""
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
    """--build-arg PIP_EXTRA_INDEX_URL, from the environment."""
    return {name: os.environ[name] for name in ("PIP_EXTRA_INDEX_URL",) if name in os.environ}


if __name__ == "__main__":
    main()
