"""The example trainer's parts as its ``main`` makes them, for tests of single steps and checkpoints."""

import dataclasses

import torch
from trainer.arguments import parse_arguments
from trainer.data import GlobalOrderSampler, build_train_dataset, micro_batches
from trainer.engine import build_engine, deepspeed_config, initialize_distributed, with_batch_sizes
from trainer.process import complete_environment
from trainer.training import learning_rate, train_step

from helpers.trainer_in_process import SmallTokenizer, command_line

STEPS = 4
HYPERPARAMETERS = ("--adam-eps", 0.1, "--weight-decay", 0.5, "--clip-grad", 2.0, "--lr", 0.05, "--lr-warmup-iters", 2)
HYPERPARAMETERS += ("--split", "1,0,0", "--adam-beta1", 0.8, "--adam-beta2", 0.9)
HYPERPARAMETERS += ("--init-method-std", 0.1, "--min-lr", 0.01)


class Trainer:
    """A run of ``STEPS`` steps on one rank, whose steps are called one by one."""

    def __init__(self, prefix, *options):
        config = parse_arguments(command_line(prefix, "--eod-mask-loss", *HYPERPARAMETERS, *options))
        complete_environment()
        initialize_distributed(config)
        config, self.accumulation = with_batch_sizes(config)
        self.settings = deepspeed_config(config, self.accumulation)
        self.config = dataclasses.replace(config, zero_stage=self.settings["zero_optimization"]["stage"])
        self.dataset = build_train_dataset(self.config, SmallTokenizer())
        self.engine = build_engine(self.config, SmallTokenizer.vocab_size, self.settings)

    def batches(self, micro_batch_size=None):
        """Micro-batches of the run's samples, as large as its own or as given."""
        size = self.config.global_batch_size
        micro_batch_size = micro_batch_size or self.config.micro_batch_size
        sampler = GlobalOrderSampler(0, STEPS * size, micro_batch_size, size, 0, 1)
        return micro_batches(self.dataset, sampler, 0, torch.device("cpu"))

    def step(self, batches, iteration):
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, iteration)
        return train_step(self.engine, [next(batches) for _ in range(self.accumulation)])

    def weights(self):
        return full_weights(self.engine.module)


def full_weights(model):
    """Weights by name, also where ZeRO 3 has taken them away."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
