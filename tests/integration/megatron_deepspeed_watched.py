"""Megatron-DeepSpeed's pretrain_gpt.py with a look at what it does. The environment says which script and what:

WATCHED_SCRIPT  pretrain_gpt.py of a copy made by megatron_deepspeed_on_cpu
WATCHED         batches     print a digest of each sample that this rank receives, in order
                alone       run the model on each chunk of the first step alone, with nothing changed in the model
                without=F   leave out the change of function F
"""

import hashlib
import json
import os
import runpy
import sys

script, what = os.environ["WATCHED_SCRIPT"], os.environ["WATCHED"]
sys.path.insert(0, os.path.dirname(script))

import numpy as np

import megatron_bfp
from megatron_bfp.integrations.megatron_deepspeed import changes as megatron_deepspeed


def say(**values):
    line = json.dumps({"rank": int(os.environ["RANK"]), **values})
    os.write(1, f"\nwatched {line}\n".encode())  # at once, as ranks share the output


def after_hook(name):
    """Decorate a function that gets the module ``name`` after, and as generator also before, our hook changed it."""

    def decorate(function):
        hook = megatron_deepspeed.HOOKS[name]

        def hook_and_function(module):
            steps = function(module)
            next(steps)
            hook(module)
            next(steps, None)

        megatron_deepspeed.HOOKS[name] = hook_and_function

    return decorate


if what.startswith("without="):
    replace = megatron_deepspeed.replace
    left_out = what.removeprefix("without=")

    def replace_but_one(owner, name, *rest):
        if f"{owner.__name__.rpartition('.')[2]}.{name}" != left_out:
            replace(owner, name, *rest)

    megatron_deepspeed.replace = replace_but_one

if what == "batches":

    @after_hook("megatron.core.tensor_parallel")
    def print_batches(module):
        yield
        broadcast_data = module.broadcast_data

        def broadcast_and_print(*arguments):
            batch = broadcast_data(*arguments)
            say(digests=[hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in batch["text"]])
            return batch

        module.broadcast_data = broadcast_and_print


stock = {}
"""(class, "forward") -> the function that was there before our hooks."""

rotation = {}
"""Megatron-DeepSpeed's own module of rotary positions and its function, and the module that calls it."""


def with_angles(forward):
    """The stock attention, given the angles that its own rotation is written for in place of cosines and sines."""
    import torch

    def attention_forward(self, states, mask, encoder_output=None, inference_params=None, rotary_pos_emb=None):
        if rotary_pos_emb is not None:
            cosines, sines = rotary_pos_emb
            rotary_pos_emb = (torch.atan2(sines.float(), cosines.float()),) * 2
        return forward(self, states, mask, encoder_output, inference_params, rotary_pos_emb)

    return attention_forward


def rotate_as_stock(tensor, angles):
    rotation["module"].cos_cached = None  # it keeps the first table that it sees
    return rotation["apply"](tensor, angles)


if what == "alone":

    @after_hook("megatron.model.rotary_pos_embedding")
    def remember_rotation(module):
        rotation.update(module=module, apply=module.apply_rotary_pos_emb)
        yield

    @after_hook("megatron.model.transformer")
    def remember_attention(module):
        rotation["caller"] = module
        stock[module.ParallelAttention] = with_angles(module.ParallelAttention.forward)
        stock[module.FlashSelfAttention] = module.FlashSelfAttention.forward
        yield

    @after_hook("megatron.model.gpt_model")
    def run_chunks_alone(module):
        stock[module.GPTModel] = module.GPTModel.forward
        yield
        forward, seen = module.GPTModel.forward, 0

        def forward_and_alone(self, tokens, positions, boundaries, labels=None):
            nonlocal seen
            if self.training and seen < micro_batches():
                alone(self, tokens, seen)
            seen += 1
            return forward(self, tokens, positions, boundaries, labels=labels)

        module.GPTModel.forward = forward_and_alone


def micro_batches():
    from megatron import get_num_microbatches

    return get_num_microbatches()


def alone(model, received, micro_batch):
    """Print the sum of the losses of a micro-batch's chunks, each in a forward pass of the unchanged model."""
    import torch
    from megatron import get_args
    from megatron.core import mpu

    args, total, targets = get_args(), 0.0, 0
    first = args.micro_batch_size * (micro_batch * mpu.get_data_parallel_world_size() + mpu.get_data_parallel_rank())
    changed = {owner: owner.forward for owner in stock}
    rotate, rotation["caller"].apply_rotary_pos_emb = rotation["caller"].apply_rotary_pos_emb, rotate_as_stock
    try:
        for owner, forward in stock.items():
            owner.forward = forward
        for row in range(args.micro_batch_size):
            start = 0
            for tokens, labels in chunks_of_sample(args, first + row):
                end = start + len(tokens)
                assert received[row, start:end].tolist() == tokens
                positions = torch.arange(end - start) + (0 if args.reset_position_ids else start)
                mask = ~torch.ones(1, 1, end - start, end - start, dtype=torch.bool).tril()
                inputs = torch.tensor([tokens]), positions[None], mask, torch.tensor([tokens[1:] + [labels[-1] or 0]])
                with torch.no_grad():
                    losses, _ = model(*inputs[:3], labels=inputs[3])
                is_target = [label is not None for label in labels]
                if args.eod_mask_loss:
                    is_target = [target and token != args.vocab_size for target, token in zip(is_target, tokens)]
                total += float(losses[0].float()[torch.tensor(is_target)].double().sum())
                targets += sum(is_target)
                start = end
            assert not received[row, start:].any()
    finally:
        rotation["caller"].apply_rotary_pos_emb = rotate
        for owner, forward in changed.items():
            owner.forward = forward
    say(alone=total, targets=targets)


def chunks_of_sample(args, sample):
    """Tokens of each chunk of a sample of the first global batch, and labels, the last of which may be None."""
    from megatron_bfp.indexed_dataset.reader import IndexedDataset
    from megatron_bfp.samples.balance import balanced_order
    from megatron_bfp.sequence_index.split import PackedSplit

    dataset, cap = IndexedDataset(args.data_path[0]), args.max_documents_per_sequence
    train = PackedSplit.open(dataset, args.seq_length, args.split, "train", cap)
    work = train.work_of(np.arange(args.global_batch_size), args.seed)
    sample = int(balanced_order(work, args.micro_batch_size)[sample])
    for document, start, end, document_end in train.chunk_spans(sample, args.seed):
        ((document_start, _),) = dataset.spans(np.array([document]))
        whole = dataset.tokens(document_start, document_end - document_start).tolist()
        first, stop = start - document_start, end - document_start
        yield whole[first:stop], [*whole, None][first + 1 : stop + 1]


megatron_bfp.install()
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
