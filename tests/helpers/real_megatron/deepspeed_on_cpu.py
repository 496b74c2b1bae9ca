"""A copy of a Megatron-DeepSpeed checkout that runs on the CPU with today's packages.

Nothing of the data's way, the masks, the loss or the parallelism is changed: what is edited are imports of packages
that pre-training GPT does not use, an operation that is compiled for minutes, views that only some strides allow, a
collective whose shapes gloo compares, and the zero-bubble schedule's calls of an older DeepSpeed.
"""

import shutil
import subprocess
import sysconfig
from pathlib import Path

FIRST_LINES = """import atexit, torch, deepspeed.ops
deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False  # compiled for minutes; gloo does without it
atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())
"""

RUNS_BACKWARD = """self._running_engine_backward = not self.is_last_stage()
    print('> backward pass without gradients of weights', flush=True)"""


def copy_for_cpu(checkout, folder):
    """Copy what pre-training GPT needs of ``checkout`` into ``folder``, edit it, and compile its helpers."""
    checkout, folder = Path(checkout), Path(folder)
    for name in ("megatron", "tools"):
        shutil.copytree(checkout / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(checkout / "pretrain_gpt.py", folder)
    _edit(folder / "megatron/__init__.py", ("import torch\n", FIRST_LINES))
    _edit(
        folder / "megatron/training.py",
        ("from megatron.model.vision.knn_monitor import compute_feature_bank\n", ""),
        ("from deepspeed.compression.compress import init_compression, redundancy_clean\n", ""),
    )
    _edit(folder / "megatron/tokenizer/tokenizer.py", ("from transformers import AutoTokenizer\n", ""))
    _edit(
        folder / "megatron/model/transformer.py",
        # after the transposes of a micro-batch of several rows these have no strides that a view could take
        ("_layer.view(output_size[", "_layer.reshape(output_size["),
        ("value_layer.view(value_layer", "value_layer.reshape(value_layer"),
        (
            "            except TypeError:\n                flash_attn_builder",
            "            except (TypeError, ValueError):\n                flash_attn_builder",
        ),
    )
    _edit(
        folder / "megatron/core/sequence_parallel/cross_entropy.py",
        ("all_gather_into_tensor(loss_all, loss,", "all_gather_into_tensor(loss_all.view(-1), loss,"),
    )
    _edit(
        folder / "megatron/core/pipeline_parallel/deepspeed_zbh1_engine.py",
        # a report of memory and a flag around autograd that DeepSpeed has had otherwise since
        ("self.mem_status('BEFORE BWD ONLY', reset_max=True)", RUNS_BACKWARD),
        ("self.mem_status('AFTER BWD ONLY')", "pass"),
    )
    _compile_helpers(folder / "megatron/data")


def _edit(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert old in text, f"{path} has no {old!r}; this checkout is not the one that these tests know"
        text = text.replace(old, new)
    path.write_text(text)


def _compile_helpers(folder):
    """What its Makefile does, for the Python that runs the tests."""
    import pybind11

    target = folder / f"helpers{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    command = ["g++", "-O1", "-shared", "-std=c++17", "-fPIC", *include, str(folder / "helpers.cpp"), "-o", str(target)]
    subprocess.run(command, check=True, timeout=300)
    (folder / "Makefile").write_text("default:\n\t@true\n")
