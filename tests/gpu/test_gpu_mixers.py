"""Layers of Megatron-LM's hybrid models that are no attention, by their own kernels on joined rows, against each chunk
alone through the same layers without boundaries: Mamba 2 (mamba_ssm, causal_conv1d) and gated delta nets (fla)."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.hybrid")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("transformer_engine")

import numpy as np
from helpers import equivalence
from helpers.datasets import documents_of
from helpers.megatron_helpers import initialize_megatron, model_options
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from trainer.model import transformer_config

from megatron_bfp.attention.boundaries import join_rows

SEQ_LENGTH, VOCAB_SIZE = 512, 16384
MIXERS = {"M*": ["mamba_ssm", "causal_conv1d"], "G*": ["fla"]}
"""Pattern of layers -> the packages with its kernels."""
GATED_DELTA_NET = {
    "experimental_attention_variant": "gdn",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


@pytest.fixture(scope="module", params=MIXERS)
def model(request):
    for package in MIXERS[request.param]:
        pytest.importorskip(package)
    initialize_megatron()
    torch.manual_seed(5)
    shape = {"hidden_size": 256, "ffn_hidden_size": 512, "init_method_std": 0.08, "bf16": True}
    config = transformer_config(model_options(**shape, group_query_attention=True, num_query_groups=2))
    config = dataclasses.replace(config, **(GATED_DELTA_NET if "G" in request.param else {}))
    options = {"hybrid_layer_pattern": request.param, "share_embeddings_and_output_weights": False}
    return HybridModel(config, hybrid_stack_spec, VOCAB_SIZE, SEQ_LENGTH, **options).bfloat16().cuda()


def joined(cu_seqlens, device):
    """As pretrain_hybrid.py makes them: with what state space layers need."""
    bounds = join_rows(cu_seqlens).to(device, torch.int32)
    longest, num_positions = int(bounds.diff().max()), int(bounds[-1])
    return PackedSeqParams(
        "thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest, total_tokens=num_positions
    )


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_joined_rows_of_other_mixers_equal_the_chunks_alone(model, micro_batch, write_dataset):
    lengths = np.random.default_rng(1).integers(1, 300, 60).tolist()
    batch = equivalence.make_batch(write_dataset(documents_of([*lengths, 1300])).prefix, micro_batch, SEQ_LENGTH)
    parts = [
        [batch[name][row : row + 1, start:end] for name in ("tokens", "labels", "loss_mask")] + [None, lambda *_: None]
        for row in range(micro_batch)
        for start, end in equivalence.chunk_bounds(batch["cu_seqlens"][row])
    ]
    logits, loss, gradients = equivalence.run_in_parts(model, parts)
    alone = equivalence.Outputs(torch.cat(logits, dim=1), loss, gradients)

    def packed(batch):
        *tensors, cu_seqlens = equivalence.packed(batch)
        return equivalence.run(model, *(tensor.reshape(1, -1) for tensor in tensors), cu_seqlens, joined)

    errors = equivalence.differences(packed(batch), alone)
    crossing = equivalence.differences(packed(equivalence.without_boundaries(batch)), alone)
    case = equivalence.Case("Megatron-LM's own", "bf16", "hybrid", f"micro-batch {micro_batch}")
    equivalence.check_errors(case, errors, crossing)
