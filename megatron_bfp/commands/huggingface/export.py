"""``megatron-bfp export-huggingface``: a checkpoint of the example trainer to a folder that transformers loads."""

import argparse
import re

from ...console import say
from ...errors import OptionError
from ...progress import terminal_progress
from ...tokenizers.registry import load_tokenizer
from ..shared import add_overwrite, add_tokenizer

DESCRIPTION = (
    "Write a checkpoint of examples/pretrain_gpt.py as a Hugging Face LLaMA model: config.json, "
    "generation_config.json, safetensors and the tokenizer. Any ZeRO stage and tensor-parallel size can be exported. "
    "The folder appears when all of it is written."
)
EPILOG = None
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.usage = "%(prog)s CKPT\n       --output FOLDER [options]"
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a checkpoint, such as CKPT/iter_0001000, or the folder of --save: its latest complete one is exported",
    )
    parser.add_argument("--output", metavar="FOLDER", required=True, help="folder to write the model to")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="type of the weights (default: that of the forward pass in training)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="most bytes of a file of weights, such as 500MB (default: %(default)s)",
    )
    add_overwrite(parser, "a folder that exists (default: refuse to)")
    add_tokenizer(parser, without="the one of the run, as the checkpoint recorded it")


def execute(options: argparse.Namespace) -> None:
    """Export the checkpoint, and say what was written.

    Raises:
        BFPError: bad options, or a checkpoint that cannot be read.
    """
    limit = num_bytes(options.max_shard_size)
    from ...huggingface.checkpoint import TrainerCheckpoint, checkpoint_folder, reading
    from ...huggingface.export import export

    folder = checkpoint_folder(options.checkpoint)
    with reading(folder):
        checkpoint = TrainerCheckpoint(folder)
        kind, path, eod = options.tokenizer_type, options.tokenizer_model, options.eod_token
        if path is None:
            if checkpoint.tokenizer is None:
                raise OptionError(f"{folder}: does not say which tokenizer its run had; give --tokenizer-model")
            recorded = checkpoint.tokenizer
            kind, path = recorded["tokenizer_type"], recorded["tokenizer_model"]
            eod = eod or recorded["eod_token"]
        tokenizer = load_tokenizer(kind, path, eod, bos_token=options.bos_token)
        done = export(
            checkpoint,
            tokenizer,
            path,
            options.output,
            dtype=options.dtype,
            max_shard_bytes=limit,
            overwrite=options.overwrite,
            progress=terminal_progress,
        )
    files = "1 file" if done.num_shards == 1 else f"{done.num_shards} files"
    say(
        f"{options.output}: LlamaForCausalLM with {done.num_parameters:,} parameters in {done.dtype}, "
        f"{done.num_bytes / 1e9:,.3f} GB in {files}, from {folder}"
    )


def num_bytes(text: str) -> int:
    """The bytes that ``--max-shard-size`` names: 5GB, 500MB, 2GiB.

    Raises:
        OptionError: it is no size.
    """
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if not match or match[2].upper() not in UNITS or int(match[1]) == 0:
        raise OptionError(f"--max-shard-size {text}: give a size such as 5GB or 500MB")
    return int(match[1]) * UNITS[match[2].upper()]
