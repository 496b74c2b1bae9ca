"""A sample's tensors as they travel between processes."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from megatron_bfp.megatron_core.sample_tensors import WORTH_JOINING, SampleTensors


def a_sample(number=0):
    return SampleTensors(
        mask=torch.tensor([[True, False, True]]),
        max_seqlen=torch.tensor(7 + number, dtype=torch.int32),
        tokens=torch.arange(5) + number,
        loss_mask=torch.ones(5),
        empty=torch.empty(0, dtype=torch.int64),
    )


def assert_same(received, expected):
    assert list(received) == list(expected)
    for name, tensor in expected.items():
        assert received[name].dtype == tensor.dtype and received[name].shape == tensor.shape
        assert torch.equal(received[name], tensor)


@pytest.mark.parametrize("send", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_a_copy_is_the_same_sample(send):
    received = send(a_sample())
    assert type(received) is SampleTensors
    assert_same(received, a_sample())


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, number):
        return a_sample(number)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_batches_of_workers_are_those_without_and_share_one_memory(context):
    def batches(**options):
        return list(torch.utils.data.DataLoader(Samples(), batch_size=2, **options))

    for received, expected in zip(
        batches(num_workers=2, multiprocessing_context=context), batches(num_workers=0), strict=True
    ):
        assert type(received) is type(expected) is SampleTensors
        assert_same(received, expected)
        assert len({tensor.untyped_storage().data_ptr() for tensor in received.values() if tensor.numel()}) == 1
        received["tokens"] += 1
        assert torch.equal(received["tokens"], expected["tokens"] + 1)


@pytest.mark.parametrize("extra", [{}, {"name": "a text"}])
def test_what_is_no_tensor_travels_too(extra):
    sample = SampleTensors(extra)
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_large_batches_are_not_copied_together():
    sample = SampleTensors(tokens=torch.arange(WORTH_JOINING // 8), labels=torch.arange(1))
    received = pickle.loads(pickle.dumps(sample))
    assert type(received) is SampleTensors
    assert_same(received, sample)
    assert received["tokens"].untyped_storage().nbytes() == WORTH_JOINING
