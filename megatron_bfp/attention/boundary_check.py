"""Whether document boundaries arrive where attention is computed, seen in the first training step. torch only.

Options cannot tell: a schedule, a graph or a wrapper may call a model without its ``packed_seq_params``, and training
continues with attention across documents. So ``BoundaryCheck`` puts a hook on every module that mixes the positions of
a sequence. In the first step each hook records the boundaries it got. They must be those of the batches that were read,
in every layer, on every rank. ``first_step_report.agree`` compares the ranks' reports before anything is updated;
afterwards the hooks are gone and cost nothing.
"""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .boundaries import InvalidBoundaries, join_rows
from .first_step_report import Report, agree, gather_reports, raise_first_fault
from .mixers import JOINED_ROWS_ONLY, has_class, kind_of, mixers_of
from .positions import PositionsSeen, kind_of_rotation, rotates
from .rotations import WatchedRotations


def packed_seq_params_of(arguments: tuple, keywords: dict[str, Any]) -> Any:
    """megatron-core's ``PackedSeqParams`` among the arguments of a forward call, or None."""
    values = [keywords.get("packed_seq_params"), *arguments, *keywords.values()]
    return next((value for value in values if getattr(value, "cu_seqlens_q", None) is not None), None)


def note_boundaries(module: nn.Module, boundaries: Any) -> None:
    """Let a check see the boundaries of a module whose parts are called in its place.

    Args:
        boundaries: as the module would get them by the keyword ``packed_seq_params``.
    """
    for hook in module._forward_pre_hooks.values():
        if getattr(hook, "notes_boundaries", False):
            hook(module, (), {"packed_seq_params": boundaries})


class BoundaryCheck:
    """Watch the modules of a model that mix positions, from now until ``remove``.

    Args:
        models: the modules of this rank, in any wrapper.
        row_length: positions of a row; None if rows are not joined.
        replica, stage: as ``Report``'s.
        boundaries_of: gets the arguments and keywords of a forward call; returns the boundaries among them, as
            ``joined_boundaries`` takes them, or None.
        context_ranks, context_rank: into how many context-parallel ranks rows are split, and which this is.

    Attributes:
        unknown: modules that would not keep to boundaries, or are not known; one line each.
        faults: what went wrong so far; one line each.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        row_length: int | None = None,
        replica: int = 0,
        stage: int = 0,
        boundaries_of: Callable[[tuple, dict[str, Any]], Any] = packed_seq_params_of,
        context_ranks: int = 1,
        context_rank: int = 0,
    ) -> None:
        self.row_length, self.replica, self.stage = row_length, replica, stage
        self.boundaries_of = boundaries_of
        self.mixers: dict[str, nn.Module] = {}
        self.unknown: list[str] = []
        self.faults: list[str] = []
        self.seen: dict[str, dict[bytes, None]] = {}  # of each module, in the order of micro-batches
        self.batches: dict[bytes, None] = {}  # a dict keeps the order, and one entry where layers are recomputed
        self.positions = PositionsSeen(row_length, context_ranks, context_rank)
        self.rotations = WatchedRotations(self.positions.note_rotation)
        self.rows_hold_documents = False  # a row was seen that holds more than one
        self.known: dict[tuple, tuple] = {}  # keeps each object, so that no other can get its id
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
            if has_class(module, {"Attention", "ParallelAttention"}):
                self._hook(module, self._record_rotation(prefix + name, module, rotation))
                self.rotations.watch(module)
            elif getattr(module, "position_embeddings", None) is not None:
                self._hook(module, self._record_embedding())

    def _hook(self, module: nn.Module, hook: Callable) -> None:
        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _record(self, name: str, module: nn.Module) -> Callable:
        def record(_: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                return  # it is not training, or recomputation will call again
            boundaries = self.boundaries_of(arguments, keywords)
            if boundaries is None:
                self.faults.append(f"{name} ({kind_of(module)}) got no document boundaries")
                return
            try:
                self.seen.setdefault(name, {})[self._joined(boundaries)[1]] = None
                _check_form(module, boundaries)
            except InvalidBoundaries as error:
                self.faults.append(f"{name} ({kind_of(module)}) got boundaries that {error.reason}")

        record.notes_boundaries = True  # type: ignore[attr-defined]
        return record

    def _record_rotation(self, name: str, module: nn.Module, rotation: str) -> Callable:
        def record(_: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
            boundaries, joined = self.boundaries_of(arguments, keywords), None
            if boundaries is not None and torch.is_grad_enabled():
                with contextlib.suppress(InvalidBoundaries):  # a fault of the core attention, which gets them next
                    joined = self._joined(boundaries)[0]
            self.positions.enter(name, rotation if rotates(module, keywords) else None, joined)

        return record

    def _record_embedding(self) -> Callable:
        def record(_: nn.Module, arguments: tuple, keywords: dict[str, Any]) -> None:
            if arguments and isinstance(arguments[0], tuple):
                arguments = arguments[0]  # DeepSpeed's pipelines pass everything in one
            ids = keywords.get("position_ids", arguments[1] if len(arguments) > 1 else None)
            if isinstance(ids, Tensor) and ids.numel() and torch.is_grad_enabled():
                self.positions.note_embedding(ids)

        return record

    def _joined(self, boundaries: Any) -> tuple[Tensor, bytes]:
        """Boundaries as ``joined_boundaries`` gives them, and their digest."""
        tensor = getattr(boundaries, "cu_seqlens_q", boundaries)
        key = (id(boundaries), id(tensor), tensor._version)
        if key not in self.known:
            joined = joined_boundaries(boundaries)
            self._note_documents(tensor, joined)
            self.known[key] = (boundaries, tensor, (joined, digest(joined)))
        return self.known[key][2]

    def _note_documents(self, cu_seqlens: Tensor, joined: Tensor) -> None:
        if self.row_length:
            rows = int(joined[-1]) // self.row_length
        else:
            rows = len(cu_seqlens) if cu_seqlens.dim() == 2 else 1
        self.rows_hold_documents |= len(joined) - 1 > rows

    def read(self, cu_seqlens: Tensor) -> None:
        """Note the boundaries of a micro-batch that this rank read.

        Args:
            cu_seqlens: int [b, any], as ``join_rows`` takes them.
        """
        if self.handles:
            joined = join_rows(cu_seqlens)
            self._note_documents(cu_seqlens, joined)
            self.batches[digest(joined)] = None

    def report(self) -> Report:
        """What was seen so far."""
        first = next(iter(self.seen.values()), {})
        return Report(
            tuple(self._all_faults(first)),
            self.replica,
            self.stage,
            dict(Counter(kind_of(self.mixers[name]) for name in self.seen)),
            self.positions.counts(self.rows_hold_documents),
            digest_of_all(first) if first else b"",
            digest_of_all(self.batches) if self.batches else b"",
        )

    def _all_faults(self, first: dict[bytes, None]) -> list[str]:
        """What is wrong, one line each.

        Args:
            first: digests of the boundaries that the first module got.
        """
        faults = list(dict.fromkeys([*self.unknown, *self.faults]))
        faults += [
            f"{name} ({kind_of(module)}) was not called as a module, so its boundaries could not be checked"
            for name, module in self.mixers.items()
            if name not in self.seen and not any(line.startswith(name + " ") for line in faults)
        ]
        expected = self.batches or first
        for name, seen in self.seen.items():
            if list(seen) != list(expected) and not faults:
                whose = "the batches" if self.batches else "other layers"
                faults.append(f"{name} ({kind_of(self.mixers[name])}) got other boundaries than those of {whose}")
        return faults

    def refuse_unknown(self) -> None:
        """Stop if a module of this or another rank is not known to keep to boundaries. All ranks must call it, before
        one of them would wait for another that stops.

        Raises:
            IntegrationError: there is such a module; the same on all ranks.
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
        self.known.clear()
        self.rotations.remove()


def joined_boundaries(boundaries: Any) -> Tensor:
    """The boundaries that a module got, with rows joined: int64 [chunks + 1] on the host, 0 < b1 < ... < t.

    Args:
        boundaries: ``PackedSeqParams``, or a tensor as ``join_rows`` takes it.

    Raises:
        InvalidBoundaries: they are not boundaries, or contradict themselves.
    """
    if isinstance(boundaries, Tensor):
        return join_rows(boundaries)
    queries = join_rows(boundaries.cu_seqlens_q)
    keys = getattr(boundaries, "cu_seqlens_kv", None)
    if keys is not None and keys is not boundaries.cu_seqlens_q and not torch.equal(join_rows(keys), queries):
        raise InvalidBoundaries("differ between queries and keys")
    max_seqlen, longest = getattr(boundaries, "max_seqlen_q", None), int(queries.diff().max())
    if max_seqlen is not None and int(max_seqlen) < longest:
        raise InvalidBoundaries(f"have max_seqlen {int(max_seqlen)}, where a document has {longest} positions")
    return queries


def digest(joined: Tensor) -> bytes:
    """A short name for boundaries, int64 [chunks + 1] on the host."""
    return hashlib.sha256(joined.numpy().tobytes()).digest()


def digest_of_all(digests: Iterable[bytes]) -> bytes:
    """A short name for the boundaries of several micro-batches, in their order."""
    return hashlib.sha256(b"".join(digests)).digest()


def _form(boundaries: Any) -> str | None:
    """megatron-core's name of how rows are laid out: "thd" if they are joined, "sbhd" if not."""
    return getattr(boundaries, "qkv_format", None)


def _check_form(module: nn.Module, boundaries: Any) -> None:
    """Make sure that a module looks at boundaries in this form.

    Raises:
        InvalidBoundaries: it does not.
    """
    by_number = has_class(module, {"MambaMixer"}) and getattr(boundaries, "seq_idx", None) is not None
    if has_class(module, JOINED_ROWS_ONLY) and _form(boundaries) != "thd" and not by_number:
        raise InvalidBoundaries(f"have the form {_form(boundaries)}, which it ignores")
    if has_class(module, {"MambaMixer"}) and hasattr(boundaries, "seq_idx"):
        _check_state(boundaries.seq_idx, joined_boundaries(boundaries))


def _check_state(seq_idx: Tensor | None, joined: Tensor) -> None:
    """Make sure that a state space layer begins anew in each document, and only there.

    Args:
        seq_idx: int32 [1, t]: a number for each position, the same inside a document.
        joined: as ``joined_boundaries``.

    Raises:
        InvalidBoundaries: it does not.
    """
    if seq_idx is None:
        raise InvalidBoundaries("have no seq_idx, without which its state crosses documents")
    changes = torch.nonzero(seq_idx.reshape(-1).cpu().diff())[:, 0] + 1
    if seq_idx.numel() != joined[-1] or not torch.equal(changes, joined[1:-1]):
        raise InvalidBoundaries("have the seq_idx of other documents")


BATCH_KEYS = ("cu_seqlens", "cu_seqlens_q")
"""Where a micro-batch has its boundaries: in Megatron-LM, and in Megatron-Bridge with its rows joined."""


class WatchedIterator:
    """An iterator of micro-batches that notes the boundaries of each in a check."""

    def __init__(self, batches: Any, check: BoundaryCheck) -> None:
        self._batches, self._check = batches, check

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        for key in BATCH_KEYS if isinstance(batch, dict) else ():
            if isinstance(batch.get(key), Tensor):
                self._check.read(batch[key])
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
