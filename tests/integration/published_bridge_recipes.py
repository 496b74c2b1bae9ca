"""How many of Megatron-Bridge's published recipes for pre-training on text can use packed samples, and why not others.

    PYTHONPATH=. PYTHON tests/integration/published_bridge_recipes.py [--json]

PYTHON is one with Megatron-Bridge; neither a GPU nor a network is needed. Each recipe is built by its own function,
gets the one line and a data path, and is checked as Megatron-Bridge's ``validate`` would have it checked. The model's
sizes would come from the Hugging Face hub: a small model stands in, and the recipe then sets what it sets. Whether all
layers of a model keep to boundaries is only seen in the first training step.
"""

import importlib
import json
import logging
import os
import pkgutil
import sys
from argparse import Namespace
from collections import Counter

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "megatron_bridge_on_cpu"))

import on_cpu
from megatron.bridge import AutoBridge, recipes
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mamba.mamba_provider import MambaModelProvider
from transformers import AutoConfig

from megatron_bfp.errors import OptionError
from megatron_bfp.integrations.megatron_bridge import BFPDatasetProvider

NOT_TEXT = ("flux", "wan", "_vl", "_omni", "_audio", "common", "utils", "run_plugins")
"""In the names of modules whose recipes train on images, video or sound, or that have no recipes."""


MODEL_SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512, "seq_length": 1}


class SmallBridge:
    """Takes the place of ``AutoBridge``, which would ask the Hugging Face hub for the sizes of a model."""

    def __init__(self, model: str) -> None:
        self.model = model

    def to_megatron_provider(self, *_, **__):
        provider = (MambaModelProvider if "nemotron" in self.model.lower() else GPTModelProvider)(**MODEL_SIZES)
        provider.to_text_provider = lambda: provider
        return provider

    get_model_config = to_megatron_provider


def without_network() -> None:
    """Let recipes be built without the Hugging Face hub."""
    AutoBridge.from_hf_pretrained = lambda model, *_, **__: SmallBridge(model)
    AutoBridge.from_hf_config = lambda *_, **__: SmallBridge("")
    AutoConfig.from_pretrained = lambda *_, **__: Namespace(text_config=Namespace())


def recipes_of_text():
    """The functions that build a recipe for pre-training on text, by name."""
    functions = {}
    for module in pkgutil.walk_packages(recipes.__path__, f"{recipes.__name__}."):
        path = module.name.removeprefix(f"{recipes.__name__}.")
        if any(word in path for word in NOT_TEXT):
            continue
        for name, function in vars(importlib.import_module(module.name)).items():
            is_recipe = "pretrain" in name and name.endswith("_config") and not name.startswith("_")
            if is_recipe and callable(function) and function.__module__.startswith(recipes.__name__):
                functions[function.__name__] = function  # which may have older names, too
    return functions


def verdict(function) -> str:
    """The setting that stands in the way of a recipe; empty if none does."""
    cfg = function()
    if cfg.model.seq_length == MODEL_SIZES["seq_length"]:
        cfg.model.seq_length = cfg.dataset.seq_length  # the recipe leaves it to the model that is not here
    try:
        cfg.dataset = BFPDatasetProvider.of(cfg.dataset)
        cfg.dataset.data_path = "data_text_document"
        cfg.dataset.fit(cfg)
        cfg.dataset.finalize()
    except OptionError as error:
        return str(error).split()[0]
    return ""


def main() -> None:
    """Print the count."""
    logging.disable(logging.WARNING)
    without_network()
    verdicts = {name: verdict(function) for name, function in sorted(recipes_of_text().items())}
    if "--json" in sys.argv:
        print(json.dumps({"versions": on_cpu.VERSIONS, "verdicts": verdicts}))
        return
    accepted = sum(not reason for reason in verdicts.values())
    print(f"{accepted} of {len(verdicts)} recipes ({100 * accepted / len(verdicts):.0f} %) can use packed samples")
    for reason, count in Counter(filter(None, verdicts.values())).most_common():
        print(f"{count:3} {reason}: {', '.join(name for name, of in verdicts.items() if of == reason)}")


main()
