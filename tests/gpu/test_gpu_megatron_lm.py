"""The attention that Megatron-LM trains packed samples with, Transformer Engine's on joined rows, against each chunk
alone through the same layers without boundaries. With context parallelism, Transformer Engine's layers get attention
inside documents."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)
pytest.importorskip("transformer_engine")

import numpy as np
from helpers import equivalence
from helpers.datasets import documents_of
from helpers.megatron_helpers import initialize_megatron, model_options
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from trainer.model import transformer_config

from megatron_bfp.megatron_core.attention import with_document_attention

SEQ_LENGTH, VOCAB_SIZE = 512, 16384


KINDS = {
    "LLaMA": {},
    "gpt-oss": {"softmax_type": "learnable", "window_size": (64, 0), "window_attn_skip_freq": 2},
}
"""Kind of model -> what its attention has."""


def make_model(spec, kind="LLaMA"):
    initialize_megatron()
    torch.manual_seed(5)
    shape = {"hidden_size": 256, "ffn_hidden_size": 512, "init_method_std": 0.08, "bf16": True}
    config = transformer_config(model_options(**shape, group_query_attention=True, num_query_groups=2))
    config = dataclasses.replace(config, **KINDS[kind])
    options = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    return GPTModel(config, spec, VOCAB_SIZE, SEQ_LENGTH, **options).bfloat16().cuda()


def make_batch(write_dataset, micro_batch):
    lengths = np.random.default_rng(1).integers(1, 300, 60).tolist()
    prefix = write_dataset(documents_of([*lengths, 1300, 777])).prefix
    return equivalence.make_batch(prefix, micro_batch, SEQ_LENGTH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_joined_rows_equal_the_chunks_alone(kind, micro_batch, write_dataset):
    model = make_model(get_gpt_layer_with_transformer_engine_spec(), kind)
    batch = make_batch(write_dataset, micro_batch)
    parts = [
        [batch[name][row : row + 1, start:end] for name in ("tokens", "labels", "loss_mask")] + [None, no_boundaries]
        for row in range(micro_batch)
        for start, end in equivalence.chunk_bounds(batch["cu_seqlens"][row])
    ]
    logits, loss, gradients = equivalence.run_in_parts(model, parts)
    alone = equivalence.Outputs(torch.cat(logits, dim=1).view(*batch["tokens"].shape, -1), loss, gradients)
    errors = equivalence.differences(equivalence.run_packed(model, batch, "joined rows"), alone)
    crossing = equivalence.without_boundaries(batch)
    crossing = equivalence.differences(equivalence.run_packed(model, crossing, "joined rows"), alone)
    case = equivalence.Case(f"transformer-engine of Megatron-LM, {kind}", "bf16", "GQA", f"micro-batch {micro_batch}")
    equivalence.check_errors(case, errors, crossing)


def no_boundaries(*_):
    return None


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_rows_through_its_layers_with_attention_inside_documents_equal_the_chunks_alone(micro_batch, write_dataset):
    model = make_model(with_document_attention(get_gpt_layer_with_transformer_engine_spec()))
    batch = make_batch(write_dataset, micro_batch)
    alone, path = equivalence.run_alone(model, batch), f"micro-batch {micro_batch}"
    errors = equivalence.differences(equivalence.run_packed(model, batch, path), alone)
    crossing = equivalence.without_boundaries(batch)
    crossing = equivalence.differences(equivalence.run_packed(model, crossing, path), alone)
    kernel = model.decoder.layers[0].self_attention.core_attention.kernel_name
    assert kernel != "sdpa"
    equivalence.check_errors(equivalence.Case(f"{kernel} in its layers", "bf16", "GQA", path), errors, crossing)
