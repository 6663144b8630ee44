"""Each recipe is a folder with its code, an experiment of the same name, a page and a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config import load
from asyncrl.rollout.agent import agents
from asyncrl.tasks.build import build_all
from tests.fakes import compose_values

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(folder for folder in (ROOT / "recipes").iterdir() if (folder / "__init__.py").exists())


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_recipe_has_an_experiment_a_page_and_a_test(folder: Path) -> None:
    assert (folder / "conf" / "experiment" / f"{folder.name}.yaml").is_file()
    assert (ROOT / "tests" / "recipes" / f"test_{folder.name}.py").is_file()
    assert f"experiment={folder.name}" in (folder / "README.md").read_text()
    assert f"({folder.name}/README.md)" in (ROOT / "recipes" / "README.md").read_text()


@pytest.mark.parametrize("folder", RECIPES, ids=lambda folder: folder.name)
def test_experiment_uses_the_code_of_its_recipe_and_has_agents(folder: Path) -> None:
    config = load(compose_values(f"experiment={folder.name}"))
    assert f'"asyncrl_recipes.{folder.name}.' in config.model_dump_json()
    assert agents(config, build_all(config), print).keys() == (config.mixture | config.eval_sets).keys()
