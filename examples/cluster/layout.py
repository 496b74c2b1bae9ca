"""How a global batch is divided over the GPUs of a cluster."""

from dataclasses import dataclass

from megatron_bfp.errors import OptionError

from .options import RunOptions


@dataclass(frozen=True)
class Layout:
    """Nodes and GPUs, and how many of the sequences of a step each GPU gets."""

    nodes: int
    gpus_per_node: int
    model_parallel: int
    """GPUs that work on the same samples together: tensor, pipeline and context parallelism."""
    micro_batch_size: int
    """Sequences per GPU and forward pass."""
    global_batch_size: int
    """Sequences per step, the same for any number of nodes."""
    seq_length: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise OptionError(f"{self.nodes} nodes of {self.gpus_per_node} GPUs: give at least one of each")
        if self.world_size % self.model_parallel:
            raise OptionError(
                f"{self.nodes} nodes of {self.gpus_per_node} GPUs: the model's size of {self.model_parallel} GPUs "
                f"(tensor_parallel, times pipeline and context parallelism) does not divide {self.world_size} GPUs"
            )
        if self.global_batch_size % (self.micro_batch_size * self.data_parallel):
            raise OptionError(
                f"{self.nodes} nodes of {self.gpus_per_node} GPUs: global_batch_size={self.global_batch_size} is not a "
                f"multiple of micro_batch_size={self.micro_batch_size} times {self.data_parallel} data-parallel ranks; "
                "take another number of nodes, or another micro_batch_size"
            )

    @classmethod
    def of(cls, options: RunOptions, nodes: int, gpus_per_node: int) -> "Layout":
        """The layout of a run.

        Raises:
            OptionError: the batch or the model cannot be divided over this cluster.
        """
        model_parallel = options.tensor_parallel * options.pipeline_parallel * options.context_parallel
        global_batch_size = options.global_batch_size
        if global_batch_size is None:
            global_batch_size = options.micro_batch_size * max(1, nodes * gpus_per_node // model_parallel)
        micro_batch_size, seq_length = options.micro_batch_size, options.seq_length
        return cls(nodes, gpus_per_node, model_parallel, micro_batch_size, global_batch_size, seq_length)

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Number of groups of GPUs that work on other samples."""
        return self.world_size // self.model_parallel

    @property
    def accumulation(self) -> int:
        """Micro-batches that a GPU runs per step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.global_batch_size * self.seq_length
