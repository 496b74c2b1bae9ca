"""Reading a checkpoint of the example trainer, of any ZeRO stage and tensor-parallel size, a parameter at a time.

    FOLDER/iter_0001000/
        complete.json                                      what kind of run saved it, and the size of each file
        mp_rank_TT_model_states.pt                         ZeRO 0 to 2: the weights of tensor-parallel rank TT
        zero_pp_rank_D_mp_rank_TT_model_states.pt          ZeRO 3: their names and shapes
        [bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt   ZeRO 3: data-parallel rank D's share of each weight in fp32,
                                                           one after another; a share is ceil(size / ranks) elements

Files are mapped into memory: of the optimizer's state nothing is read. Nothing in them is executed.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import math
import os
import pickle
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, OptionError
from .llama import LlamaShape

COMPLETE = "complete.json"
FOLDER_NAME = re.compile(r"iter_(\d{7,})")
EMBEDDING = "embedding.word_embeddings.weight"
VOCABULARY = "--tokenizer-model (size of its vocabulary)"


class _Ignored:
    """Stands for DeepSpeed's classes in its files, which are not needed, and so are not imported."""

    def __init__(self, *_: Any) -> None:
        pass


IGNORED_CLASSES: list[Any] = [
    (_Ignored, f"deepspeed.runtime.{name}")
    for name in ("zero.config.ZeroStageEnum", "fp16.loss_scaler.LossScaler", "fp16.loss_scaler.DynamicLossScaler")
]


class TrainerCheckpoint:
    """A complete checkpoint.

    Args:
        path: its folder.

    Attributes:
        options: of the run, by their names, as it recorded them.
        tokenizer: what the run recorded of its tokenizer: "tokenizer_type", "tokenizer_model", "eod_token"; None if its
            version recorded nothing.

    Raises:
        InputError: it is incomplete, or its version did not record its model.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(os.path.join(path, COMPLETE), encoding="utf-8") as file:
                saved = json.load(file)
            self._zero_stage, self._data_ranks = int(saved["zero_stage"]), int(saved["data_parallel_size"])
            self._tensor_ranks = int(saved["tensor_model_parallel_size"])
            recorded, sizes = saved["data"], dict(saved["files"])
        except FileNotFoundError:
            raise InputError(f"{path}: it has no {COMPLETE}: its run ended while writing it") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{os.path.join(path, COMPLETE)}: {error!r}") from None
        if not recorded:
            raise InputError(f"{path}: saved by a version that did not record its model; resume it and save it again")
        self.options, self.tokenizer = recorded["options"], recorded.get("tokenizer")
        for name, size in sizes.items():
            file_path = os.path.join(path, name)
            actual = os.path.getsize(file_path) if os.path.isfile(file_path) else None
            if actual != size:
                state = "is missing" if actual is None else f"has {actual} bytes, not {size}"
                raise InputError(f"{file_path}: {state}; give another checkpoint")

    @cached_property
    def shape(self) -> LlamaShape:
        """The model's shape."""
        names = [field.name for field in dataclasses.fields(LlamaShape) if field.name != "vocab_size"]
        counts = {name: self.options[f"--{name.replace('_', '-')}"] for name in names}
        return LlamaShape(**counts, vocab_size=self.options[VOCABULARY])

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights in the forward pass."""
        return self._models[0]["module"][EMBEDDING].dtype

    def parts(self, name: str) -> list[Tensor]:
        """A parameter on each tensor-parallel rank, as the forward pass uses it.

        Args:
            name: megatron-core's.

        Raises:
            InputError: the model has no such parameter.
        """
        try:
            if self._zero_stage < 3:
                return [model["module"][name] for model in self._models]
            return [self._gathered(rank, name) for rank in range(self._tensor_ranks)]
        except KeyError:
            raise InputError(f"{self.path}: has no parameter {name}: its model is not the trainer's") from None

    @cached_property
    def _models(self) -> list[dict[str, Any]]:
        """The model's file of each tensor-parallel rank."""
        prefix = "zero_pp_rank_0_" if self._zero_stage == 3 else ""
        return [self._load(f"{prefix}mp_rank_{rank:02}_model_states.pt") for rank in range(self._tensor_ranks)]

    def _gathered(self, rank: int, name: str) -> Tensor:
        """A parameter whose shares are on all data-parallel ranks."""
        shape, begin = self._layouts[rank][name]
        share = math.ceil(shape.numel() / self._data_ranks)
        shares = [piece for flat in self._flat[rank] for piece in _range_of(flat, begin, begin + share)]
        return torch.cat(shares)[: shape.numel()].view(shape).to(self.dtype)

    @cached_property
    def _layouts(self) -> list[dict[str, tuple[torch.Size, int]]]:
        """Of each tensor-parallel rank: the shape of each parameter, and where its share begins on each rank."""
        return [self._layout(model["param_shapes"]) for model in self._models]

    def _layout(self, groups: list[dict[str, torch.Size]]) -> dict[str, tuple[torch.Size, int]]:
        shapes = {name: shape for group in groups for name, shape in group.items()}
        shares = [math.ceil(shape.numel() / self._data_ranks) for shape in shapes.values()]
        begins = itertools.accumulate(shares, initial=0)
        return {name: (shape, begin) for (name, shape), begin in zip(shapes.items(), begins)}

    @cached_property
    def _flat(self) -> list[list[list[Tensor]]]:
        """For each tensor-parallel and each data-parallel rank, float32 tensors that hold its shares in a row."""
        prefix = "bf16_" if self.dtype == torch.bfloat16 else ""
        names = [
            [f"{prefix}zero_pp_rank_{data}_mp_rank_{tensor:02}_optim_states.pt" for data in range(self._data_ranks)]
            for tensor in range(self._tensor_ranks)
        ]
        return [[self._load(name)["optimizer_state_dict"]["fp32_flat_groups"] for name in row] for row in names]

    def _load(self, name: str) -> dict[str, Any]:
        path = os.path.join(self.path, name)
        try:
            with torch.serialization.safe_globals(IGNORED_CLASSES):
                return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise InputError(f"{path}: cannot be read: {str(error).strip().splitlines()[0]}") from None


def _range_of(tensors: list[Tensor], begin: int, end: int) -> list[Tensor]:
    """What is in a range of tensors in a row.

    Args:
        tensors: of one dimension each.
    """
    pieces, first = [], 0
    for tensor in tensors:
        last = first + tensor.numel()
        if first < end and last > begin:
            pieces.append(tensor[max(begin, first) - first : min(end, last) - first])
        first = last
    return pieces


def checkpoint_folder(path: str) -> str:
    """The folder of the checkpoint that a path names: itself, or the latest complete one in a folder of ``--save``.

    Raises:
        OptionError: there is none.
    """
    if os.path.isfile(os.path.join(path, COMPLETE)):
        return path
    if not os.path.isdir(path):
        raise OptionError(f"{path}: no such folder; give a checkpoint, or the folder that a run saves to")
    names = {int(match[1]): name for name in os.listdir(path) if (match := FOLDER_NAME.fullmatch(name))}
    for iteration in sorted(names, reverse=True):
        if os.path.isfile(os.path.join(path, names[iteration], COMPLETE)):
            return os.path.join(path, names[iteration])
    raise OptionError(f"{path}: holds no complete checkpoint of examples/pretrain_gpt.py (iter_*/{COMPLETE})")


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Keep a run with ``--keep-last`` from removing a checkpoint while it is read, if the file system has locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
