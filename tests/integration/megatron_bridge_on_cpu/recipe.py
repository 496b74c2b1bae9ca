"""A small recipe, which the CPU can run, from data in the working directory. ``KEY=VALUE ...`` change it."""

import torch
from layer_spec import packed
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

FUSIONS = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion")
FUSIONS += ("gradient_accumulation_fusion", "cross_entropy_loss_fusion", "persist_layer_norm")


SIZES = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "seq_length": 128,
}


def small_recipe(overrides):
    """The configuration, with Megatron-Bridge's own dataset."""
    cfg = _pretrain_common()
    cfg.model = GPTModelProvider(
        **SIZES,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        position_embedding_type="rope",
        add_bias_linear=False,
        share_embeddings_and_output_weights=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        init_method_std=0.2,  # large enough for attention to matter
    )
    return process_config_with_overrides(for_cpu(cfg), cli_overrides=overrides)


def for_cpu(cfg):
    """A recipe, small and without what needs a GPU."""
    for name, size in SIZES.items():
        setattr(cfg.model, name, size)
    for name in FUSIONS:
        setattr(cfg.model, name, False)
    cfg.model.transformer_layer_spec = packed
    cfg.tokenizer.tokenizer_type, cfg.tokenizer.vocab_size = "NullTokenizer", 600
    cfg.dataset.seq_length, cfg.dataset.num_workers = 128, 0
    cfg.dataset.data_path, cfg.dataset.split = "data_text_document", "90,5,5"
    cfg.train.micro_batch_size, cfg.train.global_batch_size, cfg.train.train_iters = 2, 8, 5
    cfg.validation.eval_interval, cfg.validation.eval_iters = 1000, 1
    cfg.scheduler.lr_warmup_iters = 1
    cfg.logger.log_interval, cfg.logger.tensorboard_dir = 1, None
    cfg.checkpoint.save = cfg.checkpoint.load = None
    cfg.dist.distributed_backend = "gloo"
    cfg.mixed_precision = None
    cfg.ddp.overlap_grad_reduce = cfg.ddp.overlap_param_gather = cfg.ddp.average_in_collective = False
    cfg.ddp.use_distributed_optimizer = cfg.optimizer.use_distributed_optimizer = False
    cfg.optimizer.bf16 = False
    return cfg
