"""Layers of Megatron-LM for a machine without a GPU: what is done to modules right after their import."""

import sys
from importlib.machinery import PathFinder


def take_sequence_parallelism(module):
    """Let torch's norms run with sequence parallelism. Their gradients, each of a part of the sequence, are added up
    over the tensor-parallel group where a weight says that it needs it, as in the norms for GPUs."""
    make = module.WrappedTorchNorm.__new__

    def make_for_parts(cls, config, *arguments, **keywords):
        is_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = make(cls, config, *arguments, **keywords)
        finally:
            config.sequence_parallel = is_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = is_parallel
        return norm

    module.WrappedTorchNorm.__new__ = make_for_parts


def stand_in_for_transformer_engine(module):
    """Layers for ``--transformer-impl transformer_engine``: a norm and a linear layer in one, and an attention that
    takes joined rows alone, as Transformer Engine has them, but made of Megatron-LM's local ones."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from torch import nn

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):
        def __init__(self, input_size, output_size, *, config, **keywords):
            super().__init__(input_size, output_size, config=config, **keywords)
            self.layer_norm = WrappedTorchNorm(config, input_size, eps=config.layernorm_epsilon)

        def forward(self, hidden_states, *arguments, **keywords):
            return super().forward(self.layer_norm(hidden_states), *arguments, **keywords)

    class TEDotProductAttention(nn.Module):
        def __init__(self, *arguments, **keywords):
            from megatron_bfp.megatron_core.attention import DocumentAttention

            super().__init__()
            self.of_joined_rows = DocumentAttention(*arguments, **keywords)

        def forward(self, *arguments, packed_seq_params=None, **keywords):
            assert packed_seq_params.qkv_format == "thd"
            return self.of_joined_rows(*arguments, packed_seq_params=packed_seq_params, **keywords)

    class TESpecProvider(LocalSpecProvider):
        def fuse_layernorm_and_linear(self):
            return True

        def column_parallel_layer_norm_linear(self):
            return TELayerNormColumnParallelLinear

        def core_attention(self):
            return TEDotProductAttention

    module.TESpecProvider = TESpecProvider


def ask_for_nothing_of_nccl(module):
    """Let groups be made without NCCL's settings, which a build of torch for the CPU lacks."""
    module.get_nccl_options = lambda *_: None


def without_layers_for_inference(module):
    """Let multi-token prediction run, which asks for layers of Transformer Engine that do not exist without it."""
    module.is_inference_column_parallel_linear = lambda layer: False


def without_kernels_for_gpus(module):
    """Leave the kernel that runs on a CPU; others would be chosen for bf16."""
    for name in module.LIBRARIES:
        del module.KERNELS[name]


CHANGES = {
    "megatron.core.parallel_state": ask_for_nothing_of_nccl,
    "megatron_bfp.attention.kernels": without_kernels_for_gpus,
    "megatron.core.transformer.torch_norm": take_sequence_parallelism,
    "megatron.core.transformer.multi_token_prediction": without_layers_for_inference,
    "megatron.core.models.gpt.gpt_layer_specs": stand_in_for_transformer_engine,
}
"""Module -> what is done to it."""


class AfterImport:
    """A finder of these modules alone."""

    def find_spec(self, name, path, target=None):
        spec = PathFinder.find_spec(name, path, target) if name in CHANGES else None
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module):
                execute(module)
                CHANGES[name](module)

            spec.loader.exec_module = execute_and_change
        return spec


def install():
    """Change them in this process."""
    sys.meta_path.insert(0, AfterImport())
