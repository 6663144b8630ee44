"""`asyncrl-convert`: convert models and adapters between Hugging Face and Megatron, import slime's rollouts, and export
recordings.

examples:
    asyncrl-convert to-megatron Qwen3-0.6B checkpoints/start --dtype bfloat16
    asyncrl-convert to-hf checkpoints/iter_0000100 exported --model Qwen3-0.6B
    asyncrl-convert merge Qwen3-0.6B adapter merged
    asyncrl-convert dequantize DeepSeek-V3.1 deepseek-bf16
    asyncrl-convert to-hf RUN/checkpoints/00000040 exported
    asyncrl-convert to-peft RUN/checkpoints/00000040 adapter
    asyncrl-convert from-slime debug/data_*.pt RUN
    asyncrl-convert export RUN rollouts.parquet
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import AsyncRLError, ConfigError, visible

SHARD_GB = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one conversion. Returns 0 on success, 2 for wrong arguments and 1 for any other error, after one line on
    stderr."""
    arguments = _parser().parse_args(argv)
    if arguments.command in ("from-slime", "export"):
        return _rollouts(arguments)
    import torch  # imported after parsing, so that --help and mistakes are answered immediately
    from safetensors import SafetensorError

    from asyncrl.extensions.convert import adapters, bridge
    from asyncrl.extensions.convert.folders import check_output

    try:
        for field in ("source", "adapter"):
            if folder := getattr(arguments, field, None):
                if not folder.is_dir():
                    raise ConfigError(field, str(folder), "It is not a folder.")
                check_output(folder, arguments.out, overwrite=arguments.overwrite)
        name, limit = getattr(arguments, "dtype", None), int(getattr(arguments, "shard_gb", SHARD_GB) * 1e9)
        dtype = getattr(torch, name) if name else None
        match arguments.command:
            case "to-megatron":
                bridge.to_megatron(arguments.source, arguments.out, dtype=dtype, limit=limit)
            case "to-hf":
                adapters.checkpoint_to_hf(
                    arguments.source, arguments.out, model=arguments.model, dtype=dtype, limit=limit
                )
            case "dequantize":
                bridge.dequantize(arguments.source, arguments.out, limit=limit)
            case "merge":
                adapters.merge(arguments.source, arguments.adapter, arguments.out, limit=limit)
            case "to-peft":
                adapters.to_peft(arguments.source, arguments.out, model=arguments.model)
            case "from-peft":
                adapters.from_peft(arguments.source, arguments.out, model=arguments.model, limit=limit)
    except (AsyncRLError, OSError, SafetensorError) as error:
        print(visible(f"asyncrl-convert: error: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _rollouts(arguments: argparse.Namespace) -> int:
    from asyncrl.extensions.convert import rollouts

    os.umask(0o077)  # as in a run: only the user may read what models wrote
    try:
        if arguments.command == "export":
            print(f"{rollouts.export(arguments.run, arguments.out)} trajectories")
        else:
            taken, left = rollouts.from_slime(arguments.dumps, arguments.out, reward_key=arguments.reward_key)
            print(
                f"{taken} samples, {left} left out; to train on them: asyncrl-train mode=replay "
                f"replay.from={arguments.out}"
            )
    except (AsyncRLError, OSError) as error:
        print(visible(f"asyncrl-convert: error: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    into = commands.add_parser("to-megatron", help="write a checkpoint that Megatron loads under any layout")
    into.add_argument("source", type=Path, metavar="HF_FOLDER", help="config, tokenizer and safetensors files")
    out = commands.add_parser("to-hf", help="write a folder that transformers and SGLang load")
    out.add_argument("source", type=Path, metavar="CHECKPOINT", help="of a run, or a torch_dist folder of Megatron")
    out.add_argument(
        "--model", type=Path, metavar="HF_FOLDER", help="config and tokenizer (default: the run's, or CHECKPOINT/hf)"
    )
    merge = commands.add_parser("merge", help="write a model with a PEFT adapter in its weights")
    merge.add_argument("source", type=Path, metavar="HF_FOLDER", help="the model that the adapter was trained on")
    merge.add_argument("adapter", type=Path, metavar="PEFT_FOLDER", help="adapter_config.json and safetensors file")
    plain = commands.add_parser(
        "dequantize", help="write a folder in FP8 or MXFP4, as DeepSeek-V3's or gpt-oss', in bfloat16"
    )
    plain.add_argument("source", type=Path, metavar="HF_FOLDER", help="FP8 with scales of 128 x 128 blocks, or MXFP4")
    peft = commands.add_parser("to-peft", help="write the adapters of a checkpoint as a PEFT folder")
    peft.add_argument("source", type=Path, metavar="CHECKPOINT", help="of a run with trainer.lora, or of from-peft")
    peft.add_argument("--model", type=Path, metavar="HF_FOLDER", help="the base model (default: that of the run)")
    back = commands.add_parser("from-peft", help="write a PEFT folder as a checkpoint that Megatron loads")
    back.add_argument("source", type=Path, metavar="PEFT_FOLDER", help="adapter_config.json and safetensors file")
    back.add_argument("--model", type=Path, metavar="HF_FOLDER", required=True, help="the base model")
    for command in (into, out):
        command.add_argument(
            "--dtype", choices=["bfloat16", "float16", "float32"], help="cast to this type (default: unchanged)"
        )
    for command in (into, out, merge, plain, peft, back):
        command.add_argument("out", type=Path, metavar="OUT", help="a new folder; it appears when it is complete")
        command.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    for command in (into, out, merge, plain, back):
        command.add_argument(
            "--shard-gb", type=_positive, default=SHARD_GB, metavar="N", help="maximum size of a file (default: 5)"
        )
    slime = commands.add_parser(
        "from-slime", help="convert slime's rollout dumps to a recording, without executing their pickles"
    )
    slime.add_argument("dumps", type=Path, nargs="+", metavar="DUMP", help="files of --save-debug-rollout-data")
    slime.add_argument("out", type=Path, metavar="OUT", help="folder in which records/ is created")
    slime.add_argument("--reward-key", metavar="NAME", help="key of the reward, if rewards are dicts")
    table = commands.add_parser("export", help="write the trajectories of a recording as .jsonl or .parquet")
    table.add_argument("run", type=Path, metavar="RUN", help="folder of a recorded run")
    table.add_argument("out", type=Path, metavar="OUT", help="a new file")
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


if __name__ == "__main__":
    sys.exit(main())
