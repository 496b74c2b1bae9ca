"""Which modules of Megatron-DeepSpeed are changed for ``--data-impl bfp``, and how.

In the order of a run: its options, and those of a checkpoint; the functions that build datasets; what a batch receives
and the masks made of it; rotary positions; attention and the layers on the way to it; the loss of a micro-batch without
targets. Its blends, samplers, parallelism and training loop stay as they are.
"""

from collections.abc import Callable
from types import ModuleType

from ...errors import UnsupportedMegatronError
from ..balance import refuse_other_batches
from ..hooks import Hook, replace
from . import options


def _change_arguments(module: ModuleType) -> None:
    if not hasattr(module, "_add_zero_args"):
        raise UnsupportedMegatronError(
            "this Megatron-LM is too old for --data-impl bfp: it needs --dataloader-inter-document-masking, which came "
            "with megatron-core 0.19"
        )
    replace(module, "_add_data_args", "parser", options.add_options)
    replace(module, "validate_args", "args, defaults", lambda original: options.check_options(original, HOOKS))


def _change_checkpoints(module: ModuleType) -> None:
    def refuse(original: Callable) -> Callable:
        return refuse_other_batches(original, options.parsed_options)

    replace(module, "check_checkpoint_args", "checkpoint_args", refuse)


def _change_batches(module: ModuleType) -> None:
    if not hasattr(getattr(module, "data", None), "get_sequence_parallel_src_rank"):
        return  # Megatron-LM's module of the same name
    from .model import broadcast_with_boundaries

    replace(module, "broadcast_data", "keys, data, datatype", broadcast_with_boundaries)


def _change_masks(module: ModuleType) -> None:
    from .model import keep_rotary_table, masks_from_boundaries

    parameters = "data, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss, skip_mask"
    replace(module, "get_ltor_masks_and_position_ids", parameters, masks_from_boundaries)
    replace(module, "update_rotary_pos_emb", "seq_length", keep_rotary_table)


def _change_rotation(module: ModuleType) -> None:
    from .model import rotate_by_table

    replace(module, "apply_rotary_pos_emb", "t, freqs", rotate_by_table)


def _change_datasets(module: ModuleType) -> None:
    from . import builder

    of_splits = (
        "data_prefix, data_impl, splits_string, train_valid_test_num_samples, seq_length, seed, skip_warmup, "
        "return_doc_ids, data_cache_path"
    )
    replace(module, "_build_train_valid_test_datasets", of_splits, builder.build_packed_splits)
    of_one = (
        "dataset_name, data_prefix, data_impl, splits_string, num_samples, seq_length, seed, skip_warmup, "
        "data_cache_path"
    )
    replace(module, "_build_dataset", of_one, builder.build_packed_split)
    of_all = (
        "data_prefix, data_impl, splits_string, train_valid_test_num_samples, seq_length, seed, skip_warmup, "
        "train_data_prefix, valid_data_prefix, test_data_prefix, return_doc_ids, data_cache_path"
    )
    replace(module, "build_train_valid_test_datasets", of_all, builder.check_and_sum_up)


def _change_layers(module: ModuleType) -> None:
    from . import model

    of_attention = "self, hidden_states, attention_mask, encoder_output, inference_params, rotary_pos_emb"
    replace(module.ParallelAttention, "forward", of_attention, model.attend_inside_documents)
    replace(module.FlashSelfAttention, "forward", "self, q, k, v", model.attend_with_varlen_kernel)
    pass_on = model.pass_on_until_the_last_layer(lambda: options.parsed_options().num_layers)
    replace(module.ParallelTransformerLayerPipe, "forward", "self, inputs, kwargs", pass_on)


def _change_embedding(module: ModuleType) -> None:
    from .model import embed_and_pass_on

    replace(module.EmbeddingPipe, "forward", "self, inputs, kwargs", embed_and_pass_on)


def _change_loss(module: ModuleType) -> None:
    from . import model

    of_model = (
        "self, input_ids, position_ids, attention_mask, retriever_input_ids, retriever_position_ids, "
        "retriever_attn_mask, labels, tokentype_ids, inference_params, curriculum_seqlen"
    )
    replace(module.GPTModel, "forward", of_model, model.no_loss_without_targets)
    replace(module, "CrossEntropy", "output, labels", model.no_pipeline_loss_without_targets)


def _change_training(module: ModuleType) -> None:
    if hasattr(module, "__path__"):
        return  # Megatron-LM's package of the same name
    from .first_step import watch_first_step

    parameters = "forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config"
    replace(module, "train_step", parameters, watch_first_step)


HOOKS: dict[str, Hook] = {
    "megatron.arguments": _change_arguments,
    "megatron.checkpointing": _change_checkpoints,
    "megatron.core.tensor_parallel": _change_batches,
    "megatron.utils": _change_masks,
    "megatron.data.gpt_dataset": _change_datasets,
    "megatron.model.rotary_pos_embedding": _change_rotation,
    "megatron.model.transformer": _change_layers,
    "megatron.model.language_model": _change_embedding,
    "megatron.model.gpt_model": _change_loss,
    "megatron.training": _change_training,
}
"""Module -> what is done to it right after its import with ``--data-impl bfp``."""
