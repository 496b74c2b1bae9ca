"""Compare attention split over ranks with attention of one rank, on random cases.

    python tests/helpers/programs/context_parallel_cases.py RANKS FOLDER

Each rank computes every case alone and split, and prints what differs as a line of JSON.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import distributed

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.programs.forked_ranks import run_forked
from helpers.upstream_attention import as_upstream

from megatron_bfp.attention.boundaries import Boundaries
from megatron_bfp.attention.context_parallel import Shards, gather, ulysses
from megatron_bfp.attention.kernels import sdpa_per_document

WAYS = {"ulysses": ulysses, "gather": gather, "upstream": as_upstream}
"""The last is the control."""
HEAD_GROUPS = [(8, 8), (8, 4), (8, 2), (8, 1), (4, 4), (12, 3)]
SIZE = 8
CASES = 24


def random_offsets(generator: torch.Generator, row_length: int, kind: int, num_ranks: int) -> list[int]:
    """Boundaries of a row: documents of one position to the whole row, some at the edges of shards.

    Padding has boundaries like a document.
    """
    if kind == 0:
        return [0, row_length]
    if kind == 1:
        return list(range(row_length + 1))
    cuts = torch.randint(1, row_length, (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator)
    edges = [row_length * piece // (2 * num_ranks) for piece in range(1, 2 * num_ranks)]
    cuts = set(cuts.tolist()) | set(edges[kind - 2 :: 2] if kind > 3 else ())
    return [0, *sorted(cuts), row_length]


def differences(number: int, num_ranks: int, rank: int, group: distributed.ProcessGroup) -> list[dict]:
    """Of one case, for each way: how far outputs and gradients are from those of one rank."""
    generator = torch.Generator().manual_seed(number)
    heads, groups = HEAD_GROUPS[number % len(HEAD_GROUPS)]
    rows, row_length = 1 + number // 6, 2 * num_ranks * (16 if number % 5 == 4 else 1 + number % 5)
    dtype = torch.bfloat16 if number % 8 == 7 else torch.float32
    kinds = [(number + number // 6 + row) % 6 for row in range(rows)]  # other heads with each kind
    offsets = [random_offsets(generator, row_length, kind, num_ranks) for kind in kinds]
    cu_seqlens = torch.tensor([row + [row_length] * (row_length + 1 - len(row)) for row in offsets], dtype=torch.int32)
    shapes = [
        (heads, SIZE),
        (groups, SIZE),
        (groups, SIZE if number % 4 else 2 * SIZE),
        (heads, SIZE if number % 4 else 2 * SIZE),
    ]
    whole = [torch.randn(rows * row_length, *shape, generator=generator).to(dtype) for shape in shapes]
    reference = [tensor.clone().requires_grad_() for tensor in whole[:3]]
    expected = sdpa_per_document(*reference, Boundaries.of_rows(cu_seqlens), SIZE**-0.5, 0.0)
    expected.backward(whole[3])
    results = []
    for is_zigzag in (True, False):
        shards = Shards(num_ranks, rows, row_length, is_zigzag)
        mine = shards.positions(rank)
        for way, attend_split in WAYS.items():
            if way == "ulysses" and heads % num_ranks or way == "upstream" and not is_zigzag:
                continue
            boundaries = Boundaries.of_rows(cu_seqlens)
            parts = [tensor[mine].clone().requires_grad_() for tensor in whole[:3]]
            output = attend_split(*parts, boundaries, shards, group, sdpa_per_document, SIZE**-0.5, 0.0)
            output.backward(whole[3][mine])
            gradients = [
                float((part.grad - tensor.grad[mine]).abs().max())
                for part, tensor in zip(parts, reference, strict=True)
            ]
            results.append(
                {
                    "case": number,
                    "way": way,
                    "rows": rows,
                    "heads": (heads, groups),
                    "lengths": sorted({end - start for row in offsets for start, end in pairwise(row)}),
                    "row_length": row_length,
                    "dtype": str(dtype).removeprefix("torch."),
                    "output": float((output - expected[mine]).abs().max()),
                    "gradient": max(gradients),
                    "is_bitwise": torch.equal(output, expected[mine]),
                    "keys": len(boundaries.plans[shards, rank].keys) if way == "gather" else None,
                    "other_shards": float((output - expected[shards.positions((rank - 1) % num_ranks)]).abs().max()),
                }
            )
    return results


def run_rank(rank: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    group = distributed.group.WORLD
    results = [result for number in range(CASES) for result in differences(number, num_ranks, rank, group)]
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_forked(run_rank, int(sys.argv[1]), sys.argv[2])
