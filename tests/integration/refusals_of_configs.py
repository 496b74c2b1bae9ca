"""Parse command lines with a Megatron's own parser, and list what the plugin refuses of each: for published_configs.py.

Usage: python refusals_of_configs.py CONFIGS.json ANSWERS.json, with the checkout on PYTHONPATH.
"""

import contextlib
import io
import json
import math
import os
import sys

try:
    from megatron.training import arguments

    from megatron_bfp.integrations.megatron_lm import options

    IS_MEGATRON_LM = True
except ImportError:  # Megatron-DeepSpeed, whose megatron.training is a module
    from megatron import arguments

    from megatron_bfp.integrations.megatron_deepspeed import options

    IS_MEGATRON_LM = False
from megatron_bfp.integrations.option_table import remarks

arguments._add_data_args = options.add_options(arguments._add_data_args)


def of_modelopt():
    """What pretrain_gpt.py adds to the parser, if the packages for it are there."""
    try:
        from megatron.post_training.arguments import add_modelopt_args
    except ImportError:
        return None
    return add_modelopt_args


def parsed(words):
    """The options; those that only a script adds may be left out."""
    sys.argv = ["pretrain_gpt.py", *words]
    return arguments.parse_args(of_modelopt() if IS_MEGATRON_LM else None, ignore_unknown_args=True)


def ranks(args):
    """The fewest ranks that the options allow."""
    of = [getattr(args, f"{name}_parallel_size", None) or 1 for name in ("tensor_model", "pipeline_model")]
    layers = math.prod(of) * (getattr(args, "context_parallel_size", None) or 1)
    layers *= getattr(args, "ds_sequence_parallel_size", None) or 1
    experts = (getattr(args, "expert_tensor_parallel_size", None) or 1) * of[1]
    experts *= getattr(args, "expert_model_parallel_size", None) or 1
    return math.lcm(layers, experts)


def answer(config):
    """What the plugin says of a config, before and after Megatron validated the options."""
    os.chdir(config["folder"])
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = config["environment"].get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    failure = ""
    for words in config["command_lines"]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                args = parsed(words)
        except (SystemExit, Exception) as error:
            failure = failure or (said.getvalue().splitlines() or [repr(error)])[-1]
            continue
        return {"name": config["name"], "unread": "", **checked(args)}
    return {"name": config["name"], "unread": failure, "refusals": [], "untested": [], "not_validated": ""}


def checked(args):
    args.world_size = ranks(args)
    if IS_MEGATRON_LM:
        args.dataloader_inter_document_masking = True
    not_validated, before = "", listed(args) if IS_MEGATRON_LM else []
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    except Exception as error:
        not_validated = f"{type(error).__name__}: {error}"[:300]
    after = listed(args)
    lines = [line for line in remarks(options.OPTIONS, args) if "not tested" in line]
    return {"refusals": list(dict.fromkeys(before + after)), "untested": lines, "not_validated": not_validated}


def listed(args):
    return [str(error) for error in options.refusals(args)]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        configs = json.load(file)
    target = os.path.abspath(sys.argv[2])
    answers = [answer(config) for config in configs]
    with open(target, "w", encoding="utf-8") as file:
        json.dump(answers, file)
