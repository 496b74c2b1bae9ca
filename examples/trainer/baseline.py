"""The paper's baseline with a document mask: concatenation as GPTDataset does it, attention inside documents."""

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset


class InterDocumentGPTDataset(GPTDataset):
    """``GPTDataset`` with the boundaries of the documents in each sample.

    Samples, labels and loss mask are GPTDataset's. ``cu_seqlens``, int32 [L + 1], is what megatron-core gives with
    ``inter_document_masking`` since 0.17. Here it is computed from the dataset's own indices of documents and samples,
    so it works with older versions too. Positions are not restarted: RoPE is relative.
    """

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """One sample; None gives Megatron's batch padding."""
        sample = super().__getitem__(idx)
        sample["cu_seqlens"] = torch.from_numpy(self._boundaries(0 if idx is None else idx))
        return sample

    def _boundaries(self, idx: int) -> np.ndarray:
        """int32 [L + 1]: 0, the end of each document's part of the inputs, then L to the end."""
        seq_length = self.config.sequence_length
        position = self.shuffle_index[idx]
        (first, first_offset), (last, _) = self.sample_index[position : position + 2].astype(np.int64)
        documents = self.document_index[first : last + 1]
        ends = np.cumsum(self.dataset.sequence_lengths[documents], dtype=np.int64) - first_offset
        ends[-1] = min(seq_length, ends[-1])  # a sample has one more token, its last label
        boundaries = np.full(seq_length + 1, seq_length, dtype=np.int32)
        boundaries[0] = 0
        inside = ends[ends < seq_length]
        boundaries[1 : len(inside) + 1] = inside
        return boundaries
