"""The corpora of a blend have orders of their own, so that a batch of a blend is a random one.

Sequence numbers go from long documents to short ones. Corpora that show the same sequence number at the same sample
make batches of long documents alone and batches of short ones alone, which the number of documents in a batch shows.
"""

import numpy as np
import pytest
from helpers.datasets import documents_of, write

from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.indexed_dataset.writer import IdxWriter
from megatron_bfp.integrations.megatron_deepspeed.dataset import build_splits
from megatron_bfp.samples.order import sequence_of_sample
from megatron_bfp.sequence_index.split import PackedSplit

BATCH = 256
LENGTH = 2048
EPOCHS = 6
"""So many that the spread over batches is known to some 3 %."""


def lengths_of_shards(num_shards, num_documents=12_000, num_sequences=None):
    """Lengths of the documents of each shard; with ``num_sequences``, filled up to equally many sequences."""
    rng = np.random.default_rng(17)
    for _ in range(num_shards):
        lengths = np.clip(rng.lognormal(5.84, 0.98, num_documents).astype(np.int32), 1, 100_000)
        if num_sequences:
            missing = num_sequences * LENGTH - int(lengths.sum())
            lengths = np.append(lengths, np.full(missing // 700, 700, dtype=np.int32))
        yield lengths


def write_lengths(prefix, lengths):
    """A dataset of documents of these lengths, whose tokens are a hole in a file."""
    with IdxWriter(f"{prefix}.idx", np.dtype(np.uint16), len(lengths), len(lengths)) as idx:
        idx.add_sequences(lengths)
        idx.add_documents(np.ones(len(lengths), dtype=np.int32))
        idx.finish()
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(lengths.sum()) * 2)
    return str(prefix)


def spread_over_batches(num_documents):
    """Standard deviation of documents in a batch, over that of the same samples shuffled."""
    num_documents = np.asarray(num_documents, dtype=float)
    batches = num_documents[: len(num_documents) // BATCH * BATCH].reshape(-1, BATCH).sum(axis=1)
    return batches.std() / (num_documents.std() * BATCH**0.5)


def num_documents_of(packed_split, sample, seed=1234):
    return len(packed_split.chunk_spans(sample, seed))


def blend_of(prefixes, epochs):
    """Documents of each sample of megatron-core's blend, one epoch after another."""
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from helpers.megatron_helpers import build, config

    weights = [1.0] * len(prefixes)
    one = sum(len(dataset) for dataset in build([None] * 3, config((prefixes, None), LENGTH))[0].datasets)
    blend = build([epochs * one, 0, 0], config((prefixes, weights), LENGTH))[0]
    which, samples = blend.dataset_index[: epochs * one], blend.dataset_sample_index[: epochs * one]
    num_documents = []
    for dataset, sample in zip(which.tolist(), samples.tolist()):
        part = blend.datasets[dataset]
        num_documents.append(len(part.sequence_index.table.entry(part.sequence_of(sample)).documents))
    return num_documents


def test_fault_A03_a_blend_of_eight_equal_shards_has_random_batches(tmp_path):
    prefixes = [write_lengths(tmp_path / f"shard{i}", lengths) for i, lengths in enumerate(lengths_of_shards(8))]
    assert 0.9 < spread_over_batches(blend_of(prefixes, EPOCHS)) < 1.1


@pytest.mark.slow
@pytest.mark.parametrize("num_sequences", [None, 3600], ids=["about-equal", "equal"])
def test_fault_A03_a_blend_of_sixteen_shards_has_random_batches(num_sequences, tmp_path):
    lengths = lengths_of_shards(16, num_sequences=num_sequences)
    prefixes = [write_lengths(tmp_path / f"shard{i}", of_shard) for i, of_shard in enumerate(lengths)]
    assert 0.9 < spread_over_batches(blend_of(prefixes, EPOCHS)) < 1.1


@pytest.fixture(scope="module")
def packed_shards(tmp_path_factory):
    """Megatron-DeepSpeed's datasets of sixteen shards."""
    folder = tmp_path_factory.mktemp("shards")
    shards = enumerate(lengths_of_shards(16, 3000, num_sequences=900))
    prefixes = [write_lengths(folder / f"shard{i}", lengths) for i, lengths in shards]
    return [build_splits(prefix, "1", [1, 0, 0], LENGTH, 1234)[0] for prefix in prefixes]


def test_fault_A03_in_megatron_deepspeed_too(packed_shards):
    splits = [packed.packed_split for packed in packed_shards]
    assert max(map(len, splits)) - min(map(len, splits)) < 30  # within sqrt(S): one grid of the Feistel network
    alternating = [num_documents_of(split, i) for i in range(EPOCHS * min(map(len, splits))) for split in splits]
    assert 0.9 < spread_over_batches(alternating) < 1.1


def test_shards_with_one_order_are_noticed(packed_shards):
    """The control: the spread when all shards share an order, as they did without the index's identity."""
    indexes = [packed.sequence_index for packed in packed_shards]
    alternating = [
        len(index.table.entry(sequence_of_sample(i, len(index), 1234, "one for all")).documents)
        for i in range(2 * min(map(len, indexes)))
        for index in indexes
    ]
    assert spread_over_batches(alternating) > 2


def test_fault_A03_the_order_follows_content_and_options_and_not_where_files_lie(tmp_path):
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from helpers.megatron_helpers import build, config

    documents = documents_of([5, 7, 3, 8, 2, 6] * 30)
    names = {"a": documents, "b": documents, "longer": [*documents, [1, 2, 3]]}
    prefixes = {name: write(tmp_path / name, of_name).prefix for name, of_name in names.items()}

    def order(name, **options):
        dataset = build([None] * 3, config(([prefixes[name]], None), **options))[0]
        return [dataset.sequence_of(i) for i in range(len(dataset))]

    assert order("a") == order("b")  # a copy of a corpus is the same corpus
    assert order("a") != order("a", random_seed=4)
    alike = [order("a"), order("a", max_documents_per_sequence=100), order("a", split="100,0.000001,0")]
    assert len({len(of_options) for of_options in alike}) == 1
    assert alike[0] != alike[1] and alike[0] == alike[2]
    assert order("longer")[:100] != order("a")[:100]


def test_a_corpus_given_twice_in_a_blend_is_warned_of(tmp_path, caplog):
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from helpers.megatron_helpers import config

    prefixes = [write(tmp_path / name, [[1, 2, 3]]).prefix for name in "ab"]
    config((prefixes, None))
    assert "times in the blend" not in caplog.text
    config(([*prefixes, str(tmp_path / "." / "a")], [1, 1, 1]))
    assert f"{prefixes[0]}: is 2 times in the blend" in caplog.text and "sum of its weights" in caplog.text


def test_fault_A03_each_split_and_length_has_an_order_of_its_own(tmp_path):
    dataset = IndexedDataset(write(tmp_path / "data", documents_of([5] * 200)).prefix)
    options = [(5, "1,1,0", "train"), (5, "1,1,0", "valid"), (6, "1,1,0", "train"), (5, "1,1,0", "train", 1)]
    splits = [PackedSplit.open(dataset, *of_split) for of_split in options]
    orders = {tuple(split.sequence_of(i, 7) for i in range(100)) for split in splits}
    assert len(orders) == len(options)
    assert {len(split) for split in splits} == {100}
