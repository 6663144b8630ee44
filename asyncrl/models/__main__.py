"""Write one built-in model as a Hugging Face folder: `python -m asyncrl.models NAME --out DIR`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.models.catalog import BUILTIN


def main() -> None:
    """Parse the command line and write the model."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl.models", description=__doc__)
    parser.add_argument("name", choices=sorted(BUILTIN))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"--out {arguments.out} exists already: give a new folder, or delete it")
    # Set before transformers is imported: all sources are local, and an unreachable hub would cost minutes.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        BUILTIN[arguments.name].write(arguments.out)
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
