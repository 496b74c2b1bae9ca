"""The ways in for ``--data-impl bfp``, without a checkout of Megatron; with one they are tested in ``integration/``."""

import io
import os
import subprocess
import sys
import textwrap
import venv

import numpy
import pytest
from helpers.datasets import ROOT

from megatron_bfp import IndexedDatasetError
from megatron_bfp.integrations import activation, refusals, startup_file
from megatron_bfp.integrations.data_impl import data_impls

TRAINER = {
    "megatron/__init__.py": "",
    "megatron/training/__init__.py": "from megatron.training.arguments import validate_args",
    "megatron/training/arguments.py": """
        import argparse

        def _add_data_args(parser):
            parser.add_argument("--dataloader-inter-document-masking", action="store_true")
            parser.add_argument("--dataloader-type")
            parser.set_defaults(micro_batch_size=1, pipeline_model_parallel_size=1)
            return parser

        def validate_args(args, defaults={}):
            return args
        """,
    "pretrain_gpt.py": """
        import argparse, sys
        from megatron.training import arguments, validate_args

        parser = arguments._add_data_args(argparse.ArgumentParser())
        parser.add_argument("--local_rank")
        args = validate_args(parser.parse_args())
        print(__name__, args.dataloader_inter_document_masking, getattr(args, "data_impl", None), args.local_rank)
        """,
}


@pytest.fixture
def trainer(tmp_path):
    for name, text in TRAINER.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


def call(*command, folder, **variables):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=folder, env=environment)
    return done.returncode, (done.stdout + done.stderr).strip()


def test_a_script_runs_as_if_python_had_started_it(trainer):
    module = [sys.executable, "-m", "megatron_bfp"]
    bfp = ["pretrain_gpt.py", "--data-impl", "bfp"]
    assert call(*module, *bfp, folder=trainer) == (0, "__main__ True bfp None")
    assert call(*module, "--local_rank=1", *bfp, folder=trainer) == (0, "__main__ True bfp 1")
    assert call(*module, "pretrain_gpt.py", "--data-impl", "mmap", folder=trainer) == (0, "__main__ False None None")
    status, output = call(*module, "gone.py", "--data-impl", "bfp", folder=trainer)
    assert (status, output) == (2, "python -m megatron_bfp: error: gone.py: no such training script")


def test_attention_may_be_imported_before_the_layers_that_get_it(tmp_path):
    """Importing it imports the module whose hook puts it into layers."""
    pytest.importorskip("megatron.core.models.backends")
    code = "import logging; logging.disable(logging.WARNING)\n"  # torch's: one that is built for a GPU misses it
    code += "import megatron_bfp; megatron_bfp.install()\n"
    code += "from megatron_bfp.attention import with_document_attention\n"
    code += "from megatron.core.models.backends import LocalSpecProvider\n"
    code += "print(LocalSpecProvider().core_attention().__name__)"
    (tmp_path / "script.py").write_text(code)
    status, output = call(sys.executable, "-W", "ignore", "script.py", "--data-impl", "bfp", folder=tmp_path)
    assert (status, output) == (0, "DocumentAttention")


def test_install_comes_first_or_says_so(trainer):
    script = (trainer / "pretrain_gpt.py").read_text()
    line = "import megatron_bfp; megatron_bfp.install()\n"
    (trainer / "first.py").write_text(line + line + script)
    (trainer / "late.py").write_text(script + line)
    assert call(sys.executable, "first.py", "--data-impl=bfp", folder=trainer) == (0, "__main__ True bfp None")
    assert call(sys.executable, "first.py", folder=trainer) == (0, "__main__ False None None")
    (trainer / "late.py").write_text("import megatron.training\n" + line)
    status, output = call(sys.executable, "late.py", "--data-impl=bfp", folder=trainer)
    reason = "megatron.training.arguments was imported before megatron_bfp.install(); make that the first line of"
    assert status == 2 and output == f"megatron_bfp: error: {reason} the script"


def test_fault_B15_without_the_flag_a_line_says_that_nothing_is_changed(trainer):
    module = [sys.executable, "-m", "megatron_bfp", "pretrain_gpt.py"]
    line = (
        "megatron_bfp: there is no --data-impl bfp on the command line: pretrain_gpt.py runs as it would without "
        "megatron_bfp"
    )
    assert call(*module, folder=trainer) == (0, f"__main__ False None None\n{line}")
    assert call(*module, folder=trainer, RANK="1") == (0, "__main__ False None None")
    assert call(*module, "--data-impl=mmap", folder=trainer) == (0, "__main__ False None None")


@pytest.mark.parametrize("words", [["--data-i", "bfp"], ["--data-im=bfp"], ["--data-impl=mmap"]])
def test_the_startup_file_knows_every_form_of_the_option(words, monkeypatch):
    """All that argparse takes for it, as ``data_impls`` does."""
    calls = []
    monkeypatch.setattr(activation, "install", lambda: calls.append(1))
    for argv, is_given in ((["x.py", *words], True), (["x.py", "--data-path", "p"], False), (["x.py"], False)):
        monkeypatch.setattr(sys, "argv", argv)
        calls.clear()
        exec(startup_file.LINE, {})
        assert bool(data_impls(argv)) is bool(calls) is is_given


REFUSED = "error: --dataloader-type cyclic cannot be used with --data-impl bfp: the order of samples"


def typed(way):
    """What a message begins with: the command that was typed, or ours inside a script."""
    return "python -m megatron_bfp" if way == "-m" else "megatron_bfp"


@pytest.fixture
def ways_in(trainer, other_python):
    """Commands that run the trainer, by module, ``install`` and start-up file; and where the last finds packages."""
    script = (trainer / "pretrain_gpt.py").read_text()
    (trainer / "first.py").write_text("import megatron_bfp; megatron_bfp.install()\n" + script)
    packages = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.path.dirname(os.path.dirname(numpy.__file__))])}
    assert call(other_python, "-m", "megatron_bfp", "enable", folder=trainer, **packages)[0] == 0
    yield {
        "-m": ([sys.executable, "-m", "megatron_bfp", "pretrain_gpt.py"], {}),
        "install": ([sys.executable, "first.py"], {}),
        "enable": ([other_python, "pretrain_gpt.py"], packages),
    }
    call(other_python, "-m", "megatron_bfp", "disable", folder=trainer, **packages)


@pytest.mark.parametrize("way", ["-m", "install", "enable"])
def test_fault_B15_a_refusal_is_one_line_on_one_rank(trainer, ways_in, way):
    command, packages = ways_in[way]
    command = [*command, "--data-impl", "bfp", "--dataloader-type", "cyclic"]
    status, output = call(*command, folder=trainer, RANK="0", **packages)
    assert status == 2 and output.startswith(f"{typed(way)}: {REFUSED}") and "\n" not in output
    assert call(*command, folder=trainer, RANK="1", **packages) == (2, "")


@pytest.mark.parametrize(
    "variables, rank",
    [
        ({}, 0),
        ({"RANK": "3", "SLURM_PROCID": "1"}, 3),
        ({"SLURM_PROCID": "1"}, 1),
        ({"OMPI_COMM_WORLD_RANK": "2"}, 2),
        ({"RANK": ""}, 0),
    ],
)
def test_fault_B15_a_rank_is_what_its_launcher_says(monkeypatch, variables, rank):
    for name in refusals.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert refusals.rank() == rank


@pytest.mark.parametrize("way", ["-m", "install", "enable"])
def test_fault_A07_is_one_line_by_every_way_in(trainer, ways_in, way):
    command, packages = ways_in[way]
    command = [*command, "--data-impl=bfp", "--data-impl", "mmap"]
    line = "error: --data-impl bfp and --data-impl mmap are both on the command line; leave out all but one"
    assert call(*command, folder=trainer, **packages) == (2, f"{typed(way)}: {line}")
    assert call(*command[:-2], "--data-impl", "bfp", folder=trainer, **packages) == (0, "__main__ True bfp None")


def test_fault_B15_other_errors_keep_their_traceback(trainer):
    (trainer / "other.py").write_text(
        "import megatron_bfp; megatron_bfp.install()\nimport sys\n"
        "from megatron_bfp import IndexedDatasetError\n"
        "raise IndexedDatasetError('x.bin: damaged') if 'ours' in sys.argv else ValueError('theirs')\n"
    )
    script = [sys.executable, "other.py", "--data-impl", "bfp"]
    status, output = call(*script, "theirs", folder=trainer)
    assert status == 1 and "Traceback" in output and output.endswith("ValueError: theirs")
    # what one rank alone may meet, it prints
    assert call(*script, "ours", folder=trainer, RANK="3") == (2, "megatron_bfp: error: x.bin: damaged")


def test_fault_B15_torch_s_own_hook_does_not_swallow_the_line(capfd, monkeypatch):
    """It calls the one that was there with a buffer in place of ``sys.stderr``."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    refusals.print_refusals_in_one_line()
    hook = sys.excepthook
    refusals.print_refusals_in_one_line()
    assert sys.excepthook is hook
    error = IndexedDatasetError("x.bin: damaged")
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        with pytest.raises(SystemExit) as ended:
            hook(type(error), error, None)
    finally:
        sys.stderr = stderr
    assert ended.value.code == 2 and "megatron_bfp: error: x.bin: damaged" in capfd.readouterr().err


@pytest.fixture(scope="module")
def other_python(tmp_path_factory):
    """A virtual environment of its own to write start-up files into; it finds this one's packages by PYTHONPATH."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


def test_unedited_scripts_take_the_flag_between_enable_and_disable(trainer, other_python):
    packages = os.pathsep.join([str(ROOT), os.path.dirname(os.path.dirname(numpy.__file__))])
    module = [other_python, "-m", "megatron_bfp"]

    def run(*command):
        return call(*command, folder=trainer, PYTHONPATH=packages)

    unedited = [other_python, "pretrain_gpt.py"]
    other_program = [other_python, "-c", "import sys; print('megatron_bfp' in sys.modules, sys.meta_path)"]
    before = run(*other_program)
    refused = run(*unedited, "--data-impl", "bfp")
    assert refused[0] == 2 and "unrecognized arguments: --data-impl bfp" in refused[1]
    assert run(*module, "status") == (0, "not enabled")
    status, output = run(*module, "enable")
    assert status == 0 and startup_file.NAME in output
    assert run(*module, "enable")[0] == 0
    assert startup_file.NAME in run(*module, "status")[1]
    assert run(*unedited, "--data-impl", "bfp") == (0, "__main__ True bfp None")
    assert run(*unedited, "--data-impl=mmap") == (0, "__main__ False None None")
    assert run(*unedited) == (0, "__main__ False None None")
    assert run(*other_program) == before
    # uninstalled, with the file left behind: as if it were not there
    assert call(*unedited, "--data-impl", "bfp", folder=trainer, PYTHONPATH="") == refused
    assert run(*module, "disable")[1].startswith("removed ")
    assert run(*module, "status") == (0, "not enabled")
    assert run(*module, "disable") == (0, "it was not enabled")
    assert run(*unedited, "--data-impl", "bfp") == refused


def test_fault_A17_options_without_a_changed_builder_stop(trainer):
    """Another tool's finder gets the builder before our hook; stock samples would be trained."""
    builder = trainer / "megatron/core/datasets/blended_megatron_dataset_builder.py"
    builder.parent.mkdir(parents=True)
    for folder in (builder.parent, builder.parent.parent):
        (folder / "__init__.py").write_text("")
    builder.write_text("class BlendedMegatronDatasetBuilder:\n    pass\n")
    script = (trainer / "pretrain_gpt.py").read_text()
    (trainer / "pretrain_gpt.py").write_text(
        "import importlib.machinery, sys\n"
        "class Elsewhere:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        return importlib.machinery.PathFinder.find_spec(name, path) if 'builder' in name else None\n"
        f"sys.meta_path.insert(0, Elsewhere())\n{script}"
    )
    command = [sys.executable, "-m", "megatron_bfp", "pretrain_gpt.py", "--data-impl", "bfp"]
    status, output = call(*command, folder=trainer)
    assert status == 2 and output.startswith(
        "python -m megatron_bfp: error: megatron.core.datasets.blended_megatron_dataset_builder is imported without "
    )
