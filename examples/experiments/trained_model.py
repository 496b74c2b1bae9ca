"""A model of the example trainer, loaded from a checkpoint: its logits, and its loss on each token of a dataset."""

import dataclasses
import os
from collections.abc import Sequence
from pickle import UnpicklingError
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed
from trainer.arguments import parse_arguments
from trainer.config import TrainerConfig
from trainer.data import EvaluationSampler, build_valid_dataset, micro_batches
from trainer.engine import initialize_distributed
from trainer.evaluation import token_losses
from trainer.model import build_model

from megatron_bfp.errors import InputError
from megatron_bfp.huggingface.checkpoint import reading
from megatron_bfp.indexed_dataset.reader import IndexedDataset
from megatron_bfp.megatron_core.attention import document_boundaries
from megatron_bfp.tokenizers.interface import Tokenizer
from megatron_bfp.tokenizers.registry import load_tokenizer

from .training_runs import free_port


class TrainedModel(NamedTuple):
    """A GPTModel in evaluation mode, with its configuration and tokenizer."""

    model: Any
    config: TrainerConfig
    tokenizer: Tokenizer

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    def logits(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Logits of the next token, for one document per row.

        Args:
            tokens: int64 [b, s], each row a document and padding after it.
            lengths: of the documents.

        Returns:
            [b, s, vocabulary], without the embedding's padding.
        """
        seq_length = tokens.shape[1]
        cu_seqlens = torch.full((len(tokens), seq_length + 1), seq_length, dtype=torch.int32)
        cu_seqlens[:, 0] = 0
        cu_seqlens[:, 1] = torch.tensor(lengths)
        tokens = tokens.to(self.device)
        positions = torch.arange(seq_length, device=self.device).expand_as(tokens)
        boundaries = document_boundaries(cu_seqlens, self.device)
        with torch.no_grad():
            logits = self.model(tokens, positions, None, packed_seq_params=boundaries)
        return logits[..., : self.tokenizer.vocab_size]


def load_model(trainer_options: Sequence[str], checkpoint: str) -> TrainedModel:
    """Load the weights of a checkpoint, without the optimizer. This process becomes the only rank of its world.

    Args:
        trainer_options: those that ``pretrain_gpt.py`` trained it with.
        checkpoint: the folder of one iteration.

    Raises:
        OptionError: the options cannot be used.
        InputError: the checkpoint has a model of other options, or only parts of one (ZeRO 3, tensor parallelism).
    """
    config = parse_arguments(trainer_options)
    tokenizer = load_tokenizer(config.tokenizer_type, config.tokenizer_model, config.eod_token)
    if not distributed.is_initialized():
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(free_port())
        initialize_distributed(config)
    on_gpu = torch.cuda.is_available()
    model = build_model(config, tokenizer.vocab_size)
    model = model.to("cuda" if on_gpu else "cpu", torch.bfloat16 if config.bf16 else torch.float32)
    path = os.path.join(checkpoint, "mp_rank_00_model_states.pt")
    try:
        with reading(checkpoint):
            model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["module"])
    except (OSError, KeyError, RuntimeError, UnpicklingError) as error:
        raise InputError(f"{path}: does not hold the whole model of these options: {error}") from None
    return TrainedModel(model.eval(), config, tokenizer)


def target_losses(trained: TrainedModel, prefix: str) -> np.ndarray:
    """The loss on each token of a dataset, given the tokens before it in its chunk, nats, float64 [tokens]. Documents
    are cut into chunks of the sequence length, which are seen alone. Packed sequences give just that, as attention
    stays inside a chunk. The first token of a document is no target: NaN."""
    config = dataclasses.replace(
        trained.config,
        data_path=(prefix,),
        split="0,1",
        data_impl="bfp",
        max_documents_per_sequence=None,
        even_sequences=False,
        targets_only=False,
        balance_batches=1,
        dataloader_inter_document_masking=False,
        eod_mask_loss=False,
        data_cache_path=None,
    )
    dataset = build_valid_dataset(config, trained.tokenizer).datasets[0]
    losses = np.full(IndexedDataset(prefix).num_tokens, np.nan)
    sampler = EvaluationSampler(len(dataset), config.micro_batch_size, 0, 1)
    for samples, batch in zip(sampler, micro_batches(dataset, sampler, 0, trained.device)):
        with torch.no_grad():
            boundaries = document_boundaries(batch["cu_seqlens"], trained.device)
            by_position = token_losses(trained.model, batch, boundaries).double().cpu().numpy()
        for sample, row in zip(samples, by_position):
            if sample is not None:
                position = 0
                for chunk in dataset.sequence_index.chunk_spans(dataset.sequence_of(sample)):
                    targets = min(chunk.num_tokens, chunk.document_end - chunk.start - 1)
                    losses[chunk.start + 1 :][:targets] = row[position:][:targets]
                    position += chunk.num_tokens
    return losses
