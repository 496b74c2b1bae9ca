"""The ways in for ``--data-impl bfp``, without a checkout of Megatron; with one they are tested in ``integration/``."""

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import textwrap
import types
import venv

import pytest
from helpers.datasets import ROOT

from megatron_bfp import IndexedDatasetError, IntegrationError, OptionError
from megatron_bfp.errors import UnsupportedMegatronError
from megatron_bfp.integrations import activation, hooks, megatron_lm, refusals, startup_file, summary
from megatron_bfp.integrations.data_impl import data_impl, data_impls, without_data_impl
from megatron_bfp.integrations.megatron_deepspeed import options as megatron_deepspeed


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
        (["--data-imp", "bfp"], "bfp"),
        (["--data-i=bfp"], "bfp"),
        (["--data-", "bfp", "--data-implx", "bfp", "data-impl=bfp"], None),
    ],
)
def test_the_flag_is_read_as_argparse_reads_it(arguments, expected):
    assert data_impl(["script.py", *arguments]) == expected


@pytest.mark.parametrize(
    "arguments, kept",
    [
        (["--data-impl", "mmap", "--seed", "1"], ["--seed", "1"]),
        (["--seed", "1", "--data-impl=mmap", "--data-i", "mmap"], ["--seed", "1"]),
        (["--data-impl", "--data-impl", "x"], ["x"]),
        (["--data-impl"], []),
    ],
)
def test_the_flag_is_taken_off_with_its_value(arguments, kept):
    assert without_data_impl(arguments) == kept


BOTH = [
    ["--data-impl", "bfp", "--data-impl", "mmap"],
    ["--data-impl=mmap", "--seed", "1", "--data-impl=bfp"],
    ["--data-imp", "bfp", "--data-impl=infer"],
    ["--data-impl", "bfp", "--data-i=mmap", "--data-impl", "bfp"],
]


@pytest.mark.parametrize("arguments", BOTH, ids=" ".join)
def test_fault_A07_two_values_of_data_impl_are_refused_where_a_megatron_reads_its_options(arguments):
    values = data_impls(arguments)
    found = activation._hooks_for(values)
    assert list(found) == ["megatron.training.arguments", "megatron.arguments"]
    for refuse in found.values():
        with pytest.raises(OptionError) as refused:
            refuse(None)
        assert all(f"--data-impl {value}" in str(refused.value) for value in values)


def test_fault_A07_one_value_twice_is_one_value():
    assert activation._hooks_for(["bfp", "bfp"]).keys() == (megatron_lm.HOOKS | megatron_deepspeed.HOOKS).keys()
    assert activation._hooks_for(["mmap", "mmap"]) == megatron_lm.HOOKS_FOR_MMAP
    assert activation._hooks_for(["infer", "mmap"]) == megatron_lm.HOOKS_FOR_MMAP  # not ours to refuse
    assert activation._hooks_for(["infer"]) == activation._hooks_for([]) == {}


# Hooks


def package(folder, **files):
    """A package called waited in ``folder``."""
    (folder / "waited").mkdir()
    (folder / "waited" / "__init__.py").write_text("")
    for name, text in files.items():
        (folder / "waited" / f"{name}.py").write_text(textwrap.dedent(text))


def test_a_module_is_changed_before_others_bind_its_names(tmp_path, monkeypatch):
    package(tmp_path, options="def parse(a): return a", user="from waited.options import parse")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []

    def double(module):
        seen.append(module.__name__)
        hooks.replace(module, "parse", "a", lambda parse: lambda a: 2 * parse(a))

    monkeypatch.setattr(sys, "meta_path", [hooks.AfterImport({"waited.options": double}), *sys.meta_path])
    from waited import user

    assert user.parse(3) == 6 and seen == ["waited.options"]
    for name in ("waited", "waited.options", "waited.user"):
        sys.modules.pop(name)


@pytest.fixture
def hooked(tmp_path, monkeypatch):
    """A package whose ``options`` module waits for a hook that counts its calls in ``CHANGED``."""
    package(
        tmp_path,
        options="""
            import os
            if os.environ.get("FAIL"):
                raise ValueError("not yet")
            VALUE = 1
            """,
        others="VALUE = 1",
    )

    def hook(module):
        module.VALUE += 1
        module.CHANGED = getattr(module, "CHANGED", 0) + 1

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(hooks, "_waited_for", {"waited.others_that_is_not_there"})
    hooks.wait_for({"waited.options": hook})
    yield tmp_path
    for name in ("waited", "waited.options", "waited.others"):
        sys.modules.pop(name, None)


def test_fault_A17_a_hook_outlives_probes_failures_and_reloads(hooked, monkeypatch):
    for _ in range(2):
        assert importlib.util.find_spec("waited.options") is not None
    hooks.check_hooks(["waited.options"])
    monkeypatch.setenv("FAIL", "1")
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            importlib.import_module("waited.options")
    monkeypatch.delenv("FAIL")
    module = importlib.import_module("waited.options")
    assert (module.VALUE, module.CHANGED) == (2, 1)
    assert importlib.util.find_spec("waited.options") is module.__spec__
    importlib.reload(module)
    assert (module.VALUE, module.CHANGED) == (2, 2)  # executed anew, and changed anew
    del sys.modules["waited.options"]
    assert importlib.import_module("waited.options").VALUE == 2
    assert importlib.import_module("waited.others").VALUE == 1


def test_fault_A17_a_tool_that_executes_a_module_itself_gets_it_changed(hooked):
    spec = importlib.util.find_spec("waited.options")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (module.VALUE, module.CHANGED) == (2, 1)
    lazy = importlib.util.find_spec("waited.options")
    lazy.loader = importlib.util.LazyLoader(lazy.loader)
    module = importlib.util.module_from_spec(lazy)
    lazy.loader.exec_module(module)
    assert module.VALUE == 2


def test_fault_A17_a_loader_of_several_modules_calls_a_hook_for_one():
    class Loader:
        def exec_module(self, module):
            module.VALUE = 1

    shared, calls = Loader(), []
    for _ in range(3):
        hooks._call_after_execution(shared, "one", calls.append)
    hooks._call_after_execution(shared, "two", calls.append)
    modules = [types.ModuleType(name) for name in ("one", "two", "three")]
    for module in modules:
        shared.exec_module(module)
    assert calls == modules[:2] and all(module.VALUE == 1 for module in modules)


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


def test_fault_A17_a_module_that_came_past_the_hook_is_noticed(hooked, monkeypatch):
    class Elsewhere:
        def find_spec(self, name, path, target=None):
            return importlib.machinery.PathFinder.find_spec(name, path, target)

    monkeypatch.setattr(sys, "meta_path", [Elsewhere(), *sys.meta_path])
    with pytest.raises(UnsupportedMegatronError, match="waited.options is imported without the changes"):
        hooks.check_hooks(["waited.others_that_is_not_there", "waited.options"])
    importlib.import_module("waited.options")
    with pytest.raises(UnsupportedMegatronError, match="waited.options is imported without the changes"):
        hooks.check_hooks(["waited.options"])
    sys.meta_path.pop(0)
    importlib.reload(sys.modules["waited.options"])
    hooks.check_hooks(["waited.options", "waited.others"])  # nobody waits for the other one


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
    code = "import megatron_bfp; megatron_bfp.install()\n"
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


REFUSED = "error: --dataloader-type cyclic cannot be used with --data-impl bfp: the order of samples"


def typed(way):
    """What a message begins with: the command that was typed, or ours inside a script."""
    return "python -m megatron_bfp" if way == "-m" else "megatron_bfp"


@pytest.fixture
def ways_in(trainer, other_python):
    """Commands that run the trainer, by module, ``install`` and start-up file; and where the last finds packages."""
    import numpy

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
    """It calls the one that was there with a buffer in the place of ``sys.stderr``."""
    import io

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


def validated(**changes):
    """Options of a run of two pipeline stages, checked by our part of ``validate_args``."""

    def validate_args(args, defaults={}):  # noqa: B006
        if args.eval_micro_batch_size is None:
            args.eval_micro_batch_size = args.micro_batch_size
        return args

    known = {"data_impl": "bfp", "micro_batch_size": 1, "eval_micro_batch_size": None, "num_experts": None}
    known |= {"pipeline_model_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
    return megatron_lm._check_options(validate_args)(options(**known | changes))


@pytest.mark.parametrize(
    "changes, joins_rows",
    [
        ({}, False),
        ({"micro_batch_size": 2}, True),
        ({"eval_micro_batch_size": 2}, True),
        ({"micro_batch_size": 2, "eval_micro_batch_size": 1}, True),
        ({"eval_micro_batch_size": 2, "pipeline_model_parallel_size": 1}, False),
        ({"eval_micro_batch_size": 1}, False),
    ],
)
def test_fault_B01_the_larger_micro_batch_decides_whether_stages_tell_shapes(changes, joins_rows):
    args = validated(**changes)
    assert args.dataloader_inter_document_masking
    assert getattr(args, "variable_seq_lengths", False) == joins_rows
    if joins_rows:
        with pytest.raises(OptionError, match="--eval-micro-batch-size above 1"):
            validated(**changes, moe_token_dispatcher_type="allgather", num_experts=8)


def test_fault_B01_a_megatron_without_a_micro_batch_of_evaluation_is_fine():
    def validate_args(args, defaults={}):  # noqa: B006
        return args

    args = options(data_impl="bfp", micro_batch_size=1, pipeline_model_parallel_size=2)
    assert not hasattr(megatron_lm._check_options(validate_args)(args), "variable_seq_lengths")


@pytest.mark.parametrize(
    "values, message",
    [
        (["0", "a", "1", "b"], "weight of 0.0 for a"),
        (["1", "a", "-0.5", "b"], "weight of -0.5 for b"),
        (["nan", "a", "1", "b"], "weight of nan for a"),
        (["inf", "a", "1", "b"], "weight of inf for a"),
        (["1e300", "a", "1e-300", "b"], "weight of 1e-300 for b is 0 beside"),
        (["1e308", "a", "1e308", "b"], "is 0 beside the sum of all, inf"),
        (["0.5", "a", "b", "0.5"], "--valid-data-path: b stands where a weight is expected"),
        (["0", "a"], "weight of 0.0 for a"),
    ],
)
def test_fault_B04_weights_that_cannot_be_are_refused_before_anything_is_opened(values, message):
    with pytest.raises(OptionError, match=message):
        megatron_lm.check(options(valid_data_path=values))


@pytest.mark.parametrize("values", [["a"], ["a", "b"], ["1", "a"], ["0.5", "a", "1e-3", "b"], ["a", "b", "c"], None])
def test_fault_B04_data_paths_that_megatron_takes_are_fine(values):
    megatron_lm.check(options(data_path=values))


class Split:
    """A split as Megatron-LM's builder returns it."""

    dataset_path = "text"

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, place):
        if place in getattr(self, "bad", ()):
            raise IndexedDatasetError(f"sample {place}")


def built(datasets, **changes):
    """What our part of the builder returns for datasets."""
    args = options(data_impl="bfp", dataloader_inter_document_masking=True, **changes)
    module = types.SimpleNamespace(get_args=lambda: args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.training.global_vars", module)
        patch.setattr(megatron_lm, "_say", lambda *_: None)
        return megatron_lm._say_what_is_active(lambda self: datasets)(None)


def test_fault_B03_an_empty_split_is_none():
    full, empty = Split(5), Split(0)
    assert built([full, empty, empty]) == [full, None, None]
    assert built([full, None, full]) == [full, None, full]
    assert built([empty, full, full], skip_train=True) == [None, full, full]
    assert built([full, [full, full], empty]) == [full, [full, full], None]
    with pytest.raises(OptionError, match="the train split has no tokens"):
        built([empty, full, full])
    with pytest.raises(OptionError, match="text: has no tokens; take it out of the validation sets"):
        built([full, [full, empty], empty])


def train_step(
    forward_step_func,
    data_iterator,
    model,
    optimizer,
    opt_param_scheduler,
    config,
    forward_backward_func,
    iteration,
    pg_collection=None,
    p2p_communicator=None,
):
    """Megatron-LM's, as far as the hooks look at it."""


@pytest.mark.parametrize("loaders, evaluates", [([None], 0), ([], 0), (None, 0), (["one"], 1), ([None, "two"], 1)])
def test_fault_B03_an_empty_split_is_not_evaluated(monkeypatch, loaders, evaluates):
    args = options(data_impl="bfp", dataloader_inter_document_masking=True, do_valid=1)
    module = types.SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    monkeypatch.setattr(megatron_lm, "_on_all_ranks", lambda flag: flag)
    training = types.ModuleType("megatron.training.training")
    training.build_train_valid_test_data_loaders = lambda build_train_valid_test_datasets_provider: (1, loaders, 3)
    training.train_step = train_step
    megatron_lm.HOOKS["megatron.training.training"](training)
    train, valid, test = training.build_train_valid_test_data_loaders(None)
    assert (train, test, args.do_valid) == (1, 3, evaluates) and valid == (loaders if evaluates else None)


def test_fault_A13_the_first_samples_are_read_before_the_first_step():
    full, damaged = Split(500), Split(500)
    damaged.bad = (63,)
    assert built([full, None, None])
    with pytest.raises(IndexedDatasetError, match="sample 63") as raised:
        built([damaged, None, None])
    assert raised.value.on_every_rank
    damaged.bad = (64,)
    assert built([damaged, None, None])
    with pytest.raises(IndexedDatasetError, match="sample 64"):
        built([damaged, None, None], consumed_train_samples=1)
    with pytest.raises(IndexedDatasetError, match="sample 64"):
        built([full, [full, damaged], None], consumed_valid_samples=64)
    damaged.samples = 64  # no more are asked for than there are
    assert built([damaged, None, None], consumed_train_samples=60)


def test_fault_B15_datasets_are_summed_up_once_for_all_virtual_stages(monkeypatch):
    def parts(*names):
        index = [types.SimpleNamespace(path=name, key=types.SimpleNamespace(name="s8")) for name in names]
        return [types.SimpleNamespace(sequence_index=one) for one in index]

    assert summary.is_news(parts("virtual a", "virtual b")) and not summary.is_news(parts("virtual a", "virtual b"))
    assert summary.is_news(parts("virtual a"))
    said = []
    args = options(data_impl="bfp", dataloader_inter_document_masking=True)
    module = types.SimpleNamespace(get_args=lambda: args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    monkeypatch.setattr(megatron_lm, "_say", lambda *_: said.append(1))
    split = Split(3)
    split.sequence_index = parts("virtual c")[0].sequence_index
    build = megatron_lm._say_what_is_active(lambda self: [split, None, None])
    assert [build(None) and len(said) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("tensor_rank, pipeline_rank, reads", [(0, 0, True), (0, 1, True), (1, 0, False)])
def test_batches_are_read_by_the_first_tensor_parallel_rank_of_every_stage(
    monkeypatch, tensor_rank, pipeline_rank, reads
):
    state = pytest.importorskip("megatron.core.parallel_state")
    monkeypatch.setattr(state, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    monkeypatch.setattr(state, "get_pipeline_model_parallel_rank", lambda: pipeline_rank)
    assert megatron_lm._reads_batches() == reads


def test_options_reach_the_config_that_takes_the_place_of_megatron_s():
    gpt_dataset = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from helpers.megatron_helpers import config

    from megatron_bfp import BFPGPTDataset, BFPGPTDatasetConfig

    theirs = config((["text"], None), 32, gpt_dataset.GPTDatasetConfig, eod_mask_loss=True, path_to_cache="cache")
    cls, ours = megatron_lm.packed(gpt_dataset.GPTDataset, theirs, 3, 600)
    assert cls is BFPGPTDataset and type(ours) is BFPGPTDatasetConfig
    assert (ours.max_documents_per_sequence, ours.model_vocab_size) == (3, 600)
    assert (ours.sequence_length, ours.eod_mask_loss, ours.path_to_cache, ours.blend) == (
        32,
        True,
        "cache",
        theirs.blend,
    )
    args = options(
        data_impl="bfp", dataloader_inter_document_masking=True, max_documents_per_sequence=5, padded_vocab_size=512
    )
    built_with = []
    initialize = megatron_lm._choose_dataset(lambda self, *arguments: built_with.extend(arguments))
    module = types.SimpleNamespace(get_args=lambda: args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.training.global_vars", module)
        initialize(None, gpt_dataset.GPTDataset, [1, 1, 1], lambda: True, theirs)
    cls, sizes, reads, ours = built_with
    assert (cls, sizes, reads) == (BFPGPTDataset, [1, 1, 1], megatron_lm._reads_batches)
    assert (ours.max_documents_per_sequence, ours.model_vocab_size) == (5, 512)


@pytest.mark.parametrize("experts", [None, 8])
def test_stages_tell_shapes_where_rows_are_joined(experts):
    args = argparse.Namespace(moe_token_dispatcher_type="allgather", num_experts=experts)
    if experts:
        with pytest.raises(OptionError, match="--moe-token-dispatcher-type alltoall, or 1 for both"):
            megatron_lm._let_stages_tell_shapes(args)
    else:
        megatron_lm._let_stages_tell_shapes(args)
        assert args.variable_seq_lengths and args.moe_token_dispatcher_type == "alltoall"
