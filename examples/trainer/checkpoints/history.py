"""What a run trains on: a resumed run must have the data, the order of samples and the model that it started with.

Each checkpoint records what determines them: options, the fingerprint of each dataset, and a digest of the order of the
samples consumed. The digest is of the order itself, so it catches every change of it, whatever the cause. With
concatenation, that may be ``--train-iters``, which can change the number of epochs. To resume with other data or
another model, give ``--override-checkpoint-args``.

Balancing inside global batches (``--balance-batches`` 0 or 1) may change, as batches keep their samples. Blocks of
several global batches may change only at a step at which both a block of before and one of now begin.
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from megatron.core import parallel_state

from megatron_bfp import BalancedDataset
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.sequence_index.fingerprints import sampled_fingerprint
from megatron_bfp.sequence_index.key import split_fractions

from ..arguments import blend
from ..config import TrainerConfig, flag, key_value_heads
from ..data import origin_of

ORDER_SAMPLES = 16
"""How many of the consumed samples are looked up for the digest of their order."""
DATA_OPTIONS = ("seed", "split", "seq_length", "data_impl", "max_documents_per_sequence")
DATA_OPTIONS += ("even_sequences", "targets_only", "dataloader_inter_document_masking", "eod_mask_loss")
DATA_OPTIONS += ("fim_rate", "fim_spm_rate", "fim_prefix_token", "fim_middle_token", "fim_suffix_token")
ADDED_OPTIONS = {"--even-sequences": False, "--targets-only": False, "--fim-rate": None}
"""Options that older checkpoints do not record, and their values there."""
BLOCK_OPTIONS = ("balance_batches", "global_batch_size", "micro_batch_size")
MODEL_OPTIONS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "rotary_base", "norm_epsilon")
OVERRIDE = "--override-checkpoint-args"
UNRECORDED_BLOCKS = {"--balance-batches": 0}
"""What a run did whose checkpoint does not say how it balanced."""


def describe_run(config: TrainerConfig, tokenizer: Any) -> dict[str, Any]:
    """What determines a run's data and model, as JSON: "options", by name and value, "corpora", "blocks" and
    "tokenizer".

    Raises:
        BFPError: a dataset cannot be read.
    """
    options = {flag(name): getattr(config, name) for name in DATA_OPTIONS + MODEL_OPTIONS}
    options["--num-query-groups"] = key_value_heads(config)
    options["--tokenizer-model (size of its vocabulary)"] = tokenizer.vocab_size
    options["--eod-token (its id)"] = tokenizer.eod
    tokenizer_options = {name: getattr(config, name) for name in ("tokenizer_type", "tokenizer_model", "eod_token")}
    tokenizer_options["tokenizer_model"] = os.path.abspath(config.tokenizer_model)  # for export-huggingface
    description = {"options": options, "corpora": _corpora(config.data_path), "blocks": _blocks(config)}
    return description | {"tokenizer": tokenizer_options}


def _blocks(config: TrainerConfig) -> dict[str, int]:
    """What decides how global batches are composed by cost."""
    blocks = {flag(name): getattr(config, name) for name in BLOCK_OPTIONS}
    return blocks | {"data-parallel ranks": parallel_state.get_data_parallel_world_size()}


def _corpora(data_path: Sequence[str]) -> list[dict[str, Any]]:
    """Each dataset's prefix, fingerprint and share of the samples."""
    prefixes, weights = blend(data_path)
    total = math.fsum(weights) if weights else None
    corpora = []
    for number, prefix in enumerate(prefixes):
        dataset = IndexedDataset(prefix, needs_bin=False)
        fingerprint = sampled_fingerprint(dataset.idx_content)["sampled_sha256"]
        share = weights[number] / total if weights else None
        corpora.append({"prefix": prefix, "documents": dataset.num_documents, "idx": fingerprint, "share": share})
    return corpora


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What a run would change, each with both values: "--seed 1234, not 99".

    Args:
        saved: of ``describe_run``, read from a checkpoint.
        now: the same of this run.
    """
    changes = []
    for name, value in now["options"].items():
        before = saved["options"].get(name, ADDED_OPTIONS.get(name, value))  # it may be newer than the checkpoint
        if not _is_same(name, before, value):
            changes.append(f"{name} {_text(before)}, not {_text(value)}")
    before, after = saved["corpora"], now["corpora"]
    if len(before) != len(after):
        return [*changes, f"--data-path of {len(before)} datasets, not {len(after)}"]
    for old, new in zip(before, after, strict=True):
        if old["idx"] != new["idx"]:
            changes.append(f"--data-path {_corpus(old)}, not {_corpus(new)}")
        elif not _is_same_share(old["share"], new["share"]):
            shares = _percent(old["share"]), _percent(new["share"])
            changes.append(f"--data-path with {shares[0]} of {new['prefix']}, not {shares[1]}")
    return changes


def changed_blocks(saved: dict[str, Any], now: dict[str, Any], iteration: int) -> list[str]:
    """As ``differences``, for blocks of several global batches that a run would leave unfinished or begin inside.

    Args:
        iteration: steps done before.
    """
    before, after = saved.get("blocks", UNRECORDED_BLOCKS), now["blocks"]
    counts = [max(1, blocks["--balance-batches"]) for blocks in (before, after)]
    if counts[0] == counts[1] and (counts[0] == 1 or before == after):
        return []
    boundary = math.lcm(*counts)
    if iteration % boundary == 0:
        return []
    names = after if min(counts) > 1 else ["--balance-batches"]
    changes = [f"{name} {before[name]}, not {after[name]}" for name in names if before[name] != after[name]]
    return [f"{', '.join(changes)} (can change after a multiple of {boundary} steps)"]


def _is_same(name: str, before: Any, after: Any) -> bool:
    if name != "--split":
        return before == after
    ends = [[end for pair in split_fractions(split) for end in pair or ()] for split in (before, after)]
    empty = [[pair is None for pair in split_fractions(split)] for split in (before, after)]
    return empty[0] == empty[1] and np.allclose(*ends, rtol=0, atol=1e-12)


def _is_same_share(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is after
    return math.isclose(before, after, rel_tol=1e-9)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "not given" if value is None else str(value)


def _corpus(corpus: dict[str, Any]) -> str:
    return f"{corpus['prefix']} ({corpus['documents']:,} documents, .idx {corpus['idx'][:8]})"


def _percent(share: float | None) -> str:
    return "all samples" if share is None else f"{100 * share:g} %"


class DataHistory:
    """What a run has consumed since it started, over all resumes.

    Args:
        description: of ``describe_run``.
        dataset: the training set.
        first_sample: where this process resumed; 0 for a new run.
        consumed: samples of each dataset that were consumed before that, by prefix.
    """

    def __init__(
        self, description: dict[str, Any], dataset: Any, first_sample: int = 0, consumed: dict[str, int] | None = None
    ) -> None:
        self.description, self.dataset = description, dataset
        self.first_sample, self._before = first_sample, dict(consumed or {})

    def consumed(self, num_samples: int) -> dict[str, int]:
        """Samples of each dataset, by prefix, after ``num_samples`` of the run."""
        corpora = self.description["corpora"]
        if hasattr(self.dataset, "dataset_index"):  # megatron-core's blend
            (first, begun_before), (end, begun) = map(self._unfinished_block, (self.first_sample, num_samples))
            numbers = self.dataset.dataset_index
            whole, more, less = (
                np.bincount(numbers[samples], minlength=len(corpora))
                for samples in (slice(first, end), begun, begun_before)
            )
            counts = (whole + more - less).tolist()
        else:
            counts = [num_samples - self.first_sample]
        totals = dict(self._before)
        for corpus, count in zip(corpora, counts, strict=True):
            totals[corpus["prefix"]] = totals.get(corpus["prefix"], 0) + count
        return totals

    def order(self, num_samples: int) -> str:
        """Digest of the order of the first ``num_samples`` samples.

        It is of the order without balancing, which keeps the samples of a block, and of what was consumed of a block
        that is not finished.
        """
        steps = max(1, ORDER_SAMPLES - 1)
        samples = sorted({(num_samples - 1) * step // steps for step in range(steps + 1)}) if num_samples else []
        prefixes = [corpus["prefix"] for corpus in self.description["corpora"]]
        plain = self.dataset.dataset if isinstance(self.dataset, BalancedDataset) else self.dataset
        origins: list[list[Any]] = []
        for sample in samples:
            origin = origin_of(plain, sample)
            origins.append([sample, prefixes.index(origin.prefix), origin.sequence, origin.documents])
        begun = self._unfinished_block(num_samples)[1]
        origins += [begun] if begun else []
        return hashlib.sha256(json.dumps(origins).encode()).hexdigest()

    def _unfinished_block(self, num_samples: int) -> tuple[int, list[int]]:
        """The block of global batches in which a run stops: its first sample, and the samples consumed of it.

        Samples are counted without balancing. There are none after a whole block, as after any step in which batches
        were balanced one by one.
        """
        blocks = self.description["blocks"]
        first = num_samples - num_samples % (max(1, blocks["--balance-batches"]) * blocks["--global-batch-size"])
        return first, [self.dataset.sample_of(sample) for sample in range(first, num_samples)]

    def at(self, num_samples: int) -> dict[str, Any]:
        """What a checkpoint after ``num_samples`` samples records, as JSON."""
        return self.description | {"order": self.order(num_samples), "consumed": self.consumed(num_samples)}
