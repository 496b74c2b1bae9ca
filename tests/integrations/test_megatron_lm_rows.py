"""What ``--data-impl bfp`` does to Megatron-LM's model: boundaries by rows, and attention if rows are split."""

import argparse
import functools
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from torch import distributed, nn

from megatron_bfp import IntegrationError, OptionError
from megatron_bfp.integrations.megatron_lm import changes, model
from megatron_bfp.megatron_core.attention import DocumentAttention, DocumentBoundaries, with_document_attention


def options(**values):
    known = {"context_parallel_size": 1, "reset_position_ids": False, "sequence_parallel": False}
    return lambda: argparse.Namespace(**known | values)


# Attention


class TEDotProductAttention:
    pass


class TELinear:
    pass


def transformer_engine_spec():
    """A local layer with Transformer Engine's attention and a linear layer of its own."""
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = TEDotProductAttention
    spec.submodules.self_attention.submodules.linear_proj = TELinear
    return spec


def spec_that_is_built(given, options):
    """The layer spec that ``GPTModel`` gets."""
    got = []

    def initialize(self, config, transformer_layer_spec, vocab_size=1):
        got.append(transformer_layer_spec)

    model.attend_inside_documents(initialize, options)(None, None, transformer_layer_spec=given)
    model.attend_inside_documents(initialize, options)(None, None, given)
    assert len(got) == 2
    return got[1]


def parts_of(spec):
    parts = spec.submodules.self_attention.submodules
    return getattr(parts.core_attention, "module", parts.core_attention), parts.linear_proj


def test_transformer_engine_keeps_all_but_its_attention_if_rows_are_split():
    given = transformer_engine_spec()
    assert parts_of(spec_that_is_built(given, options(context_parallel_size=2))) == (DocumentAttention, TELinear)
    assert parts_of(given) == (TEDotProductAttention, TELinear)  # as it was


@pytest.mark.parametrize("options", [options(), lambda: None], ids=["whole rows", "no run of ours"])
def test_other_models_are_left_alone(options):
    given = transformer_engine_spec()
    assert spec_that_is_built(given, options) is given


def test_a_kernel_that_a_spec_names_is_kept():
    named = with_document_attention(transformer_engine_spec(), kernel="sdpa")
    built = spec_that_is_built(named, options(context_parallel_size=2))
    assert built.submodules.self_attention.submodules.core_attention.params == {"kernel": "sdpa"}


def test_a_stage_without_attention_is_fine_and_other_mixers_are_refused():
    class GatedDeltaNet:
        pass

    rows_are_split = options(context_parallel_size=2)
    empty = SimpleNamespace(layer_specs=[])
    assert spec_that_is_built(empty, rows_are_split).layer_specs == []
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    spec.submodules.self_attention = GatedDeltaNet
    with pytest.raises(OptionError, match="self_attention is GatedDeltaNet, which has no core attention"):
        spec_that_is_built(spec, rows_are_split)


# Boundaries


def joined(**values):
    """Of two rows of 4 positions, of which the first holds two documents."""
    cu_seqlens = torch.tensor([0, 1, 4, 8], dtype=torch.int32)
    params = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=4, max_seqlen_kv=4)
    vars(params).update(values)
    return params


def named(name):
    """A module whose class has this name."""
    return type(name, (nn.Module,), {})()


def boundaries_of_forward(options, mixer="DocumentAttention", params=None, **config):
    """The boundaries that a model's forward gets."""
    whole = nn.Module()
    whole.config = SimpleNamespace(**config)
    whole.core_attention = named(mixer)
    forward = model.by_rows(lambda _, *, packed_seq_params=None: packed_seq_params, options)
    return forward(whole, packed_seq_params=params or joined(tokens_per_sample=4))


@pytest.mark.parametrize(
    "split, tokens_per_sample",
    [({}, 4), ({"context_parallel_size": 2}, None), ({"sequence_parallel": True}, None)],
)
def test_joined_rows_become_one_row(split, tokens_per_sample):
    boundaries = boundaries_of_forward(options(**split))
    assert isinstance(boundaries, DocumentBoundaries) and boundaries.qkv_format == "sbhd"
    assert boundaries.cu_seqlens_q.tolist() == [[0, 1, 4, 8, 8, 8, 8, 8, 8]]
    assert boundaries.joined.offsets == [0, 1, 4, 8] and boundaries.max_seqlen_q == 8
    assert boundaries.tokens_per_sample == tokens_per_sample  # experts see each row where it is whole


def test_joined_rows_of_multi_latent_attention_become_one_row_too():
    boundaries = boundaries_of_forward(options(context_parallel_size=2), multi_latent_attention=True)
    assert isinstance(boundaries, DocumentBoundaries)


@pytest.mark.parametrize(
    "options, mixer",
    [
        (options(reset_position_ids=True), "DocumentAttention"),
        (options(), "TEDotProductAttention"),
        (lambda: None, "DocumentAttention"),
    ],
    ids=["restarted positions", "Transformer Engine", "no run of ours"],
)
def test_joined_rows_stay_as_they_are(options, mixer):
    params = joined()
    assert boundaries_of_forward(options, mixer, params) is params


@pytest.mark.parametrize("mixer", ["TEDotProductAttention", "GatedDeltaNet"])
def test_a_mixer_that_knows_only_joined_rows_stops_a_run_whose_rows_are_split(mixer):
    with pytest.raises(OptionError, match="needs layers of attention inside documents and of Mamba alone"):
        boundaries_of_forward(options(context_parallel_size=2), mixer)


def test_state_space_layers_get_the_numbers_of_whole_rows_if_rows_are_split():
    numbers = torch.tensor([[0, 1, 1, 1, 2, 2, 2, 2]])
    boundaries = boundaries_of_forward(options(context_parallel_size=2), "MambaMixer", joined(seq_idx=numbers))
    assert isinstance(boundaries, DocumentBoundaries) and boundaries.seq_idx is numbers
    whole = joined(seq_idx=numbers)
    assert boundaries_of_forward(options(), "MambaMixer", whole) is whole  # the control


def test_state_space_layers_take_rows_in_the_order_of_rows():
    exchange = model.in_order_of_rows(lambda states, packed_seq_params=None: (states, packed_seq_params), None)
    of_rows = boundaries_of_forward(options(context_parallel_size=2))
    assert exchange("states", of_rows) == exchange("states", packed_seq_params=of_rows) == ("states", None)
    of_documents = joined()
    assert exchange("states", of_documents) == ("states", of_documents)  # the control


def hybrid_stack_spec():
    """Of all kinds of layers, whether a model has them or not."""
    return SimpleNamespace(
        submodules=SimpleNamespace(
            mamba_layer="Mamba", attention_layer=transformer_engine_spec(), mla_layer=transformer_engine_spec()
        )
    )


def test_attention_of_hybrid_models_is_replaced_if_rows_are_split():
    def initialize(self, config, hybrid_stack_spec):
        return built.append(hybrid_stack_spec)

    built, given = [], hybrid_stack_spec()
    for ranks in (2, 1):
        model.attend_inside_documents(initialize, options(context_parallel_size=ranks))(None, None, given)
    kinds = built[0].submodules
    assert parts_of(kinds.attention_layer) == parts_of(kinds.mla_layer) == (DocumentAttention, TELinear)
    assert kinds.mamba_layer == "Mamba"
    assert built[1] is given and parts_of(given.submodules.attention_layer) == (TEDotProductAttention, TELinear)


def test_angles_of_joined_rows_are_those_of_each_row():
    """Otherwise the second row would go on where the first one ends."""

    class Embedding:
        def get_emb(self, max_seq_len, offset=0):
            return torch.arange(offset, offset + max_seq_len)[:, None, None, None]

        def get_emb_and_scale(self, max_seq_len, offset=0):
            return self.get_emb(max_seq_len, offset), 0.5

    of_rows = model.repeat_for_joined_rows(Embedding.get_emb, options(seq_length=4))
    assert of_rows(Embedding(), 8).flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert of_rows(Embedding(), 4).flatten().tolist() == of_rows(Embedding(), max_seq_len=4).flatten().tolist()
    assert of_rows(Embedding(), 6).flatten().tolist() == list(range(6))  # no number of whole rows
    with_scale = model.repeat_for_joined_rows(Embedding.get_emb_and_scale, options(seq_length=4))
    angles, scale = with_scale(Embedding(), 8)
    assert angles.flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3] and scale == 0.5


# Loss


@pytest.mark.parametrize("targets_of_others, expected", [(5, 2 * 6.0 / 8), (0, 2 * 6.0 / 3)])
def test_a_micro_batch_is_divided_by_the_targets_of_all_ranks(monkeypatch, targets_of_others, expected):
    """Gradients are averaged over the two ranks afterwards."""
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: None)
    monkeypatch.setattr(distributed, "all_reduce", lambda tensor, group: tensor.add_(targets_of_others))

    def calculate_loss(model, output_tensor, loss_func, config):
        loss, num_targets, _ = loss_func(output_tensor)
        assert num_targets.dtype == torch.int32  # schedules add it to whole numbers
        return float(loss / num_targets)

    num_targets = torch.tensor(3, dtype=torch.int32)
    calculate = model.count_targets_of_the_row(calculate_loss, options())
    found = functools.partial(calculate, None, torch.tensor(6.0), lambda loss: (loss, num_targets, {}))
    assert found(SimpleNamespace(calculate_per_token_loss=False)) == pytest.approx(expected)
    assert found(SimpleNamespace(calculate_per_token_loss=True)) == pytest.approx(6.0 / 3)
    assert int(num_targets) == 3  # what is reported is of this rank


# Versions


def test_a_function_of_another_form_stops_megatron_lm_alone(monkeypatch):
    monkeypatch.setattr(changes, "_missed", [])
    monkeypatch.setattr(changes.options, "parsed_options", options())
    assert changes._options_of_known_version() is not None
    other = SimpleNamespace(__name__="gpt_model.GPTModel")
    changes._wrap_needed(other, "forward", "packed_seq_params", model.by_rows)
    with pytest.raises(IntegrationError, match="no gpt_model.GPTModel.forward with packed_seq_params; this version is"):
        changes._options_of_known_version()
    monkeypatch.setattr(changes.options, "parsed_options", lambda: None)
    assert changes._options_of_known_version() is None
