"""What a Megatron-Bridge configuration may ask for with packed samples."""

from argparse import Namespace
from typing import Any

from megatron.bridge import __version__
from megatron.bridge.training import gpt_step
from megatron.bridge.training.config import GPTDatasetConfig, GPTFIMDatasetConfig, MockGPTDatasetConfig

from ...arguments import checked_cap, checked_seq_length
from ...errors import OptionError, UnsupportedMegatronError
from ...sequence_index.key import split_fractions
from ..balance import batches_of, check_resume, num_batches_of

OLDEST = "0.6.2"

KEYS = {
    "_CURRENT_PACKED_SEQ_DEVICE_KEYS": ("cu_seqlens_q", "cu_seqlens_kv"),
    "_CURRENT_PACKED_SEQ_HOST_KEYS": ("max_seqlen_q", "max_seqlen_kv"),
}
"""List in Megatron-Bridge's forward step -> the keys of a batch that it must hold for boundaries to be taken."""

CAPTURES_NO_ATTENTION = {"mlp", "moe", "moe_router", "moe_preprocess"}
"""Parts of a layer that CUDA graphs may capture: they do not mix positions."""

WITHOUT_CONTEXT_PARALLELISM = ("is_hybrid_model", "mtp_num_layers", "multi_latent_attention", "window_size")
"""Settings of a model that attention cannot have if its rows are split over ranks."""


def check_version() -> None:
    """Make sure that this Megatron-Bridge takes boundaries from a batch.

    Raises:
        UnsupportedMegatronError: it does not.
    """
    for where, keys in KEYS.items():
        for key in keys:
            if key not in getattr(gpt_step, where, ()):
                raise unsupported(f"its forward step takes no {key} from a batch")


def unsupported(reason: str) -> UnsupportedMegatronError:
    """The error that names this Megatron-Bridge."""
    return UnsupportedMegatronError(
        f"Megatron-Bridge {__version__} is not supported: {reason}. Use {OLDEST}, or a version that "
        "docs/megatron-bridge.md names"
    )


def check_kind(dataset: Any) -> None:
    """Refuse datasets that are not documents to pre-train on.

    Args:
        dataset: a recipe's ``cfg.dataset``.

    Raises:
        OptionError: it is of another kind.
    """
    name = type(dataset).__name__
    if isinstance(dataset, GPTFIMDatasetConfig):
        raise OptionError(
            f"{name} cannot be packed: filling in the middle rearranges samples after they were packed; "
            "use GPTDatasetConfig, and give BFPDatasetProvider.of fim_rate and fim_extra_tokens"
        )
    if isinstance(dataset, MockGPTDatasetConfig):
        raise OptionError(f"{name} cannot be packed: mock data has no documents; use GPTDatasetConfig with data_path")
    if not isinstance(dataset, GPTDatasetConfig):
        raise OptionError(f"{name} cannot be packed: BFPDatasetProvider.of takes the GPTDatasetConfig of a recipe")


def check_dataset(dataset: Any) -> None:
    """Refuse settings of the dataset that would have no effect, or another one.

    Args:
        dataset: a ``BFPDatasetProvider``.

    Raises:
        OptionError: there is one.
    """
    if dataset.dataloader_type not in (None, "single"):
        raise OptionError(
            f"dataset.dataloader_type {dataset.dataloader_type!r} cannot be used with packed samples: leave it at "
            "'single'; they are shuffled anyway, in an order that does not depend on the data-parallel size"
        )
    if not dataset.blend and not any(dataset.blend_per_split or ()):
        raise OptionError("dataset: there are no documents to pack; set data_path, blend or blend_per_split")
    if dataset.split is not None:
        split_fractions(dataset.split)
    checked_seq_length("dataset.seq_length", dataset.seq_length)
    checked_cap(dataset.max_documents_per_sequence)
    for name in ("multiple_validation_sets", "full_validation"):
        if getattr(dataset, name):
            raise OptionError(f"dataset.{name} cannot be used: Megatron-Bridge has one validation loader; leave it out")


def check_run(cfg: Any) -> None:
    """Refuse settings of the rest of a recipe that do not work with packed samples.

    Args:
        cfg: Megatron-Bridge's ``ConfigContainer``, whose dataset is a ``BFPDatasetProvider``.

    Raises:
        OptionError: there is one.
    """
    model, seq_length = cfg.model, cfg.dataset.seq_length
    if getattr(model, "seq_length", seq_length) != seq_length:
        raise OptionError(f"dataset.seq_length is {seq_length:,}, but model.seq_length is {model.seq_length:,}")
    _check_context_parallelism(cfg)
    _check_expert_overlap(cfg)
    _check_cuda_graphs(model)
    _check_micro_batches(cfg)


def _check_context_parallelism(cfg: Any) -> None:
    if getattr(cfg.dist, "eval_context_parallel_size", None) not in (None, context_ranks(cfg)):
        raise OptionError(
            "dist.eval_context_parallel_size cannot be used with packed samples: attention is built for the ranks of "
            "training; leave it out"
        )
    if context_ranks(cfg) == 1:
        return
    settings = {"dataset.reset_position_ids": cfg.dataset.reset_position_ids}
    settings |= {f"model.{name}": getattr(cfg.model, name, None) for name in WITHOUT_CONTEXT_PARALLELISM}
    for name, value in settings.items():
        if value:
            raise OptionError(
                f"{name} {value} cannot be used with packed samples and model.context_parallel_size above 1: attention "
                "that splits rows does not have it"
            )


def context_ranks(cfg: Any) -> int:
    """Into how many ranks rows are split."""
    return getattr(cfg.model, "context_parallel_size", 1) or 1


def _check_expert_overlap(cfg: Any) -> None:
    for owner in (cfg.model, getattr(cfg, "comm_overlap", None)):
        if getattr(owner, "overlap_moe_expert_parallel_comm", False):
            raise OptionError(
                "overlap_moe_expert_parallel_comm cannot be used with packed samples: its schedule calls the layers "
                "in parts, so that it cannot be checked whether they keep to document boundaries; set it to False"
            )


def _check_cuda_graphs(model: Any) -> None:
    from megatron.bridge.utils.cuda_graph import cuda_graph_module_names, is_full_iteration_cuda_graph

    impl = getattr(model, "cuda_graph_impl", None) or "none"
    modules = set(cuda_graph_module_names(model))
    if impl == "none" or not is_full_iteration_cuda_graph(model) and modules and modules <= CAPTURES_NO_ATTENTION:
        return
    raise OptionError(
        f"model.cuda_graph_impl {impl!r} cannot be used with packed samples where attention is captured: a CUDA graph "
        "cannot take the document boundaries of each micro-batch; set it to 'none', or model.cuda_graph_modules to "
        f"nothing but {', '.join(sorted(CAPTURES_NO_ATTENTION))}"
    )


def _check_micro_batches(cfg: Any) -> None:
    of_evaluation = cfg.validation.eval_micro_batch_size or cfg.train.micro_batch_size
    if cfg.train.micro_batch_size == 1 < of_evaluation and cfg.model.pipeline_model_parallel_size > 1:
        raise OptionError(
            f"validation.eval_micro_batch_size {of_evaluation} cannot be used with pipeline parallelism and "
            "train.micro_batch_size 1: Megatron-Bridge exchanges shapes between stages only if training has several "
            "rows; set it to 1"
        )


def check_continuation(before: dict[str, Any], run: Namespace) -> None:
    """Refuse a resume in which sequences would be lost and others shown twice.

    Args:
        before: the recipe in the checkpoint, as Megatron-Bridge reads it from run_config.yaml.
        run: what the order of samples depends on now, as ``integrations.balance`` takes it.

    Raises:
        OptionError: it would be such a resume.
    """
    dataset, train = before.get("dataset", {}), before.get("train", {})
    was_packed = str(dataset.get("_target_")).endswith(".BFPDatasetProvider")
    of_before = Namespace(
        data_impl="bfp" if was_packed else None,
        balance_batches=dataset.get("balance_batches", 0),
        global_batch_size=train.get("global_batch_size", run.global_batch_size),
        micro_batch_size=train.get("micro_batch_size", run.micro_batch_size),
        data_parallel_size=dataset.get("data_parallel_size", 1) if was_packed else run.data_parallel_size,
    )
    if max(num_batches_of(of_before), num_batches_of(run)) > 1:
        check_resume(batches_of(of_before), batches_of(run), run.consumed_train_samples)
