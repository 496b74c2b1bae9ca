"""The memory estimate of a recipe against what a training run takes, and what autograd keeps of a layer."""

import json
import os
import re
import subprocess

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core.models.gpt")
pytest.importorskip("deepspeed")
pytest.importorskip("tokenizers")

from cluster.layout import Layout
from cluster.memory import estimate, kept_per_token, model_of, num_parameters
from cluster.recipe import read_recipe, vocab_size_of
from helpers import launching
from helpers.datasets import ROOT
from helpers.kept import bytes_kept
from helpers.megatron_helpers import initialize_megatron, model_options
from helpers.recipes import RECIPES, dry_run, training_options
from trainer.model import build_model

from megatron_bfp import InputError
from megatron_bfp.megatron_core.attention import document_boundaries

TINY = RECIPES / "tiny.sh"
MOSTLY_WEIGHTS = {"num_layers": 8, "hidden_size": 512, "ffn_hidden_size": 1536, "micro_batch_size": 1}
LEFT_OUT = ("--save", "--load", "--save-interval", "--eval-interval", "--eval-iters", "--json-log")


def corpus_of_recipe(folder, vocab_size):
    """A corpus, and its tokenizer with the vocabulary filled up to the size that the recipe was made for."""
    launching.make_corpus(folder)
    path = folder / "tokenizer.json"
    description = json.loads(path.read_text())
    vocabulary = description["model"]["vocab"]
    vocabulary |= {f"unused{number}": number for number in range(len(vocabulary), vocab_size)}
    path.write_text(json.dumps(description))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="tiny", marks=pytest.mark.slow),
        pytest.param(MOSTLY_WEIGHTS, id="mostly weights", marks=pytest.mark.slow),
    ],
)
def test_the_estimate_is_what_a_run_takes(tmp_path, changes):
    (tmp_path / "recipe.sh").write_text(
        f'source "{TINY}"\n' + "".join(f"{name}={value}\n" for name, value in changes.items())
    )
    recipe = read_recipe(str(tmp_path / "recipe.sh"))
    corpus_of_recipe(tmp_path, recipe.vocab_size)
    status, output = dry_run(
        tmp_path,
        "slurm",
        tmp_path / "recipe",
        NODES=1,
        DATA_PATH="data_text_document",
        TOKENIZER_MODEL="tokenizer.json",
        EOD_TOKEN="<eod>",
    )
    assert status == 0, output
    options = training_options(output, "pretrain_gpt.py")
    for name in LEFT_OUT:
        first = options.index(name)
        del options[first : first + 2]
    command = [
        "deepspeed",
        "--num_gpus",
        "2",
        "--master_port",
        str(launching.free_port()),
        str(ROOT / "tests/helpers/programs/measure_memory.py"),
    ]
    environment = launching.ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": "", "MALLOC_MMAP_THRESHOLD_": "65536"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "examples"), environment["PYTHONPATH"]])
    done = subprocess.run(
        [*command, *options, "--train-iters", "2", "--num-workers", "0"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=280,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    estimated = estimate(model_of(recipe), Layout.of(recipe.options, 1, 2))
    measured = [int(number) for number in re.findall(r"^rank \d measured (\d+)", output, re.MULTILINE)]
    print(f"estimated {estimated}; measured {measured}")
    assert len(measured) == 2
    for number in measured:
        assert number == pytest.approx(estimated.total, rel=0.2)


def elements_kept(num_layers, run):
    """Elements that autograd keeps of a forward pass, weights left out."""
    shape = {
        name: getattr(run, name) for name in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length")
    }
    torch.manual_seed(1)
    model = build_model(model_options(num_layers=num_layers, **shape), 128)
    rows, seq_length = run.micro_batch_size, shape["seq_length"]
    tokens = torch.randint(128, (rows, seq_length))
    cu_seqlens = torch.full((rows, seq_length + 1), seq_length, dtype=torch.int32)
    cu_seqlens[:, 0], cu_seqlens[:, 1] = 0, 200  # two documents
    positions = torch.arange(seq_length).expand_as(tokens)
    boundaries = document_boundaries(cu_seqlens)
    return bytes_kept(model, lambda: model(tokens, positions, None, labels=tokens, packed_seq_params=boundaries)) / 4


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU autograd keeps less, as kernels do what several operations do"
)
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_what_a_layer_keeps_is_counted_right(micro_batch_size):
    initialize_megatron()
    recipe = read_recipe(str(TINY), ["--micro-batch-size", str(micro_batch_size)])
    run = recipe.options
    tokens = micro_batch_size * run.seq_length
    measured = (elements_kept(3, run) - elements_kept(1, run)) / 2 / tokens
    counted = kept_per_token(model_of(recipe))
    print(f"counted {counted}, kept {measured:.0f} elements per token")
    assert measured == pytest.approx(counted, rel=0.03)


def test_parameters_are_those_of_the_models():
    """LLaMA's own numbers: 6.74 and 13.02 billion."""
    for name, billions in (("llama_7b_code_2k", 6.738), ("llama_13b_text_2k", 13.016)):
        recipe = read_recipe(str(RECIPES / f"{name}.sh"), ["--tensor-model-parallel-size", "1"])
        assert num_parameters(model_of(recipe)) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_parameters_are_those_that_are_built():
    """Grouped queries, a feed-forward size and a padding of their own."""
    words = ["--group-query-attention", "--num-query-groups", "2", "--make-vocab-size-divisible-by", "96"]
    recipe = read_recipe(str(TINY), [*words, "--num-layers", "2", "--ffn-hidden-size", "640"])
    initialize_megatron()
    shape = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "seq_length")
    options = model_options(**{name: getattr(recipe.options, name) for name in shape})
    options.group_query_attention, options.make_vocab_size_divisible_by = True, 96
    built = build_model(options, recipe.vocab_size)
    assert sum(parameter.numel() for parameter in built.parameters()) == num_parameters(model_of(recipe))


@pytest.mark.parametrize(
    "name", ["llama_7b_code_2k", "llama_13b_text_2k", "llama_13b_text_8k", "llama_13b_text_32k", "tiny"]
)
def test_a_recipe_states_its_estimate(name):
    path = RECIPES / f"{name}.sh"
    recipe = read_recipe(str(path))
    layout = Layout.of(recipe.options, *((1, 2) if name == "tiny" else (32, 8)))
    assert f"# {estimate(model_of(recipe), layout)}\n" in path.read_text()


def test_adam_s_state_follows_precision_and_zero_stage():
    """Two averages in fp32; where weights are bf16 or ZeRO flattens them, also the weights in fp32."""
    for words, states in (([], 8), (["--zero-stage", "1"], 12), (["--bf16"], 12)):
        recipe = read_recipe(str(TINY), ["--zero-stage", "0", *words])
        model = model_of(recipe)
        memory = estimate(model, Layout.of(recipe.options, 1, 1))
        assert memory.optimizer == states * num_parameters(model), words


def test_keys_that_are_gathered_take_memory():
    """Those of whole rows, on each rank; heads that are exchanged take a share of each."""

    def activations_of(*words):
        return estimate(model_of(read_recipe(str(TINY), words)), Layout(1, 4, 4, 1, 4, 128)).activations

    alone = activations_of("--micro-batch-size", "4")
    shared = activations_of("--micro-batch-size", "4", "--context-parallel-size", "4")
    gathered = activations_of("--micro-batch-size", "4", "--context-parallel-size", "4", "--cp-comm-type", "all_gather")
    assert shared == alone // 4 and 1.1 * shared < gathered < alone


def test_a_recipe_s_vocabulary_has_a_size():
    assert vocab_size_of("1") == 1
    for text in ("0", "-1", "", "1.0", "many"):
        with pytest.raises(InputError, match="give a whole number above 0"):
            vocab_size_of(text)
