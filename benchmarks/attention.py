"""Step time of a 7B model's layer on packed sequences, document-masked beside full causal attention.

    python benchmarks/attention.py --seq-length 2048 8192 32768

One transformer layer of megatron-core in the shape of LLaMA 7B (hidden size 4096, 32 heads, feed-forward 11008, bf16),
forward and backward, on micro-batches of as many sequences as make ``--tokens``. Sequences are simulated RefinedWeb
documents, packed; full causal attention is the same kernel with one segment a row. For each kernel that is installed.
"""

import argparse
import json
import statistics
import sys
import types
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.megatron_helpers import initialize_megatron, model_options
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import build_module
from trainer.model import transformer_config

from benchmarks.packing import SIMULATED, simulated_lengths
from megatron_bfp import pack
from megatron_bfp.attention.kernels import KERNELS, Needs
from megatron_bfp.megatron_core.attention import document_boundaries, with_document_attention
from megatron_bfp.tables import format_table

SHAPE = {"hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32, "init_method_std": 0.02}
WARM_UP, STEPS = 3, 9


def packed_cu_seqlens(seq_length: int, rows: int) -> torch.Tensor:
    """int32 [rows, L + 1]: boundaries of packed sequences drawn at random."""
    packing = pack(simulated_lengths(1_000_000), seq_length)
    cu_seqlens = np.full((rows, seq_length + 1), seq_length, dtype=np.int32)
    for row, sequence in enumerate(np.random.default_rng(7).integers(0, len(packing), rows).tolist()):
        ends = np.cumsum(packing[sequence][:, 2])
        cu_seqlens[row, 0] = 0
        cu_seqlens[row, 1 : len(ends) + 1] = ends
    return torch.from_numpy(cu_seqlens)


def one_document_a_row(seq_length: int, rows: int) -> torch.Tensor:
    """int32 [rows, L + 1]: boundaries that leave attention full and causal."""
    cu_seqlens = torch.full((rows, seq_length + 1), seq_length, dtype=torch.int32)
    cu_seqlens[:, 0] = 0
    return cu_seqlens


def milliseconds(step: types.FunctionType) -> float:
    """Median time of a step on the GPU."""
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


def measure(kernel: str, seq_length: int, tokens: int) -> dict:
    """Times of the layer and of its attention alone."""
    rows = max(1, tokens // seq_length)
    options = model_options(seq_length=seq_length, bf16=True, attention_kernel=kernel, **SHAPE)
    config = transformer_config(options)
    torch.manual_seed(1)
    spec = with_document_attention(get_gpt_layer_local_spec(normalization="RMSNorm"), kernel)
    layer = build_module(spec, config=config, layer_number=1).cuda().bfloat16()
    rotary = RotaryEmbedding(config.kv_channels, rotary_percent=1.0)(seq_length)
    hidden = torch.randn(seq_length, rows, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    heads = config.num_attention_heads
    qkv = [
        torch.randn(rows * seq_length, heads, config.kv_channels, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    found = {"kernel": kernel, "seq_length": seq_length, "rows": rows}
    for name, make in (("documents", packed_cu_seqlens), ("causal", one_document_a_row)):
        boundaries = document_boundaries(make(seq_length, rows), "cuda")

        def layer_step(boundaries=boundaries):
            out, _ = layer(hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=boundaries)
            out.backward(out.detach())
            layer.zero_grad()

        def attention_step(boundaries=boundaries):
            out = KERNELS[kernel].attend(*qkv, boundaries.joined, config.kv_channels**-0.5, 0.0)
            torch.autograd.grad(out, qkv, out.detach())

        found[f"layer_{name}"] = milliseconds(layer_step)
        found[f"attention_{name}"] = milliseconds(attention_step)
        found[f"segments_{name}"] = len(boundaries.joined.offsets) - 1
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Document-masked beside full causal attention, 7B layer.")
    parser.add_argument("--seq-length", nargs="+", type=int, default=[2048, 8192, 32768])
    parser.add_argument("--tokens", type=int, default=32768, help="of a micro-batch")
    parser.add_argument("--kernels", nargs="+", choices=tuple(KERNELS), default=tuple(KERNELS))
    parser.add_argument("--output", help="also write the figures as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmark_attention: skipped, there is no GPU")
        return
    initialize_megatron()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {SIMULATED}; bf16, forward and backward",
        flush=True,
    )
    found = []
    for kernel in options.kernels:
        reason = KERNELS[kernel].unusable(Needs(torch.bfloat16, 128, 0.0))
        if reason:
            print(f"{kernel}: {reason}", flush=True)
            continue
        found += [measure(kernel, seq_length, options.tokens) for seq_length in options.seq_length]
    rows = []
    for row in found:
        cells = [row["kernel"], row["seq_length"], row["rows"], row["segments_documents"]]
        for part in ("layer", "attention"):
            documents, causal = row[f"{part}_documents"], row[f"{part}_causal"]
            cells += [f"{documents:.2f}", f"{causal:.2f}", f"{documents / causal:.3f}"]
        rows.append(cells)
    header = ["kernel", "L", "rows", "segments", "layer, documents (ms)", "causal (ms)", "ratio"]
    print(format_table([*header, "attention, documents (ms)", "causal (ms)", "ratio"], rows), flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
