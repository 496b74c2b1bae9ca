"""A dataset that is read for a long time by many processes: the same samples, no more memory, no more open files."""

import os
import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.datasets.gpt_dataset")

from helpers.datasets import DATA, write
from helpers.megatron_helpers import build, config

SAMPLES = int(os.environ.get("LONG_LIFE_SAMPLES", 1_000_000))
BATCH = 500
SEQ_LENGTH = 256


class Checksums(torch.utils.data.Dataset):
    """A number for each sample of a dataset, which stands for all of its tensors."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        checksum = 0
        for tensor in self.dataset[index].values():
            checksum = zlib.crc32(tensor.numpy(), checksum)
        return checksum


def private_bytes(process):
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def read_all(dataset, context, num_workers):
    """The checksums of all samples, and for a few moments on the way RssAnon and open files of each worker."""
    loader = torch.utils.data.DataLoader(  # batches of numpy: a tensor under way is an open file of torch's
        dataset, BATCH, num_workers=num_workers, multiprocessing_context=context, collate_fn=np.array
    )
    batches, checksums, states = iter(loader), [], []
    workers = [worker.pid for worker in batches._workers]
    for number, batch in enumerate(batches):
        checksums.append(batch)
        if number % max(1, len(loader) // 10) == 0 and number < len(loader) - 3 * num_workers:
            states.append([(private_bytes(pid), len(os.listdir(f"/proc/{pid}/fd"))) for pid in workers])
    return np.concatenate(checksums), np.array(states)


@pytest.mark.slow
def test_a_million_samples_by_eight_workers(tmp_path):
    lengths = np.load(DATA / "text_lengths.npy")[:3000]
    prefix = write(tmp_path / "data", [np.arange(length) % 60_000 for length in lengths]).prefix
    dataset = Checksums(build([SAMPLES, 0, 0], config(([prefix], None), SEQ_LENGTH))[0])
    ids = {}
    for context in ("fork", "spawn"):
        ids[context], states = read_all(dataset, context, num_workers=8)
        memory, files = states[1:, :, 0], states[1:, :, 1]  # the first one is a start
        megabytes = [f"{value / 2**20:.1f}" for value in (memory[0].mean(), memory[-1].mean(), memory.max())]
        print(f"{context}: {len(ids[context]):,} samples; RssAnon {', '.join(megabytes)} MB (start, end, most)")
        print(f"open files of the workers {files[0].tolist()}, at the end {files[-1].tolist()}")
        assert np.all(memory - memory[0] < 4 << 20)
        assert np.all(files == files[0])
    assert len(ids["fork"]) == len(dataset) >= SAMPLES
    assert np.array_equal(ids["fork"], ids["spawn"])
    for index in range(0, len(dataset), len(dataset) // 1000):
        assert ids["fork"][index] == dataset[index]
