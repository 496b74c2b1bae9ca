"""torch.cuda for a machine without one, as far as Megatron-LM's training loop asks for it."""

import atexit
import contextlib
import typing

import torch
from torch.distributed import DeviceMesh
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Every device that is called cuda is the CPU, and dtypes and types keep the names they would have there."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        keywords = {name: on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        state = torch.default_generator.get_state() if function in DRAWN_ON_THE_GPU else None
        result = function(*(on_cpu(value) for value in args), **keywords)
        if state is not None:
            torch.default_generator.set_state(state)
        return result


DRAWN_ON_THE_GPU = (torch.rand, torch.dropout, torch.nn.functional.dropout)
"""What Megatron-LM draws while it warms up; it must not disturb the CPU's generator, which gives the weights."""


def on_cpu(value):
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


class Stream:
    """A stream, or an event, that has always finished."""

    def __init__(self, *_, **__):
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    def __getattr__(self, name):
        answers = {"elapsed_time": 0.0, "query": True, "record_event": self}
        return lambda *_, **__: answers.get(name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Generators:
    """One random generator, whatever the device; not the CPU's, from which weights are drawn."""

    only = torch.Generator()

    def __getitem__(self, _):
        return self.only


class Properties:
    """Of a device that Megatron has no special case for."""

    name = "none"
    major, minor = 8, 0
    multi_processor_count = 1
    total_memory = 1 << 34
    warp_size = 32


def install():
    """Change torch for this process."""
    # gloo's threads abort a process that ends while they run
    atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda function: function
    cuda = torch.cuda
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": "cpu",
        "get_device_name": "none",
        "get_device_capability": (8, 0),
        "get_device_properties": Properties(),
        "memory_stats": {},
        "memory_snapshot": [],
        "mem_get_info": (1 << 34, 1 << 34),
        "current_stream": Stream(),
        "default_stream": Stream(),
        "is_current_stream_capturing": False,
    }
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        answers[name] = 0
    for name in ("set_device", "synchronize", "empty_cache", "init"):
        answers[name] = None
    for name in ("reset_peak_memory_stats", "set_stream", "_lazy_init"):
        answers[name] = None
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    torch.accelerator.is_available = lambda: False  # asked by torch itself, which must not look for a GPU then
    cuda.Stream = cuda.Event = Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.device = lambda *_: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_, **__: None
    cuda.default_generators = Generators()
    cuda.manual_seed = cuda.manual_seed_all = Generators.only.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: Generators.only.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: Generators.only.set_state(state)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    kind = torch.Tensor.type

    def type_of(self, *arguments, **keywords):
        name = kind(self, *(on_cpu_type(value) for value in arguments), **keywords)
        return "torch.cuda." + name.split(".")[-1] if isinstance(name, str) else name

    torch.Tensor.type = type_of
    all_to_all = torch.distributed.all_to_all_single

    def all_to_all_of_lists(output, input, output_split_sizes=None, input_split_sizes=None, **keywords):
        sizes = (
            sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes  # from a GPU they would have been copied
            for sizes in (output_split_sizes, input_split_sizes)
        )
        return all_to_all(output, input, *sizes, **keywords)

    torch.distributed.all_to_all_single = all_to_all_of_lists
    from_group = DeviceMesh.from_group

    def from_group_on_cpu(group, device_type, *arguments, **keywords):
        return from_group(group, on_cpu(device_type), *arguments, **keywords)

    DeviceMesh.from_group = staticmethod(from_group_on_cpu)
    CudaIsCpu().__enter__()


def on_cpu_type(value):
    return value.replace("torch.cuda.", "torch.") if isinstance(value, str) else value
