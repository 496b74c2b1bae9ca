"""The central equivalence: loss and gradients on packed sequences are those of their chunks alone."""

import contextlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")

import megatron.core.transformer.attention as megatron_attention
import torch
from helpers.datasets import documents_of
from helpers.megatron_helpers import build, config, initialize_megatron, model_options
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from trainer.model import build_model, transformer_config

from megatron_bfp import OptionError
from megatron_bfp.megatron_core.attention import DocumentAttention, document_boundaries, with_document_attention

SEQ_LENGTH = 64
VOCAB_SIZE = 320


@pytest.fixture(scope="module", params=["MHA", "GQA"])
def model(request):
    initialize_megatron()
    torch.manual_seed(5)
    grouped = {"group_query_attention": True, "num_query_groups": 2} if request.param == "GQA" else {}
    return build_model(model_options(seq_length=SEQ_LENGTH, **grouped), VOCAB_SIZE)


@pytest.fixture
def micro_batch(write_dataset):
    """Two packed sequences: one with padding and chunks of several lengths, one with a cut document's remainder."""
    lengths = [37, 1, 20, 64 + 11, 40, 9, 13]
    prefix = write_dataset(documents_of(lengths)).prefix
    dataset = build([None] * 3, config(([prefix], None), SEQ_LENGTH))[0]
    samples = [dataset[i] for i in range(len(dataset))]
    several = sorted(samples, key=lambda sample: int((sample["cu_seqlens"] < SEQ_LENGTH).sum()))[-2:]
    assert any((sample["tokens"] == 0).any() for sample in several)
    return torch.utils.data.default_collate(several)


def run(model, tokens, labels, loss_mask, cu_seqlens):
    """Logits [b, s, v], the summed loss, and the gradient of each parameter."""
    model.zero_grad()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits = model(tokens, positions, None, packed_seq_params=document_boundaries(cu_seqlens))
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=document_boundaries(cu_seqlens))
    loss = (losses * loss_mask).sum()
    loss.backward()
    return logits.detach(), loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def chunks(cu_seqlens):
    """Start and end of each chunk of a row, and of its padding."""
    offsets = cu_seqlens.tolist()
    return [(start, end) for start, end in zip(offsets, offsets[1:]) if start < end]


def one_chunk(length):
    return torch.tensor([[0] + [length] * length], dtype=torch.int32)


def run_alone(model, batch):
    """Every chunk of a micro-batch in a forward pass of its own; gradients and losses added up."""
    logits, total, gradients = torch.zeros(0), 0.0, {}
    rows = []
    for row in range(len(batch["tokens"])):
        pieces = []
        for start, end in chunks(batch["cu_seqlens"][row]):
            piece = [batch[name][row : row + 1, start:end] for name in ("tokens", "labels", "loss_mask")]
            logits, loss, of_piece = run(model, *piece, one_chunk(end - start))
            pieces.append(logits)
            total += loss
            gradients = {name: gradients.get(name, 0) + gradient for name, gradient in of_piece.items()}
        rows.append(torch.cat(pieces, dim=1))
    return torch.cat(rows), total, gradients


def packed(batch):
    return [batch[name] for name in ("tokens", "labels", "loss_mask", "cu_seqlens")]


@pytest.mark.case(23)
def test_packed_sequences_equal_their_chunks_alone(model, micro_batch):
    logits, loss, gradients = run(model, *packed(micro_batch))
    logits_alone, loss_alone, gradients_alone = run_alone(model, micro_batch)
    logit_error = (logits - logits_alone).abs().max().item()
    gradient_error = max(
        ((gradients[name] - gradients_alone[name]).abs().max() / gradients_alone[name].abs().max()).item()
        for name in gradients_alone
    )
    print(f"logits differ by {logit_error:.1e} of {logits.abs().max():.1f}; gradients relatively {gradient_error:.1e}")
    assert gradients.keys() == gradients_alone.keys() and len(gradients) > 10
    assert logit_error < 1e-4
    assert gradient_error < 1e-4
    assert abs(loss - loss_alone) < 1e-4 * loss_alone


def test_without_the_boundaries_the_result_is_another(model, micro_batch):
    logits, _, _ = run(model, *packed(micro_batch))
    batch = dict(micro_batch, cu_seqlens=one_chunk(SEQ_LENGTH).expand(2, -1))
    crossing, _, _ = run(model, *packed(batch))
    assert (logits - crossing).abs().max() > 0.1


@pytest.mark.case(24)
def test_padding_and_other_documents_have_no_influence(model, micro_batch):
    logits, _, _ = run(model, *packed(micro_batch))
    changed = {name: tensor.clone() for name, tensor in micro_batch.items()}
    start, end = chunks(changed["cu_seqlens"][0])[0]
    changed["tokens"][0, start:end] = 7
    padding = changed["tokens"][1] == 0
    changed["tokens"][1, padding] = 9
    others, _, _ = run(model, *packed(changed))
    assert torch.equal(logits[0, end:], others[0, end:])
    assert torch.equal(logits[1, ~padding], others[1, ~padding])


def test_positions_applied_by_the_model_are_those_of_the_whole_row(model, micro_batch, monkeypatch):
    """Observed where megatron-core rotates: each query and key is turned by its position in the row, 0 .. L - 1."""
    seen = []
    original = megatron_attention.apply_rotary_pos_emb

    def observe(tensor, freqs, *arguments, **keywords):
        before = tensor.detach().clone()
        rotated = original(tensor, freqs, *arguments, **keywords)
        seen.append((before, rotated.detach().clone()))
        return rotated

    monkeypatch.setattr(megatron_attention, "apply_rotary_pos_emb", observe)
    run(model, *packed(micro_batch))
    assert len(seen) >= 4  # query and key of two layers
    assert micro_batch["position_ids"].tolist() == [list(range(SEQ_LENGTH))] * 2
    for before, rotated in seen:
        expected = rotate(before, torch.arange(SEQ_LENGTH))
        restarted = rotate(before, torch.arange(SEQ_LENGTH) % 13)
        assert torch.allclose(rotated, expected, atol=1e-4)
        assert not torch.allclose(rotated, restarted, atol=1e-1)


def rotate(tensor, positions):
    """RoPE (Su et al., 2021) written out: channel pairs (i, i + d/2) of [s, b, n, d], turned by their position."""
    half = tensor.shape[-1] // 2
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(half) / half)
    angles = angles[:, None, None, :]
    first, second = tensor[..., :half].double(), tensor[..., half:].double()
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    ).float()


@pytest.mark.parametrize("layer_number", [1, 4])
@pytest.mark.parametrize("layer_scaling", [False, True])
def test_one_document_a_row_equals_megatron_core_s_own_attention(layer_number, layer_scaling, monkeypatch):
    class Buffer:
        def get_tensor(self, shape, dtype, name):
            return torch.empty(shape, dtype=dtype)  # the original allocates on a GPU

    initialize_megatron()
    monkeypatch.setattr("megatron.core.parallel_state.get_global_memory_buffer", Buffer)
    options = model_options(group_query_attention=True, num_query_groups=2)
    settings = transformer_config(options)
    settings.apply_query_key_layer_scaling = layer_scaling
    settings.attention_softmax_in_fp32 = True
    arguments = (settings, layer_number, AttnMaskType.causal, "self")
    ours, theirs = DocumentAttention(*arguments), DotProductAttention(*arguments)
    torch.manual_seed(layer_number)
    query, key, value = (torch.randn(24, 2, heads, 16) for heads in (4, 2, 2))
    mask = torch.ones(24, 24, dtype=torch.bool).triu(1)[None, None]
    boundaries = document_boundaries(one_chunk(24).expand(2, -1))
    expected = theirs(query, key, value, mask)
    assert torch.allclose(ours(query, key, value, None, packed_seq_params=boundaries), expected, atol=1e-5)


@pytest.mark.case(17)
@pytest.mark.parametrize(
    "named, changes",
    [
        ("softmax type learnable", {"softmax_type": "learnable", "context_parallel_size": 2}),
        ("clipping or logging of attention logits", {"qk_clip": True}),
        ("clipping or logging of attention logits", {"log_max_attention_logit": True}),
        ("attention in fp8", {"fp8_dot_product_attention": True}),
        ("cross attention", {}),
        ("mask type", {}),
    ],
)
def test_what_would_be_ignored_is_refused(named, changes):
    initialize_megatron()
    settings = transformer_config(model_options())
    for field, value in changes.items():
        setattr(settings, field, value)
    attention_type = "cross" if named == "cross attention" else "self"
    mask_type = AttnMaskType.no_mask if named == "mask type" else AttnMaskType.causal
    with pytest.raises(OptionError, match=named):
        DocumentAttention(settings, 1, mask_type, attention_type)


def test_dropout_is_for_training_only():
    initialize_megatron()
    attention = DocumentAttention(transformer_config(model_options()), 1, AttnMaskType.causal, "self", 0.5)
    torch.manual_seed(0)
    query = torch.randn(24, 1, 4, 16)
    boundaries = document_boundaries(one_chunk(24))

    def outputs_differ():
        first, second = (attention(query, query, query, None, packed_seq_params=boundaries) for _ in range(2))
        return not torch.equal(first, second)

    assert outputs_differ()
    attention.eval()
    assert not outputs_differ()


def test_there_is_no_way_around_the_boundaries(model, micro_batch):
    tokens, positions = micro_batch["tokens"], micro_batch["position_ids"]
    with pytest.raises(OptionError, match="document_boundaries"):
        model(tokens, positions, None)
    mask = torch.zeros(1, 1, SEQ_LENGTH, SEQ_LENGTH, dtype=torch.bool)
    with pytest.raises(OptionError, match="takes no attention_mask"):
        model(tokens, positions, mask, packed_seq_params=document_boundaries(micro_batch["cu_seqlens"]))
    with pytest.raises(OptionError, match="shape"):
        model(tokens, positions, None, packed_seq_params=document_boundaries(micro_batch["cu_seqlens"][:1]))


def test_the_spec_given_is_not_changed():
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    before = spec.submodules.self_attention.submodules.core_attention
    changed = with_document_attention(spec)
    assert spec.submodules.self_attention.submodules.core_attention is before
    assert changed.submodules.self_attention.submodules.core_attention.module is DocumentAttention


class Tracker:
    """Stands in for megatron-core's random number tracker: each rank's numbers, while forked."""

    def __init__(self, rank):
        self.rank, self.forks = rank, 0

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        assert name == "model-parallel-rng"
        self.forks += 1
        outside = torch.get_rng_state()
        torch.manual_seed(1000 + self.rank)
        yield
        torch.set_rng_state(outside)


def dropped_weights(monkeypatch, rank, joined, **changes):
    """Output of attention to values of 1 with dropout 0.5 on a tensor-parallel rank, and the tracker."""
    initialize_megatron()
    settings = transformer_config(model_options())
    for name, value in changes.items():
        setattr(settings, name, value)
    attention = DocumentAttention(settings, 1, AttnMaskType.causal, "self", 0.5)
    tracker = Tracker(rank)
    monkeypatch.setattr("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda: tracker)
    torch.manual_seed(0)
    query = torch.randn(24, 1, 4, 16)
    if joined:
        ends = torch.tensor([0, 12, 24], dtype=torch.int32)
        boundaries = PackedSeqParams("thd", ends, ends, max_seqlen_q=12, max_seqlen_kv=12)
        query = query[:, 0]
    else:
        boundaries = document_boundaries(one_chunk(24))
    return attention(query, query, torch.ones_like(query), None, packed_seq_params=boundaries), tracker


@pytest.mark.parametrize("joined", [False, True], ids=["rows", "joined rows"])
def test_fault_A16_tensor_parallel_ranks_drop_different_weights(monkeypatch, joined):
    first, tracker = dropped_weights(monkeypatch, 0, joined)
    second, _ = dropped_weights(monkeypatch, 1, joined)
    again, _ = dropped_weights(monkeypatch, 0, joined)
    assert not torch.equal(first, second) and torch.equal(first, again) and tracker.forks == 1
    # with sequence parallelism the layers around it fork, as for DotProductAttention
    one, tracker = dropped_weights(monkeypatch, 0, joined, sequence_parallel=True)
    other, _ = dropped_weights(monkeypatch, 1, joined, sequence_parallel=True)
    assert torch.equal(one, other) and tracker.forks == 0


def test_fault_A16_without_dropout_no_random_numbers_are_needed(monkeypatch):
    initialize_megatron()
    monkeypatch.setattr("megatron.core.tensor_parallel.get_cuda_rng_tracker", lambda: None)
    attention = DocumentAttention(transformer_config(model_options()), 1, AttnMaskType.causal, "self", 0.5)
    query, boundaries = torch.randn(24, 1, 4, 16), document_boundaries(one_chunk(24))
    with pytest.raises(AttributeError, match="fork"):
        attention(query, query, query, None, packed_seq_params=boundaries)
    attention.eval()
    attention(query, query, query, None, packed_seq_params=boundaries)


@pytest.mark.parametrize("joined", [False, True], ids=["rows", "joined rows"])
def test_a_softmax_scale_that_is_given_is_used(joined):
    initialize_megatron()
    settings = transformer_config(model_options())
    torch.manual_seed(0)
    query = torch.randn(24, 1, 4, 16)
    ends = torch.tensor([0, 24], dtype=torch.int32)
    boundaries = PackedSeqParams("thd", ends, ends) if joined else document_boundaries(one_chunk(24))
    query = query[:, 0] if joined else query

    def output(scale, factor):
        attention = DocumentAttention(settings, 1, AttnMaskType.causal, "self", softmax_scale=scale)
        return attention(query * factor, query, query, None, packed_seq_params=boundaries)

    assert torch.allclose(output(0.5, 1.0), output(None, 0.5 * 16**0.5), atol=1e-5)
    assert not torch.allclose(output(0.5, 1.0), output(None, 1.0), atol=1e-2)


@pytest.mark.parametrize(
    "heads, cp_comm_type, mtp_num_layers, named",
    [
        (4, "ring", None, "--cp-comm-type ring"),
        (4, None, 1, "multi-token prediction with context parallelism"),
        (3, "a2a", None, "3 attention heads per tensor-parallel rank cannot be divided among 2"),
    ],
)
def test_context_parallelism_that_cannot_be_is_refused(heads, cp_comm_type, mtp_num_layers, named):
    initialize_megatron()
    settings = transformer_config(model_options(num_attention_heads=heads, hidden_size=16 * heads))
    settings.context_parallel_size, settings.mtp_num_layers = 2, mtp_num_layers
    with pytest.raises(OptionError, match=named):
        DocumentAttention(settings, 1, AttnMaskType.causal, "self", cp_comm_type=cp_comm_type)
