"""Estimate the memory of a GPU that trains a recipe with ``pretrain_gpt.py``.

    python examples/estimate_memory.py examples/cluster/recipes/llama_7b_code_2k.sh --nodes 32 --gpus-per-node 8

Options of the trainer may follow the recipe, as in a launcher: ``--micro-batch-size 4``.

Weights, gradients and optimizer are those of DeepSpeed's ZeRO stages, in bytes per parameter. ZeRO 1 with bf16 holds
gradients twice: in bf16 as autograd leaves them, and in fp32 where they are summed. Activations are what autograd keeps
of the layers for the backward pass, counted operation by operation in ``kept_per_token``, and the logits. The sum is
the memory at the end of a step's last forward pass. CUDA, NCCL and a fragmented allocator are not included: leave about
6 GB of a GPU free.
"""

from dataclasses import dataclass

from megatron_bfp.commands.shared import Parser
from megatron_bfp.console import run
from megatron_bfp.errors import OptionError

from .layout import Layout
from .options import RunOptions
from .recipe import Recipe, read_recipe

GB, MB = 10**9, 10**6
REDUCE_BUCKET = 5 * 10**8
"""Elements of the buffer in which DeepSpeed collects gradients to reduce them (its ``reduce_bucket_size``)."""
LIVE_PARAMETERS = 10**9
"""Gathered parameters that ZeRO 3 holds at a time (its ``stage3_max_live_parameters``)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def __str__(self) -> str:
        unit, name = (GB, "GB") if self.total >= GB else (MB, "MB")
        parts = ", ".join(f"{part} {value / unit:.1f}" for part, value in vars(self).items())
        return f"{self.total / unit:.1f} {name}: {parts}"


@dataclass(frozen=True)
class Model:
    """What is estimated: a run, with what its options do not say."""

    options: RunOptions
    vocab_size: int
    """Of the tokenizer."""
    on_cpu: bool

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding, as the trainer pads it."""
        multiple = self.options.vocab_multiple * self.options.tensor_parallel
        return -(-self.vocab_size // multiple) * multiple

    @property
    def bytes_of_a_number(self) -> int:
        """Of a weight, and of what a layer computes."""
        return 2 if self.options.half_precision else 4


def num_parameters(model: Model) -> int:
    """Parameters of one tensor-parallel rank."""
    options = model.options
    layers, hidden, ffn = options.num_layers, options.hidden_size, options.ffn_hidden_size
    keys_and_values = 2 * hidden * hidden * options.num_query_groups // options.num_attention_heads
    matrices = layers * (2 * hidden * hidden + keys_and_values + 3 * hidden * ffn) + 2 * model.padded_vocab * hidden
    norms = (2 * layers + 1) * hidden
    return matrices // options.tensor_parallel + norms


def kept_per_token(model: Model) -> int:
    """Elements that a layer keeps for the backward pass, per token of a rank, without recomputation.

    Whole on each tensor-parallel rank: the inputs of both norms, and of what follows each norm. Split between the
    ranks: query, key and value as the kernel takes them, its result, and that result again, reordered for the
    projection; the MLP's first product, its two halves (one after SiLU), and their product. A micro-batch of one row is
    not reordered, but its value is a view that keeps the joint product of query, key and value; context parallelism
    exchanges them, and keeps none. On the CPU, torch's norms are several operations, which keep their result before its
    weights, and the kernel runs once per document.
    """
    options = model.options
    one_row = options.micro_batch_size == 1 and options.context_parallel == 1
    whole = 6 * options.hidden_size if model.on_cpu else 4 * options.hidden_size
    in_attention = (7 if model.on_cpu else 6) if one_row else 5
    split = in_attention * options.hidden_size + 5 * options.ffn_hidden_size + _gathered_per_token(options)
    return whole + split // options.tensor_parallel


def _gathered_per_token(options: RunOptions) -> int:
    """Keys and values of other ranks' positions that a layer keeps, in elements per token of a rank, over all
    tensor-parallel ranks. Those of whole rows, which are needed if each is one document; fewer otherwise.

    None where context parallelism exchanges heads. In N ranks' zigzag a rank's two pieces need 2 N + 1 of a row's 2 N
    pieces of keys together, and 2 are its own.
    """
    ranks = options.context_parallel
    can_exchange = options.num_attention_heads // options.tensor_parallel % ranks == 0
    if ranks == 1 or can_exchange and not options.gathers_keys:
        return 0
    width = options.hidden_size * options.num_query_groups // options.num_attention_heads
    return (2 * ranks - 1) * width


def activations(model: Model) -> int:
    """Bytes that a micro-batch keeps on a rank, including its logits."""
    options, width = model.options, model.bytes_of_a_number
    tokens = options.micro_batch_size * options.seq_length // options.context_parallel
    if options.full_recomputation:  # the layers' inputs, and one layer at a time
        in_layers = options.num_layers * options.hidden_size + kept_per_token(model)
    else:
        in_layers = options.num_layers * kept_per_token(model)
    # bf16 logits, the same in fp32 where the softmax is computed in place, and their gradient; in fp32 all in one place
    logit_bytes = model.padded_vocab // options.tensor_parallel * (8 if width == 2 else 4)
    return tokens * ((in_layers + 2 * options.hidden_size) * width + logit_bytes)


def estimate(model: Model, layout: Layout) -> Memory:
    """The memory of each GPU of a layout.

    Raises:
        OptionError: there is no estimate for this kind of parallelism.
    """
    options = model.options
    if options.pipeline_parallel > 1 or options.has_experts:
        raise OptionError("not estimated with pipeline parallelism, or with experts")
    parameters, stage = num_parameters(model), options.zero_stage
    ranks = layout.data_parallel * options.context_parallel  # they hold the same weights
    width = model.bytes_of_a_number
    share = -(-parameters // ranks)
    bucket = min(REDUCE_BUCKET, parameters) if model.on_cpu else REDUCE_BUCKET
    weights, gradients = width * parameters, width * parameters
    if stage == 1:
        gradients += 4 * parameters if options.half_precision else 4 * bucket
    if stage >= 2:
        gradients = width * (share + bucket)
    if stage == 3:
        weights = width * (share + min(LIVE_PARAMETERS, parameters))
    states = 8 if stage == 0 and not options.half_precision else 12  # Adam's two, and the weights in fp32
    return Memory(weights, gradients, states * (share if stage else parameters), activations(model))


def model_of(recipe: Recipe) -> Model:
    """What a recipe trains."""
    return Model(recipe.options, recipe.vocab_size, recipe.device == "cpu")


def main() -> None:
    """Print the estimate.

    Raises:
        BFPError: the recipe cannot be used.
    """
    parser = Parser(
        prog="estimate_memory",
        usage="estimate_memory [--nodes N] [--gpus-per-node N] RECIPE [OPTIONS]",
        description=__doc__.partition("\n\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nodes", type=int, default=32, metavar="N", help="nodes of the cluster (default: %(default)s)"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of each (default: %(default)s)")
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a file of examples/cluster/recipes, or your own; options of the trainer may follow",
    )
    options, words = parser.parse_known_args()
    recipe = read_recipe(options.recipe, words)
    print(estimate(model_of(recipe), Layout.of(recipe.options, options.nodes, options.gpus_per_node)))


def console() -> int:
    """Run the command; returns its exit status."""
    return run(main, "estimate_memory")
