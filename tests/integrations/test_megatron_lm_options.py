"""Which of Megatron-LM's options are refused with ``--data-impl bfp``, and which are set."""

import argparse
import sys
import types

import pytest

from megatron_bfp import IntegrationError, OptionError
from megatron_bfp.integrations.megatron_lm import options as megatron_lm
from megatron_bfp.integrations.option_table import Refused, attribute_of


def options(**changes):
    known = {
        "dataloader_inter_document_masking": False,
        "data_impl": "bfp",
        "context_parallel_size": 1,
        "dataloader_type": None,
        "micro_batch_size": 1,
        "pipeline_model_parallel_size": 1,
        "cuda_graph_impl": "none",
        "cuda_graph_modules": [],
        "seq_length": 16,
        "balance_batches": 1,
    }
    return argparse.Namespace(**(known | changes))


LONG = {"context_parallel_size": 2}
"""A run with context parallelism."""
BY_SEQUENCE = LONG | {"micro_batch_size": 2, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}


@pytest.mark.parametrize("transformer_impl", ["transformer_engine", "local"])
@pytest.mark.parametrize("cp_comm_type", [None, ["p2p"], "a2a", ["all_gather", "a2a"]])
def test_context_parallelism_is_taken(cp_comm_type, transformer_impl):
    megatron_lm.check(options(**LONG, cp_comm_type=cp_comm_type, transformer_impl=transformer_impl))


def test_experts_may_be_balanced_by_sequence_where_rows_are_split():
    megatron_lm.check(options(**BY_SEQUENCE))


def test_the_options_of_a_plain_run_are_fine():
    megatron_lm.check(options(fim_data=False, dataloader_type="single"))
    megatron_lm.check(options(position_embedding_type="mrope", multi_latent_attention=True))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({attribute_of(option): True}, f"{option} cannot be used")
        for row in megatron_lm.OPTIONS
        if isinstance(row, Refused) and not row.condition and not row.checked_by
        for option in row.options
    ]
    + [
        (LONG | {"cp_comm_type": ["ring"]}, "--cp-comm-type ring"),
        (LONG | {"mtp_num_layers": 1}, "--mtp-num-layers"),
        (LONG | {"reset_position_ids": True}, "--reset-position-ids"),
        (LONG | {"hybrid_layer_pattern": "M*G*"}, "--hybrid-layer-pattern with G cannot be used .*: gated delta nets"),
        (LONG | {"hybrid_override_pattern": "M-D"}, "--hybrid-override-pattern with D cannot be used"),
        (LONG | {"seq_length": 18}, "--seq-length 18 must be a multiple of 4, twice --context-parallel-size"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic"),
        ({"dataloader_type": "external"}, "--dataloader-type external"),
        ({"position_embedding_type": "mrope"}, "--position-embedding-type mrope cannot be used .* give rope"),
        ({"fused_single_qkv_rope": True}, "fused_single_qkv_rope cannot be used"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_honoured_are_refused(changes, message):
    with pytest.raises(OptionError, match=message):
        megatron_lm.check(options(**changes))


def test_an_old_megatron_lm_is_refused_with_the_version_it_needs():
    with pytest.raises(IntegrationError, match=r"no --dataloader-inter-document-masking.*megatron-core 0\.19"):
        megatron_lm.check(argparse.Namespace())


def test_options_from_elsewhere_are_refused(monkeypatch):
    module = types.SimpleNamespace(get_args=lambda: options())
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    with pytest.raises(OptionError, match="--yaml-cfg"):
        megatron_lm.parsed_options()
    module.get_args = lambda: options(data_impl="bfp", dataloader_inter_document_masking=True)
    assert megatron_lm.parsed_options().data_impl == "bfp"
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars")
    assert megatron_lm.parsed_options() is None


def validated(**changes):
    """Options of a run of two pipeline stages, checked by our part of ``validate_args``."""

    def validate_args(args, defaults={}):  # noqa: B006
        if args.eval_micro_batch_size is None:
            args.eval_micro_batch_size = args.micro_batch_size
        return args

    known = {"data_impl": "bfp", "micro_batch_size": 1, "eval_micro_batch_size": None, "num_experts": None}
    known |= {"pipeline_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    return megatron_lm.check_options(validate_args, ())(options(**known | changes))


@pytest.mark.parametrize("size", ["micro_batch_size", "eval_micro_batch_size"])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_fault_B01_stages_of_any_micro_batch_take_any_dispatcher_and_exchange_no_shapes(size, dispatcher):
    args = validated(moe_token_dispatcher_type=dispatcher, num_experts=8, **{size: 2})
    assert args.dataloader_inter_document_masking
    assert not hasattr(args, "variable_seq_lengths") and args.moe_token_dispatcher_type == dispatcher


@pytest.mark.parametrize(
    "values, message",
    [
        (["0", "a", "1", "b"], "weight of 0.0 for a"),
        (["1", "a", "-0.5", "b"], "weight of -0.5 for b"),
        (["nan", "a", "1", "b"], "weight of nan for a"),
        (["inf", "a", "1", "b"], "weight of inf for a"),
        (["1e300", "a", "1e-300", "b"], "weight of 1e-300 for b is 0 beside"),
        (["1e308", "a", "1e308", "b"], "is 0 beside the sum of all, inf"),
        (["0.5", "a", "b", "0.5"], "--valid-data-path: b stands where a weight is expected"),
        (["0", "a"], "weight of 0.0 for a"),
    ],
)
def test_fault_B04_weights_that_cannot_be_are_refused_before_anything_is_opened(values, message):
    with pytest.raises(OptionError, match=message):
        megatron_lm.check(options(valid_data_path=values))


@pytest.mark.parametrize("values", [["a"], ["a", "b"], ["1", "a"], ["0.5", "a", "1e-3", "b"], ["a", "b", "c"], None])
def test_fault_B04_data_paths_that_megatron_takes_are_fine(values):
    megatron_lm.check(options(data_path=values))


@pytest.mark.parametrize("balancing", ["seq_aux_loss", ["aux_loss", "seq_aux_loss"]])
def test_fault_A01_plans_of_later_tokens_and_of_experts_balanced_by_sequence_are_fine(balancing):
    overlap = {"overlap_moe_expert_parallel_comm": True, "micro_batch_size": 2, "mtp_num_layers": 1}
    megatron_lm.check(options(moe_router_load_balancing_type=balancing, **overlap))


@pytest.mark.parametrize("pattern", ["M-M*", "M+ME|M*"])
def test_hybrid_layers_of_split_rows_are_taken(pattern):
    megatron_lm.check(options(**LONG, hybrid_layer_pattern=pattern))


@pytest.mark.parametrize("spelling", ["hybrid_override_pattern", "mtp_hybrid_override_pattern", "hybrid_layer_pattern"])
def test_hybrid_layers_are_accepted_and_reported(spelling, capsys):
    megatron_lm.check_options(lambda args, defaults: args, ())(options(**{spelling: "M*M*"}))
    assert f"--{spelling.replace('_', '-')} is accepted but not tested" in capsys.readouterr().out


@pytest.mark.parametrize("variant", ["gdn", "gdn2", "gated_delta_net", "dsa"])
def test_the_deterministic_gdn2_alone_is_refused(variant):
    megatron_lm.check(options(experimental_attention_variant=variant))
    megatron_lm.check(options(deterministic_mode=True))
    deterministic = options(experimental_attention_variant=variant, deterministic_mode=True)
    if variant != "gdn2":
        return megatron_lm.check(deterministic)
    with pytest.raises(OptionError, match="--deterministic-mode cannot .* and --experimental-attention-variant gdn2"):
        megatron_lm.check(deterministic)


@pytest.mark.parametrize("softmax_type", ["learnable", "off-by-one"])
def test_sinks_are_refused_where_rows_are_split(softmax_type):
    split = {"context_parallel_size": 2, "transformer_impl": "local", "seq_length": 8}
    megatron_lm.check(options(softmax_type=softmax_type))
    megatron_lm.check(options(softmax_type="vanilla", **split))
    with pytest.raises(OptionError, match=f"--softmax-type {softmax_type} cannot be used"):
        megatron_lm.check(options(softmax_type=softmax_type, **split))


@pytest.mark.parametrize(
    "copied, message",
    [
        ({"fim_data": True}, "--fim-data cannot be used"),
        ({"context_parallel_size": 2, "mtp_num_layers": 1}, "--mtp-num-layers cannot be used .* and --context-parall"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local cannot be used"),
    ],
)
def test_fault_A08_what_validation_copies_or_sets_is_refused_too(copied, message):
    def validate_args(args, defaults):
        vars(args).update(copied)
        return args

    check_and_validate = megatron_lm.check_options(validate_args, ())
    with pytest.raises(OptionError, match=message):
        check_and_validate(options())
    assert check_and_validate(options(data_impl="mmap"))  # no affair of ours


def test_fault_A08_what_never_was_validated_is_refused_too(monkeypatch):
    """As with ``--yaml-cfg``, whose options take another way."""
    args = options(dataloader_inter_document_masking=True)
    module = types.SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    assert megatron_lm.parsed_options() is args
    args.fim_data = True
    with pytest.raises(OptionError, match="--fim-data cannot be used"):
        megatron_lm.parsed_options()


def module_of(name):
    """As an entry of Megatron-LM's CudaGraphModule."""
    return types.SimpleNamespace(name=name)


CAPTURED = [
    {"cuda_graph_impl": "local"},
    {"cuda_graph_impl": "transformer_engine"},
    {"cuda_graph_impl": "full_iteration"},
    {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": [module_of("mlp")]},
    {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"]},
    {"cuda_graph_impl": "local", "cuda_graph_modules": [module_of("mlp")]},  # of the whole layer
    {"enable_cuda_graph": True, "cuda_graph_scope_deprecated": ["moe"]},
    {"cuda_graph_impl": "local", "cuda_graph_modules": [module_of("attn"), module_of("mlp")]},
    {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [module_of("mamba")]},
    {"cuda_graph_impl": "local", "cuda_graph_scope_deprecated": ["full"]},
    {"cuda_graph_impl": "local", "cuda_graph_modules": "mlp,attn"},
    {"cuda_graph_impl": "none", "cuda_graph_scope_deprecated": ["full_iteration"]},
    {"enable_cuda_graph": True},
    {"external_cuda_graph": True},
    {"external_cuda_graph": True, "cuda_graph_scope_deprecated": ["attn"]},
]


@pytest.mark.parametrize("changes", CAPTURED, ids=str)
def test_fault_B11_graphs_with_attention_in_them_are_refused(changes):
    with pytest.raises(OptionError, match="cuda-graph.*cannot be used .* where attention is captured"):
        megatron_lm.check(options(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cuda_graph_impl": "none", "cuda_graph_modules": ["attn"]},
        {"cuda_graph_impl": "none", "cuda_graph_scope_deprecated": ["full_iteration_inference"]},
        {"cuda_graph_impl": "local", "cuda_graph_modules": [module_of("moe_router")]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [module_of("mlp")]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe_router", "moe_preprocess"]},
        {"external_cuda_graph": True, "cuda_graph_scope_deprecated": ["moe"]},
        {"enable_cuda_graph": False, "external_cuda_graph": False},
    ],
    ids=str,
)
def test_fault_B11_graphs_without_attention_are_fine(changes):
    megatron_lm.check(options(**changes))


@pytest.mark.parametrize(
    "changes, option",
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl transformer_engine"),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["moe_router"]}, "--cuda-graph-impl local"),
        ({"transformer_impl": "local"}, None),
    ],
)
def test_options_that_no_test_has_tried_are_reported(changes, option, capsys):
    megatron_lm.check_options(lambda args, defaults: args, ())(options(**changes))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (option is not None)
    assert option is None or f"best-fit packing: {option} is accepted but not tested with packed samples" in lines[0]
