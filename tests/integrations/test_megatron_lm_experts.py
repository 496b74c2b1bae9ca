"""What ``--data-impl bfp`` does to Megatron-LM's experts: balance inside each sequence of joined rows, and plans of
multi-token prediction, by stand-ins of the form of Megatron-LM's functions."""

import argparse
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from torch import nn

from megatron_bfp.attention.boundary_check import BoundaryCheck
from megatron_bfp.attention.context_parallel import Shards
from megatron_bfp.integrations.megatron_lm import experts
from megatron_bfp.integrations.megatron_lm.pipelines import plan_later_tokens

ROW_LENGTH, EXPERTS = 8, 4
CONFIG = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "sequence_parallel": False}


def options():
    return argparse.Namespace(seq_length=ROW_LENGTH)


def counts(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask=False):
    """As the router's: sums of scores and of routes by sequence and expert, and positions of a sequence."""
    scores, routes = (tensor.reshape(seq_length, -1) for tensor in (scores_for_aux_loss, routing_map))
    assert scores.shape == (seq_length, bsz * EXPERTS)
    return scores.sum(0), routes.sum(0), len(routes)


def routed(rows):
    """Scores and a routing map of two experts for each of the joined positions of some rows."""
    scores = torch.rand(rows * ROW_LENGTH, EXPERTS, generator=torch.Generator().manual_seed(1))
    routes = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(2).indices, True)
    return scores, routes


def by_sample(joined, rows):
    """Joined rows in the form that the router takes: [L, rows, experts], positions first."""
    return joined.view(rows, ROW_LENGTH, EXPERTS).transpose(0, 1).reshape(-1, EXPERTS)


def balance(positions, scores, routes, options=options, **config):
    """What the function gets for the positions of a rank."""
    router = SimpleNamespace(config=SimpleNamespace(**CONFIG | config))
    share = scores[positions], routes[positions]
    return experts.balance_in_sequences(counts, options)(router, share[0], *share, len(positions), 1)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_joined_rows_are_balanced_as_rows_are(rows):
    scores, routes = routed(rows)
    got = balance(torch.arange(rows * ROW_LENGTH), scores, routes)
    expected = counts(None, None, by_sample(scores, rows), by_sample(routes, rows), ROW_LENGTH, rows)
    assert torch.allclose(got[0], expected[0]) and torch.equal(got[1], expected[1]) and got[2] == expected[2]
    as_one = balance(torch.arange(rows * ROW_LENGTH), scores, routes, lambda: None)  # the control
    assert (len(as_one[0]) == len(expected[0])) == (rows == 1)


@pytest.mark.parametrize("context_ranks, tensor_ranks", [(1, 2), (2, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("rows", [2, 3])
def test_shares_of_joined_rows_add_up_to_each_row(monkeypatch, rows, context_ranks, tensor_ranks):
    """Over context-parallel ranks, and over tensor-parallel ranks with sequence parallelism."""
    scores, routes = routed(rows)
    config = {"tensor_model_parallel_size": tensor_ranks, "context_parallel_size": context_ranks}
    config["sequence_parallel"] = tensor_ranks > 1
    got = []
    for rank in range(context_ranks):
        monkeypatch.setattr(parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        shards = Shards(context_ranks, 1, rows * ROW_LENGTH, is_zigzag=context_ranks > 1)
        for part, positions in enumerate(shards.positions(rank).chunk(tensor_ranks)):
            monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda part=part: part)
            got.append(balance(positions, scores, routes, **config))
    expected = counts(None, None, by_sample(scores, rows), by_sample(routes, rows), ROW_LENGTH, rows)
    assert torch.allclose(sum(of_rank[0] for of_rank in got), expected[0])
    assert torch.equal(sum(of_rank[1] for of_rank in got), expected[1])
    assert sum(of_rank[2] for of_rank in got) == ROW_LENGTH


def test_rows_that_were_separated_before_are_left_alone():
    scores, routes = routed(2)
    router = SimpleNamespace(config=SimpleNamespace(**CONFIG))
    of_rows = experts.balance_in_sequences(counts, options)
    assert of_rows(router, scores, scores, routes, ROW_LENGTH, 2)[2] == ROW_LENGTH


# Plans of later tokens


class MultiTokenPredictionLayer(nn.Module):
    def _get_embeddings(self, packed_seq_params=None):
        return packed_seq_params

    def _concat_embeddings(self, looked_up):
        return looked_up


def build(layer):
    """As Megatron-LM's: looks up by the state's boundaries, asserts that there are none, joins, and calls attention."""

    def first(node, hidden_states):
        looked_up = layer._get_embeddings(packed_seq_params=node.chunk_state.packed_seq_params)
        assert node.chunk_state.packed_seq_params is None, "not yet supported"
        return layer._concat_embeddings(looked_up), node.chunk_state.packed_seq_params

    return [first, None], {"mlp": "weights"}


def node(boundaries):
    return SimpleNamespace(chunk_state=SimpleNamespace(packed_seq_params=boundaries))


def packed():
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    return SimpleNamespace(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=5)


def test_a_plan_of_later_tokens_hands_boundaries_to_the_look_up_and_to_attention():
    layer, boundaries = MultiTokenPredictionLayer(), packed()
    (first, rest), backward = plan_later_tokens(build, options)(layer)
    for of_node, expected in ((node(boundaries), (boundaries, boundaries)), (node(None), (None, None))):
        assert first(of_node, None) == expected and of_node.chunk_state.packed_seq_params is expected[0]
    assert rest is None and backward == {"mlp": "weights"}
    assert "_get_embeddings" not in vars(layer) and "_concat_embeddings" not in vars(layer)


@pytest.mark.parametrize("make", [build, plan_later_tokens(build, lambda: None)], ids=["Megatron-LM's", "no run"])
def test_others_still_assert_that_there_are_none(make):
    (first, _), _ = make(MultiTokenPredictionLayer())
    with pytest.raises(AssertionError, match="not yet supported"):
        first(node(packed()), None)


def test_the_first_step_sees_the_boundaries_of_a_planned_layer():
    """Its parts are called, and not the layer."""
    model = nn.Module()
    model.mtp = MultiTokenPredictionLayer()
    check = BoundaryCheck([model])
    assert "was not called as a module" in check.report().faults[0]  # the control
    (first, _), _ = plan_later_tokens(build, options)(model.mtp)
    first(node(packed()), None)
    assert check.report().faults == ()
