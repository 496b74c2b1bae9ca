"""The trainer's steps against an independent loop: gradients, clipping, AdamW and its decay, weight for weight.

The loop is plain torch: the cross-entropy of the model's logits at the targets, their mean, one backward pass for the
whole global batch, ``clip_grad_norm_`` and an AdamW that does not decay norms and biases. AdamW forgets how large its
gradients are, but for its epsilon, which is large here for that reason.
"""

import json
import os
import re
from collections import namedtuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from helpers.datasets import documents_of, write
from helpers.disk_order import watched_disk
from helpers.launching import steps
from helpers.trainer_in_process import SmallTokenizer, alone, command_line, run_trainer
from torch.nn.functional import cross_entropy
from trainer import checkpoints as pretrain_checkpoints
from trainer import save_folder
from trainer import training as pretrain_gpt
from trainer.arguments import parse_arguments
from trainer.data import GlobalOrderSampler, build_train_dataset, micro_batches
from trainer.engine import build_engine, engine_config, initialize_distributed, set_batch_sizes
from trainer.model import build_model
from trainer.process import complete_environment
from trainer.resume import DataHistory, describe_run
from trainer.training import learning_rate, train_step

from megatron_bfp import BFPError
from megatron_bfp.megatron_core.attention import document_boundaries

LENGTHS = [5, 40, 1, 17, 31, 32, 9, 70, 3, 12, 25, 8, *[1, 2] * 10, 64, 30, 30, 14, 50]
STEPS = 4
HYPERPARAMETERS = ("--adam-eps", 0.1, "--weight-decay", 0.5, "--clip-grad", 2.0, "--lr", 0.05, "--lr-warmup-iters", 2)
HYPERPARAMETERS += (
    "--split",
    "1,0,0",
    "--adam-beta1",
    0.8,
    "--adam-beta2",
    0.9,
    "--init-method-std",
    0.1,
    "--min-lr",
    0.01,
)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Documents, of which every second has many inputs without a loss, so that sequences differ in targets."""
    documents = documents_of(LENGTHS)
    documents[1::2] = [[token if token % 3 else 0 for token in document] for document in documents[1::2]]
    return write(tmp_path_factory.mktemp("data") / "data", documents).prefix


class Trainer:
    """Parts of ``pretrain_gpt.main`` as it makes them."""

    def __init__(self, prefix, *options):
        self.options = parse_arguments(command_line(prefix, "--eod-mask-loss", *HYPERPARAMETERS, *options))
        complete_environment()
        initialize_distributed(self.options)
        self.accumulation = set_batch_sizes(self.options)
        self.dataset = build_train_dataset(self.options, SmallTokenizer())
        config = engine_config(self.options, self.accumulation)
        self.engine = build_engine(self.options, SmallTokenizer.vocab_size, config)

    def batches(self, micro_batch_size=None):
        """Micro-batches of the run's samples, as large as its own or as given."""
        size = self.options.global_batch_size
        micro_batch_size = micro_batch_size or self.options.micro_batch_size
        sampler = GlobalOrderSampler(0, STEPS * size, micro_batch_size, size, 0, 1)
        return micro_batches(self.dataset, sampler, 0, torch.device("cpu"))

    def step(self, batches, iteration):
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, iteration)
        return train_step(self.engine, [next(batches) for _ in range(self.accumulation)])

    def weights(self):
        return full_weights(self.engine.module)


def full_weights(model):
    """Weights by name, also where ZeRO 3 has taken them away."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}


class PlainLoop:
    """The independent loop, from the same weights."""

    def __init__(self, trainer, scale=1.0, decayed=()):
        self.options, self.scale = trainer.options, scale
        self.model = build_model(self.options, SmallTokenizer.vocab_size).float()
        with torch.no_grad():
            for name, weight in trainer.weights().items():
                self.model.get_parameter(name).copy_(weight)
        named = list(self.model.named_parameters())
        matrices = [parameter for name, parameter in named if "norm" not in name or name in decayed]
        others = [parameter for name, parameter in named if "norm" in name and name not in decayed]
        assert len(others) + len(decayed) == 5 and all(parameter.dim() == 1 for parameter in others)
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}],
            betas=(0.8, 0.9),
            eps=0.1,
        )

    def step(self, batch, lr):
        """One step on a whole global batch; returns loss, gradient norm and number of targets."""
        boundaries = document_boundaries(batch["cu_seqlens"], "cpu")
        logits = self.model(batch["tokens"], batch["position_ids"], None, packed_seq_params=boundaries)
        is_target = batch["loss_mask"].flatten() > 0
        loss = cross_entropy(logits.flatten(0, 1).float()[is_target], batch["labels"].flatten()[is_target])
        self.optimizer.zero_grad()
        (loss * self.scale).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return loss.item(), norm.item(), int(is_target.sum())


RATES = (0.025, 0.05, 0.05, 0.03)
"""Warm-up to 0.05 in two steps, then half a cosine to 0.01 in two more."""


def largest_differences(prefix, *options, **changes):
    """Largest differences of (loss, gradient norm, weights) between trainer and loop, relative, over all steps."""
    with alone():
        trainer = Trainer(prefix, *options)
        loop = PlainLoop(trainer, **changes)
        batches, whole = trainer.batches(), trainer.batches(trainer.options.global_batch_size)
        found = [0.0, 0.0, 0.0]
        for iteration in range(STEPS):
            result, batch = trainer.step(batches, iteration), next(whole)
            loss, norm, num_targets = loop.step(batch, RATES[iteration])
            # packed sequences differ in targets, or a mean of means would do
            assert result.num_targets == num_targets < 0.9 * batch["tokens"].numel()
            assert (norm > 2.0) == (iteration < 2)  # clipped in some steps
            weights, expected = trainer.weights(), full_weights(loop.model)
            far = max((weights[name] - expected[name]).abs().max().item() for name in expected)
            new = (abs(result.loss / loss - 1), abs(result.grad_norm / norm - 1), far)
            found = [max(pair) for pair in zip(found, new, strict=True)]
    return found


@pytest.mark.parametrize("micro_batch_size", [1, 4])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_steps_equal_an_independent_loop(prefix, zero_stage, micro_batch_size):
    kind = ("--zero-stage", zero_stage, "--micro-batch-size", micro_batch_size)
    loss, norm, weights = largest_differences(prefix, *kind)
    print(f"ZeRO {zero_stage}: loss {loss:.1e}, gradient norm {norm:.1e}, weights {weights:.1e}")
    assert loss < 1e-5 and norm < 1e-5 and weights < 1e-5


@pytest.mark.parametrize("change", [{"scale": 0.8}, {"decayed": ["decoder.final_layernorm.weight"]}])
def test_an_independent_loop_that_differs_is_noticed(prefix, change):
    _, norm, weights = largest_differences(prefix, **change)
    assert weights > 1e-3 and (norm > 0.1 or "scale" not in change)


def test_without_a_limit_gradients_are_not_clipped(prefix):
    with alone():
        trainer = Trainer(prefix, "--clip-grad", 0)
        assert engine_config(trainer.options, trainer.accumulation)["gradient_clipping"] == 0
        before = trainer.weights()
        trainer.step(trainer.batches(), 0)
        moved = max((after - before[name]).abs().max().item() for name, after in trainer.weights().items())
    assert moved > 0


def test_the_seed_decides_the_weights(prefix):
    found = []
    for seed in (1, 1, 2):
        with alone():
            found.append(Trainer(prefix, "--seed", seed).weights())
    first, same, other = found
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def summed_gradients(trainer, dtype):
    """Gradients of a global batch, added up over its micro-batches in a type, by name. For a bf16 model, float32."""
    model = build_model(trainer.options, SmallTokenizer.vocab_size).bfloat16()
    with torch.no_grad():
        for name, weight in trainer.weights().items():
            model.get_parameter(name).copy_(weight)
    batches = trainer.batches()
    batches = [next(batches) for _ in range(trainer.accumulation)]
    num_targets = sum(batch["loss_mask"].sum() for batch in batches)
    found = {name: torch.zeros_like(weight, dtype=dtype) for name, weight in model.named_parameters()}
    for batch in batches:
        boundaries = document_boundaries(batch["cu_seqlens"], "cpu")
        keywords = {"labels": batch["labels"], "packed_seq_params": boundaries}
        losses = model(batch["tokens"], batch["position_ids"], None, **keywords)
        ((losses.float() * batch["loss_mask"]).sum() / num_targets).backward()
        for name, parameter in model.named_parameters():
            found[name] += parameter.grad
            parameter.grad = None
    return {name: gradient.float() for name, gradient in found.items()}


def test_bf16_gradients_add_up_in_fp32_under_zero_1(prefix):
    """The first average of Adam is the gradient: all steps of the sum are in it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    options = ("--bf16", "--zero-stage", 1, "--micro-batch-size", 1, "--global-batch-size", 64, "--clip-grad", 0)
    with alone():
        trainer = Trainer(prefix, *options)
        expected, coarse = (summed_gradients(trainer, dtype) for dtype in (torch.float32, torch.bfloat16))
        trainer.step(trainer.batches(), 0)
        errors = [0.0, 0.0]
        for name, parameter in trainer.engine.module.named_parameters():
            gradient = safe_get_full_optimizer_state(parameter, "exp_avg") / (1 - 0.8)
            size = expected[name].norm()
            for i, other in enumerate((expected, coarse)):
                errors[i] = max(errors[i], ((gradient - other[name]).norm() / size).item())
    print(f"from sums in fp32 {errors[0]:.1e}, from sums in bf16 {errors[1]:.1e}")
    assert errors[0] < 3e-3 < 6e-3 < errors[1]


def test_a_step_without_targets_stops_the_run(tmp_path):
    prefix = write(tmp_path / "data", [[7]] * 300).prefix
    with pytest.raises(pretrain_gpt.TrainingStopped, match="iteration 1: the loss is nan"):
        run_trainer(prefix)


@pytest.fixture
def saved(prefix, tmp_path):
    """A trainer after a step, and the folder for its checkpoints, where a run of more ranks has left files."""
    folder = tmp_path / "saved"
    with alone():
        trainer = Trainer(prefix, "--save", folder, "--zero-stage", 1)
        trainer.step(trainer.batches(), 0)
        yield trainer, folder


def save(trainer, iteration):
    history = DataHistory(describe_run(trainer.options, SmallTokenizer()), trainer.dataset)
    pretrain_checkpoints.save_checkpoint(trainer.engine, trainer.options, iteration, history)


def test_a_checkpoint_is_on_disk_before_it_is_complete_and_complete_before_it_is_the_latest(saved):
    trainer, folder = saved
    with watched_disk() as disk:
        save(trainer, 1)
    path = folder / "iter_0000001"
    assert disk.unforced == [] and disk.names_not_forced() == []
    complete, latest = disk.index("name", "complete.json"), disk.index("name", "latest")
    content = json.loads((path / "complete.json").read_text())
    assert len(content["files"]) == 2
    for name in [*content["files"], ""]:
        assert ("force", str(path / name).rstrip("/")) in disk.events[:complete], name
    assert ("force", str(folder)) in disk.events[:complete]  # the name of the checkpoint's folder
    assert ("force", str(path)) in disk.events[complete:latest]  # the name complete.json
    assert ("force", str(folder)) in disk.events[latest:]
    assert (folder / "latest").read_text() == path.name


def test_a_checkpoint_s_files_are_forced_as_they_are_listed(saved, monkeypatch):
    """What another rank still writes when files are forced would be listed and not be on disk."""
    trainer, _ = saved
    with watched_disk() as disk:
        complete = pretrain_checkpoints._complete
        lists = []

        def watched(path, saved_run):
            lists.extend(os.path.join(path, name) for name in pretrain_checkpoints._sizes(path))
            assert all(disk.is_forced(name) for name in [*lists, path])
            complete(path, saved_run)

        monkeypatch.setattr(pretrain_checkpoints, "_complete", watched)
        save(trainer, 1)
    assert lists


def test_older_checkpoints_go_after_the_new_one_is_there_and_their_mark_goes_first(saved):
    trainer, folder = saved
    trainer.options.keep_last = 1
    save(trainer, 1)
    with watched_disk() as disk:
        save(trainer, 2)
    removed = [event for event in disk.events if event[0] == "remove"]
    assert removed[0] == ("remove", str(folder / "iter_0000001" / "complete.json"))
    assert disk.events.index(("force", str(folder)), disk.index("name", "latest")) < disk.events.index(removed[0])
    assert [name for name in os.listdir(folder) if name.startswith("iter_")] == ["iter_0000002"]


def test_what_another_number_of_ranks_has_left_is_gone_when_a_checkpoint_is_saved_again(saved):
    trainer, folder = saved
    path = folder / "iter_0000001"
    path.mkdir(parents=True)
    strange = "zero_pp_rank_7_mp_rank_00_optim_states.pt"
    (path / strange).write_bytes(b"x")
    (path / "complete.json").write_text("{}")
    save(trainer, 1)
    assert strange not in os.listdir(path) and strange not in json.loads((path / "complete.json").read_text())["files"]


@pytest.mark.parametrize("document, options", [([7], []), ([0, 5], ["--eod-mask-loss"])])
def test_fault_A18_a_split_without_targets_has_no_perplexity(tmp_path, document, options):
    documents = [*documents_of([40] * 4), *[document] * 200]
    prefix = write(tmp_path / "data", documents).prefix
    log = tmp_path / "log.jsonl"
    split = ("--split", "4,200,0", "--train-iters", 1, "--eval-interval", 1, "--json-log", log)
    status, output = run_trainer(prefix, *split, *options)
    assert status == 0
    line = r"^validation at iteration 1 \| loss nan \| perplexity nan \| target tokens 0 "
    assert re.search(line, output, re.MULTILINE)
    assert "have no target tokens" in output
    event = json.loads(log.read_text().splitlines()[-1])
    assert event["event"] == "valid" and event["loss"] is event["perplexity"] is None


def test_fault_C11_lines_have_the_time_the_seconds_of_a_step_and_those_that_are_left(prefix, tmp_path):
    log = tmp_path / "log.jsonl"
    _, output = run_trainer(prefix, "--save", tmp_path / "saved", "--log-interval", 2, "--json-log", log)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$"
    lines = re.findall(rf"^iteration .* \| (\S+) s/step \| ETA (\S+) \| {stamp}", output, re.MULTILINE)
    assert len(lines) == len(steps(output)) == 2
    assert lines[-1][1] == "0:00:00"
    assert re.search(rf"^saved \S+ in \S+ s \| {stamp}", output, re.MULTILINE)
    first, last = (json.loads(line) for line in log.read_text().splitlines())
    assert first["seconds_left"] == pytest.approx(2 * first["seconds_per_step"]) and last["seconds_left"] == 0
    assert re.match(stamp, first["time"])


def test_fault_C11_the_time_that_is_left_is_that_of_recent_steps(monkeypatch):
    clock = iter([0.0, 10.0, 10.0, 30.0, 30.0])
    monkeypatch.setattr(pretrain_gpt.time, "perf_counter", lambda: next(clock))
    options = parse_arguments(command_line("data", "--train-iters", 100))
    with alone():
        complete_environment()
        initialize_distributed(options)
        meter = pretrain_gpt.Meter(options, 1)
        for num_steps, iteration, seconds_per_step, seconds_left in ((2, 2, 5.0, 98 * 5.0), (10, 12, 2.0, 88 * 2.5)):
            for _ in range(num_steps):
                meter.add(pretrain_gpt.Work(100, 1))
            found = meter.read(iteration)
            assert (found["seconds_per_step"], found["seconds_left"]) == (seconds_per_step, seconds_left)
    assert pretrain_gpt.duration(93_784.4) == "1 day, 2:03:04"


def test_fault_C03_the_run_stops_before_anything_is_built(prefix, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(pretrain_gpt, "build_train_dataset", lambda *_: pytest.fail("too late"))
    for options, named in (
        (["--save", tmp_path / "file"], "--save .*file: not a folder"),
        (["--json-log", tmp_path / "file" / "log"], "--json-log .*log: Not a directory"),
        (["--tensorboard-dir", tmp_path / "file"], "--tensorboard-dir .*file: "),
    ):
        with pytest.raises(BFPError, match=named):
            run_trainer(prefix, *options)


def test_fault_C03_the_room_of_a_checkpoint_is_known_before_it_is_made(saved):
    trainer, folder = saved
    save(trainer, 1)
    least = pretrain_checkpoints.smallest_of(trainer.options, SmallTokenizer.vocab_size)
    written = sum(os.path.getsize(folder / "iter_0000001" / name) for name in os.listdir(folder / "iter_0000001"))
    assert 0.7 * written < least < written


def test_fault_C03_a_folder_without_room_stops_the_run_before_anything_is_built(prefix, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain_gpt, "build_train_dataset", lambda *_: pytest.fail("too late"))
    usage = namedtuple("usage", "total free")(10**12, 100_000)
    monkeypatch.setattr(save_folder.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(BFPError, match="has 0.0 GB free, a checkpoint takes at least"):
        run_trainer(prefix, "--save", tmp_path / "saved")


def test_inner_folders_of_a_checkpoint_are_forced_too(tmp_path):
    inner = tmp_path / "inner" / "most"
    inner.mkdir(parents=True)
    (inner / "file").write_bytes(b"x")
    with watched_disk() as disk:
        pretrain_checkpoints._sync(str(tmp_path))
    order = [path for _, path in disk.events]
    assert order == [str(inner / "file"), str(inner), str(inner.parent), str(tmp_path)]
