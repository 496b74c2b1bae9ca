"""Kernels under several ranks of one device, beside the reference kernel on one rank."""

import json
from pathlib import Path

import torch
from torch import distributed

from megatron_bfp.attention import context_parallel
from megatron_bfp.attention.boundaries import Boundaries
from megatron_bfp.attention.context_parallel import Shards, gather, ulysses
from megatron_bfp.attention.kernels import KERNELS, Needs, sdpa_per_document

RANKS, ROWS, LENGTH, HEAD_SIZE = 2, 2, 512, 64
WAYS = {"ulysses": ulysses, "gather": gather}
HEADS = {"MHA": (8, 8), "GQA": (8, 2), "MQA": (8, 1)}


def usable():
    """Names of the kernels that can be used here, and of each other one why not."""
    reasons = {name: kernel.unusable(Needs(torch.bfloat16, HEAD_SIZE, 0.0)) for name, kernel in KERNELS.items()}
    return [name for name in reasons if reasons[name] is None], {name: why for name, why in reasons.items() if why}


def through_the_host(all_to_all):
    """The exchange by gloo, which does not take a GPU's tensors; NCCL refuses two ranks on one GPU."""

    def exchange(tensor, *arguments):
        return all_to_all(tensor.cpu(), *arguments).to(tensor.device)

    return exchange


def make_boundaries(device):
    """Of two rows: some documents of any length, and one document."""
    cu_seqlens = torch.full((ROWS, LENGTH + 1), LENGTH, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    ends = torch.tensor([1, 38, 128, 131, 300, 499])  # one at the edge of a shard; the last chunk is padding
    cu_seqlens[0, 1 : len(ends) + 1] = ends
    return Boundaries.of_rows(cu_seqlens, device)


def inputs(heads, groups, device, dtype):
    """Query, key, value, and the gradient of the output."""
    generator = torch.Generator().manual_seed(heads * groups)
    shapes = [(ROWS * LENGTH, number, HEAD_SIZE) for number in (heads, groups, groups, heads)]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def largest_errors(outputs, expected, mine):
    """Of the output and of each gradient at this rank's positions, relative to the largest value."""
    pairs = zip(outputs, expected, strict=True)
    return max(float((one.float() - other[mine]).abs().max() / other.abs().max()) for one, other in pairs)


def forward_and_backward(tensors, run):
    """The output, and the gradients of query, key and value."""
    *inputs, gradient = (tensor.detach() for tensor in tensors)
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    output = run(*inputs)
    output.backward(gradient)
    return [output.detach(), *(tensor.grad for tensor in inputs)]


def compare(kernel, way, heads, is_zigzag, rank, device, dtype):
    """How far a rank's share is from the reference in fp32; and, as a control, if attention crosses documents."""
    shards = Shards(RANKS, ROWS, LENGTH, is_zigzag)
    mine = shards.positions(rank).to(device)
    tensors = inputs(*HEADS[heads], device, dtype)
    scale = HEAD_SIZE**-0.5
    expected = forward_and_backward(
        [tensor.float() for tensor in tensors],
        lambda *parts: sdpa_per_document(*parts, make_boundaries(device), scale, 0.0),
    )

    def errors(boundaries):
        group, attend = distributed.group.WORLD, KERNELS[kernel].attend
        outputs = forward_and_backward(
            [tensor[mine] for tensor in tensors],
            lambda *parts: WAYS[way](*parts, boundaries, shards, group, attend, scale, 0.0),
        )
        return largest_errors(outputs, expected, mine)

    whole_rows = Boundaries.of_lengths([LENGTH] * ROWS, device)
    return {"error": errors(make_boundaries(device)), "crossing": errors(whole_rows)}


def run_rank(rank, folder, device, kernels):
    """Compare all cases as one of ``RANKS`` processes; writes a list of dicts."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    context_parallel._all_to_all = through_the_host(context_parallel._all_to_all)
    cases = [
        {"kernel": kernel, "way": way, "heads": heads, "is_zigzag": is_zigzag}
        for kernel in kernels
        for way in WAYS
        for heads in HEADS
        for is_zigzag in (True, False)
    ]
    results = [case | compare(**case, rank=rank, device=device, dtype=torch.bfloat16) for case in cases]
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    distributed.destroy_process_group()


def check_kernels(folder, device, kernels):
    """Compare in processes of their own; prints a line for each kernel and way, and asserts that they agree."""
    torch.multiprocessing.spawn(run_rank, (str(folder), device, kernels), nprocs=RANKS)
    results = [result for path in folder.glob("*.json") for result in json.loads(path.read_text())]
    assert len(results) == RANKS * len(kernels) * len(WAYS) * len(HEADS) * 2
    for kernel in kernels:
        for way in WAYS:
            chosen = [result for result in results if (result["kernel"], result["way"]) == (kernel, way)]
            error = max(result["error"] for result in chosen)
            crossing = min(result["crossing"] for result in chosen)
            print(f"{kernel}, {way}: {error:.1e} of the largest value; at least {crossing:.1e} across documents")
            assert error < 3e-2 and crossing > 1e-1
