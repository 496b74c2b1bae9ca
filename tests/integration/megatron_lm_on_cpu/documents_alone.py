"""Megatron-LM's training scripts with a look at each document alone: ``documents_alone.py SCRIPT OPTIONS``.

Before the first step the model is run on each document of the first batch alone, and on each row as if it held one
document. Printed are the summed losses of both, of the next token and of the token after it, and the same of the step.
"""

import itertools
import json
import os
import runpy
import sys

script = sys.argv[1]
sys.argv[:] = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))

import megatron_bfp

megatron_bfp.install()

import torch
from megatron import training
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


def say(**values):
    os.write(1, f"\nwatched {json.dumps(values)}\n".encode())


def tracked():
    """What Megatron-LM has noted of later tokens: the losses and the tokens, or None."""
    tracker = MTPLossLoggingHelper.tracker
    return [tracker[name].clone() for name in ("loss_values", "total_values")] if "loss_values" in tracker else None


def later_tokens(before):
    """The summed loss of later tokens since then; Megatron-LM notes the mean of a call."""
    now = tracked()
    if now is None:
        return 0.0
    loss, count = (new - old for new, old in zip(now, before or [torch.zeros_like(value) for value in now]))
    return float((loss * count).sum())


def run(model, batch, row, start, end):
    """Summed losses of a part of a row, as a document of its own: of next tokens and of later ones."""
    tokens, labels, positions, mask = (
        batch[name][row : row + 1, start:end] for name in ("tokens", "labels", "position_ids", "loss_mask")
    )
    bounds = torch.tensor([0, end - start], dtype=torch.int32)
    one = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=end - start,
        max_seqlen_kv=end - start,
        total_tokens=end - start,
    )
    before = tracked()
    with torch.no_grad():
        losses = model(tokens, positions, None, labels=labels, loss_mask=mask, packed_seq_params=one)
    return float((losses.float() * mask).sum()), later_tokens(before)


def total(model, batch, bounds_of_rows):
    parts = [
        run(model, batch, row, start, end)
        for row, bounds in enumerate(bounds_of_rows)
        for start, end in itertools.pairwise(bounds)
        if start < end
    ]
    return [sum(values) for values in zip(*parts)]


def watch(forward_step):
    seen = 0

    def step(data_iterator, model, *rest, **keywords):
        nonlocal seen
        seen += 1
        if seen > get_num_microbatches():
            return forward_step(data_iterator, model, *rest, **keywords)
        batch = next(data_iterator)
        rows = batch["cu_seqlens"].tolist()
        alone = total(model, batch, rows)
        as_one = total(model, batch, [[0, len(row) - 1] for row in rows])
        targets = float(batch["loss_mask"].sum())
        before = tracked()
        result = forward_step(iter([batch]), model, *rest, **keywords)
        say(alone=alone, as_one=as_one, targets=targets, later=later_tokens(before))
        return result

    return step


pretrain = training.pretrain


def pretrain_watched(config, provider, model_type, forward_step, **options):
    return pretrain(config, provider, model_type, watch(forward_step), **options)


training.pretrain = pretrain_watched
runpy.run_path(script, run_name="__main__")
