"""Packaging of megatron_bfp. Pure Python: it installs without a compiler, and its core needs numpy alone."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+?)"', (here / "megatron_bfp" / "__init__.py").read_text()).group(1)

TOKENIZERS = "tokenizers>=0.23,<0.24"
SENTENCEPIECE = "sentencepiece>=0.2.1,<0.3"
TIKTOKEN = "tiktoken>=0.14,<0.15"
GIGATOKEN = "gigatoken>=0.10,<0.11"
ORJSON = "orjson>=3.10.18,<4"
ZSTD = 'backports.zstd>=1,<2; python_version < "3.14"'
PYARROW = "pyarrow>=21,<27"
TQDM = "tqdm>=4.66,<5"
PREPROCESS = [TOKENIZERS, SENTENCEPIECE, TIKTOKEN, GIGATOKEN, ORJSON, ZSTD, PYARROW, TQDM]
MATPLOTLIB = "matplotlib>=3.10,<3.12"
RAY = 'ray>=2.60,<3; python_version < "3.14"'
PYFLAKES = "pyflakes>=4,<5"
TENSORBOARD = "tensorboard>=2.20,<3"

setup(
    name="megatron-bfp",
    version=version,
    description="Best-fit Packing for Megatron: pre-training sequences without needless truncation",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["megatron_bfp", "megatron_bfp.*"]),
    install_requires=["numpy>=1.26,<3"],
    extras_require={
        "preprocess": PREPROCESS,
        "deepspeed": ["deepspeed>=0.19.8,<0.20", "torch>=2.13,<2.14", "megatron-core>=0.16.1,<0.20", TOKENIZERS],
        "report": [MATPLOTLIB],
        "tensorboard": [TENSORBOARD],
        "flash-attn": ["flash-attn>=2.7,<3"],
        "ray": [RAY],
        "ablation": [MATPLOTLIB, PYFLAKES],
        "integration": [
            *("pybind11>=3,<4", "triton>=3.7,<4", "six>=1.17,<2", "regex>=2026.11"),
            'transformers>=5.24,<6; python_version >= "3.11"',
        ],
        "test": ["pytest>=9,<10", "hypothesis>=6.150,<7", *PREPROCESS, RAY, MATPLOTLIB, PYFLAKES, TENSORBOARD],
    },
    entry_points={
        "console_scripts": [
            "megatron-bfp-preprocess = megatron_bfp.preprocessing.command:console",
            "megatron-bfp-report = megatron_bfp.report_command:console",
        ]
    },
)
