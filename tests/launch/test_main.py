"""The command: its help, its refusals, and the folder it writes to."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from asyncrl.config import Section, load
from asyncrl.errors import ConfigError, ProcessDied
from asyncrl.launch import help, run
from asyncrl.launch import main as module
from asyncrl.launch.compose import argument, check_resume
from asyncrl.launch.main import CONF
from asyncrl.launch.resume import lock
from asyncrl.launch.run_folder import MARK, explained, prepare, take
from asyncrl.settings import Choice
from tests.fakes import compose_values, tiny_config
from tests.forks import forked


def leaves(section: Section, prefix: str = "") -> list[str]:
    found = []
    for attribute, field in type(section).model_fields.items():
        name, value = field.alias or attribute, getattr(section, attribute)
        inside = isinstance(value, Section) and not isinstance(value, Choice)
        found += leaves(value, f"{prefix}{name}.") if inside else [prefix + name]
    extensions = {name: value for name, value in (section.model_extra or {}).items() if isinstance(value, Section)}
    return found + [field for name, value in extensions.items() for field in leaves(value, f"{name}.")]


def test_help_explains_every_field_and_names_every_group() -> None:
    text = help.render(CONF, "all")
    fields = leaves(tiny_config())
    assert sorted(help.field_names()) == sorted(fields)
    for field in fields:
        assert f"\n  {field}  (" in text
    for file in (file for conf in (CONF, *help.further_confs()) for file in conf.glob("*/*.yaml")):
        assert file.stem in text.partition("Fields")[0].replace(",", " ").split()
    assert "integer ≥ 1, or null" in text  # a kind in words, not a type's name
    assert "Annotated" not in text
    assert "\n        ppo  clip_low=0.2, clip_high=0.28, dual_clip=None\n" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_short_help_shows_what_people_set_first() -> None:
    text = help.render(CONF)
    shown = set(re.findall(r"\n  ([\w.]+)  \(", text))
    assert shown == {*help.FIRST} & {*help.field_names()}, "all but those of an extension that was deleted"
    assert len(help.FIRST) == 30
    assert "more fields: asyncrl-train --help all" in text
    section = help.render(CONF, "trainer.recompute")
    assert set(re.findall(r"\n  ([\w.]+)  \(", section)) == {n for n in help.field_names() if ".recompute." in n}


def test_help_about_a_word_shows_its_fields_or_none() -> None:
    assert "checkpoint.every  (" in help.render(CONF, "every")
    assert help.render(CONF, "wandbb") == "No field has 'wandbb' in its name or meaning: see --help all."


def test_help_names_no_type_of_python() -> None:
    kinds = {field.name: field.kind for section in help.sections() for field in section.fields}
    assert {name: kind for name, kind in kinds.items() if re.search(r"[\[\]]|\b[A-Z][a-z]+[A-Z]|float$", kind)} == {}
    assert kinds["trainer.lora.targets"] == "all or list of texts"


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_ends_well(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["asyncrl-train", flag])
    module.main()
    assert "rollout.max_staleness" in capsys.readouterr().out


def test_installed_command_finds_modules_in_the_current_folder(tmp_path: Path) -> None:
    """Python puts the folder of an installed script, not the current one, on the module path."""
    (tmp_path / "mine.py").write_text("class Task: ...")
    script = "from asyncrl.launch.main import main; main()"
    words = ("--check", "experiment=tiny", "task=own", "task.kind=mine:Task", "run.dir=run")
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "Must be a class with question(index)" in done.stdout, done.stdout + done.stderr


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return forked(module.main, *arguments, cwd=cwd)


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("experiment=tinny", "experiment=tiny?"),
        ("task=prodcts", "task=products?"),
        ("rollout.stp=1", "rollout.stop?"),
        ("trainer.lr=1e-5", "trainer.optimizer.lr?"),
    ],
)
def test_misspelt_option_or_field_is_answered_with_the_nearest(word: str, near: str, tmp_path: Path) -> None:
    assert f"Did you mean {near}" in command(word, cwd=tmp_path).stderr


@pytest.mark.parametrize(
    ("word", "remedy"),
    [("run.dir=lr=1", """A text needs quotes: 'run.dir="lr=1"'"""), ("run.dir", "Write FIELD=VALUE.")],
)
def test_what_hydra_cannot_read_is_told_with_its_remedy(word: str, remedy: str, tmp_path: Path) -> None:
    assert f"{word}: Hydra cannot read it. {remedy}" in command(word, cwd=tmp_path).stderr


@pytest.mark.parametrize(
    "text", ["/runs/a-1_b.c", "lr=1,2", "ünï it's", 'a "b"', "{a: 1}", "back\\slash \\", "", "null"]
)
def test_argument_of_any_text_is_read_as_that_text(text: str) -> None:
    assert OverridesParser.create().parse_override(argument("run.dir", text)).value() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rollout.max_stalenes=1", "rollout.max_staleness"),
        ("engine.speculative=ngram", "engine.speculative'. It was removed: speculative decoding is set by"),
        ("actor_rollout_ref.actor.clip_ratio=0.2", "docs/coming_from.md says what settings of verl"),
        ("rollout.nothing_like_it=1", "asyncrl-train --help all lists every field"),
        ("rollout.lead=9", "rollout.lead: got 9. Must not exceed rollout.max_staleness (2)"),
        ("task=copy model.path=/no/such/folder", "model.path: got '/no/such/folder'"),
        ("experiment=nothing", "nothing"),
        (
            "task=copy model.chat_template=/no/such.jinja",
            "model.chat_template: got '/no/such.jinja'. There is no such file",
        ),
        ("task=copy task.params.digits=99", "task.params.digits: got 99"),
    ],
)
def test_wrong_setting_exits_with_2_one_message_and_no_folder(arguments: str, message: str, tmp_path: Path) -> None:
    done = command(*arguments.split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- the run folder -----------------------------------------------------------------------------------------


def old_run(folder: Path) -> Path:
    take(folder)
    (folder / "config.json").write_text("{}")
    return folder


def prepared(folder: Path, *, overwrite: bool, **changes: Any) -> None:
    prepare(tiny_config(**{"run.overwrite": overwrite, "run.dir": str(folder), **changes}), folder)


@pytest.mark.parametrize("overwrite", [False, True])
def test_new_or_empty_folder_is_taken(overwrite: bool, tmp_path: Path) -> None:
    prepared(tmp_path / "new", overwrite=overwrite)
    prepared(tmp_path, overwrite=overwrite)
    assert tmp_path.is_dir()
    (tmp_path / "logs").mkdir()  # of a launcher that was killed at once
    (tmp_path / "lock").touch()
    prepared(tmp_path, overwrite=overwrite)


def test_filled_folder_is_never_silently_overwritten(tmp_path: Path) -> None:
    folder = old_run(tmp_path / "run")
    with pytest.raises(
        ConfigError, match=r"The folder is not empty: choose another, or set run.overwrite=true"
    ) as found:
        prepared(folder, overwrite=False)
    assert (found.value.field, found.value.value) == ("run.dir", str(folder))
    assert (folder / "config.json").exists()
    held = lock(folder)
    with pytest.raises(ConfigError, match="A run is already using this folder"):
        prepared(folder, overwrite=True)
    os.close(held)
    prepared(folder, overwrite=True)
    assert not folder.exists()


def test_folder_of_something_else_is_not_emptied_even_when_asked(tmp_path: Path) -> None:
    """Nor a model's, which has a config.json as well."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"has no {MARK}, so it is not a run folder") as caught:
        prepared(tmp_path, overwrite=True)
    assert caught.value.field == "run.overwrite"
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize(
    ("field", "name"),
    [("model.path", "hf-8"), ("task.train_file", "questions.jsonl"), ("eval.sets", "held-out.jsonl")],
)
def test_folder_that_holds_what_the_run_reads_is_not_emptied(field: str, name: str, link: bool, tmp_path: Path) -> None:
    folder = old_run(tmp_path / "run")
    (folder / name).touch()
    (tmp_path / "link").symlink_to(folder)
    path = str((tmp_path / "link" if link else folder) / name)
    values = compose_values("experiment=tiny", f"run.dir={folder}", "run.overwrite=true")
    if field == "eval.sets":
        values["eval"] |= {"questions": 1, "sets": {"other": {**values["task"], "kind": "file", "eval_file": path}}}
        field = "eval.sets.other.eval_file"
    else:
        section, key = field.split(".")
        values[section][key] = path
    with pytest.raises(ConfigError, match=r"inside run\.dir, which run\.overwrite=true would empty") as caught:
        prepare(load(values), folder)
    assert caught.value.field == field
    assert (folder / name).exists()


def test_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    take(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def shell(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = ["sh", "-c", script, "sh", sys.executable, "-m", "asyncrl.launch.main", *arguments]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("preflight", [True, False])
def test_read_only_folder_is_refused_by_name(preflight: bool, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    script = 'unshare -rm sh -c \'mount -t tmpfs -o ro none . && cd . && exec "$@"\' sh "$@"'
    settings = ("experiment=tiny", f"run.dir={tmp_path}/run", f"cluster.preflight={preflight}")
    done = shell(script, *settings, cwd=tmp_path)
    assert done.returncode == (1 if "Preflight failed" in done.stderr else 2), done.stderr
    said = " ".join((done.stdout + done.stderr).split())  # lines of the preflight are wrapped
    assert "run.dir" in said
    assert "Read-only file system" in said
    assert "Traceback" not in said


def test_few_open_files_are_refused_up_to_the_hard_limit(tmp_path: Path) -> None:
    done = shell('ulimit -n 64 && exec "$@"', "experiment=tiny", f"run.dir={tmp_path}/run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "ulimit -n: got 64. Processes of a run open more files: allow at least 1024" in done.stderr
    assert list(tmp_path.iterdir()) == []
    told = "import resource as r; from asyncrl.launch.machine import allow_files as f; f(); print(r.getrlimit(7))"
    words = ["sh", "-c", f'ulimit -Sn 64 && ulimit -Hn 4096 && exec "{sys.executable}" -c "{told}"']
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == "(4096, 4096)"


def test_unwritable_folder_is_explained_and_others_are_not(tmp_path: Path) -> None:
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "gone" / "stop"))
    assert "It was removed or moved during the run" in str(explained(missing, tmp_path / "gone"))
    assert explained(missing, tmp_path) is None


def test_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        prepared(tmp_path / "file", overwrite=False)
    assert caught.value.field == "run.dir"


def test_refused_model_leaves_the_old_run_in_place(tmp_path: Path) -> None:
    folder = old_run(tmp_path / "run")
    done = command(f"run.dir={folder}", "run.overwrite=true", "model.path=/no/such/folder", cwd=tmp_path)
    assert done.returncode == 2
    assert (folder / "config.json").exists()


def test_going_on_by_itself_needs_a_folder_that_is_found_again() -> None:
    for overrides, fine in ((["resume=auto"], False), (["resume=auto", "run.dir=/runs/a"], True), ([], True)):
        with initialize_config_dir(str(CONF), version_base=None):
            composed = compose("train", ["experiment=tiny", *overrides])
        values: Any = OmegaConf.to_container(composed, resolve=True)
        if fine:
            check_resume(values, composed)
        else:
            with pytest.raises(ConfigError, match=r"resume: got 'auto'. run.dir is a new folder each time"):
                check_resume(values, composed)


def test_sweep_names_differences_and_ends_with_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(config: Any, folder: Path, began: float, arguments: Any) -> None:
        if "algo.beta=2" in arguments:
            raise ProcessDied("planted")
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text('{"steps": 3, "reward/last": 0.5}')

    monkeypatch.setattr(run, "launch", launch)
    config = tiny_config(**{"run.dir": str(tmp_path)})
    composed = [(config, ["experiment=tiny", f"algo.beta={value}"]) for value in (1, 2)]
    with pytest.raises(ProcessDied):
        run.start(composed, 0.0)
    assert capsys.readouterr().out.splitlines() == [
        "asyncrl: run 1 of 2: algo.beta=1",
        "asyncrl: run 2 of 2: algo.beta=2",
        "run  settings     steps  reward/last  accuracy/after  samples_per_s",
        "0    algo.beta=1  3      0.5          -               -",
        "1    algo.beta=2  -      -            -               -",
    ]
