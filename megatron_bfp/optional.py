"""Optional packages: the error for one that is not installed names the pip command that installs it."""

EXTRAS = {
    "torch": "deepspeed",
    "megatron": "deepspeed",
    "deepspeed": "deepspeed",
    "tokenizers": "preprocess",
    "sentencepiece": "preprocess",
    "tiktoken": "preprocess",
    "regex": "preprocess",
    "gigatoken": "preprocess",
    "orjson": "preprocess",
    "backports": "preprocess",
    "pyarrow": "preprocess",
    "tqdm": "preprocess",
    "fastwarc": "warc",
    "fsspec": "remote",
    "huggingface_hub": "remote",
    "matplotlib": "report",
    "tensorboard": "tensorboard",
    "safetensors": "huggingface",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "ray": "ray",
    "pyflakes": "ablation",
}
"""Imported module -> the extra of this package that installs it."""
PACKAGES = {"megatron": "megatron-core", "backports": "backports.zstd", "mlflow": "mlflow-skinny"}
"""Imported module -> package, if their names differ."""


def pip_command(module: str) -> str:
    """The command that installs what ``import module`` needs."""
    return f"pip install 'megatron-bfp[{EXTRAS[module]}]'"


def not_installed(error: ModuleNotFoundError, what: str = "this") -> ModuleNotFoundError:
    """The error to raise instead of the one that an import raised: it names the package and the pip command.

    Args:
        error: of the import. It is returned as it is if its module belongs to no extra.
        what: what needs the package.
    """
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return error
    command = pip_command(module)
    if EXTRAS[module] == "deepspeed":
        command += ", or pip install torch megatron-core"
    package = PACKAGES.get(module, module)
    return ModuleNotFoundError(f"{what} needs the {package} package, which is missing: {command}", name=error.name)
