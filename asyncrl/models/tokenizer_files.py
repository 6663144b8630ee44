"""Writer of the tokenizer files of a Hugging Face folder, without `save_pretrained`.

`save_pretrained` would add traces of the loader: its paths, and a class name that only transformers 5 knows.
"""

from __future__ import annotations

import json
from pathlib import Path


def write_tokenizer(
    folder: Path, tokenizer_json: str, chat_template: str, special: dict[str, str], max_length: int
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja.

    `special` maps roles to tokens, as in {"eos_token": "<eos>"}; each token must be in `tokenizer_json`.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": max_length,
        "padding_side": "left",
        # True would change " ." into "." when decoding, but the text must follow from the token ids alone.
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
