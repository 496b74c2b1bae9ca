"""Which of Megatron-DeepSpeed's options and versions are refused with ``--data-impl bfp``."""

import argparse
import json
import sys

import pytest

pytest.importorskip("torch")

from helpers.megatron_deepspeed_stand_ins import module_with

from megatron_bfp.errors import IntegrationError, OptionError
from megatron_bfp.integrations.megatron_deepspeed import options as megatron_deepspeed
from megatron_bfp.integrations.megatron_deepspeed.changes import HOOKS
from megatron_bfp.integrations.option_table import Refused, attribute_of

PARTS_OF_TWO = ["0.5", "a", "0.5", "b"]


def options(**changed):
    stated = dict.fromkeys(attribute_of(option) for row in megatron_deepspeed.OPTIONS for option in row.options)
    stated |= {"dataloader_type": "single", "transformer_impl": "local", "masked_softmax_fusion": True}
    stated |= {"fp16": False, "bf16": True, "use_flash_attn": True, "ds_sequence_parallel_size": 1}
    stated |= {"force_ds_sequence_parallel": False, "deepspeed": True, "deepspeed_config": "nowhere.json"}
    stated |= {"balance_batches": 1}
    return argparse.Namespace(**stated | changed)


def test_what_can_be_honoured_is_accepted():
    megatron_deepspeed.check(options())
    megatron_deepspeed.check(options(use_flash_attn=False, bf16=False))
    megatron_deepspeed.check(options(use_flash_attn=False, masked_softmax_fusion=False))
    megatron_deepspeed.check(options(ds_sequence_parallel_size=4))
    megatron_deepspeed.check(options(dataloader_type=None))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({attribute_of(option): True}, f"{option} cannot be")
        for row in megatron_deepspeed.OPTIONS
        if isinstance(row, Refused) and not row.condition and not row.checked_by
        for option in row.options
    ]
    + [
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic cannot be used"),
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl transformer_engine cannot be used"),
        (
            {"use_flash_attn": False, "masked_softmax_fusion": False, "ds_sequence_parallel_size": 2},
            "sequence parallelism needs --use-flash-attn-v2",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(changed, message):
    with pytest.raises(OptionError, match=message):
        megatron_deepspeed.check(options(**changed))


@pytest.mark.parametrize(
    "changed, is_switched_off",
    [
        ({}, False),
        ({"use_flash_attn": False}, True),
        ({"use_flash_attn": False, "bf16": False, "fp16": True}, True),
        ({"use_flash_attn": False, "bf16": False}, False),
        ({"use_flash_attn": False, "masked_softmax_fusion": False}, False),
    ],
    ids=str,
)
def test_the_fused_softmax_is_switched_off_with_a_line(changed, is_switched_off, capsys, monkeypatch):
    monkeypatch.setattr(megatron_deepspeed, "most_corpora", lambda: None)
    given = options(**changed)
    fused = given.masked_softmax_fusion
    args = megatron_deepspeed.check_options(lambda args, defaults: args, ())(given)
    assert args.masked_softmax_fusion == (fused and not is_switched_off)
    assert ("--no-masked-softmax-fusion was added: the fused softmax ignores" in capsys.readouterr().out) == (
        is_switched_off
    )


def test_the_curriculum_of_deepspeeds_configuration_is_refused(tmp_path):
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"curriculum_learning": {"enabled": False}}))
    megatron_deepspeed.check(options(deepspeed_config=str(path)))
    path.write_text(json.dumps({"curriculum_learning": {"enabled": True}}))
    with pytest.raises(OptionError, match="deepspeed.json: curriculum_learning cannot be used"):
        megatron_deepspeed.check(options(deepspeed_config=str(path)))


@pytest.mark.parametrize(
    "changed, is_refused",
    [
        ({}, True),
        ({"deepspeed_activation_checkpointing": True}, False),
        ({"no_pipeline_parallel": False}, False),
        ({"recompute_granularity": "selective"}, False),
        ({"use_rotary_position_embeddings": False}, False),
    ],
)
def test_fault_B18_recomputation_that_cannot_save_the_rotary_table_is_refused(changed, is_refused):
    rotary = {"use_rotary_position_embeddings": True, "recompute_granularity": "full", "no_pipeline_parallel": True}
    rotary["deepspeed_activation_checkpointing"] = False
    if is_refused:
        with pytest.raises(OptionError, match="full needs --deepspeed-activation-checkpointing"):
            megatron_deepspeed.check(options(**rotary | changed))
    else:
        megatron_deepspeed.check(options(**rotary | changed))


@pytest.mark.parametrize("option", ["data_path", "train_data_path", "valid_data_path", "test_data_path"])
@pytest.mark.parametrize(
    "values, message",
    [
        ([part for number in range(255) for part in ("1", f"part{number}")], "of 255 corpora; .* 254 at most"),
        (["0", "a", "1", "b"], "weight of 0.0 for a"),
        (["1", "a", "-1", "b"], "weight of -1.0 for b"),
        (["1", "a", "nan", "b"], "weight of nan for b"),
        (["1", "a", "inf", "b"], "weight of inf for b"),
        (["0", "a"], "weight of 0.0 for a"),
        (["a", "b"], "a b ...: give one prefix, or a weight before each"),
        (["1", "a", "b"], "1 a b ...: give one prefix, or a weight before each"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_fault_B04_blends_that_megatron_deepspeed_would_end_are_refused(option, values, message):
    with pytest.raises(OptionError, match=message):
        megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: values}), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: PARTS_OF_TWO}), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: ["a"]}), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: ["1", "a"]}), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(**{option: None}), 254)


def test_fault_B04_as_many_corpora_as_it_takes_are_fine():
    most = [part for number in range(254) for part in ("1", f"part{number}")]
    megatron_deepspeed.check_data_paths(argparse.Namespace(data_path=most), 254)
    megatron_deepspeed.check_data_paths(argparse.Namespace(data_path=most + PARTS_OF_TWO), None)


@pytest.mark.parametrize(
    "body, most",
    [
        ("assert num_datasets < 255\n        dataset_index = np.zeros(self.size, dtype=np.uint8)", 254),
        ("assert num_datasets < 32767\n        dataset_index = np.zeros(self.size, dtype=np.int16)", 32766),
        ("dataset_index = np.zeros(self.size, dtype=np.int16)", 32767),
        ("dataset_index = build(self.size)", None),
    ],
)
def test_fault_B04_the_limit_is_that_of_its_own_code(tmp_path, monkeypatch, body, most):
    folder = tmp_path / "megatron/data"
    folder.mkdir(parents=True)
    (folder / "blendable_dataset.py").write_text(f"class BlendableDataset:\n    def __init__(self):\n        {body}\n")
    for name in ("megatron", "megatron.data", "megatron.data.blendable_dataset"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for path in (tmp_path / "megatron", folder):
        (path / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert megatron_deepspeed.most_corpora() == most
    finally:
        for name in ("megatron.data.blendable_dataset", "megatron.data", "megatron"):
            sys.modules.pop(name, None)


def test_data_impl_gets_one_choice_more():
    def add_data_args(parser):
        parser.add_argument("--data-impl", default="infer", choices=["mmap", "infer"])
        return parser

    arguments = module_with("megatron.arguments", _add_zero_args=None, _add_data_args=add_data_args)
    arguments.validate_args = lambda args, defaults={}: args
    HOOKS["megatron.arguments"](arguments)
    parser = arguments._add_data_args(argparse.ArgumentParser())
    parsed = parser.parse_args(["--data-impl", "bfp", "--max-documents-per-sequence", "8"])
    assert (parsed.data_impl, parsed.max_documents_per_sequence) == ("bfp", 8)
    assert (parsed.balance_batches, parsed.even_sequences) == (1, False)
    parsed = parser.parse_args(["--data-impl", "bfp", "--balance-batches", "0", "--even-sequences"])
    assert (parsed.balance_batches, parsed.even_sequences) == (0, True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--data-impl", "lazy"])


def test_an_unknown_version_is_refused():
    changed = module_with("megatron.utils", get_ltor_masks_and_position_ids=lambda data, eod_token: None)
    with pytest.raises(
        IntegrationError, match=r"this Megatron has .*\(data, eod_token\), expected \(data, eod_token, re"
    ):
        HOOKS["megatron.utils"](changed)
    with pytest.raises(IntegrationError, match="has no megatron.model.gpt_model.CrossEntropy|has no .*forward"):
        gpt_model = module_with("megatron.model.gpt_model", GPTModel=type("GPTModel", (), {}))
        HOOKS["megatron.model.gpt_model"](gpt_model)
    with pytest.raises(IntegrationError, match="too old for --data-impl bfp"):
        HOOKS["megatron.arguments"](module_with("megatron.arguments"))


def test_megatron_lms_module_of_the_same_name_is_left_alone():
    def broadcast_data(keys, data, datatype, tp_group=None):
        pass

    data = module_with("megatron.core.tensor_parallel.data", broadcast_data=broadcast_data)
    package = module_with("megatron.core.tensor_parallel", broadcast_data=broadcast_data, data=data)
    HOOKS["megatron.core.tensor_parallel"](package)
    assert package.broadcast_data is broadcast_data


def test_masks_and_the_rotary_table_are_changed_together():
    def masks(data, eod_token, reset_position_ids, reset_attention_mask, eod_mask_loss, skip_mask=False):
        pass

    def rotary(seq_length):
        pass

    changed = module_with("megatron.utils", get_ltor_masks_and_position_ids=masks, update_rotary_pos_emb=rotary)
    HOOKS["megatron.utils"](changed)
    assert changed.get_ltor_masks_and_position_ids is not masks and changed.update_rotary_pos_emb is not rotary
    for missing in ("get_ltor_masks_and_position_ids", "update_rotary_pos_emb"):
        functions = {"get_ltor_masks_and_position_ids": masks, "update_rotary_pos_emb": rotary}
        del functions[missing]
        with pytest.raises(IntegrationError, match=f"this Megatron has no megatron.utils.{missing}"):
            HOOKS["megatron.utils"](module_with("megatron.utils", **functions))
