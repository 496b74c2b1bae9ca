"""Step time of a 7B model's layer on packed sequences, compared with full causal attention.

    python benchmarks/attention.py --seq-length 2048 8192 32768

One transformer layer of megatron-core in the shape of LLaMA 7B (hidden size 4096, 32 heads, feed-forward 11008, bf16),
forward and backward, on micro-batches of ``--tokens`` tokens. Sequences are simulated RefinedWeb documents, packed;
full causal attention is the same kernel with one document per row. Every installed kernel is measured.

``megatron-lm`` is the layer that Megatron-LM trains with by default, all of Transformer Engine: with joined rows and
their boundaries, as ``--data-impl bfp`` has them, and with rows that are not joined, as Megatron-LM has them otherwise.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from trainer.config import TrainerConfig
from trainer.model import transformer_config
from trainer.process import complete_environment

from benchmarks.packing import SIMULATED, simulated_lengths
from megatron_bfp import pack
from megatron_bfp.attention.kernels import KERNELS, Needs
from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.integrations.megatron_lm.positions import rotate_by_rows
from megatron_bfp.megatron_core.attention import document_boundaries, with_document_attention
from megatron_bfp.tables import format_table

WARM_UP, STEPS = 3, 9

MEGATRON_LM = "megatron-lm"
"""Stands for Megatron-LM's own layer among the kernels."""


def packed_cu_seqlens(seq_length: int, rows: int) -> torch.Tensor:
    """Boundaries of packed sequences drawn at random, int32 [rows, L + 1]."""
    packing = pack(simulated_lengths(1_000_000), seq_length)
    cu_seqlens = np.full((rows, seq_length + 1), seq_length, dtype=np.int32)
    for row, sequence in enumerate(np.random.default_rng(7).integers(0, len(packing), rows).tolist()):
        ends = np.cumsum(packing[sequence][:, 2])
        cu_seqlens[row, 0] = 0
        cu_seqlens[row, 1 : len(ends) + 1] = ends
    return torch.from_numpy(cu_seqlens)


def one_document_per_row(seq_length: int, rows: int) -> torch.Tensor:
    """Boundaries that leave attention full and causal, int32 [rows, L + 1]."""
    cu_seqlens = torch.full((rows, seq_length + 1), seq_length, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    return cu_seqlens


def milliseconds(step: Callable[[], None]) -> float:
    """Median time of a step on the GPU, ms."""
    times = []
    for number in range(WARM_UP + STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        if number >= WARM_UP:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def initialize() -> None:
    """Make this process the only rank of a world, as megatron-core's layers need one."""
    complete_environment()
    distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def configuration(seq_length: int) -> TrainerConfig:
    """A layer of LLaMA 7B in bf16."""
    return TrainerConfig(
        num_layers=1,
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_attention_heads=32,
        init_method_std=0.02,
        bf16=True,
        seq_length=seq_length,
        data_path=(),
        tokenizer_model="",
        micro_batch_size=1,
        train_iters=1,
    )


def measure(kernel: str, seq_length: int, tokens: int) -> dict[str, Any]:
    """Times of the layer, and of its attention alone, ms."""
    rows = max(1, tokens // seq_length)
    config = transformer_config(configuration(seq_length))
    torch.manual_seed(1)
    spec = with_document_attention(gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm"), kernel)
    layer = build_module(spec, config=config, layer_number=1).cuda().bfloat16()
    rotary = RotaryEmbedding(config.kv_channels, rotary_percent=1.0)(seq_length)
    hidden = torch.randn(seq_length, rows, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    heads = config.num_attention_heads
    qkv = [
        torch.randn(rows * seq_length, heads, config.kv_channels, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    row = {"kernel": kernel, "seq_length": seq_length, "rows": rows}
    for name, make in (("documents", packed_cu_seqlens), ("causal", one_document_per_row)):
        boundaries = document_boundaries(make(seq_length, rows), "cuda")

        def layer_step(boundaries=boundaries):
            out, _ = layer(hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=boundaries)
            out.backward(out.detach())
            layer.zero_grad()

        def attention_step(boundaries=boundaries):
            out = KERNELS[kernel].attend(*qkv, boundaries.joined, config.kv_channels**-0.5, 0.0)
            torch.autograd.grad(out, qkv, out.detach())

        row[f"layer_{name}"] = milliseconds(layer_step)
        row[f"attention_{name}"] = milliseconds(attention_step)
        row[f"chunks_{name}"] = len(boundaries.joined.offsets) - 1
    return row


def joined_rows(seq_length: int, rows: int, device: str) -> PackedSeqParams:
    """Boundaries of packed sequences, for rows that are joined."""
    joined = document_boundaries(packed_cu_seqlens(seq_length, rows), device).joined
    ends, longest = joined.cu_seqlens, joined.max_seqlen
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def measure_megatron_lm(seq_length: int, tokens: int, device: str = "cuda") -> dict[str, Any]:
    """Times of Megatron-LM's default layer, and of its attention alone, ms: as ``measure``, but without boundaries
    where attention is full and causal."""
    rows = max(1, tokens // seq_length)
    config = transformer_config(configuration(seq_length))
    torch.manual_seed(1)
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    layer = build_module(spec, config=config, layer_number=1).to(device).bfloat16()
    core_attention = layer.self_attention.core_attention
    rotary = RotaryEmbedding(config.kv_channels, rotary_percent=1.0)(seq_length)
    boundaries = joined_rows(seq_length, rows, device)
    row = {"kernel": MEGATRON_LM, "seq_length": seq_length, "rows": rows}
    row |= {"chunks_documents": len(boundaries.cu_seqlens_q) - 1, "chunks_causal": rows}
    cases = (("documents", (rows * seq_length, 1), boundaries), ("causal", (seq_length, rows), None))
    for name, shape, params in cases:
        make = {"device": device, "dtype": torch.bfloat16}
        hidden = torch.randn(*shape, config.hidden_size, **make).requires_grad_()
        positions = shape[:1] if params else shape
        of_heads = (*positions, config.num_attention_heads, config.kv_channels)
        qkv = [torch.randn(*of_heads, **make).requires_grad_() for _ in range(3)]

        def layer_step(hidden=hidden, params=params):
            out, _ = layer(hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=params)
            out.backward(out.detach())
            layer.zero_grad()

        def attention_step(qkv=qkv, params=params):
            out = core_attention(*qkv, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)
            torch.autograd.grad(out, qkv, out.detach())

        row[f"layer_{name}"] = milliseconds(layer_step)
        row[f"attention_{name}"] = milliseconds(attention_step)
    return row


def rotating_by_rows(seq_length: int) -> Callable[..., Any]:
    """megatron-core's function that rotates queries and keys, as ``--data-impl bfp`` changes it."""
    options = argparse.Namespace(seq_length=seq_length, reset_position_ids=False)
    return rotate_by_rows(ROTATE, lambda: options)


ROTATE = attention.apply_rotary_pos_emb


def measured_by_megatron_lm(seq_lengths: list[int], tokens: int) -> list[dict[str, Any]]:
    """The rows of the table for Megatron-LM's layers; says so if they are not there."""
    if not gpt_layer_specs.HAVE_TE:
        print(f"{MEGATRON_LM}: Transformer Engine is not installed", flush=True)
        return []
    rows = []
    for seq_length in seq_lengths:
        attention.apply_rotary_pos_emb = rotating_by_rows(seq_length)
        rows.append(measure_megatron_lm(seq_length, tokens))
    attention.apply_rotary_pos_emb = ROTATE
    return rows


def main() -> None:
    """Measure and print."""
    parser = Parser(
        prog="benchmarks/attention.py",
        description="Attention inside documents, compared with full causal attention, in a 7B layer.",
    )
    add = parser.add_argument
    add(
        "--seq-length",
        nargs="+",
        type=int,
        default=[2048, 8192, 32768],
        metavar="L",
        help="tokens per sequence (default: 2048 8192 32768)",
    )
    add("--tokens", type=int, default=32768, metavar="N", help="tokens per micro-batch (default: %(default)s)")
    add(
        "--kernels",
        nargs="+",
        choices=(*KERNELS, MEGATRON_LM),
        default=(*KERNELS, MEGATRON_LM),
        metavar="NAME",
        help="default: all installed",
    )
    add("--output", metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/attention.py: skipped, there is no GPU")
        return
    initialize()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {SIMULATED}; bf16, forward and backward",
        flush=True,
    )
    measured = []
    for kernel in options.kernels:
        if kernel == MEGATRON_LM:
            measured += measured_by_megatron_lm(options.seq_length, options.tokens)
            continue
        reason = KERNELS[kernel].unusable(Needs(torch.bfloat16, 128, 0.0))
        if reason:
            print(f"{kernel}: {reason}", flush=True)
            continue
        measured += [measure(kernel, seq_length, options.tokens) for seq_length in options.seq_length]
    rows = []
    for row in measured:
        cells = [row["kernel"], row["seq_length"], row["rows"], row["chunks_documents"]]
        for part in ("layer", "attention"):
            documents, causal = row[f"{part}_documents"], row[f"{part}_causal"]
            cells += [f"{documents:.2f}", f"{causal:.2f}", f"{documents / causal:.3f}"]
        rows.append(cells)
    header = ["kernel", "L", "rows", "chunks", "layer, documents (ms)", "causal (ms)", "ratio"]
    print(format_table([*header, "attention, documents (ms)", "causal (ms)", "ratio"], rows), flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(measured, indent=2))


if __name__ == "__main__":
    sys.exit(run(main, "benchmarks/attention.py"))
