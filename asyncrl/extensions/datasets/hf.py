"""Questions from a dataset of the Hugging Face Hub, or from a folder that holds one: task=hf task.dataset=openai/gsm8k.

A folder is read without the package `datasets`: files named after a split, as repositories have them
(train.jsonl, data/train-00000-of-00001.parquet), or a folder for each split, as `save_to_disk` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.tasks.files import FileTask
from asyncrl.tasks.rows import rows_of_file

SUFFIXES = (".parquet", ".jsonl", ".json", ".arrow")


class HfTask(FileTask):
    """Rows of the splits task.train_split and task.eval_split."""

    SOURCES = ("eval_split", "train_split")

    def _read(self, field: str, source: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a split. Raises ConfigError."""
        name = self._config.dataset
        if not name:
            raise ConfigError("task.dataset", name, "Name a dataset of the Hub, as openai/gsm8k, or a folder.")
        folder = Path(name).expanduser()
        if not folder.is_dir():
            return _of_hub(field, name, self._config.subset, source)
        files = _files(folder / (self._config.subset or ""), source)
        if not files:
            remedy = f"{folder} has no files of this split: download the dataset into it, or name another split."
            raise ConfigError(field, source, remedy)
        return (row for file in files for row in rows_of_file(field, str(file)))


def _files(folder: Path, split: str) -> list[Path]:
    """Return the files of a split in order."""
    found = [file for file in folder.rglob("*") if file.suffix in SUFFIXES]
    return sorted(
        file
        for file in found
        if file.name.startswith((f"{split}.", f"{split}-")) or split in file.relative_to(folder).parts[:-1]
        if file.suffix != ".json" or file.stem not in ("dataset_info", "state", "dataset_dict")  # of save_to_disk
    )


def _of_hub(field: str, name: str, subset: str | None, split: str) -> Iterator[dict[str, Any]]:
    """Return the rows of a split of the Hub, which are downloaded once and then cached. Raises ConfigError."""
    try:
        import datasets
        import datasets.exceptions
        import httpx
    except ImportError:
        remedy = "There is no such folder, and the Hub's need the package datasets: pip install 'asyncrl[hf]'."
        raise ConfigError("task.dataset", name, remedy) from None
    try:
        found = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        remedy = (
            f"Split {split} cannot be loaded ({type(error).__name__}: {str(error)[:300]}). Without a network, run on a "
            f"machine with one: hf download --repo-type dataset {name} --local-dir FOLDER, and set task.dataset=FOLDER."
        )
        raise ConfigError("task.dataset", name, remedy) from None
    for column, feature in found.features.items():
        if type(feature).__name__ == "Image":  # as bytes, which image_key reads
            found = found.cast_column(column, datasets.Image(decode=False))
    return map(dict, found)
