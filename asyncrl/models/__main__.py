"""Write one built-in model as a Hugging Face folder: `python -m asyncrl.models NAME FOLDER`, as catalog.py does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from asyncrl.models.catalog import builtin

if __name__ == "__main__":
    # Set before transformers is imported: all sources are local, and an unreachable hub would cost minutes.
    os.environ["HF_HUB_OFFLINE"] = "1"
    builtin()[sys.argv[1]].write(Path(sys.argv[2]))
