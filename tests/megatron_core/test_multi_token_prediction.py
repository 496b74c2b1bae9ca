"""Models that predict later tokens as well: labels, masks and inputs are shifted inside documents."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

import torch
from helpers.megatron_helpers import initialize_megatron, model_options
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import roll_tensor
from trainer.model import CPURotaryEmbedding, transformer_config

from megatron_bfp import OptionError
from megatron_bfp.megatron_core.attention import document_boundaries, with_document_attention

ROWS = {
    # boundaries, labels of the next token, labels of the one after it
    "two documents": ([0, 3, 8], [11, 12, 0, 14, 15, 16, 17, 0], [12, 0, 0, 15, 16, 17, 0, 0]),
    "documents of one token": ([0, 1, 2, 8], [0, 0, 13, 14, 15, 16, 17, 0], [0, 0, 14, 15, 16, 17, 0, 0]),
    "one document": ([0, 8], [11, 12, 13, 14, 15, 16, 17, 0], [12, 13, 14, 15, 16, 17, 0, 0]),
    "padding": ([0, 5, 8], [11, 12, 13, 14, 0, 0, 0, 0], [12, 13, 14, 0, 0, 0, 0, 0]),
    "a chunk that goes on": ([0, 4, 8], [11, 12, 13, 99, 15, 16, 17, 0], [12, 13, 99, 0, 16, 17, 0, 0]),
}


def batch(names):
    """cu_seqlens [b, 9], labels and expected labels [b, 8]."""
    rows = [ROWS[name] for name in names]
    cu_seqlens = torch.tensor([[*ends, *([8] * (9 - len(ends)))] for ends, _, _ in rows], dtype=torch.int32)
    return cu_seqlens, *(torch.tensor([row[part] for row in rows]) for part in (1, 2))


BATCHES = [[name] for name in ROWS] + [list(ROWS)[:2], list(ROWS)]


@pytest.mark.parametrize("names", BATCHES, ids=len)
def test_fault_A02_labels_masks_and_inputs_are_shifted_inside_documents(names):
    cu_seqlens, labels, expected = batch(names)
    boundaries = document_boundaries(cu_seqlens)
    rolled, total = roll_tensor(labels, shifts=-1, dims=-1, packed_seq_params=boundaries)
    assert rolled.tolist() == expected.tolist() and total == expected.sum()
    mask, targets = roll_tensor((labels > 0).float(), packed_seq_params=boundaries)
    assert mask.tolist() == (expected > 0).float().tolist() and targets == (expected > 0).sum()
    positions, _ = roll_tensor(torch.arange(8)[None], packed_seq_params=boundaries)
    ends = [set(row.tolist()) for row in cu_seqlens]
    successors = [[0 if position + 1 in row_ends else position + 1 for position in range(8)] for row_ends in ends]
    assert positions.tolist() == successors
    with pytest.raises(OptionError, match="by one position"):
        roll_tensor(labels, shifts=-2, packed_seq_params=boundaries)


def test_fault_A02_megatron_core_s_own_boundaries_are_left_to_it():
    lengths = torch.tensor([0, 3, 8], dtype=torch.int32)
    labels = torch.tensor([[11, 12, 13, 14, 15, 16, 17, 18]])
    rolled, _ = roll_tensor(labels, packed_seq_params=PackedSeqParams("thd", lengths, lengths))
    assert rolled.tolist() == [[12, 13, 0, 15, 16, 17, 18, 0]]


@pytest.mark.parametrize("names", [list(ROWS)[:1], list(ROWS)], ids=["one row", "five rows"])
def test_fault_A02_a_model_s_later_heads_get_labels_and_tokens_of_the_same_document(names):
    initialize_megatron()
    torch.manual_seed(3)
    config = transformer_config(model_options(num_layers=1))
    config.mtp_num_layers, config.mtp_loss_scaling_factor = 2, 0.1
    spec = with_document_attention(get_gpt_layer_local_spec(normalization="RMSNorm"))
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=128,
        max_sequence_length=8,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    )
    model.rotary_pos_emb = CPURotaryEmbedding(config.kv_channels, rotary_percent=1.0, use_cpu_initialization=True)
    model.eval()  # in training it logs losses, in a tensor on a GPU
    cu_seqlens, labels, expected = batch(names)
    seen, inputs = [], []
    loss, embed = model.compute_language_model_loss, model.embedding.forward
    model.compute_language_model_loss = lambda labels, logits: seen.append(labels.tolist()) or loss(labels, logits)

    def embed_and_remember(input_ids, *rest, **keywords):
        inputs.append(input_ids.tolist())
        return embed(input_ids, *rest, **keywords)

    model.embedding.forward = embed_and_remember
    positions = torch.arange(8).expand_as(labels)
    boundaries = document_boundaries(cu_seqlens)
    mask = (labels > 0).float()
    losses = model(labels + 1, positions, None, labels=labels, loss_mask=mask, packed_seq_params=boundaries)
    assert torch.isfinite(losses).all()
    twice = roll_tensor(expected, packed_seq_params=boundaries)[0].tolist()
    assert sorted(seen) == sorted([expected.tolist(), twice, labels.tolist()])
    assert inputs[0] == (labels + 1).tolist() and len(inputs) == 3
    ends = cu_seqlens[:, 1:].long() - 1
    assert inputs[1] == (labels + 1).roll(-1, -1).scatter(-1, ends, 0).tolist()
