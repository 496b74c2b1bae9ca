"""What ``--data-impl bfp`` does in Megatron-DeepSpeed, without a checkout; with one: integration/."""

import argparse
import json
import pickle
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.datasets import documents_of
from torch.utils.checkpoint import checkpoint

from megatron_bfp.attention.boundaries import join_rows
from megatron_bfp.attention.kernels import KERNELS
from megatron_bfp.errors import IndexedDatasetError, IntegrationError, OptionError
from megatron_bfp.integrations.megatron_deepspeed import model
from megatron_bfp.integrations.megatron_deepspeed import options as megatron_deepspeed
from megatron_bfp.integrations.megatron_deepspeed.dataset import build_dataset, build_splits
from megatron_bfp.samples.sample import dense_attention_mask
from megatron_bfp.sequence_index.builder import build
from megatron_bfp.sequence_index.key import IndexKey, index_directory
from megatron_bfp.sequence_index.split import PackedSplit

LENGTH = 16
LENGTHS = [3, 40, 16, 1, 5, 5, 9, 33, 2, 1, 7, 12, 16, 17]
PARTS_OF_TWO = ["0.5", "a", "0.5", "b"]


def cu_seqlens_of(*lengths, length=LENGTH):
    """The cu_seqlens of a row with segments of these lengths, and of the padding behind them."""
    ends = np.cumsum(lengths)
    return [0, *ends.tolist(), *([length] * (length - len(lengths)))]


def boundaries_of_rows(*rows, targets=1):
    return torch.tensor([[*cu_seqlens_of(*row), targets] for row in rows], dtype=torch.int32)


# datasets


@pytest.fixture
def packed(write_dataset):
    dataset = write_dataset(documents_of(LENGTHS))
    return build_dataset(PackedSplit.open(dataset, LENGTH, None), 1, seed=7)


def test_every_token_is_an_input_once_and_every_one_but_a_first_a_target_once(packed):
    inputs, targets = [], []
    for place in range(len(packed)):
        sample = packed[place]
        assert {name: (array.dtype, len(array)) for name, array in sample.items()} == {
            "text": (np.int64, LENGTH + 1),
            "cu_seqlens": (np.int64, LENGTH + 1),
            "loss_mask": (np.int64, LENGTH),
        }
        tokens, labels = sample["text"][:-1], sample["text"][1:]
        inputs += tokens[tokens > 0].tolist()
        is_target = sample["loss_mask"] == 1
        assert np.array_equal(tokens[is_target] + 1, labels[is_target])
        targets += labels[is_target].tolist()
    firsts = (np.cumsum([0, *LENGTHS[:-1]]) + 1).tolist()
    assert sorted(inputs) == list(range(1, sum(LENGTHS) + 1))
    assert sorted(targets) == sorted(set(range(1, sum(LENGTHS) + 1)) - set(firsts))


def test_samples_last_for_whole_epochs_and_survive_pickling(write_dataset):
    dataset = write_dataset(documents_of(LENGTHS))
    split = PackedSplit.open(dataset, LENGTH, None)
    sequences = len(build_dataset(split, 0, 7))
    packed = build_dataset(split, sequences + 1, 7)
    assert len(packed) == 2 * sequences and len(list(packed)) == 2 * sequences
    again = pickle.loads(pickle.dumps(packed))
    assert np.array_equal(again[3]["text"], packed[3]["text"])
    for place in (-1, len(packed)):
        with pytest.raises(IndexError, match=f"sample {place} is not in"):
            packed[place]
    assert packed.desc != build_dataset(split, sequences + 1, 8).desc


def test_splits_are_those_of_the_prebuilt_indexes(write_dataset):
    dataset = write_dataset(documents_of([5] * 1000))
    for first, end in ((0, 969), (969, 999), (999, 1000)):
        build(dataset, IndexKey(LENGTH, first, end), index_directory(dataset.prefix))
    for split in ("969, 30, 1", "969/30/1"):
        datasets = build_splits(dataset.prefix, split, [1, 1, 1], LENGTH, 7)
        names = [dataset.sequence_index.key.name for dataset in datasets]
        assert names == ["s16-d0-969", "s16-d969-999", "s16-d999-1000"]
        assert not any(dataset.sequence_index.was_built for dataset in datasets)


@pytest.mark.case(27)
def test_a_split_without_documents_is_none_and_refused_in_a_blend(write_dataset):
    dataset = write_dataset(documents_of([5] * 10))
    train, valid, test = build_splits(dataset.prefix, "98,2,0", [1, 1, 1], LENGTH, 7)
    assert train and valid is None and test is None
    with pytest.raises(OptionError, match="the valid split, documents 10 to 10 of 10, has no tokens"):
        build_splits(dataset.prefix, "98,2,0", [1, 1, 1], LENGTH, 7, is_in_blend=True)


@pytest.mark.parametrize("paths, is_in_blend", [(["text"], False), (["1", "text"], True), (PARTS_OF_TWO, True)])
def test_options_reach_the_datasets_of_megatron_deepspeed_s_builder(monkeypatch, paths, is_in_blend):
    from megatron_bfp.integrations.megatron_deepspeed import dataset as datasets

    args = SimpleNamespace(data_path=paths, max_documents_per_sequence=3, padded_vocab_size=512)
    calls = []
    monkeypatch.setattr(megatron_deepspeed, "_options", lambda: args)
    monkeypatch.setattr(datasets, "build_splits", lambda *rest, **keywords: calls.append((rest, keywords)))
    build = megatron_deepspeed._build_packed_splits(None)
    build("text", "bfp", "9,1,0", [4, 5, 6], 32, 7, True, data_cache_path="cache")
    assert calls == [(("text", "9,1,0", [4, 5, 6], 32, 7, 3, "cache"), {"is_in_blend": is_in_blend, "vocab_size": 512})]


def test_fault_A13_ids_outside_the_vocabulary_are_named(write_dataset, monkeypatch):
    prefix = write_dataset(documents_of(LENGTHS)).prefix
    last = sum(LENGTHS)
    train, *_ = build_splits(prefix, "1,0,0", [1, 1, 1], LENGTH, 7, vocab_size=last + 1)
    assert len(list(train)) == len(train)
    reason = f"data.bin: document {len(LENGTHS) - 1} holds the token id {last}, the model's vocabulary ends at"
    train, *_ = build_splits(prefix, "1,0,0", [1, 1, 1], LENGTH, 7, vocab_size=last)
    with pytest.raises(IndexedDatasetError, match=reason):
        list(train)
    args = SimpleNamespace(data_path=[], max_documents_per_sequence=None, padded_vocab_size=last)
    args.consumed_train_samples = args.consumed_valid_samples = 0
    monkeypatch.setattr(megatron_deepspeed, "_options", lambda: args)
    of_a_split = megatron_deepspeed._build_packed_split(None)
    with pytest.raises(IndexedDatasetError, match=reason):
        list(of_a_split("train", prefix, "bfp", "", 1, LENGTH, 7, True))
    monkeypatch.setitem(sys.modules, "megatron", module_with("megatron", print_rank_0=lambda line: None))
    for which in range(3):  # before training, from any split
        splits = [None] * 3
        splits[which] = train
        with pytest.raises(IndexedDatasetError, match=reason) as raised:
            megatron_deepspeed._say_what_is_active(lambda splits=splits: splits)()
        assert raised.value.on_every_rank


def test_fault_B15_datasets_are_summed_up_once_for_all_virtual_stages(packed, monkeypatch):
    lines = []
    args = SimpleNamespace(use_flash_attn=False, reset_position_ids=False)
    monkeypatch.setattr(megatron_deepspeed, "_options", lambda: args)
    monkeypatch.setitem(sys.modules, "megatron", module_with("megatron", print_rank_0=lines.append))
    build = megatron_deepspeed._say_what_is_active(lambda: (packed, None, None))
    assert build() == (packed, None, None) and len(lines) == 1
    assert build() == (packed, None, None) and len(lines) == 1


# batches


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


# the model


def test_boundaries_are_prepared_once_for_a_micro_batch_and_anew_for_another():
    tensor = boundaries_of_rows((5, 11))
    found = model.boundaries_of(tensor)
    assert found is model.boundaries_of(tensor.detach())
    other = model.boundaries_of(boundaries_of_rows((4, 12)))
    assert other.segments.boundaries == [0, 4, 16] and found.segments.boundaries == [0, 5, 16]
    tensor[0, 1] = 6
    assert model.boundaries_of(tensor).segments.boundaries == [0, 6, 16]
    tensor[0, 1] = 7  # in the place of the latest that was asked for
    assert model.boundaries_of(tensor).segments.boundaries == [0, 7, 16]
    assert not model.boundaries_of(tensor).mask[0, 0, 6, 0] and model.boundaries_of(tensor).mask[0, 0, 7, 6]
    row = boundaries_of_rows((5, 11), (4, 12))
    assert model.boundaries_of(row[:1]).segments.boundaries == [0, 5, 16]
    assert model.boundaries_of(row).segments.boundaries == [0, 5, 16, 20, 32]  # the same memory, another shape
    row.copy_(boundaries_of_rows((1, 15), (2, 14)))
    assert model.boundaries_of(row).segments.boundaries == [0, 1, 16, 18, 32]
    for wrong in (None, torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), boundaries_of_rows((4, 12)).long()):
        with pytest.raises(IntegrationError, match="attention got no document boundaries"):
            model.boundaries_of(wrong)


class Attention:
    """Has the part of ParallelAttention that matters: [s, b, h] to its kernel and back."""

    enable_ds_sequence_parallel = False

    def __init__(self, flash=None, heads=2):
        self.use_flash_attn, self.flash, self.heads = flash is not None, flash, heads

    def forward(self, hidden_states, attention_mask, encoder_output=None, inference_params=None, rotary_pos_emb=None):
        query = hidden_states.unflatten(-1, (self.heads, -1)).transpose(0, 1)
        if self.use_flash_attn:
            assert attention_mask is None
            return self.flash.forward(query, query, query).transpose(0, 1).flatten(2), None
        scores = torch.einsum("bqhd,bkhd->bhqk", query, query) / query.shape[-1] ** 0.5
        weights = scores.masked_fill(attention_mask, -10000.0).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, query).transpose(0, 1).flatten(2), None


class Flash:
    """Has what FlashSelfAttention has; its kernel stands in for flash-attn and remembers what it got."""

    softmax_scale, dropout_p, causal, training = None, 0.25, True, True

    def __init__(self):
        self.calls = []

    def flash_attn_func(self, q, k, v, starts, starts_k, longest, longest_k, dropout, softmax_scale, causal):
        assert starts is starts_k and longest == longest_k and starts.dtype == torch.int32 and causal
        self.calls.append((starts.tolist(), longest, dropout))
        self.scales = (softmax_scale, self.softmax_scale)
        segments = join_rows(starts[None]) if len(starts) > len(q) else None
        segments = segments or SimpleNamespace(boundaries=starts.tolist())
        return KERNELS["sdpa"].attend(q, k, v, segments, q.shape[-1] ** -0.5, 0.0)

    forward = model.attend_with_varlen_kernel(None)


class Attending(Attention):
    forward = model.attend_inside_documents(Attention.forward)


def alone(hidden_states, rows):
    """Plain causal attention of every segment."""
    found = torch.zeros_like(hidden_states)
    for row, lengths in enumerate(rows):
        bounds = sorted({*cu_seqlens_of(*lengths)})
        for start, end in zip(bounds, bounds[1:]):
            mask = ~torch.ones(1, 1, end - start, end - start, dtype=torch.bool).tril()
            found[start:end, row] = Attention().forward(hidden_states[start:end, row : row + 1], mask)[0][:, 0]
    return found


@pytest.mark.parametrize("with_flash", [False, True], ids=["softmax", "flash"])
def test_attention_is_that_of_the_documents_alone(with_flash):
    rows = [(5, 7), (16,), (1, 1, 14)]
    flash = Flash() if with_flash else None
    hidden_states = torch.randn(LENGTH, 3, 8)
    found, _ = Attending(flash).forward(hidden_states, boundaries_of_rows(*rows), rotary_pos_emb=None)
    assert torch.allclose(found, alone(hidden_states, rows), atol=1e-6)
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


def stock_table(length, head_size):
    """Cosines and sines as Megatron-DeepSpeed's RotaryEmbedding gives them: [length, 1, 1, head size] each."""
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None]
    return angles.cos(), angles.sin()


rotate = model.rotate_by_table(None)


@pytest.mark.parametrize("rotated", [8, 4], ids=["whole heads", "half of each head"])
def test_fault_B18_rotation_is_by_positions_and_relative(rotated):
    """Pair (i, i + d / 2) of a head is a complex number, turned by its position's angle."""
    torch.manual_seed(1)
    tensor = torch.randn(LENGTH, 2, 3, 8, dtype=torch.float64)
    table = [part.double() for part in stock_table(LENGTH + 5, rotated)]
    found = rotate(tensor, table)
    pairs = torch.complex(tensor[..., : rotated // 2], tensor[..., rotated // 2 : rotated])
    speeds = 10000.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    turns = torch.arange(LENGTH)[:, None, None, None] * speeds
    turned = pairs * torch.complex(turns.cos(), turns.sin())
    assert torch.allclose(found[..., :rotated], torch.cat((turned.real, turned.imag), dim=-1), atol=1e-6)
    assert torch.equal(found[..., rotated:], tensor[..., rotated:])
    # what a query makes of a key depends on the distance alone, so a document is the same at any offset
    moved = [part[3:] for part in table]
    scores = torch.einsum("qbhd,kbhd->bhqk", rotate(tensor, table), rotate(tensor, table))
    shifted = torch.einsum("qbhd,kbhd->bhqk", rotate(tensor, moved), rotate(tensor, moved))
    assert torch.allclose(scores, shifted, atol=1e-6)
    assert not torch.allclose(scores, torch.einsum("qbhd,kbhd->bhqk", tensor, tensor), atol=1e-2)
    with pytest.raises(IntegrationError, match="rotary positions came as a tensor"):
        rotate(tensor, table[0])


def test_fault_B18_a_table_of_another_length_or_precision_is_not_kept():
    tensor = torch.randn(LENGTH, 1, 1, 8)
    table = stock_table(LENGTH, 8)
    whole = rotate(tensor, table)
    assert torch.equal(rotate(tensor[:5], table), whole[:5])
    assert torch.equal(rotate(tensor, table), whole)
    assert torch.allclose(rotate(tensor, stock_table(2 * LENGTH, 8)), whole)
    halves = rotate(tensor.bfloat16(), table)
    assert halves.dtype == torch.bfloat16 and torch.allclose(halves.float(), whole, atol=5e-2)


class Rotating(Attention):
    """ParallelAttention as it takes rotary positions: one of a pair for queries, the other for keys."""

    def forward(self, hidden_states, attention_mask, encoder_output=None, inference_params=None, rotary_pos_emb=None):
        self.received = rotary_pos_emb
        if not self.enable_ds_sequence_parallel:
            of_queries, of_keys = rotary_pos_emb
            hidden_states = rotate(hidden_states.unflatten(-1, (2, -1)), of_queries).flatten(2)
            assert all(torch.equal(one, other) for one, other in zip(of_queries, of_keys, strict=True))
        return super().forward(hidden_states, attention_mask)


class AttendingAndRotating(Rotating):
    forward = model.attend_inside_documents(Rotating.forward)


def test_fault_B18_queries_and_keys_get_the_same_table():
    table = stock_table(LENGTH, 4)
    attention = AttendingAndRotating()
    attention.enable_ds_sequence_parallel = False
    attention.forward(torch.randn(LENGTH, 1, 8), boundaries_of_rows((5, 11)), rotary_pos_emb=table)
    assert attention.received == (table, table)
    attention.enable_ds_sequence_parallel = True  # DeepSpeed rotates there, by cosines and sines
    attention.forward(torch.randn(LENGTH, 1, 8), boundaries_of_rows((5, 11)), rotary_pos_emb=table)
    assert attention.received is table


def test_fault_B18_a_pipeline_s_layers_get_the_table_too(monkeypatch):
    class RotaryEmbedding:
        def __init__(self, dim, theta):
            self.dim, self.theta = dim, theta

        def __call__(self, length):
            assert self.theta == 5000
            return list(stock_table(length, self.dim))

    rotary = module_with("megatron.model.rotary_pos_embedding", RotaryEmbedding=RotaryEmbedding)
    rotary.apply_rotary_pos_emb = lambda t, freqs: None
    megatron_deepspeed.HOOKS["megatron.model.rotary_pos_embedding"](rotary)
    assert rotary.apply_rotary_pos_emb.__qualname__.startswith("rotate_by_table")
    args = SimpleNamespace(hidden_size=64, num_attention_heads=4, kv_channels=None, rotary_percent=0.5, rope_theta=5000)
    args.params_dtype = torch.bfloat16
    for name, module in (("megatron", ModuleType("megatron")), ("megatron.model", ModuleType("megatron.model"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, rotary.__name__, rotary)
    monkeypatch.setattr(megatron_deepspeed, "_options", lambda: args)
    megatron_deepspeed._keep_rotary_table(None)(LENGTH)
    assert isinstance(args.rotary_pos_emb, tuple)
    for kept, expected in zip(args.rotary_pos_emb, stock_table(LENGTH, 8), strict=True):
        assert kept.dtype == torch.bfloat16 and torch.equal(kept, expected.bfloat16())
    args.kv_channels = 8
    megatron_deepspeed._keep_rotary_table(None)(LENGTH)
    assert args.rotary_pos_emb[0].shape == (LENGTH, 1, 1, 4)


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


# options and versions


def options(**changed):
    stated = dict.fromkeys(megatron_deepspeed.REFUSED)
    stated |= {"dataloader_type": "single", "transformer_impl": "local", "masked_softmax_fusion": True}
    stated |= {"fp16": False, "bf16": True, "use_flash_attn": True, "ds_sequence_parallel_size": 1}
    stated |= {"force_ds_sequence_parallel": False, "deepspeed": True, "deepspeed_config": "nowhere.json"}
    return argparse.Namespace(**stated | changed)


def test_what_can_be_honoured_is_accepted():
    megatron_deepspeed.check(options())
    megatron_deepspeed.check(options(use_flash_attn=False, bf16=False))
    megatron_deepspeed.check(options(use_flash_attn=False, masked_softmax_fusion=False))
    megatron_deepspeed.check(options(ds_sequence_parallel_size=4))


@pytest.mark.parametrize(
    "changed, message",
    [({attribute: True}, f"{option} cannot be") for attribute, (option, _) in megatron_deepspeed.REFUSED.items()]
    + [
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic cannot be used"),
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl transformer_engine cannot be used"),
        ({"use_flash_attn": False}, "needs --use-flash-attn-v2, or --no-masked-softmax-fusion"),
        ({"use_flash_attn": False, "bf16": False, "fp16": True}, "the fused softmax ignores masks"),
        (
            {"use_flash_attn": False, "masked_softmax_fusion": False, "ds_sequence_parallel_size": 2},
            "sequence parallelism needs --use-flash-attn-v2",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(changed, message):
    with pytest.raises(OptionError, match=message):
        megatron_deepspeed.check(options(**changed))


def test_the_curriculum_of_deepspeeds_configuration_is_refused(tmp_path):
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"curriculum_learning": {"enabled": False}}))
    megatron_deepspeed.check(options(deepspeed_config=str(path)))
    path.write_text(json.dumps({"curriculum_learning": {"enabled": True}}))
    with pytest.raises(OptionError, match="deepspeed.json: curriculum_learning cannot be used"):
        megatron_deepspeed.check(options(deepspeed_config=str(path)))


def module_with(name, **members):
    module = ModuleType(name)
    module.__dict__.update(members)
    return module


@pytest.mark.parametrize(
    "changed, is_refused",
    [
        ({}, True),
        ({"deepspeed_activation_checkpointing": True}, False),
        ({"no_pipeline_parallel": False}, False),
        ({"recompute_granularity": "selective"}, False),
        ({"use_rotary_position_embeddings": False}, False),
    ],
)
def test_fault_B18_recomputation_that_cannot_save_the_rotary_table_is_refused(changed, is_refused):
    rotary = {"use_rotary_position_embeddings": True, "recompute_granularity": "full", "no_pipeline_parallel": True}
    rotary["deepspeed_activation_checkpointing"] = False
    if is_refused:
        with pytest.raises(OptionError, match="full needs --deepspeed-activation-checkpointing"):
            megatron_deepspeed.check(options(**rotary | changed))
    else:
        megatron_deepspeed.check(options(**rotary | changed))


@pytest.mark.parametrize("option", ["data_path", "train_data_path", "valid_data_path", "test_data_path"])
@pytest.mark.parametrize(
    "values, message",
    [
        ([part for number in range(255) for part in ("1", f"part{number}")], "of 255 corpora, .* 254 at the most"),
        (["0", "a", "1", "b"], "weight of 0.0 for a"),
        (["1", "a", "-1", "b"], "weight of -1.0 for b"),
        (["1", "a", "nan", "b"], "weight of nan for b"),
        (["1", "a", "inf", "b"], "weight of inf for b"),
        (["0", "a"], "weight of 0.0 for a"),
        (["a", "b"], "a b ...: give one prefix, or a weight before each"),
        (["1", "a", "b"], "1 a b ...: give one prefix, or a weight before each"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_fault_B04_blends_that_megatron_deepspeed_would_end_are_refused(option, values, message):
    with pytest.raises(OptionError, match=message):
        megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: values}), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: PARTS_OF_TWO}), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: ["a"]}), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: ["1", "a"]}), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: None}), 254)


def test_fault_B04_as_many_corpora_as_it_takes_are_fine():
    most = [part for number in range(254) for part in ("1", f"part{number}")]
    megatron_deepspeed.check_data_paths(argparse.Namespace(data_path=most), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(data_path=most + PARTS_OF_TWO), None)


@pytest.mark.parametrize(
    "body, most",
    [
        ("assert num_datasets < 255\n        dataset_index = np.zeros(self.size, dtype=np.uint8)", 254),
        ("assert num_datasets < 32767\n        dataset_index = np.zeros(self.size, dtype=np.int16)", 32766),
        ("dataset_index = np.zeros(self.size, dtype=np.int16)", 32767),
        ("dataset_index = build(self.size)", None),
    ],
)
def test_fault_B04_the_limit_is_that_of_its_own_code(tmp_path, monkeypatch, body, most):
    folder = tmp_path / "megatron/data"
    folder.mkdir(parents=True)
    (folder / "blendable_dataset.py").write_text(f"class BlendableDataset:\n    def __init__(self):\n        {body}\n")
    for name in ("megatron", "megatron.data", "megatron.data.blendable_dataset"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for path in (tmp_path / "megatron", folder):
        (path / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert megatron_deepspeed.most_corpora() == most
    finally:
        for name in ("megatron.data.blendable_dataset", "megatron.data", "megatron"):
            sys.modules.pop(name, None)


def test_data_impl_gets_one_choice_more():
    def add_data_args(parser):
        parser.add_argument("--data-impl", default="infer", choices=["mmap", "infer"])
        return parser

    arguments = module_with("megatron.arguments", _add_zero_args=None, _add_data_args=add_data_args)
    arguments.validate_args = lambda args, defaults={}: args
    megatron_deepspeed.HOOKS["megatron.arguments"](arguments)
    parser = arguments._add_data_args(argparse.ArgumentParser())
    parsed = parser.parse_args(["--data-impl", "bfp", "--max-documents-per-sequence", "8"])
    assert (parsed.data_impl, parsed.max_documents_per_sequence) == ("bfp", 8)
    with pytest.raises(SystemExit):
        parser.parse_args(["--data-impl", "lazy"])


def test_an_unknown_version_is_refused():
    changed = module_with("megatron.utils", get_ltor_masks_and_position_ids=lambda data, eod_token: None)
    with pytest.raises(
        IntegrationError, match=r"this Megatron has .*\(data, eod_token\), expected \(data, eod_token, re"
    ):
        megatron_deepspeed.HOOKS["megatron.utils"](changed)
    with pytest.raises(IntegrationError, match="has no megatron.model.gpt_model.CrossEntropy|has no .*forward"):
        gpt_model = module_with("megatron.model.gpt_model", GPTModel=type("GPTModel", (), {}))
        megatron_deepspeed.HOOKS["megatron.model.gpt_model"](gpt_model)
    with pytest.raises(IntegrationError, match="too old for --data-impl bfp"):
        megatron_deepspeed.HOOKS["megatron.arguments"](module_with("megatron.arguments"))


def test_megatron_lms_module_of_the_same_name_is_left_alone():
    def broadcast_data(keys, data, datatype, tp_group=None):
        pass

    data = module_with("megatron.core.tensor_parallel.data", broadcast_data=broadcast_data)
    package = module_with("megatron.core.tensor_parallel", broadcast_data=broadcast_data, data=data)
    megatron_deepspeed.HOOKS["megatron.core.tensor_parallel"](package)
    assert package.broadcast_data is broadcast_data


def test_what_is_active_is_said_in_a_line_for_each_split(packed):
    lines = megatron_deepspeed.description((SimpleNamespace(datasets=[packed, packed]), packed, None))
    assert lines[0].startswith("best-fit packing: train: 2 indexes (") and ", 22 sequences, padding " in lines[0]
    assert lines[1].startswith(f"best-fit packing: valid: {packed.sequence_index.path} (1 built, 0 opened), 11 seq")
    assert len(lines) == 2  # attention is spoken of when the first step has shown it
