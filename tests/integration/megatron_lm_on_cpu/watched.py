"""Megatron-LM's pretrain_gpt.py with a look at what it does: ``watched.py WHAT pretrain_gpt.py OPTIONS``.

WHAT is one of

    batches     print a digest of each micro-batch's samples
    alone       before the first step, run the model on each chunk of the first batch alone and print the loss
    datasets    build the datasets, print what they are and end
    without=F   leave out the hook that changes function F
    restart     let position ids restart in each document, whatever the options say
    lose=R      call the model on rank R without boundaries
    shift       call the model with the position ids of a row rotated by one
    shapes      print the shapes that pipeline stages send each other, and whether they exchange them beforehand
    exchange    the same, and let them exchange shapes
    accept=O    refuse options as always, but not --O
"""

import hashlib
import itertools
import json
import os
import runpy
import sys
import time

what = sys.argv.pop(1)
script = sys.argv[1]
sys.argv[:] = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))

import megatron_bfp
from megatron_bfp.integrations.megatron_lm import changes, options

if what.startswith("without="):
    for way in ("replace", "_wrap"):
        change = getattr(changes, way)

        def change_others(owner, name, *rest, change=change):
            return what[8:] in (name, f"{owner.__name__}.{name}") or change(owner, name, *rest)

        setattr(changes, way, change_others)
if what.startswith("accept="):
    options.OPTIONS = tuple(row for row in options.OPTIONS if f"--{what[7:]}" not in row.options)
megatron_bfp.install()

import torch
from megatron import training
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_bfp.megatron_core.attention import document_boundaries


def say(name, **values):
    line = json.dumps({"what": name, "rank": torch.distributed.get_rank(), **values})
    os.write(1, f"\nwatched {line}\n".encode())  # at once, as ranks share the output


def sum_of_losses(model, tokens, labels, loss_mask, boundaries):
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        losses = model(tokens, positions, None, labels=labels, packed_seq_params=boundaries)
    return float((losses.float() * loss_mask).sum())


def alone(model, batch):
    """Loss of each chunk alone, and of the rows with positions that go on from chunk to chunk."""
    total = 0.0
    for row, cu_seqlens in enumerate(batch["cu_seqlens"].tolist()):
        for start, end in itertools.pairwise(cu_seqlens):
            if start < end:
                part = [batch[name][row : row + 1, start:end] for name in ("tokens", "labels", "loss_mask")]
                length = torch.tensor([0, end - start], dtype=torch.int32)
                one = PackedSeqParams("thd", length, length, max_seqlen_q=end - start, max_seqlen_kv=end - start)
                total += sum_of_losses(model, *part, one)
    rows = [batch[name] for name in ("tokens", "labels", "loss_mask")]
    unchanged = sum_of_losses(model, *rows, document_boundaries(batch["cu_seqlens"]))
    say("alone", alone=total, unchanged=unchanged, targets=float(batch["loss_mask"].sum()))


def restarted(cu_seqlens):
    """Position ids that restart in each document, int64 [b, L]."""
    positions = torch.arange(cu_seqlens.shape[1] - 1)
    documents = torch.searchsorted(cu_seqlens.long(), positions.expand(len(cu_seqlens), -1).contiguous(), right=True)
    return positions - cu_seqlens.long().gather(1, documents - 1)


def watch(forward_step):
    seen = 0

    def step(data_iterator, model, *rest, **keywords):
        nonlocal seen
        if data_iterator is not None:
            batch = next(data_iterator)
            if what == "batches":
                say("batch", digests=[hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch["tokens"]])
            elif what == "restart":
                batch["position_ids"] = restarted(batch["cu_seqlens"])
            elif what == "alone" and seen < get_num_microbatches():
                alone(model, batch)
            data_iterator = iter([batch])
        seen += 1
        return forward_step(data_iterator, model, *rest, **keywords)

    return step


def described(provider):
    def describe_and_end(sizes, **keywords):
        start = time.monotonic()
        datasets = provider(sizes, **keywords)
        seconds = time.monotonic() - start
        say("datasets", seconds=seconds, sizes=sizes, splits=list(map(description, datasets)))
        raise SystemExit(0)

    describe_and_end.is_distributed = True
    return describe_and_end


def description(dataset):
    """The indexes a split reads, and which sample of which corpus its first samples are."""
    if isinstance(dataset, list):  # several validation sets
        return [description(part) for part in dataset]
    parts = getattr(dataset, "datasets", [dataset])
    indexes = [[part.dataset_path, part.sequence_index.key.name, part.sequence_index.was_built] for part in parts]
    seen = {"length": len(dataset), "indexes": indexes, "part_of_sample": [], "same_as_in_part": []}
    if len(parts) > 1:
        dataset[0]  # opens its index, if that was put off
        for sample in range(min(100, len(dataset))):
            of_blend = getattr(dataset, "sample_of", int)(sample)  # in balanced batches, or the sample itself
            part, number = int(dataset.dataset_index[of_blend]), int(dataset.dataset_sample_index[of_blend])
            seen["part_of_sample"].append(part)
            same = torch.equal(dataset[sample]["tokens"], parts[part][number]["tokens"])
            seen["same_as_in_part"].append(same)
    return seen


def losing(forward_step):
    """Lose what was read on one rank between the batch and the model."""
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.forward

    def forward_without(self, *rest, packed_seq_params=None, **keywords):
        is_lost = torch.distributed.get_rank() == int(what[5:])
        return forward(self, *rest, packed_seq_params=None if is_lost else packed_seq_params, **keywords)

    GPTModel.forward = forward_without
    return forward_step


def shifted(forward_step):
    """Give each position the position id of its neighbour, and the first that of the last."""
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.forward
    GPTModel.forward = lambda self, ids, positions, *rest, **keywords: forward(
        self, ids, positions.roll(1, dims=-1), *rest, **keywords
    )
    return forward_step


def watch_shapes():
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    communicate, exchange_shapes = P2PCommunicator._communicate, P2PCommunicator._communicate_shapes

    def communicate_watched(self, *, tensor_shape, **keywords):
        self.config.variable_seq_lengths |= what == "exchange"
        if tensor_shape is not None:  # something is received
            say("shape", shape=list(tensor_shape))
        return communicate(self, tensor_shape=tensor_shape, **keywords)

    def exchange_watched(self, *arguments, **keywords):
        say("exchange of shapes")
        return exchange_shapes(self, *arguments, **keywords)

    P2PCommunicator._communicate, P2PCommunicator._communicate_shapes = communicate_watched, exchange_watched


pretrain = training.pretrain


def pretrain_watched(config, provider, model_type, forward_step, **options):
    provider = described(provider) if what == "datasets" else provider
    if what in ("shapes", "exchange"):
        watch_shapes()
    change = losing if what.startswith("lose=") else shifted if what == "shift" else watch
    forward_step = change(forward_step)
    return pretrain(config, provider, model_type, forward_step, **options)


training.pretrain = pretrain_watched
runpy.run_path(script, run_name="__main__")
