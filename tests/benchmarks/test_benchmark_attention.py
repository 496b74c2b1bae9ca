"""benchmarks/attention.py as far as a CPU goes: Megatron-LM's own layers, with a stand-in for Transformer Engine's."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

from helpers.megatron_helpers import initialize_megatron
from megatron.core.transformer import attention as megatron_attention
from torch import nn

from benchmarks import attention
from megatron_bfp.megatron_core.attention import DocumentAttention, document_boundaries

SEQ_LENGTH, TOKENS = 64, 128
SMALL = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 16}


class JoinedRowsOrWholeOnes(nn.Module):
    """Takes what Transformer Engine's attention takes; ``seen`` are the shapes of queries and the boundaries."""

    seen = []

    def __init__(self, *arguments, **keywords):
        super().__init__()
        self.inside_documents = DocumentAttention(*arguments, kernel="sdpa", **keywords)

    def forward(self, query, *others, packed_seq_params=None, **keywords):
        self.seen.append((tuple(query.shape), packed_seq_params))
        if packed_seq_params is None:
            length, rows = query.shape[:2]
            packed_seq_params = document_boundaries(attention.one_document_per_row(length, rows))
        return self.inside_documents(query, *others, packed_seq_params=packed_seq_params, **keywords)


def spec_of_stand_ins():
    spec = attention.gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = JoinedRowsOrWholeOnes
    return spec


@pytest.fixture
def on_the_cpu(monkeypatch):
    """A small layer, documents that need little time, and steps that are run once."""
    initialize_megatron()
    make, lengths = attention.transformer_config, attention.simulated_lengths(1000)

    def small(options):
        config = make(options)
        vars(config).update(SMALL)
        return config

    def once(step):
        step()
        return 1.0

    monkeypatch.setattr(attention, "simulated_lengths", lambda _: lengths)
    monkeypatch.setattr(attention, "transformer_config", small)
    monkeypatch.setattr(attention, "milliseconds", once)
    monkeypatch.setattr(JoinedRowsOrWholeOnes, "seen", [])
    specs = attention.gpt_layer_specs
    monkeypatch.setattr(specs, "get_gpt_layer_with_transformer_engine_spec", spec_of_stand_ins)
    monkeypatch.setattr(attention, "RotaryEmbedding", lambda *_, **__: lambda length: torch.zeros(length, 1, 1, 16))
    monkeypatch.setattr(megatron_attention, "apply_rotary_pos_emb", attention.rotating_by_rows(SEQ_LENGTH))


def test_megatron_lm_s_layer_is_measured_with_joined_rows_and_with_whole_ones(on_the_cpu):
    row = attention.measure_megatron_lm(SEQ_LENGTH, TOKENS, "cpu")
    shapes = [shape for shape, _ in JoinedRowsOrWholeOnes.seen]
    assert shapes == [(128, 2, 16)] * 2 + [(64, 2, 2, 16)] * 2  # in the layer, and alone
    boundaries = [packed for _, packed in JoinedRowsOrWholeOnes.seen]
    assert boundaries[0] is boundaries[1] and boundaries[0].cu_seqlens_q[-1] == TOKENS
    assert boundaries[2] is boundaries[3] is None
    assert row["chunks_documents"] == len(boundaries[0].cu_seqlens_q) - 1 >= row["chunks_causal"] == row["rows"] == 2
    assert {key for key in row if key.startswith(("layer", "attention"))} == {
        f"{part}_{name}" for part in ("layer", "attention") for name in ("documents", "causal")
    }


def test_without_transformer_engine_it_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(attention.gpt_layer_specs, "HAVE_TE", False)
    assert attention.measured_by_megatron_lm([64], 64) == []
    assert capsys.readouterr().out == "megatron-lm: Transformer Engine is not installed\n"
