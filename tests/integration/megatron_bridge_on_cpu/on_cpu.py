"""Import this first: it lets Megatron-Bridge run where there is neither a GPU nor Transformer Engine."""

import os
import sys

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "megatron_lm_on_cpu"))

import cuda_on_cpu
import no_transformer_engine
import torch

no_transformer_engine.install()
import megatron.bridge  # noqa: F401  # looks for a GPU itself while it is imported
import megatron.core
from megatron.core.datasets import utils

utils.compile_helpers = lambda: None  # its wheel has them compiled, and no Makefile
cuda_on_cpu.install()
torch.cuda.random.get_rng_state = lambda *_, **__: torch.cuda.get_rng_state()  # weights are drawn "on the GPU"

VERSIONS = {"megatron-bridge": megatron.bridge.__version__, "megatron-core": megatron.core.__version__}
