#!/usr/bin/env python3
"""Pre-train a model of 1.2 billion parameters with Megatron-Bridge on best-fit packed documents.

    torchrun --nproc-per-node 8 examples/megatron_bridge/pretrain.py \\
        dataset.data_path="0.7 data/web_text_document 0.3 data/code_text_document" \\
        tokenizer.tokenizer_model=data/tokenizer train.train_iters=50000 checkpoint.save=checkpoints

The arguments are Megatron-Bridge's own overrides: they set any field of the recipe. ``slurm.sh`` beside this file
starts it on several nodes. The recipe has the form of Megatron-Bridge's published ones, and one line that packs
documents.
"""

import sys

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    RNGConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from megatron_bfp.integrations.megatron_bridge import BFPDatasetProvider

SEQ_LENGTH = 8192


def llama_1b_pretrain_config() -> ConfigContainer:
    """The recipe: the sizes of Llama 3.2 1B, for one node or more with 8 GPUs each."""
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(
        lr_warmup_iters=2000, lr_decay_iters=None, max_lr=3e-4, min_lr=3e-5
    )
    cfg = ConfigContainer(
        model=llama_1b(),
        train=TrainingConfig(train_iters=50_000, global_batch_size=256, micro_batch_size=2),
        validation=ValidationConfig(eval_interval=1000, eval_iters=16),
        optimizer=optimizer,
        scheduler=scheduler,
        ddp=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            use_distributed_optimizer=True,
            average_in_collective=False,  # as calculate_per_token_loss needs it
        ),
        dataset=GPTDatasetConfig(
            random_seed=1234,
            seq_length=SEQ_LENGTH,
            split="990,9,1",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=8,
            dataloader_type="single",
        ),
        logger=LoggerConfig(log_interval=10),
        tokenizer=TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="meta-llama/Llama-3.2-1B"),
        checkpoint=CheckpointConfig(save_interval=1000, ckpt_format="torch_dist"),
        rng=RNGConfig(seed=1234),
        mixed_precision="bf16_mixed",
    )
    cfg.dataset = BFPDatasetProvider.of(cfg.dataset, even_sequences=True)  # the one line
    return cfg


def llama_1b() -> GPTModelProvider:
    """The model. Its vocabulary is that of the tokenizer."""
    return GPTModelProvider(
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=64,
        seq_length=SEQ_LENGTH,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_base=500_000,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        share_embeddings_and_output_weights=True,
        calculate_per_token_loss=True,  # sequences have different numbers of targets; each target counts the same
    )


def main() -> None:
    """Train the recipe with the overrides on the command line."""
    pretrain(process_config_with_overrides(llama_1b_pretrain_config(), cli_overrides=sys.argv[1:]), forward_step)


if __name__ == "__main__":
    main()
