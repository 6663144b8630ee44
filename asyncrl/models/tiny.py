"""Small models with random weights: the 0.13M-parameter Llama of tests and CI, and a small model of any family.

The tiny model reads and writes single characters: digit d is token d. It learns to copy three digits in about 200 steps
of 256 answers (lr 1e-3). torch, transformers and tokenizers are imported inside functions, because the launcher imports
this module through catalog.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from asyncrl.models.families import of_type

TOKENS = (*"0123456789", "<eos>", "=", "<bos>", "<pad>", "<unk>", " ")
"""The vocabulary; a token's index is its id."""
BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"
MAX_POSITIONS = 64
NORM = re.compile(r"(norm[12]?|ln_q)\.weight$")
"""Names of norms, in text models and in vision towers."""

# "<bos>question=" is a prompt and "<bos>question=answer<eos>" a dialogue: the prompt is a prefix of its dialogue.
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '=' + message['content'] + '<eos>' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '=' }}{% endif %}"
)


def write(folder: Path) -> None:
    """Write the tiny model and its tokenizer into the new folder `folder`; the bytes are the same every time."""
    write_random_model(
        folder,
        "llama",
        vocab=len(TOKENS),
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=4,
        intermediate=256,
        tied=False,
        seed=0,
        dtype="float32",
        max_positions=MAX_POSITIONS,
        bos_eos_pad=(TOKENS.index(BOS), TOKENS.index(EOS), TOKENS.index(PAD)),
    )
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK}
    write_tokenizer(folder, tokenizer_json(TOKENS, UNK, (BOS, EOS, PAD, UNK)), CHAT_TEMPLATE, special, MAX_POSITIONS)


def tokenizer_json(tokens: Sequence[str], unknown: str, special: Sequence[str]) -> str:
    """Return tokenizer.json of a tokenizer that splits text into single characters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without a decoder, tokens would be joined by spaces
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return str(tokenizer.to_str(pretty=True))


def write_random_model(
    folder: Path,
    arch: str,
    *,
    vocab: int,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    tied: bool,
    seed: int,
    dtype: Literal["float32", "bfloat16"],
    max_positions: int = 512,
    bos_eos_pad: tuple[int | None, int | None, int | None] = (None, None, None),
    spread: float = 0.02,
    fields: dict[str, Any] | None = None,
) -> None:
    """Write a model without a tokenizer into `folder`. Its weights depend only on its config and seed.

    `arch` is transformers' model type of a record of models/families; `fields` are further fields of its config.
    `spread` is the standard deviation of the weights.

    Example: write_random_model(path, "qwen3", vocab=257, hidden=64, layers=2, heads=4, kv_heads=2,
                                intermediate=128, tied=True, seed=0, dtype="bfloat16")
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = dict(zip(("bos_token_id", "eos_token_id", "pad_token_id"), bos_eos_pad, strict=True))
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,  # Qwen3's default is 128 for all sizes
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
    }
    config = AutoConfig.for_model(arch, **{**sizes, **of_type(arch).tiny, **(fields or {}), **tokens})
    save_random(AutoModelForCausalLM, config, folder, dtype, tokens, seed, spread)


def save_random(
    kind: Any, config: Any, folder: Path, dtype: str, tokens: Mapping[str, int | None], seed: int, spread: float
) -> None:
    """Write a model of transformers' class `kind` with random weights. `tokens` are the ids of its special tokens.

    Every weight is drawn from one generator in the order of names, because a constructor's order may change. Norms get
    the same noise around the constructor's values, so that a mapping that swaps two of them is detected.
    """
    import torch
    from transformers import GenerationConfig

    with torch.random.fork_rng(devices=[]):  # the constructor draws, too: keep the state of the caller's generator
        model = kind.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    biases = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith("_bias")]  # of routers
    with torch.no_grad():
        for name, weight in sorted([*model.named_parameters(), *biases], key=lambda item: item[0]):
            mean = weight.flatten()[0].item() if NORM.search(name) else 0.0
            weight.normal_(mean, spread, generator=generator)
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, dtype))  # buffers stay float32, as in published models
    model.config.dtype = dtype
    model.generation_config = GenerationConfig(**tokens)
    model.save_pretrained(folder)
    # safetensors creates files with mode 0600; the folder must follow the umask, like its other files.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def write_tokenizer(
    folder: Path, tokenizer_json: str, chat_template: str, special: dict[str, str], max_length: int
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, without `save_pretrained`, which would add
    traces of the loader: its paths, and a class name that only transformers 5 knows.

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
