"""Compare a GPTModel whose rows are split over ranks with the same model of one rank.

    python tests/helpers/programs/context_parallel_model.py RANKS FOLDER

Each rank computes every case alone and split, and writes what differs as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import distributed

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]

from helpers.megatron_helpers import initialize_megatron, model_options
from helpers.programs.forked_ranks import run_forked
from helpers.upstream_attention import as_upstream
from trainer.model import build_model

from megatron_bfp.attention.context_parallel import Shards, gather, ulysses
from megatron_bfp.megatron_core.attention import DocumentAttention, document_boundaries

VOCAB, LENGTH = 96, 64
WAYS = {"ulysses": ulysses, "gather": gather}
HEADS = [
    {"num_attention_heads": 4},
    {"num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 2},
    {"num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 1},
]
CASES = [
    {"rows": rows, "way": way, "recompute_granularity": recompute, **heads}
    for rows, heads in zip((1, 2, 4), HEADS, strict=True)
    for way in WAYS
    for recompute in (None, "full")
]
CASES += [{"rows": 2, "num_attention_heads": heads, "hidden_size": 48} for heads in (2, 6)]
"""The last two attend as the model chooses."""


def run(model, batch, boundaries, shard):
    """The summed loss of a shard of the rows, and its gradients."""
    tokens, labels = (tensor[:, shard] for tensor in batch)
    model.zero_grad()
    positions = shard.expand(len(tokens), -1)
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=boundaries)
    losses.sum().backward()
    return losses.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def make_case(number, case):
    """Tokens and labels, int64 [2, rows, LENGTH], and the boundaries of the rows."""
    generator = torch.Generator().manual_seed(number)
    batch = torch.randint(0, VOCAB, (2, case["rows"], LENGTH), generator=generator)
    cu_seqlens = torch.full((case["rows"], LENGTH + 1), LENGTH, dtype=torch.int32)
    for row in cu_seqlens:
        cuts = torch.randint(1, LENGTH, (4,), generator=generator).unique()
        row[: len(cuts) + 1] = torch.tensor([0, *cuts.tolist()])
    return batch, cu_seqlens


def make_model(case, num_ranks):
    options = {name: value for name, value in case.items() if name not in ("rows", "way")}
    torch.manual_seed(5)
    model = build_model(model_options(seq_length=LENGTH, context_parallel_size=num_ranks, **options), VOCAB)
    for module in model.modules():
        if isinstance(module, DocumentAttention) and module.split and case.get("way"):
            module.split = WAYS[case["way"]]
    return model


def difference(number, case, expected, rank, num_ranks):
    """How far the losses and gradients of a split model are from those of one rank."""
    (whole_losses, whole_gradients), model = expected, make_model(case, num_ranks)
    batch, cu_seqlens = make_case(number, case)
    shard = Shards(num_ranks, 1, LENGTH).positions(rank)
    losses, gradients = run(model, batch, document_boundaries(cu_seqlens), shard)
    own_share = {name: num_ranks * gradient for name, gradient in gradients.items()}
    for name, gradient in gradients.items():
        gradients[name] = gradient.clone()
        distributed.all_reduce(gradients[name])
    scale = max(float(gradient.abs().max()) for gradient in whole_gradients.values())

    def largest(others):
        return max(float((others[name] - whole_gradients[name]).abs().max()) for name in others) / scale

    way = next(module.split.__name__ for module in model.modules() if isinstance(module, DocumentAttention))
    for module in model.modules():
        if isinstance(module, DocumentAttention):
            module.split = as_upstream
    losses_of_upstream, _ = run(model, batch, document_boundaries(cu_seqlens), shard)
    return {
        "case": number,
        "loss_of_upstream": float((losses_of_upstream - whole_losses[:, shard]).abs().max()),
        "way": way,
        "loss": float((losses - whole_losses[:, shard]).abs().max()),
        "gradient": largest(gradients),
        "gradient_of_own_share": largest(own_share),
    }


def run_rank(rank, num_ranks, folder):
    torch.set_num_threads(1)
    initialize_megatron(rank, num_ranks, f"{folder}/store")
    whole, expected = torch.arange(LENGTH), []
    for number, case in enumerate(CASES):
        batch, cu_seqlens = make_case(number, case)
        expected.append(run(make_model(case, 1), batch, document_boundaries(cu_seqlens), whole))
    parallel_state.destroy_model_parallel()
    initialize_megatron(rank, num_ranks, context_parallel=num_ranks)
    cases = zip(CASES, expected, strict=True)
    results = [difference(number, *case, rank, num_ranks) for number, case in enumerate(cases)]
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_forked(run_rank, int(sys.argv[1]), sys.argv[2])
