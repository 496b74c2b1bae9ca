"""The concatenation baselines: samples are GPTDataset's, boundaries those of megatron-core's inter-document masking."""

from dataclasses import fields

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from helpers.datasets import documents_of
from helpers.megatron_helpers import build, config
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from trainer.baseline import InterDocumentGPTDataset

IS_STOCK = "inter_document_masking" in {field.name for field in fields(GPTDatasetConfig)}


def datasets(prefix, seq_length, samples):
    """Ours and stock's."""
    sizes = [samples] + [None if samples is None else 0] * 2
    blend, masking = ([prefix], None), {"inter_document_masking": True} if IS_STOCK else {}
    ours = build(sizes, config(blend, seq_length, GPTDatasetConfig), InterDocumentGPTDataset)[0]
    return ours, build(sizes, config(blend, seq_length, GPTDatasetConfig, **masking), GPTDataset)[0]


@pytest.mark.parametrize("seq_length", [5, 8, 64])
@pytest.mark.parametrize("samples", [None, 40])
def test_samples_and_boundaries_are_those_of_the_stock_dataset(write_dataset, seq_length, samples):
    lengths = np.random.default_rng(seq_length).integers(1, 3 * seq_length, 60).tolist()
    ours, stock = datasets(write_dataset(documents_of(lengths)).prefix, seq_length, samples)
    assert len(ours) == len(stock) > 10
    owner = np.repeat(np.arange(len(lengths)), lengths)  # of token t + 1: all tokens are different
    for i in range(len(stock)):
        mine, theirs = ours[i], stock[i]
        for name in ("tokens", "labels", "loss_mask"):
            assert torch.equal(mine[name], theirs[name])
        assert mine["position_ids"].tolist() == list(range(seq_length))
        if IS_STOCK:
            assert torch.equal(mine["cu_seqlens"], theirs["cu_seqlens"])
        assert mine["cu_seqlens"].dtype == torch.int32 and len(mine["cu_seqlens"]) == seq_length + 1
        boundaries = mine["cu_seqlens"].tolist()
        assert boundaries[0] == 0 and boundaries[-1] == seq_length
        tokens = mine["tokens"].numpy()
        # a new document begins where the token is not its predecessor's successor, or belongs to another document
        begins = [
            at
            for at in range(1, seq_length)
            if tokens[at] != tokens[at - 1] + 1 or owner[tokens[at] - 1] != owner[tokens[at - 1] - 1]
        ]
        assert [b for b in boundaries[1:] if b < seq_length] == begins
