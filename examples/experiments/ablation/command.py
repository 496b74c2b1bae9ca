"""The paper's ablation (appendix C.3) at a size that runs here: does packing train a better model than concatenation?

    python examples/ablation.py --size cpu --output ablation --jobs 2

It trains the same small model on the same Python files in three ways, with several seeds each: concatenation;
concatenation with attention inside documents; best-fit packing. Each run sees every document once. Then it measures all
models on the same held-out files, with one chunk of a document per sequence. The endpoints were decided before the
runs: the difference of perplexity between runs with the same seed, and the same on tokens whose evidence lies further
back than a cut would have left it (``report.py``, ``held_out.py``). Loss by position and by length, and the share of
completions that use undefined names, are reported beside them. Results are kept: rerun the same command to resume.

``--size gpu`` takes ten minutes on one GPU. ``--size full`` is the paper's 7B model of code: it prints the commands of
``examples/cluster/launch`` for the runs that are missing, and measures those that are trained.
"""

import argparse
import dataclasses
import io
import json
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cluster.recipe import read_recipe
from quickstart.data import EOD

from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import InputError, OptionError
from megatron_bfp.files import write_whole
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.progress import terminal_progress

from ..data_methods import (
    COMPARISONS,
    METHODS,
    Comparison,
    Method,
    Methods,
    add_run_options,
    by_method,
    check_run_options,
    check_settings,
    chosen_methods,
    method_runs,
    run_folder,
    seeds_of,
)
from ..training_runs import EXAMPLES, TrainingRun, say, train_all
from .data import CorpusSize, make_corpus, write_cut_documents
from .held_out import read_held_out
from .report import Result, draw, report

TEMPERATURE = 0.6
SAMPLING_SEED = 1
WARMUP_PART = 5
"""The learning rate is warmed up over this part of the steps. A short warm-up makes seeds differ more."""
CUT = "pack_cut"
"""The method of ``--cut-documents``. It tells what comes from cuts, and what from packing."""


class Sampling(NamedTuple):
    """How completions are sampled: the first tokens of held-out documents are the prompts."""

    prompts: int
    completions: int
    """Per prompt."""
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Size:
    """A size of the ablation."""

    options: dict[str, Any]
    """The trainer's options for model and batch."""
    corpus: CorpusSize
    sampling: Sampling


def _model(layers: int, hidden: int, ffn: int, heads: int) -> dict[str, Any]:
    return {"num-layers": layers, "hidden-size": hidden, "ffn-hidden-size": ffn, "num-attention-heads": heads}


SIZES = {
    "test": Size(
        _model(2, 64, 128, 4) | {"seq-length": 128, "micro-batch-size": 8, "global-batch-size": 8, "lr": 3e-3},
        CorpusSize(train_bytes=200_000, valid_documents=40, longest=800, vocab_size=1024),
        Sampling(prompts=16, completions=2, prompt_tokens=32, completion_tokens=32),
    ),
    "cpu": Size(
        _model(1, 64, 192, 4) | {"seq-length": 512, "micro-batch-size": 1, "global-batch-size": 1, "lr": 1e-3},
        CorpusSize(train_bytes=3_700_000, valid_documents=500, longest=1_600, vocab_size=2048),
        Sampling(prompts=128, completions=2, prompt_tokens=96, completion_tokens=64),
    ),
    "gpu": Size(
        _model(6, 512, 1536, 8)
        | {"seq-length": 1024, "micro-batch-size": 32, "global-batch-size": 32, "lr": 2e-3, "bf16": True},
        CorpusSize(train_bytes=40_000_000, valid_documents=1000, longest=8_000, vocab_size=8192),
        Sampling(prompts=512, completions=8, prompt_tokens=384, completion_tokens=192),
    ),
}
FULL_RECIPE = "llama_7b_code_2k"
FULL_SAMPLING = Sampling(prompts=1024, completions=8, prompt_tokens=512, completion_tokens=512)


def chosen_size(options: argparse.Namespace) -> Size:
    """The size that is trained here, with the learning rate of ``--lr``."""
    size = SIZES[options.size]
    return size if options.lr is None else dataclasses.replace(size, options=size.options | {"lr": options.lr})


def small_runs(
    folder: str, size: Size, seeds: Sequence[int], methods: Methods = METHODS, cut_documents: bool = False
) -> tuple[list[TrainingRun], str, Methods]:
    """The runs of a size that is trained here, the prefix of the held-out documents, and the methods of the runs.
    Writes the corpus.

    Args:
        cut_documents: also pack documents that are cut as concatenation cuts them.

    Raises:
        InputError: the corpus cannot be made.
    """
    seq_length, batch = size.options["seq-length"], size.options["global-batch-size"]
    corpus = make_corpus(os.path.join(folder, "corpus"), size.corpus, seq_length)
    steps = (IndexedDataset(corpus.train).num_tokens - 1) // (seq_length * batch)  # concatenation needs one token more
    common = {"data-path": corpus.train, "split": 1, "tokenizer-model": corpus.tokenizer, "eod-token": EOD}
    common |= {"train-iters": steps, "lr-warmup-iters": steps // WARMUP_PART, "min-lr": size.options["lr"] / 10}
    common |= {"num-workers": 0, "log-interval": 10}
    if cut_documents:
        prefix = f"{corpus.train}_cut"
        write_cut_documents(corpus.train, prefix, seq_length)
        methods = methods | {CUT: Method("packing of cut documents", {"data-impl": "bfp", "data-path": prefix})}
    return method_runs(folder, methods, seeds, {**size.options, **common}), corpus.valid, methods


def full_runs(options: argparse.Namespace) -> tuple[list[TrainingRun], list[str]]:
    """The runs of the recipes, and the command for each.

    Raises:
        OptionError: an option is missing, or not for this size.
    """
    if options.packing_options or options.cut_documents or options.lr is not None:
        raise OptionError(
            "--size full takes none of --packing-options, --cut-documents and --lr: its runs are those of the recipes"
        )
    for name in ("data_path", "valid_data", "tokenizer_model"):
        if getattr(options, name) is None:
            raise OptionError(f"--size full needs --{name.replace('_', '-')}")
    runs, commands = [], []
    for seed in seeds_of(options):
        for method in METHODS:
            twin = "" if method == "pack" else f"_{method}"
            path = os.path.join(EXAMPLES, "cluster", "recipes", f"{FULL_RECIPE}{twin}.sh")
            folder = os.path.abspath(run_folder(options.output, method, seed))
            # after the recipe, as DATA_PATH takes no paths with spaces
            words = ["--data-path", *options.data_path, "--seed", str(seed)]
            recipe = read_recipe(path, words).options
            names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length")
            names += ("micro_batch_size", "train_iters", "tokenizer_type")
            of_recipe = {name.replace("_", "-"): getattr(recipe, name) for name in names}
            of_recipe |= {"bf16": True} if recipe.half_precision else {}
            of_recipe |= {"tokenizer-model": options.tokenizer_model, "data-path": options.data_path}
            runs.append(TrainingRun(f"{method}, seed {seed}", folder, of_recipe))
            variables = {"DATA_PATH": " ".join(options.data_path), "TOKENIZER_MODEL": options.tokenizer_model}
            variables["OUTPUT"] = folder
            assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
            commands.append(f"{assignments} {options.launcher} {shlex.join([path, *words])}")
    return runs, commands


def measure(training: TrainingRun, valid: str, sampling: Sampling) -> Result:
    """Measure a trained model, or read its result if it was measured before."""
    path, losses_path = (os.path.join(training.folder, name) for name in ("result.json", "token_losses.npy"))
    if not os.path.exists(path):
        from ..sampling import sample
        from ..trained_model import load_model, target_losses

        trained = load_model(training.trainer_options(), training.checkpoint())
        say(f"{training.name}: measuring")
        losses = io.BytesIO()
        np.save(losses, target_losses(trained, valid).astype(np.float32))
        prompts, _ = prompts_and_continuations(valid, sampling)
        repeated = np.repeat(prompts, sampling.completions, axis=0)
        added = sample(trained, repeated, sampling.completion_tokens, TEMPERATURE, SAMPLING_SEED, terminal_progress)
        files = completed_files(trained.tokenizer, prompts, added.reshape(*prompts.shape[:1], sampling.completions, -1))
        write_whole(losses_path, losses.getvalue())
        write_whole(path, json.dumps(files, indent=1).encode())
    with open(path, encoding="utf-8") as file:
        return Result.of(np.load(losses_path, allow_pickle=False).astype(np.float64), json.load(file))


def prompts_and_continuations(valid: str, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The first tokens of held-out documents, and the tokens that follow them: int64 [prompts, tokens] each. Shorter
    documents are left out.

    Raises:
        InputError: no document is long enough.
    """
    dataset = IndexedDataset(valid)
    lengths = np.concatenate([*dataset.checked_lengths()])
    whole = sampling.prompt_tokens + sampling.completion_tokens
    long_enough = np.flatnonzero(lengths >= whole)[: sampling.prompts]
    if not len(long_enough):
        raise InputError(f"{valid}: no document has the {whole} tokens of a prompt and its continuation")
    tokens = np.stack([dataset.document(int(document))[:whole] for document in long_enough]).astype(np.int64)
    return tokens[:, : sampling.prompt_tokens], tokens[:, sampling.prompt_tokens :]


def completed_files(tokenizer: Any, prompts: np.ndarray, added: np.ndarray) -> dict[str, list]:
    """Static analysis of completions, which end at the first EOD, and their texts.

    Args:
        prompts: int64 [prompts, tokens].
        added: int64 [prompts, completions, tokens].

    Returns:
        "parses", "undefined" and "completions": for each prompt, a list with an entry per completion.
    """
    from .undefined_names import check_completion

    results: dict[str, list] = {"parses": [], "undefined": [], "completions": []}
    for prompt, completions in zip(prompts, added):
        before = tokenizer.decode(prompt.tolist())
        texts = [_text(tokenizer, completion) for completion in completions]
        checked = [check_completion(before, text) for text in texts]
        results["parses"].append([file.parses for file in checked])
        results["undefined"].append([file.undefined for file in checked])
        results["completions"].append(texts)
    return results


def _text(tokenizer: Any, completion: np.ndarray) -> str:
    ends = np.flatnonzero(completion == tokenizer.eod)
    return tokenizer.decode(completion[: ends[0] if len(ends) else None].tolist())


def reference(trainer_options: Sequence[str], valid: str, sampling: Sampling) -> Result:
    """The held-out documents' own continuations, analysed like completions: the share of undefined names that comes
    from cutting files off. They have no losses."""
    from trainer.arguments import parse_arguments

    from megatron_bfp.tokenizers.registry import load_tokenizer

    config = parse_arguments(trainer_options)
    tokenizer = load_tokenizer(config.tokenizer_type, config.tokenizer_model, config.eod_token)
    prompts, continuations = prompts_and_continuations(valid, sampling)
    files = completed_files(tokenizer, prompts, continuations[:, None])
    return Result.of(np.array([]), files)


def main() -> None:
    """Train, measure, report, draw.

    Raises:
        BFPError: bad options or data, or a trainer failed.
    """
    options = _parse()
    os.makedirs(options.output, exist_ok=True)
    methods, comparisons = METHODS, COMPARISONS
    if options.size == "full":
        check_settings(options.output, (FULL_RECIPE, FULL_SAMPLING))
        (runs, commands), valid, sampling = full_runs(options), options.valid_data, FULL_SAMPLING
        missing = [command for training, command in zip(runs, commands) if not training.is_done()]
        for training in runs:
            if training.is_done():
                measure(training, valid, sampling)
        if missing:
            print(f"{len(missing)} of {len(runs)} runs are not trained. Train them, then rerun this command:")
            print(*missing, sep="\n", flush=True)
            return
    else:
        size = chosen_size(options)
        check_settings(options.output, (size, WARMUP_PART))
        sampling = size.sampling
        methods, comparisons = chosen_methods(options.packing_options)
        if options.cut_documents:
            comparisons = (*comparisons, Comparison(CUT, "concat_masked"), Comparison("pack", CUT))
        runs, valid, methods = small_runs(options.output, size, seeds_of(options), methods, options.cut_documents)
        for _ in train_all(runs, options.jobs, lambda training: measure(training, valid, sampling)):
            pass
    results = by_method(methods, [measure(training, valid, sampling) for training in runs])
    held_out = read_held_out(valid, runs[0].options["seq-length"])
    completed = reference(runs[0].trainer_options(), valid, sampling)
    text = report(results, completed, held_out, methods, comparisons)
    figure = os.path.join(options.output, "ablation.png")
    draw(figure, results, held_out, methods, comparisons)
    write_whole(os.path.join(options.output, "ablation.md"), (text + "\n").encode())
    print(text, f"Figure: {figure}", sep="\n\n", flush=True)


def _parse() -> argparse.Namespace:
    parser = Parser(prog="ablation", description="Compare concatenation, with and without document mask, and packing.")
    parser.add_argument(
        "--size",
        choices=(*SIZES, "full"),
        required=True,
        help="test: a minute; cpu: an hour; gpu: ten minutes; full: the paper's (required)",
    )
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="for corpus, models and the report (required)"
    )
    add_run_options(parser, seeds=8)
    parser.add_argument(
        "--lr",
        type=float,
        metavar="X",
        help="peak learning rate, to compare how much seeds differ (default: the size's)",
    )
    parser.add_argument(
        "--cut-documents",
        action="store_true",
        help="also pack documents that are cut as concatenation cuts them (default: off)",
    )
    full = parser.add_argument_group("with --size full")
    full.add_argument("--data-path", nargs="+", metavar="[WEIGHT] PREFIX", help="datasets to train on (required)")
    full.add_argument("--valid-data", metavar="PREFIX", help="held-out Python files, as a dataset (required)")
    full.add_argument("--tokenizer-model", metavar="FILE", help="of the datasets (required)")
    full.add_argument(
        "--launcher",
        default="sbatch --nodes 32 examples/cluster/launch/slurm.sh",
        metavar="COMMAND",
        help="for the printed commands (default: %(default)s)",
    )
    options = parser.parse_args()
    check_run_options(options)
    if options.lr is not None and not 0 < options.lr < math.inf:
        raise OptionError(f"--lr {options.lr}: must be above 0")
    return options


def console() -> int:
    """Run the command; returns its exit status."""
    return run(main, "ablation")
