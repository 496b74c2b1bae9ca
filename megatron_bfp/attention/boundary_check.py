"""Whether document boundaries arrive where attention is computed, seen in the first training step. torch only.

Options cannot tell: a schedule, a graph or a wrapper may call a model without its ``packed_seq_params``, and training
goes on with attention across documents. So ``BoundaryCheck`` puts a hook on every module that mixes the positions of a
sequence. In the first step each hook records the boundaries it got. They must be those of the batches that were read,
in every layer, on every rank. ``agree`` compares the ranks' reports before anything is updated; afterwards the hooks
are gone and cost nothing.

Which modules mix positions is told by the names of their classes and base classes, so megatron-core and
Megatron-DeepSpeed need not be imported. A module that seems to mix positions and is not known is refused.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..errors import IntegrationError

TAKE_BOUNDARIES = {
    "DocumentAttention",
    "TEDotProductAttention",
    "DSAttention",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProductMixer",
    "MambaMixer",
    "MultiTokenPredictionLayer",
    "ParallelAttention",
}
"""Classes that mix positions and keep to the boundaries they get. ``ParallelAttention`` is Megatron-DeepSpeed's."""

LAYERS = {"TransformerLayer", "MambaLayer", "MLPLayer", "MultiTokenPredictionLayer", "ParallelTransformerLayer"}
"""Base classes of layers whose slots are known."""

SLOTS = ("self_attention", "core_attention", "mixer")
"""Names under which layers hold what mixes positions."""

CROSS_SLOTS = ("cross_attention", "inter_attention")
"""Names under which layers hold attention to another sequence, for which there are no boundaries."""

POSITION_WISE = re.compile(r"Identity|Linear|^Noop")
"""Classes that may stand in a slot and mix nothing, as in heterogeneous models."""

SEEMS_TO_MIX = re.compile(
    r"attention|attn|mamba|mixer|conv[123]d|delta_?(net|rule|product)|ssm|state_?space|lstm|^gru|rnn|recurren|retention"
    r"|hyena|rwkv|transformerencoder|transformerdecoder|tokenshift|engram",
    re.IGNORECASE,
)

THD_ONLY = TAKE_BOUNDARIES - {"DocumentAttention", "MultiTokenPredictionLayer", "ParallelAttention"}
"""Classes that look at boundaries only if rows are joined, ``qkv_format="thd"``."""


class Misfit(Exception):
    """Boundaries that no attention can be right with; the text says why."""


@dataclass(frozen=True)
class Report:
    """What one rank saw in the first step. Small, as every rank sends it to all."""

    faults: tuple[str, ...]
    """What is wrong, one line each; empty if nothing."""
    replica: int = 0
    """The data-parallel rank: ranks that share it train on the same batches."""
    stage: int = 0
    """The pipeline stage."""
    layers: dict[str, int] = field(default_factory=dict)
    """Kind of module, with its kernel -> modules that got the right boundaries."""
    positions: dict[str, int] = field(default_factory=dict)
    """What is true of positions -> attention layers; 0 for what an embedding adds."""
    seen: bytes = b""
    """Digest of the boundaries that attention got; empty without attention on this rank."""
    read: bytes = b""
    """Digest of the boundaries of the batches; empty if this rank reads none."""


def packed_seq_params_of(arguments: tuple, keywords: dict[str, Any]) -> Any:
    """megatron-core's ``PackedSeqParams`` among the arguments of a forward call, or None."""
    values = [keywords.get("packed_seq_params"), *arguments, *keywords.values()]
    return next((value for value in values if getattr(value, "cu_seqlens_q", None) is not None), None)


class BoundaryCheck:
    """Watch the modules of a model that mix positions, from now until ``remove``.

    Args:
        models: the modules of this rank, in any wrapper.
        row_length: positions of a row; None if rows are not joined.
        replica, stage: as ``Report``'s.
        boundaries_of: finds the boundaries among a call's arguments; None where there are none.

    Attributes:
        unknown: modules that would not keep to boundaries, or are not known; one line each.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        row_length: int | None = None,
        replica: int = 0,
        stage: int = 0,
        boundaries_of: Callable[[tuple, dict[str, Any]], Any] = packed_seq_params_of,
    ) -> None:
        self.row_length, self.replica, self.stage = row_length, replica, stage
        self.boundaries_of = boundaries_of
        self.mixers: dict[str, nn.Module] = {}
        self.unknown: list[str] = []
        self.faults: list[str] = []
        self.seen: dict[str, dict[bytes, None]] = {}  # of each module, in the order of micro-batches
        self.batches: dict[bytes, None] = {}  # a dict keeps the order, and one entry where layers are recomputed
        self.rotations: dict[str, str] = {}  # of attention layers
        self.restarts: set[bool] = set()  # whether positions that an embedding adds fell back inside a row
        self.rows_hold_documents = False  # a row was seen that holds more than one
        self.digests: dict[tuple, tuple] = {}  # keeps each object, so that no other can get its id
        self.handles: list[Any] = []
        models = list(models)
        for number, model in enumerate(models):
            self._watch(model, f"chunk {number}, " if len(models) > 1 else "")

    def _watch(self, model: nn.Module, prefix: str) -> None:
        mixers, unknown = mixers_of(model)
        self.unknown += [prefix + line for line in unknown]
        rotation = kind_of_rotation(model)
        for name, module in mixers.items():
            self.mixers[prefix + name] = module
            self._hook(module, self._record(prefix + name, module))
        for name, module in model.named_modules():
            if _is(module, {"Attention", "ParallelAttention"}):
                self._hook(module, self._record_rotation(prefix + name, module, rotation))
            elif getattr(module, "position_embeddings", None) is not None:
                self._hook(module, self._record_embedding())

    def _hook(self, module: nn.Module, hook: Callable) -> None:
        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _record(self, name: str, module: nn.Module) -> Callable:
        def record(_: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                return  # it is no training, or recomputation will call again
            boundaries = self.boundaries_of(arguments, keywords)
            if boundaries is None:
                self.faults.append(f"{name} ({kind_of(module)}) got no document boundaries")
                return
            try:
                self.seen.setdefault(name, {})[self._digest(boundaries)] = None
                _check_form(module, boundaries)
            except Misfit as error:
                self.faults.append(f"{name} ({kind_of(module)}) got boundaries that {error}")

        return record

    def _record_rotation(self, name: str, module: nn.Module, rotation: str) -> Callable:
        def record(_: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
            is_rotated, restart = rotates(module, keywords), is_joined(self.boundaries_of(arguments, keywords))
            self.rotations[name] = f"{rotation} {_course(restart)}" if is_rotated else NOT_ROTATED

        return record

    def _record_embedding(self) -> Callable:
        def record(_: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
            if arguments and isinstance(arguments[0], tuple):
                arguments = arguments[0]  # DeepSpeed's pipelines pass everything in one
            ids = keywords.get("position_ids", arguments[1] if len(arguments) > 1 else None)
            if isinstance(ids, Tensor) and ids.numel():
                self.restarts.add(_restart(ids, self.row_length))

        return record

    def _digest(self, boundaries: Any) -> bytes:
        tensor = getattr(boundaries, "cu_seqlens_q", boundaries)
        key = (id(boundaries), id(tensor), tensor._version)
        if key not in self.digests:
            joined = joined_boundaries(boundaries)
            self._note_documents(tensor, joined)
            self.digests[key] = (boundaries, tensor, digest(joined))
        return self.digests[key][2]

    def _note_documents(self, cu_seqlens: Tensor, joined: Tensor) -> None:
        rows = len(cu_seqlens) if cu_seqlens.dim() == 2 else int(joined[-1]) // (self.row_length or int(joined[-1]))
        self.rows_hold_documents |= len(joined) - 1 > rows

    def _learned_positions(self) -> list[str]:
        if not self.restarts:
            return []
        if not any(self.restarts) and not self.rows_hold_documents:
            return ["learned positions, in rows of one document each"]
        return [f"learned positions {_course(any(self.restarts))}"]

    def read(self, cu_seqlens: Tensor) -> None:
        """Note the boundaries of a micro-batch that this rank read.

        Args:
            cu_seqlens: int [b, any], in each row from 0 to the row's positions, where entries may repeat.
        """
        if self.handles:
            joined = join(cu_seqlens)
            self._note_documents(cu_seqlens, joined)
            self.batches[digest(joined)] = None

    def report(self) -> Report:
        """What was seen so far."""
        faults = list(dict.fromkeys([*self.unknown, *self.faults]))
        faults += [
            f"{name} ({kind_of(module)}) was not called as a module, so its boundaries could not be checked"
            for name, module in self.mixers.items()
            if name not in self.seen and not any(line.startswith(name + " ") for line in faults)
        ]
        first = next(iter(self.seen.values()), {})
        expected = self.batches or first
        for name, seen in self.seen.items():
            if list(seen) != list(expected) and not faults:
                whose = "the batches" if self.batches else "other layers"
                faults.append(f"{name} ({kind_of(self.mixers[name])}) got other boundaries than those of {whose}")
        return Report(
            tuple(faults),
            self.replica,
            self.stage,
            dict(Counter(kind_of(self.mixers[name]) for name in self.seen)),
            dict(Counter(self.rotations.values())) | dict.fromkeys(self._learned_positions(), 0),
            digest_of_all(first) if first else b"",
            digest_of_all(self.batches) if self.batches else b"",
        )

    def refuse_unknown(self) -> None:
        """Stop if a module of this or another rank is not known to keep to boundaries. All ranks must call it, before
        one of them would wait for another that stops.

        Raises:
            IntegrationError: there is one; the same on all ranks.
        """
        raise_first_fault(gather_reports(Report(tuple(self.unknown))))

    def conclude(self) -> str:
        """Take the hooks off, and say in words what all ranks saw. All ranks must call it, before an update.

        Raises:
            IntegrationError: as ``agree``.
        """
        report = self.report()
        self.remove()
        return agree(gather_reports(report))

    def remove(self) -> None:
        """Take the hooks off and forget what they saw."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.digests.clear()


def mixers_of(model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """The modules of a model that mix positions and take boundaries, by name; and a line for each that is not known."""
    mixers: dict[str, nn.Module] = {}
    unknown: list[str] = []
    inside = ()  # names of modules whose insides are their own affair
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        slot = name.rpartition(".")[2]
        if slot not in CROSS_SLOTS and _is(module, TAKE_BOUNDARIES):
            mixers[name] = module
            if not _is(module, {"MultiTokenPredictionLayer"}):
                inside += (name + ".",)
        elif _mixes_unknown(module, slot) or _is_unknown_layer(name, module):
            kind = f"{name or 'the model'} ({type(module).__name__})"
            unknown.append(f"{kind} is not known to keep to document boundaries")
            inside += (name + ".",) if name else ()
    return mixers, unknown


def _mixes_unknown(module: nn.Module, slot: str) -> bool:
    name = type(module).__name__
    if slot in SLOTS + CROSS_SLOTS and POSITION_WISE.search(name):
        return False
    if slot not in CROSS_SLOTS and _is(module, {"Attention"}) and hasattr(module, "core_attention"):
        return False  # core_attention, which comes next, does the mixing
    if slot in SLOTS + CROSS_SLOTS or isinstance(module, nn.RNNBase | nn.modules.conv._ConvNd):
        return True
    return bool(SEEMS_TO_MIX.search(name)) and not _is(module, LAYERS)


def _is_unknown_layer(name: str, module: nn.Module) -> bool:
    """Whether it is an element of a ``layers`` list, and neither of a known class nor made of known attention."""
    owner, _, number = name.rpartition(".")
    if not number.isdigit() or owner.rpartition(".")[2] != "layers" or _is(module, LAYERS):
        return False
    if type(module).__module__.startswith("torch.nn") or POSITION_WISE.search(type(module).__name__):
        return False
    return not any(_is(child, TAKE_BOUNDARIES) for child in module.modules())


def _is(module: nn.Module, names: set[str]) -> bool:
    """Whether one of the module's classes has one of these names."""
    return any(base.__name__ in names for base in type(module).__mro__)


def kind_of(module: nn.Module) -> str:
    """A module's class, with its kernel where it has chosen one."""
    kernel = getattr(module, "kernel_name", None)
    if _is(module, {"ParallelAttention"}):
        uses_flash = getattr(module, "use_flash_attn", False)
        kernel = "flash-attn's varlen kernel" if uses_flash else "torch's softmax with a mask"
    return type(module).__name__ + (f" by {kernel}" if kernel else "")


def joined_boundaries(boundaries: Any) -> Tensor:
    """int64 [segments + 1] on the host: 0 < b1 < ... < t, the boundaries of a micro-batch with its rows joined.

    Args:
        boundaries: ``PackedSeqParams``, or int [b, any] as ``BoundaryCheck.read`` takes it.

    Raises:
        Misfit: they are not boundaries.
    """
    if isinstance(boundaries, Tensor):
        return join(boundaries)
    queries = join(boundaries.cu_seqlens_q)
    keys = getattr(boundaries, "cu_seqlens_kv", None)
    if keys is not None and keys is not boundaries.cu_seqlens_q and not torch.equal(join(keys), queries):
        raise Misfit("differ between queries and keys")
    longest = getattr(boundaries, "max_seqlen_q", None)
    if longest is not None and int(longest) < int(queries.diff().max()):
        raise Misfit(f"have max_seqlen {int(longest)}, where a document has {int(queries.diff().max())} positions")
    return queries


def join(cu_seqlens: Tensor) -> Tensor:
    """As ``joined_boundaries``, of int [any] or int [b, any]."""
    rows = cu_seqlens.detach().to("cpu", torch.int64)
    rows = rows if rows.dim() == 2 else rows[None]
    if rows.dim() != 2 or rows.shape[1] < 2 or (rows[:, 0] != 0).any() or (rows.diff(dim=1) < 0).any():
        raise Misfit("do not rise from 0")
    if (rows[:, -1] < 1).any():
        raise Misfit("hold no position")
    lengths = rows[:, -1]
    return torch.unique_consecutive(rows + (lengths.cumsum(0) - lengths)[:, None])


def digest(joined: Tensor) -> bytes:
    """A short name for boundaries."""
    return hashlib.sha256(joined.numpy().tobytes()).digest()


def digest_of_all(digests: Iterable[bytes]) -> bytes:
    """A short name for the boundaries of several micro-batches, in their order."""
    return hashlib.sha256(b"".join(digests)).digest()


def _check_form(module: nn.Module, boundaries: Any) -> None:
    """
    Raises:
        Misfit: the module would not look at boundaries in this form.
    """
    form = getattr(boundaries, "qkv_format", None)
    if _is(module, THD_ONLY) and form != "thd":
        raise Misfit(f"have the form {form}, which it ignores")
    if _is(module, {"MambaMixer"}) and hasattr(boundaries, "seq_idx") and boundaries.seq_idx is None:
        raise Misfit("have no seq_idx, without which its state crosses documents")


NOT_ROTATED = "no rotary positions"


def kind_of_rotation(model: nn.Module) -> str:
    """What a model's rotary positions are called."""
    names = " ".join(type(module).__name__ for module in model.modules())
    if "YarnRotaryEmbedding" in names:
        return "YaRN rotary positions"
    return "multimodal rotary positions" if "MultimodalRotaryEmbedding" in names else "rotary positions"


def rotates(module: nn.Module, keywords: dict[str, Any]) -> bool:
    """Whether an attention layer turns queries and keys by their positions.

    Args:
        module: megatron-core's ``Attention`` or Megatron-DeepSpeed's ``ParallelAttention``.
        keywords: those of its forward call.
    """
    without = getattr(getattr(module, "config", None), "no_rope_freq", None)
    number = getattr(module, "layer_number", 0)
    if isinstance(without, list | tuple) and 0 < number <= len(without) and without[number - 1]:
        return False
    own = getattr(module, "rotary_pos_emb", None)  # of multi-latent attention
    return own is not None or keywords.get("rotary_pos_emb") is not None


def is_joined(boundaries: Any) -> bool:
    """Whether rows are joined in the form in which megatron-core rotates each document from position 0."""
    return getattr(boundaries, "qkv_format", None) == "thd"


def _course(restart: bool) -> str:
    return "restart in each document" if restart else "run on through the sequence"


def _restart(ids: Tensor, row_length: int | None) -> bool:
    """Whether position ids fall back inside a row."""
    flat = ids.reshape(-1, ids.shape[-1])
    falls = torch.nonzero(flat.diff(dim=-1) < 1)[:, -1] + 1
    return bool((falls % (row_length or flat.shape[-1] + 1) != 0).any())


def gather_reports(report: Report) -> list[Report]:
    """The reports of all ranks, in their order. All ranks must call it."""
    if not distributed.is_initialized():
        return [report]
    reports: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(reports, report)
    return reports


def agree(reports: list[Report]) -> str:
    """What all ranks saw together, in words.

    Args:
        reports: of all ranks, in their order.

    Raises:
        IntegrationError: boundaries did not reach attention, or not the right ones. The same on all ranks.
    """
    raise_first_fault(reports)
    read = {report.replica: report.read for report in reports if report.read}
    for rank, report in enumerate(reports):
        if report.seen and report.seen != read.get(report.replica, report.seen):
            raise stopped("attention got other boundaries than those of the batches", rank)
    layers, positions = Counter(), Counter()
    for report in {report.stage: report for report in reports}.values():
        layers.update(report.layers)
        positions.update(report.positions)  # keeps those that are counted 0 times
    if not layers:
        raise IntegrationError("no attention layer was called in the first step; nothing is known of its boundaries")
    return f"{_in_words(layers)}; {describe_positions(positions)}"


def raise_first_fault(reports: list[Report]) -> None:
    """
    Raises:
        IntegrationError: a rank has a fault.
    """
    for rank, report in enumerate(reports):
        if report.faults:
            more = sum(len(other.faults) for other in reports) - 1
            raise stopped(report.faults[0] + (f" (and {more:,} more like this)" if more else ""), rank)


def stopped(fault: str, rank: int) -> IntegrationError:
    """The error that ends a run."""
    return IntegrationError(
        f"rank {rank}: {fault}. Attention would cross documents, so training stops before the first update; leave out "
        "the option, layer spec or wrapper that calls the model without them"
    )


def _in_words(layers: Counter) -> str:
    return ", ".join(f"{count:,} x {kind}" for kind, count in sorted(layers.items()))


def describe_positions(positions: Counter) -> str:
    """What is true of positions in the whole model."""
    rotary = {text: count for text, count in positions.items() if count and text != NOT_ROTATED}
    learned = sorted(text for text in positions if text.startswith("learned"))
    without = positions[NOT_ROTATED]
    texts = [
        text + (f" ({count:,} of {sum(rotary.values()) + without:,} layers)" if len(rotary) > 1 or without else "")
        for text, count in sorted(rotary.items())
    ]
    if not rotary and not learned:
        return "no positions" if without else "positions unknown"
    return ", ".join(texts + learned)


class WatchedIterator:
    """An iterator of micro-batches that notes the boundaries of each in a check."""

    def __init__(self, batches: Any, check: BoundaryCheck) -> None:
        self._batches, self._check = batches, check

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if isinstance(batch, dict) and isinstance(batch.get("cu_seqlens"), Tensor):
            self._check.read(batch["cu_seqlens"])
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def before_first_update(optimizer: Any, act: Callable[[], None]) -> None:
    """Call ``act`` once, at the beginning of the optimizer's next ``step``; if it raises, nothing is updated.

    Args:
        optimizer: whose ``step`` all ranks call at the same point, as DeepSpeed's engine does.
    """
    step = optimizer.step

    def step_after_act(*arguments: Any, **keywords: Any) -> Any:
        optimizer.step = step
        act()
        return step(*arguments, **keywords)

    optimizer.step = step_after_act
