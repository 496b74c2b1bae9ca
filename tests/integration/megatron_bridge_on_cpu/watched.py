"""Megatron-Bridge's pretrain with a look at what it does: ``train`` runs it with a function in ``WATCHES``."""

import hashlib
import itertools
import json
import os
import runpy
from collections import Counter

import layer_spec
import torch
from megatron.bridge.training import gpt_step
from megatron.bridge.training import train as training
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.state import GlobalState
from megatron.bridge.utils.instantiate_utils import instantiate
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from omegaconf import OmegaConf
from recipe import for_cpu, small_recipe

from megatron_bfp.integrations.megatron_bridge import BFPDatasetProvider, changes

NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
LENGTH = 128


def say(name, **values):
    line = json.dumps({"what": name, "rank": torch.distributed.get_rank(), **values})
    os.write(1, f"\nwatched {line}\n".encode())  # at once, as ranks share the output


def plain(cfg):
    """Nothing is looked at."""
    return forward_step


def batches(cfg):
    """Print what each forward step hands to the model, and whether it is what the samples say.

    The samples are those that a reader of the whole order would expect: micro-batch k of a step, of data-parallel rank
    r, begins at sample ``consumed + (k * ranks + r) * micro-batch size``.
    """
    watch = Batches(cfg)
    gpt_step.get_batch, gpt_step.get_packed_seq_params = watch.get_batch, watch.get_packed_seq_params
    cfg.dataset.build_datasets = watch.build_datasets

    def step(state: GlobalState, data_iterator, model, return_schedule_plan: bool = False):
        watch.begin(state.train_state.consumed_train_samples)
        return forward_step(state, data_iterator, model, return_schedule_plan)

    return step


class Batches:
    """Replacements for functions that a forward step calls one after the other, and what they saw."""

    def __init__(self, cfg):
        self.size = cfg.train.micro_batch_size
        self.originals = cfg.dataset.build_datasets, gpt_step.get_batch, gpt_step.get_packed_seq_params
        self.consumed, self.counts = None, Counter()

    def begin(self, consumed):
        if consumed != self.consumed:
            self.consumed, self.counts = consumed, Counter()

    def build_datasets(self, context):
        datasets = self.originals[0](context)
        self.samples = datasets[0]
        return datasets

    def get_batch(self, *arguments, vp_stage=None, **keywords):
        self.batch = self.originals[1](*arguments, vp_stage=vp_stage, **keywords)
        self.vp_stage = vp_stage
        return self.batch

    def get_packed_seq_params(self, values):
        params = self.originals[2](values)
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        first = self.consumed + (self.counts[self.vp_stage] * ranks + rank) * self.size
        self.counts[self.vp_stage] += 1
        samples = [self.samples[first + row] for row in range(self.size)]
        stage = [parallel_state.get_pipeline_model_parallel_rank(), self.vp_stage]
        given = {name: tensor for name, tensor in zip(NAMES, self.batch, strict=False) if tensor is not None}
        say("batch", stage=stage, first=first, digests=list(map(digest, samples)), **compare(given, params, samples))
        return params


def compare(given, params, samples):
    """Whether the tensors of a micro-batch and its boundaries are those of its samples."""
    ends = [0]
    for row, sample in enumerate(samples):
        ends += [end + row * LENGTH for end in dict.fromkeys(sample["cu_seqlens"].tolist()) if end]
    longest = max(map(difference, itertools.pairwise(ends)))
    numbers = [number for number, pair in enumerate(itertools.pairwise(ends)) for _ in range(difference(pair))]
    return {
        "given": list(given),
        "differ": [name for name, tensor in given.items() if not same(tensor, [one[name] for one in samples])],
        "boundaries": params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == ends,
        "rows_alone": params.cu_seqlens_q.tolist() == list(range(0, ends[-1] + 1, LENGTH)),
        "longest": params.max_seqlen_q == params.max_seqlen_kv == longest,
        "numbered": params.seq_idx is not None and params.seq_idx.flatten().tolist() == numbers,
    }


def digest(sample):
    return hashlib.sha256(sample["tokens"].numpy().tobytes()).hexdigest()[:16]


def same(tensor, rows):
    joined = torch.cat(rows)[None]
    return tensor.dtype == joined.dtype and torch.equal(tensor, joined)


def difference(pair):
    return pair[1] - pair[0]


def alone(cfg):
    """Before each training step's micro-batches, print the loss of each chunk alone, and that of Megatron-Bridge's own
    forward step on the micro-batch; also if the chunks of a row were not told apart."""

    def step(state: GlobalState, data_iterator, model, return_schedule_plan: bool = False):
        batch = next(data_iterator)
        ends = batch["cu_seqlens_q"].tolist()
        total = 0.0
        for start, end in itertools.pairwise(ends):
            part = {name: batch[name][:, start:end] for name in ("tokens", "labels", "loss_mask")}
            total += sum_of_losses(model, part, [0, end - start])
        crossed = sum_of_losses(model, batch, list(range(0, ends[-1] + 1, LENGTH)))
        output, loss_function = forward_step(state, iter([batch]), model, return_schedule_plan)
        loss, num_targets, _ = loss_function(output)
        targets = float(batch["loss_mask"].sum())
        say("alone", alone=total, joined=float(loss), crossed=crossed, targets=targets, counted=float(num_targets))
        return output, loss_function

    return step


def sum_of_losses(model, part, ends):
    """The sum of the losses of a row at its targets, with chunks that end there."""
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    longest = max(map(difference, itertools.pairwise(ends)))
    boundaries = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
    positions = torch.arange(part["tokens"].shape[1])[None]
    with torch.no_grad():
        losses = model(part["tokens"], positions, None, labels=part["labels"], packed_seq_params=boundaries)
    return float((losses.float() * part["loss_mask"]).sum())


def unaware(cfg):
    """The attention works without boundaries, too, as Transformer Engine's does."""
    cfg.model.transformer_layer_spec = layer_spec.like_transformer_engine
    return forward_step


def lose(cfg):
    """Lose the boundaries between the batch and the model on the last rank; the attention would not notice."""
    cfg.model.transformer_layer_spec = layer_spec.like_transformer_engine
    get_packed_seq_params = gpt_step.get_packed_seq_params

    def get_or_lose(values):
        is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return None if is_last else get_packed_seq_params(values)

    gpt_step.get_packed_seq_params = get_or_lose
    return forward_step


def other_keys(cfg):
    """As if the forward step took other keys from a batch."""
    gpt_step._CURRENT_PACKED_SEQ_HOST_KEYS = ()
    changes.make()


def other_step(cfg):
    """As if a training step had other parameters."""
    training.train_step = lambda forward_step_func, data_iterator, model: None
    changes.make()


def stored(cfg):
    """Write the recipe, read its dataset, and print what was read."""
    cfg.to_yaml("recipe.yaml")
    same = instantiate(OmegaConf.load("recipe.yaml").dataset)
    names = ("seq_length", "data_path", "split", "random_seed", "even_sequences", "max_documents_per_sequence")
    print("\nwatched", json.dumps({"kind": type(same).__name__, **{name: getattr(same, name) for name in names}}))
    return forward_step


WATCHES = {"plain": plain, "batches": batches, "alone": alone, "unaware": unaware, "lose": lose}
WATCHES |= {"other_keys": other_keys, "other_step": other_step, "stored": stored}


def train(job):
    """Run a job, as ``serve.py`` describes it. "example" is the recipe in examples/. Without "options", the small
    recipe keeps Megatron-Bridge's own dataset."""
    if job["what"] == "example":
        example = runpy.run_path(f"{job['root']}/examples/megatron_bridge/pretrain.py")
        return pretrain(for_cpu(example["llama_1b_pretrain_config"]()), forward_step)
    cfg = small_recipe(job["overrides"])
    if job["options"] is not None:
        cfg.dataset = BFPDatasetProvider.of(cfg.dataset, **job["options"])
    pretrain(cfg, WATCHES[job["what"]](cfg))
