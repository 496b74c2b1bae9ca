"""The ways in for ``--data-impl bfp``, without a checkout of Megatron; with one they are tested in ``integration/``."""

import argparse
import os
import subprocess
import sys
import textwrap
import types
import venv

import pytest
from conftest import ROOT

from megatron_bfp import IntegrationError, OptionError
from megatron_bfp.integrations import hooks, megatron_lm, startup_file
from megatron_bfp.integrations.data_impl import data_impl, data_impls, without_data_impl


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ([], None),
        (["--data-path", "bfp"], None),
        (["--data-impl"], None),
        (["--data-impl", "bfp"], "bfp"),
        (["--data-impl=bfp"], "bfp"),
        (["--data-impl", "mmap", "--x", "--data-impl=bfp"], "bfp"),
        (["--data-impl=bfp", "--data-impl", "mmap"], "mmap"),
    ],
)
def test_the_flag_is_read_as_argparse_reads_it(arguments, expected):
    assert data_impl(["script.py", *arguments]) == expected


# Hooks


def package(folder, **files):
    """A package called trainer in ``folder``."""
    (folder / "trainer").mkdir()
    (folder / "trainer" / "__init__.py").write_text("")
    for name, text in files.items():
        (folder / "trainer" / f"{name}.py").write_text(textwrap.dedent(text))


def test_a_module_is_changed_before_others_bind_its_names(tmp_path, monkeypatch):
    package(tmp_path, options="def parse(a): return a", user="from trainer.options import parse")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []

    def double(module):
        seen.append(module.__name__)
        hooks.replace(module, "parse", "a", lambda parse: lambda a: 2 * parse(a))

    monkeypatch.setattr(sys, "meta_path", [hooks.AfterImport({"trainer.options": double}), *sys.meta_path])
    from trainer import user

    assert user.parse(3) == 6 and seen == ["trainer.options"]
    for name in ("trainer", "trainer.options", "trainer.user"):
        monkeypatch.delitem(sys.modules, name)


class Known:
    def method(self, value, scale=1):
        return value * scale

    @staticmethod
    def function(value):
        return value


def test_a_function_is_replaced_if_its_parameters_are_known():
    hooks.replace(Known, "method", "self, value, scale", lambda original: lambda *rest: original(*rest) + 1)
    assert Known().method(3, 2) == 7


@pytest.mark.parametrize(
    "name, parameters, message",
    [
        ("gone", "self", "has no Known.gone"),
        ("function", "value, more", r"has Known.function\(value\), expected \(value, more\)"),
    ],
)
def test_an_unknown_version_is_refused(name, parameters, message):
    with pytest.raises(IntegrationError, match=message):
        hooks.replace(Known, name, parameters, lambda original: original)


# The ways in, with a trainer that has Megatron-LM's module names

TRAINER = {
    "megatron/__init__.py": "",
    "megatron/training/__init__.py": "from megatron.training.arguments import validate_args",
    "megatron/training/arguments.py": """
        import argparse

        def _add_data_args(parser):
            parser.add_argument("--dataloader-inter-document-masking", action="store_true")
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
    assert call(*module, "pretrain_gpt.py", folder=trainer) == (0, "__main__ False None None")
    bfp = ["pretrain_gpt.py", "--data-impl", "bfp"]
    assert call(*module, *bfp, folder=trainer) == (0, "__main__ True bfp None")
    assert call(*module, "--local_rank=1", *bfp, folder=trainer) == (0, "__main__ True bfp 1")
    assert call(*module, "pretrain_gpt.py", "--data-impl", "mmap", folder=trainer) == (0, "__main__ False None None")
    status, output = call(*module, "gone.py", "--data-impl", "bfp", folder=trainer)
    assert (status, output) == (2, "megatron_bfp: error: gone.py: no such training script")


def test_install_comes_first_or_says_so(trainer):
    script = (trainer / "pretrain_gpt.py").read_text()
    line = "import megatron_bfp; megatron_bfp.install()\n"
    (trainer / "first.py").write_text(line + line + script)
    (trainer / "late.py").write_text(script + line)
    assert call(sys.executable, "first.py", "--data-impl=bfp", folder=trainer) == (0, "__main__ True bfp None")
    assert call(sys.executable, "first.py", folder=trainer) == (0, "__main__ False None None")
    (trainer / "late.py").write_text("import megatron.training\n" + line)
    status, output = call(sys.executable, "late.py", "--data-impl=bfp", folder=trainer)
    assert status == 1 and "megatron.training.arguments was imported before megatron_bfp.install()" in output


@pytest.fixture(scope="module")
def other_python(tmp_path_factory):
    """A virtual environment of its own to write start-up files into; it finds this one's packages by PYTHONPATH."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


def test_unedited_scripts_take_the_flag_between_enable_and_disable(trainer, other_python):
    import numpy

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


# Megatron-LM


def options(**changes):
    known = {"dataloader_inter_document_masking": False, "context_parallel_size": 1, "dataloader_type": None}
    return argparse.Namespace(**(known | changes))


def test_the_options_of_a_plain_run_are_fine():
    megatron_lm.check(options(fim_data=False, dataloader_type="single"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({attribute: True}, f"{option} cannot be used")
        for attribute, (option, _) in megatron_lm.REFUSED.items()
    ]
    + [
        ({"context_parallel_size": 2}, "--context-parallel-size above 1"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic"),
        ({"dataloader_type": "external"}, "--dataloader-type external"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_honoured_are_refused(changes, message):
    with pytest.raises(OptionError, match=message):
        megatron_lm.check(options(**changes))


def test_an_old_megatron_lm_is_refused_with_the_version_it_needs():
    with pytest.raises(IntegrationError, match=r"no --dataloader-inter-document-masking.*megatron-core 0\.19"):
        megatron_lm.check(argparse.Namespace())


def test_options_from_elsewhere_are_refused(monkeypatch):
    module = types.SimpleNamespace(get_args=lambda: options())
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    with pytest.raises(OptionError, match="--yaml-cfg"):
        megatron_lm._options()
    module.get_args = lambda: options(data_impl="bfp", dataloader_inter_document_masking=True)
    assert megatron_lm._options().data_impl == "bfp"
    monkeypatch.delitem(sys.modules, "megatron.training.global_vars")
    assert megatron_lm._options() is None


@pytest.mark.parametrize("experts", [None, 8])
def test_stages_tell_shapes_where_rows_are_joined(experts):
    args = argparse.Namespace(moe_token_dispatcher_type="allgather", num_experts=experts)
    if experts:
        with pytest.raises(OptionError, match="--moe-token-dispatcher-type alltoall or --micro-batch-size 1"):
            megatron_lm._let_stages_tell_shapes(args)
    else:
        megatron_lm._let_stages_tell_shapes(args)
        assert args.variable_seq_lengths and args.moe_token_dispatcher_type == "alltoall"
