"""Evaluate an exported model with lm-eval: on its own tasks, or on documents of yours, which needs no network.

    python examples/huggingface/evaluate.py MODEL --documents held_out.jsonl
    python examples/huggingface/evaluate.py MODEL --tasks hellaswag,arc_easy

A file of documents becomes a task, whose figures are bits per byte and the perplexity of bytes and of words. They
compare models with different tokenizers.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_bfp.console import say

MEASURES = ("bits_per_byte", "byte_perplexity", "word_perplexity")


def task_of_documents(path: str) -> dict[str, Any]:
    """lm-eval's description of a task: the likelihood of each document.

    Args:
        path: a JSON Lines file of objects with "text".
    """
    return {
        "task": "documents",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": os.path.abspath(path)}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in MEASURES],
    }


def evaluate(folder: str, tasks: Sequence[str | dict[str, Any]], device: str | None = None) -> dict[str, Any]:
    """lm-eval's results of each task, by its name.

    Args:
        folder: of a model that transformers loads.
        tasks: names of lm-eval's tasks, or descriptions.
        device: "cuda", "cpu" or the like; None for a GPU if there is one.
    """
    import lm_eval

    results = lm_eval.simple_evaluate("hf", {"pretrained": folder}, list(tasks), device=device, bootstrap_iters=0)
    return results["results"]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the results as JSON."""
    parser = argparse.ArgumentParser(description="Evaluate an exported model with lm-eval.")
    parser.add_argument("model", metavar="MODEL", help="folder of the model")
    parser.add_argument("--tasks", default="", metavar="NAME,...", help="lm-eval's tasks; most need the network")
    parser.add_argument("--documents", metavar="FILE", help='JSON Lines file of objects with "text"')
    parser.add_argument("--device", help="cuda, cpu or the like (default: a GPU if there is one)")
    options = parser.parse_args(argv)
    tasks: list[str | dict[str, Any]] = [name for name in options.tasks.split(",") if name]
    tasks += [task_of_documents(options.documents)] if options.documents else []
    if not tasks:
        parser.error("give --tasks or --documents")
    say(json.dumps(evaluate(options.model, tasks, options.device), indent=1, default=str))


if __name__ == "__main__":
    main()
