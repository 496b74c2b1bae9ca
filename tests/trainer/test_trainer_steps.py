"""The trainer's steps against an independent loop: gradients, clipping, AdamW and its decay, weight for weight.

The loop is plain torch: the cross-entropy of the model's logits at the targets, their mean, one backward pass for the
whole global batch, ``clip_grad_norm_`` and an AdamW that does not decay norms and biases. AdamW forgets how large its
gradients are, but for its epsilon, which is large here for that reason.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from helpers.trainer_in_process import SmallTokenizer, alone, command_line
from helpers.trainer_parts import STEPS, Trainer, full_weights
from torch.nn.functional import cross_entropy
from trainer.arguments import parse_arguments
from trainer.model import build_model
from trainer.training import learning_rate

from megatron_bfp.megatron_core.attention import document_boundaries


class PlainLoop:
    """The independent loop, from the same weights."""

    def __init__(self, trainer, scale=1.0, decayed=()):
        self.config, self.scale = trainer.config, scale
        self.model = build_model(self.config, SmallTokenizer.vocab_size).float()
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
        batches, whole = trainer.batches(), trainer.batches(trainer.config.global_batch_size)
        largest = [0.0, 0.0, 0.0]
        for iteration in range(STEPS):
            result, batch = trainer.step(batches, iteration), next(whole)
            loss, norm, num_targets = loop.step(batch, RATES[iteration])
            # packed sequences differ in targets, or a mean of means would do
            assert result.num_targets == num_targets < 0.9 * batch["tokens"].numel()
            assert (norm > 2.0) == (iteration < 2)  # clipped in some steps
            weights, expected = trainer.weights(), full_weights(loop.model)
            far = max((weights[name] - expected[name]).abs().max().item() for name in expected)
            new = (abs(result.loss / loss - 1), abs(result.grad_norm / norm - 1), far)
            largest = [max(pair) for pair in zip(largest, new, strict=True)]
    return largest


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
        assert trainer.settings["gradient_clipping"] == 0
        before = trainer.weights()
        trainer.step(trainer.batches(), 0)
        moved = max((after - before[name]).abs().max().item() for name, after in trainer.weights().items())
    assert moved > 0


def test_the_seed_decides_the_weights(prefix):
    weights = []
    for seed in (1, 1, 2):
        with alone():
            weights.append(Trainer(prefix, "--seed", seed).weights())
    first, same, other = weights
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def summed_gradients(trainer, dtype):
    """Gradients of a global batch, added up over its micro-batches in a type, by name. For a bf16 model, float32."""
    model = build_model(trainer.config, SmallTokenizer.vocab_size).bfloat16()
    with torch.no_grad():
        for name, weight in trainer.weights().items():
            model.get_parameter(name).copy_(weight)
    batches = trainer.batches()
    batches = [next(batches) for _ in range(trainer.accumulation)]
    num_targets = sum(batch["loss_mask"].sum() for batch in batches)
    gradients = {name: torch.zeros_like(weight, dtype=dtype) for name, weight in model.named_parameters()}
    for batch in batches:
        boundaries = document_boundaries(batch["cu_seqlens"], "cpu")
        keywords = {"labels": batch["labels"], "packed_seq_params": boundaries}
        losses = model(batch["tokens"], batch["position_ids"], None, **keywords)
        ((losses.float() * batch["loss_mask"]).sum() / num_targets).backward()
        for name, parameter in model.named_parameters():
            gradients[name] += parameter.grad
            parameter.grad = None
    return {name: gradient.float() for name, gradient in gradients.items()}


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


def config_of(text):
    return parse_arguments(command_line("data", "--train-iters", 100, *text.split()))


def test_the_learning_rate_warms_up_and_decays_along_a_cosine():
    config = config_of("--lr 1.0 --min-lr 0.1 --lr-warmup-iters 10")
    assert [learning_rate(config, i) for i in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert learning_rate(config, 55) == pytest.approx(0.55)
    assert learning_rate(config, 100) == pytest.approx(0.1)
    rates = [learning_rate(config, i) for i in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(config_of("--lr 1.0 --lr-decay-style constant"), 99) == 1.0
    assert learning_rate(config_of("--lr 1.0 --lr-decay-iters 50"), 99) == 0.0
