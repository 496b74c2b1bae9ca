"""Measure what autograd keeps of the trainer's model on each of several ranks that share sequences.

    python tests/helpers/programs/context_parallel_memory.py RANKS FOLDER

Each rank writes the bytes of every case as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]

from helpers.kept import bytes_kept
from helpers.megatron_helpers import initialize_megatron, model_options
from helpers.programs.forked_ranks import run_forked
from trainer.model import build_model

from megatron_bfp.attention.context_parallel import Shards
from megatron_bfp.megatron_core.attention import document_boundaries

VOCAB, LENGTH = 512, 2048
SHAPE = {"num_layers": 4, "hidden_size": 240, "ffn_hidden_size": 768, "seq_length": LENGTH}
HEADS = {"12 heads": 12, "15 heads": 15}
"""Neither 2 nor 4 ranks can divide 15, so they gather keys and values."""
GROUPS = {"": 0, ", 3 groups": 3}
DOCUMENTS = {"one document": [LENGTH], "8 documents": [300, 5, 700, 64, 1, 378, 500, 100]}
CASES = {
    f"{heads}{groups}, {documents}{', recomputed' if recompute else ''}": {
        "heads": HEADS[heads],
        "groups": GROUPS[groups],
        "lengths": DOCUMENTS[documents],
        "recompute_granularity": recompute,
    }
    for heads in HEADS
    for groups in GROUPS
    for documents in DOCUMENTS
    for recompute in (None, "full")
}


def measure(rank, num_ranks, heads, groups, lengths, recompute_granularity):
    """Bytes that a rank's model keeps of a forward pass of its share of one row."""
    torch.manual_seed(1)
    options = {"num_attention_heads": heads, "recompute_granularity": recompute_granularity, **SHAPE}
    if groups:
        options |= {"group_query_attention": True, "num_query_groups": groups}
    model = build_model(model_options(context_parallel_size=num_ranks, **options), VOCAB)
    shard = Shards(num_ranks, 1, LENGTH).positions(rank)
    tokens = torch.randint(VOCAB, (1, LENGTH))[:, shard]
    ends = torch.tensor(lengths).cumsum(0)
    cu_seqlens = torch.full((1, LENGTH + 1), LENGTH, dtype=torch.int32)
    cu_seqlens[0, 0], cu_seqlens[0, 1 : len(ends) + 1] = 0, ends
    boundaries = document_boundaries(cu_seqlens)
    return bytes_kept(model, lambda: model(tokens, shard[None], None, labels=tokens, packed_seq_params=boundaries))


def run_rank(rank, num_ranks, folder):
    torch.set_num_threads(1)
    initialize_megatron(rank, num_ranks, f"{folder}/store", context_parallel=num_ranks)
    measured = {name: measure(rank, num_ranks, **case) for name, case in CASES.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(measured))
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_forked(run_rank, int(sys.argv[1]), sys.argv[2])
