"""What tests with megatron-core share: a tokenizer, configurations, a small model."""

import argparse
import tempfile

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from torch import distributed

from megatron_bfp import BFPGPTDataset, BFPGPTDatasetConfig


class Tokenizer:
    """As much of a tokenizer as megatron-core's datasets ask for. Its pad is its EOD, which must not matter."""

    vocab_size = 65_000
    eod = eos = pad = 0
    unique_identifiers = {"class": "Tokenizer"}


def config(blend, seq_length=8, config_class=BFPGPTDatasetConfig, **changes):
    """A dataset configuration; ``blend`` as megatron-core's, or None with ``blend_per_split``."""
    fields = {
        "random_seed": 1234,
        "sequence_length": seq_length,
        "blend": blend,
        "split": None if blend is None else "1,0,0",
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    if config_class is GPTDatasetConfig:
        fields["create_attention_mask"] = False
    return config_class(**(fields | changes))


def build(sizes, dataset_config, dataset_class=BFPGPTDataset):
    """Train, valid and test datasets from megatron-core's builder."""
    return BlendedMegatronDatasetBuilder(dataset_class, sizes, lambda: True, dataset_config).build()


def initialize_megatron(rank=0, world_size=1, store=None, tensor_parallel=1, context_parallel=1):
    """This process as one of a world, by default alone, for tests that make a model.

    ``store`` is a file that all processes name.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not distributed.is_initialized():
        store = store or tempfile.NamedTemporaryFile(delete=False).name
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_parallel, context_parallel_size=context_parallel)
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=not torch.cuda.is_available())


def model_options(**changes):
    """Options of a small model, as ``trainer.model.build_model`` takes them."""
    options = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "group_query_attention": False,
        "num_query_groups": 1,
        "rotary_base": 10000,
        "norm_epsilon": 1e-5,
        "init_method_std": 0.2,
        "make_vocab_size_divisible_by": 8,
        "bf16": False,
        "seq_length": 64,
        "attention_kernel": None,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "cp_comm_type": None,
        "recompute_granularity": None,
    }
    return argparse.Namespace(**(options | changes))
