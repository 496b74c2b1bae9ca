"""Document boundaries through Megatron-DeepSpeed's model, without a checkout; with one: integration/."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from helpers.megatron_deepspeed_stand_ins import LENGTH, Attention, boundaries_of_rows, cu_seqlens_of
from torch.utils.checkpoint import checkpoint

from megatron_bfp.attention.boundaries import Boundaries
from megatron_bfp.attention.kernels import KERNELS
from megatron_bfp.errors import IntegrationError
from megatron_bfp.integrations.megatron_deepspeed import model
from megatron_bfp.samples.sample import dense_attention_mask

# Batches


def receive(rows, loss_mask):
    """A batch as ``broadcast_data`` gives it, and the masks made of it."""
    data = {
        "text": torch.arange(len(rows) * (LENGTH + 1)).view(len(rows), -1),
        "cu_seqlens": torch.tensor([cu_seqlens_of(*row) for row in rows]),
        "loss_mask": torch.tensor(loss_mask),
    }
    broadcast = model.broadcast_with_boundaries(lambda keys, data, _: {key: data[key] for key in keys})
    batch = broadcast(["text"], data, torch.int64)
    assert list(batch) == ["text"]
    return batch["text"][:, :-1]


make_masks = model.masks_from_boundaries(None)


def test_masks_and_positions_come_from_the_boundaries():
    rows = [(5, 7), (16,), (1, 1, 14)]
    mask = np.ones((3, LENGTH), dtype=np.int64)
    mask[0, 4] = mask[0, 11:] = 0
    tokens = receive(rows, mask)
    boundaries, loss_mask, positions = make_masks(tokens, 20, True, False, True)
    mask[1, 3] = 0  # token 20
    assert boundaries.dtype == torch.int32 and boundaries[:, -1].tolist() == [mask.sum()] * 3
    assert loss_mask.dtype == torch.float32 and loss_mask.tolist() == mask.tolist()
    assert positions[0].tolist() == [*range(5), *range(7), *range(4)]
    assert positions[2].tolist() == [0, 0, *range(14)]
    for row, dense in zip(rows, model.dense_mask(boundaries[:, :-1])):
        assert np.array_equal(dense, dense_attention_mask(np.array(cu_seqlens_of(*row))))
    _, _, positions = make_masks(receive(rows, mask), 20, False, True, False, True)
    assert positions.tolist() == [list(range(LENGTH))] * 3


def test_a_micro_batch_without_targets_has_a_finite_loss_of_0():
    boundaries, loss_mask, _ = make_masks(receive([(1, 1)], np.zeros((1, LENGTH), dtype=np.int64)), 0, False, False, 0)
    losses = torch.full((1, LENGTH), 5.0, requires_grad=True)

    def mean(losses):
        return (losses * loss_mask).sum() / loss_mask.sum()

    whole = model.no_loss_without_targets(lambda *arguments: (losses, []))
    output, _ = whole(SimpleNamespace(post_process=True), None, None, boundaries, labels=torch.zeros(1, LENGTH))
    piped = model.no_pipeline_loss_without_targets(lambda output, labels: mean(output))
    for loss in (mean(output), piped(losses, (None, loss_mask))):
        loss.backward()
        assert loss == 0 and losses.grad.tolist() == [[0.0] * LENGTH]


@pytest.mark.parametrize("targets", [0, 1, 2, LENGTH])
def test_a_micro_batch_with_a_target_has_its_loss_whatever_carries_it(targets):
    mask = np.zeros((1, LENGTH), dtype=np.int64)
    mask[0, 3 : 3 + targets] = 1
    boundaries, loss_mask, _ = make_masks(receive([(LENGTH,)], mask), 0, False, False, False)
    losses = torch.arange(LENGTH, dtype=torch.float32)[None] + 5
    expected = losses[0, 3 : 3 + targets].mean() if targets else 0.0

    def mean(losses):
        return (losses * loss_mask).sum() / loss_mask.sum()

    whole = model.no_loss_without_targets(lambda *arguments: (losses, []))
    output, _ = whole(SimpleNamespace(post_process=True), None, None, boundaries, labels=torch.zeros(1, LENGTH))
    piped = model.no_pipeline_loss_without_targets(lambda output, labels: mean(output))
    assert mean(output) == pytest.approx(expected) and piped(losses, (None, loss_mask)) == pytest.approx(expected)


def test_with_targets_only_labels_come_beside_the_tokens(monkeypatch):
    text, labels = torch.arange(LENGTH + 1)[None], torch.arange(LENGTH)[None] + 100
    data = {"text": text, "cu_seqlens": torch.tensor([cu_seqlens_of(16)]), "labels": labels}
    data["loss_mask"] = torch.ones(1, LENGTH, dtype=torch.int64)
    asked = []

    def broadcast_data(keys, sent, datatype):
        asked.append(list(keys))
        return {key: data[key] for key in keys}

    broadcast = model.broadcast_with_boundaries(broadcast_data)
    monkeypatch.setattr(model, "parsed_options", lambda: SimpleNamespace(targets_only=True))
    for sent in (data, None):  # of the first rank of a tensor-parallel group, and of the others
        tokens_ = broadcast(["text"], sent, torch.int64)["text"].long()
        assert torch.equal(tokens_[:, 1:].contiguous(), labels) and torch.equal(
            tokens_[:, :-1].contiguous(), text[:, :-1]
        )
        make_masks(tokens_[:, :-1], 20, False, False, False)
    assert asked == [["text", "cu_seqlens", "loss_mask", "labels"]] * 2
    for use in (lambda: tokens_[:, :5], lambda: tokens_[0], lambda: tokens_.cuda(), lambda: tokens_[:1, 1:]):
        with pytest.raises(IntegrationError, match="--targets-only: the script takes"):
            use()


def test_a_script_that_uses_batches_in_another_way_is_stopped():
    tokens = receive([(16,)], np.ones((1, LENGTH), dtype=np.int64))
    with pytest.raises(IntegrationError, match="a second batch before"):
        receive([(16,)], np.ones((1, LENGTH), dtype=np.int64))
    with pytest.raises(IntegrationError, match="did not receive just before"):
        make_masks(tokens[:, 1:], 0, False, False, False)
    with pytest.raises(IntegrationError, match="did not receive just before"):
        make_masks(tokens, 0, False, False, False)
    broadcast = model.broadcast_with_boundaries(None)
    with pytest.raises(IntegrationError, match="the script wants .*'types'"):
        broadcast(["text", "types"], None, torch.int64)
    with pytest.raises(IntegrationError, match="makes its own samples"):
        broadcast(["text"], {"text": tokens}, torch.int64)


# The model


def test_boundaries_are_prepared_once_for_a_micro_batch_and_anew_for_another():
    tensor = boundaries_of_rows((5, 11))
    first = model.micro_batch_of(tensor)
    assert first is model.micro_batch_of(tensor.detach())
    other = model.micro_batch_of(boundaries_of_rows((4, 12)))
    assert other.joined.offsets == [0, 4, 16] and first.joined.offsets == [0, 5, 16]
    tensor[0, 1] = 6
    assert model.micro_batch_of(tensor).joined.offsets == [0, 6, 16]
    tensor[0, 1] = 7  # in the memory of the latest that was asked for
    assert model.micro_batch_of(tensor).joined.offsets == [0, 7, 16]
    assert not model.micro_batch_of(tensor).mask[0, 0, 6, 0] and model.micro_batch_of(tensor).mask[0, 0, 7, 6]
    row = boundaries_of_rows((5, 11), (4, 12))
    assert model.micro_batch_of(row[:1]).joined.offsets == [0, 5, 16]
    assert model.micro_batch_of(row).joined.offsets == [0, 5, 16, 20, 32]  # the same memory, another shape
    row.copy_(boundaries_of_rows((1, 15), (2, 14)))
    assert model.micro_batch_of(row).joined.offsets == [0, 1, 16, 18, 32]
    for wrong in (None, torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), boundaries_of_rows((4, 12)).long()):
        with pytest.raises(IntegrationError, match="attention got no document boundaries"):
            model.micro_batch_of(wrong)


class Flash:
    """Has what FlashSelfAttention has; its kernel stands in for flash-attn and remembers what it got."""

    softmax_scale, dropout_p, causal, training = None, 0.25, True, True

    def __init__(self):
        self.calls = []

    def flash_attn_func(self, q, k, v, starts, starts_k, longest, longest_k, dropout, softmax_scale, causal):
        assert starts is starts_k and longest == longest_k and starts.dtype == torch.int32 and causal
        self.calls.append((starts.tolist(), longest, dropout))
        self.scales = (softmax_scale, self.softmax_scale)
        boundaries = Boundaries.of_joined_rows(starts, len(q))
        return KERNELS["sdpa"].attend(q, k, v, boundaries, q.shape[-1] ** -0.5, 0.0)

    forward = model.attend_with_varlen_kernel(None)


class Attending(Attention):
    forward = model.attend_inside_documents(Attention.forward)


def alone(hidden_states, rows):
    """Plain causal attention of every chunk."""
    outputs = torch.zeros_like(hidden_states)
    for row, lengths in enumerate(rows):
        bounds = sorted({*cu_seqlens_of(*lengths)})
        for start, end in zip(bounds, bounds[1:]):
            mask = ~torch.ones(1, 1, end - start, end - start, dtype=torch.bool).tril()
            outputs[start:end, row] = Attention().forward(hidden_states[start:end, row : row + 1], mask)[0][:, 0]
    return outputs


@pytest.mark.parametrize("with_flash", [False, True], ids=["softmax", "flash"])
def test_attention_is_that_of_the_documents_alone(with_flash):
    rows = [(5, 7), (16,), (1, 1, 14)]
    flash = Flash() if with_flash else None
    hidden_states = torch.randn(LENGTH, 3, 8)
    output, _ = Attending(flash).forward(hidden_states, boundaries_of_rows(*rows), rotary_pos_emb=None)
    assert torch.allclose(output, alone(hidden_states, rows), atol=1e-6)
    if with_flash:
        assert flash.calls == [([0, 5, 12, 16, 32, 33, 34, 48], 16, 0.25)]
        flash.training, flash.softmax_scale = False, 0.3
        Attending(flash).forward(hidden_states, boundaries_of_rows(*rows))
        assert flash.calls[-1][-1] == 0.0 and flash.scales == (0.3, 0.3)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("with_flash", [False, True], ids=["softmax", "flash"])
def test_recomputation_sees_the_boundaries_of_its_own_micro_batch(with_flash, use_reentrant):
    attention = Attending(Flash() if with_flash else None)
    micro_batches = [[(5, 7)], [(16,)], [(1, 1, 14)]]
    inputs = [torch.randn(LENGTH, 1, 8, requires_grad=True) for _ in micro_batches]
    outputs = [
        checkpoint(attention.forward, states, boundaries_of_rows(*rows), use_reentrant=use_reentrant)[0]
        for states, rows in zip(inputs, micro_batches)
    ]
    for output in outputs:  # all forward passes are done before the first is run again
        output.square().sum().backward()
    for states, rows in zip(inputs, micro_batches):
        twin = states.detach().clone().requires_grad_()
        alone(twin, rows).square().sum().backward()
        assert torch.allclose(states.grad, twin.grad, atol=1e-5)


def test_flash_attention_without_boundaries_or_for_other_tokens_is_stopped():
    query = torch.randn(1, LENGTH, 2, 4)
    with pytest.raises(IntegrationError, match="for other tokens"):
        Flash().forward(query, query, query)
    with pytest.raises(IntegrationError, match="for other tokens"):
        Attending(Flash()).forward(torch.randn(LENGTH, 2, 8), boundaries_of_rows((16,)))


@pytest.mark.parametrize("is_moe", [False, True])
def test_a_pipeline_passes_the_boundaries_on_to_its_last_layer(is_moe):
    def layer(self, inputs, **keywords):
        if len(inputs) == 3:
            return inputs[0] + 1, inputs[2]
        return (inputs[0] + 1, inputs[1], torch.zeros(1)) if is_moe else (inputs[0] + 1, inputs[1])

    embed = model.embed_and_pass_on(lambda self, inputs, **keywords: inputs[0] * 2)
    forward = model.pass_on_until_the_last_layer(lambda: 2)(layer)
    boundaries = boundaries_of_rows((16,))
    states = embed(None, (torch.ones(2), None, boundaries))
    states = forward(SimpleNamespace(layer_number=0), states)
    assert states[1] is boundaries and len(states) == 2 + is_moe
    states = forward(SimpleNamespace(layer_number=1), states)
    assert (len(states) == 2 and states[0].tolist() == [4, 4]) if is_moe else states.tolist() == [4, 4]
    with pytest.raises(IntegrationError, match="no document boundaries"):
        forward(SimpleNamespace(layer_number=0), torch.ones(2))
