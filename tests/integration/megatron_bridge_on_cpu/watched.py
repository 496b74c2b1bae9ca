"""Megatron-Bridge's pretrain with a look at what it does. ``train`` runs it with one of the functions in ``WATCHES``."""

import hashlib
import itertools
import json
import os

import layer_spec
import torch
from megatron.bridge.training import gpt_step
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.state import GlobalState
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from recipe import small_recipe

from megatron_bfp.integrations.megatron_bridge import BFPDatasetProvider

NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


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
    datasets, metadata = [], []
    counts, consumed = {}, None
    build = cfg.dataset.build_datasets
    get_batch, get_packed_seq_params = gpt_step.get_batch, gpt_step.get_packed_seq_params

    def build_and_keep(context):
        datasets[:] = build(context)
        return tuple(datasets)

    def get_and_keep(*arguments, vp_stage=None, **keywords):
        batch = get_batch(*arguments, vp_stage=vp_stage, **keywords)
        metadata[:] = [batch, vp_stage]
        return batch

    def get_params_and_say(values):
        params = get_packed_seq_params(values)
        batch, vp_stage = metadata
        say("batch", **compare(batch, params, vp_stage))
        return params

    def compare(batch, params, vp_stage):
        size, ranks = cfg.train.micro_batch_size, parallel_state.get_data_parallel_world_size()
        number = counts[vp_stage] = counts.get(vp_stage, -1) + 1
        first = consumed + (number * ranks + parallel_state.get_data_parallel_rank()) * size
        samples = [datasets[0][first + row] for row in range(size)]
        expected = rows_of(samples)
        given = dict(zip(NAMES, batch, strict=False))
        return {
            "stage": [parallel_state.get_pipeline_model_parallel_rank(), vp_stage],
            "first": first,
            "digests": [hashlib.sha256(sample["tokens"].numpy().tobytes()).hexdigest()[:16] for sample in samples],
            "given": [name for name in NAMES if given[name] is not None],
            "differ": [name for name, tensor in given.items() if tensor is not None and not same(tensor, expected[name])],
            "boundaries": params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == expected["boundaries"],
            "rows_alone": params.cu_seqlens_q.tolist() == list(range(0, size * 128 + 1, 128)),
            "longest": params.max_seqlen_q == params.max_seqlen_kv == max(map(difference, pairs(expected["boundaries"]))),
            "total_tokens": params.total_tokens,
        }

    def step(state: GlobalState, data_iterator, model, return_schedule_plan: bool = False):
        nonlocal consumed
        if consumed != state.train_state.consumed_train_samples:
            consumed = state.train_state.consumed_train_samples
            counts.clear()
        return forward_step(state, data_iterator, model, return_schedule_plan)

    if isinstance(cfg.dataset, BFPDatasetProvider):
        cfg.dataset.build_datasets = build_and_keep
        gpt_step.get_batch, gpt_step.get_packed_seq_params = get_and_keep, get_params_and_say
    return step


def rows_of(samples):
    """What a micro-batch must hold, from its samples one by one."""
    rows = {name: torch.cat([sample[name] for sample in samples])[None] for name in samples[0] if name in NAMES}
    ends = [0]
    for row, sample in enumerate(samples):
        ends += [end + row * 128 for end in dict.fromkeys(sample["cu_seqlens"].tolist()) if end]
    return rows | {"boundaries": ends}


def same(tensor, expected):
    return tensor.dtype == expected.dtype and torch.equal(tensor, expected)


def pairs(ends):
    return itertools.pairwise(ends)


def difference(pair):
    return pair[1] - pair[0]


def alone(cfg):
    """Before each training step's micro-batches, print the loss of each chunk alone, and that of Megatron-Bridge's own
    forward step on the micro-batch; also if the chunks of a row were not told apart."""

    def step(state: GlobalState, data_iterator, model, return_schedule_plan: bool = False):
        batch = next(data_iterator)
        ends = batch["cu_seqlens_q"].tolist()
        total = 0.0
        for start, end in pairs(ends):
            part = {name: batch[name][:, start:end] for name in ("tokens", "labels", "loss_mask")}
            total += sum_of_losses(model, part, [0, end - start])
        crossed = sum_of_losses(model, batch, list(range(0, ends[-1] + 1, 128)))
        output, loss_function = forward_step(state, iter([batch]), model, return_schedule_plan)
        loss, num_targets, _ = loss_function(output)
        targets = float(batch["loss_mask"].sum())
        say("alone", alone=total, joined=float(loss), crossed=crossed, targets=targets, counted=float(num_targets))
        return output, loss_function

    return step


def sum_of_losses(model, part, ends):
    """The sum of the losses of a row at its targets, with chunks that end there."""
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    longest = max(map(difference, pairs(ends)))
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


WATCHES = {"plain": plain, "batches": batches, "alone": alone, "unaware": unaware, "lose": lose}


def train(job):
    """Run a job, as ``serve.py`` describes it. Without "options", Megatron-Bridge's own dataset is left in place."""
    cfg = small_recipe(job["overrides"])
    if job["options"] is not None:
        cfg.dataset = BFPDatasetProvider.of(cfg.dataset, **job["options"])
    pretrain(cfg, WATCHES[job["what"]](cfg))
