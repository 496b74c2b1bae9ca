"""A model on packed sequences beside the same model on their chunks alone."""

from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from trainer.model import build_model

from helpers.megatron_helpers import build, config, initialize_megatron, model_options
from megatron_bfp.attention.kernels import KERNELS
from megatron_bfp.megatron_core.attention import DocumentAttention, document_boundaries

TOLERANCES = {"fp32": 1e-4, "bf16": 4e-2}
"""Largest difference allowed, relative to the largest logit and to the largest gradient of each parameter. Rounding to
bf16 alone, in another order, changes single values of a small model by about 1 %."""


class Case(NamedTuple):
    """One row of the table."""

    kernel: str
    precision: str
    heads: str
    path: str

    def __str__(self) -> str:
        return ", ".join(self)


PATHS = ("micro-batch 1", "micro-batch 2", "micro-batch 4", "accumulation", "recomputation", "joined rows")
"""The last is Megatron-LM's form of a micro-batch: its rows one after another, and one list of boundaries."""


class Outputs(NamedTuple):
    """Outputs of a micro-batch."""

    logits: torch.Tensor
    """[b, s, v]."""
    loss: float
    """Sum over the targets."""
    gradients: dict[str, torch.Tensor]


class Errors(NamedTuple):
    """Differences, relative to the largest value."""

    logits: float
    loss: float
    gradients: float


def make_model(case, seq_length, vocab_size, device, **shape):
    """A small model of a case."""
    initialize_megatron()
    torch.manual_seed(5)
    grouped = {"group_query_attention": True, "num_query_groups": 2} if case.heads == "GQA" else {}
    recompute = "full" if case.path == "recomputation" else None
    options = {"seq_length": seq_length, "bf16": case.precision == "bf16", "attention_kernel": case.kernel}
    model = build_model(model_options(**options, recompute_granularity=recompute, **grouped, **shape), vocab_size)
    return (model.bfloat16() if case.precision == "bf16" else model).to(device)


def make_batch(prefix, rows, seq_length):
    """The fullest ``rows`` packed sequences of a dataset that have most documents, as a micro-batch."""
    dataset = build([None] * 3, config(([prefix], None), seq_length))[0]
    samples = sorted((dataset[i] for i in range(len(dataset))), key=lambda s: -len(chunk_bounds(s["cu_seqlens"])))
    return torch.utils.data.default_collate(samples[:rows])


def run(model, tokens, labels, loss_mask, cu_seqlens, make_boundaries=document_boundaries):
    """One forward and backward pass."""
    device = next(model.parameters()).device
    tokens, labels, loss_mask = (tensor.to(device) for tensor in (tokens, labels, loss_mask))
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    model.zero_grad()
    boundaries = make_boundaries(cu_seqlens, device)
    with torch.no_grad():
        logits = model(tokens, positions, None, packed_seq_params=boundaries)
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=boundaries)
    loss = (losses.float() * loss_mask).sum()
    loss.backward()
    gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return Outputs(logits.float(), loss.item(), gradients)


def run_in_parts(model, parts):
    """Passes one after another, added up; ``parts`` are the arguments of ``run``. Logits stay a list."""
    logits, loss, gradients = [], 0.0, {}
    for part in parts:
        result = run(model, *part)
        logits.append(result.logits)
        loss += result.loss
        gradients = {name: gradients.get(name, 0) + gradient for name, gradient in result.gradients.items()}
    return logits, loss, gradients


def packed(batch):
    """A micro-batch as the arguments of ``run``."""
    return [batch[name] for name in ("tokens", "labels", "loss_mask", "cu_seqlens")]


def joined_boundaries(cu_seqlens, device):
    """Boundaries of rows that were joined, with the repeated entries that joining leaves."""
    rows, length = cu_seqlens.shape[0], cu_seqlens.shape[1] - 1
    joined = (cu_seqlens[:, :-1] + length * torch.arange(rows, dtype=torch.int32)[:, None]).flatten()
    joined = torch.cat([joined, joined.new_tensor([rows * length])]).to(device)
    longest = int(joined.diff().max())
    return PackedSeqParams("thd", joined, joined, max_seqlen_q=longest, max_seqlen_kv=longest)


def run_packed(model, batch, path):
    """The micro-batch at once, its rows joined to one, or one by one."""
    if path == "joined rows":
        *tensors, cu_seqlens = packed(batch)
        tensors = (tensor.reshape(1, -1) for tensor in tensors)
        result = run(model, *tensors, cu_seqlens, joined_boundaries)
        return result._replace(logits=result.logits.view(*batch["tokens"].shape, -1))
    if path != "accumulation":
        return run(model, *packed(batch))
    rows = [[tensor[row : row + 1] for tensor in packed(batch)] for row in range(len(batch["tokens"]))]
    logits, loss, gradients = run_in_parts(model, rows)
    return Outputs(torch.cat(logits), loss, gradients)


def run_alone(model, batch):
    """Every chunk in a pass of its own, through the reference kernel."""
    modules = [module for module in model.modules() if isinstance(module, DocumentAttention)]
    kernel = modules[0].attend
    parts = [
        [batch[name][row : row + 1, start:end] for name in ("tokens", "labels", "loss_mask")]
        + [one_segment(end - start)]
        for row in range(len(batch["tokens"]))
        for start, end in chunk_bounds(batch["cu_seqlens"][row])
    ]
    try:
        for module in modules:
            module.attend = KERNELS["sdpa"].attend
        logits, loss, gradients = run_in_parts(model, parts)
    finally:
        for module in modules:
            module.attend = kernel
    return Outputs(torch.cat(logits, dim=1).view(*batch["tokens"].shape, -1), loss, gradients)


def chunk_bounds(cu_seqlens):
    """Start and end of each chunk of a row, and of its padding."""
    boundaries = cu_seqlens.tolist()
    return [(start, end) for start, end in zip(boundaries, boundaries[1:]) if start < end]


def one_segment(length):
    """The cu_seqlens of a row that holds one document."""
    return torch.tensor([[0] + [length] * length], dtype=torch.int32)


def without_boundaries(batch):
    """The same micro-batch, with attention across documents."""
    rows, length = batch["tokens"].shape
    return dict(batch, cu_seqlens=one_segment(length).expand(rows, -1))


def differences(result, expected):
    """How far two results are apart."""
    assert result.gradients.keys() == expected.gradients.keys() and len(result.gradients) > 10
    return Errors(
        ((result.logits - expected.logits).abs().max() / expected.logits.abs().max()).item(),
        abs(result.loss - expected.loss) / abs(expected.loss),
        max(
            ((result.gradients[name] - gradient).abs().max() / gradient.abs().max()).item()
            for name, gradient in expected.gradients.items()
        ),
    )


def show(errors):
    """The three figures in a line."""
    return f"logits {errors.logits:.1e} loss {errors.loss:.1e} gradients {errors.gradients:.1e}"


def check_errors(case, errors, crossing):
    """Print a row of the table and assert that it holds, and that it would not without the boundaries."""
    tolerance = TOLERANCES[case.precision]
    allowed = f"allowed {tolerance:.0e}"
    print(f"\n{case}: {show(errors)}; {allowed}; without boundaries {show(crossing)}", flush=True)
    assert max(errors) < tolerance
    assert max(crossing.logits, crossing.gradients) > 2 * tolerance


def check(case, prefix, device, seq_length, vocab_size, **shape):
    """Compare a case with its chunks alone, and see that it fails without the boundaries."""
    model = make_model(case, seq_length, vocab_size, device, **shape)
    rows = int(case.path.split()[-1]) if case.path.startswith("micro-batch") else 2
    batch = make_batch(prefix, rows, seq_length)
    alone = run_alone(model, batch)
    errors = differences(run_packed(model, batch, case.path), alone)
    crossing = differences(run_packed(model, without_boundaries(batch), case.path), alone)
    check_errors(case, errors, crossing)
