"""Megatron-Bridge is needed by one folder alone. What that folder does is tested in tests/integration."""

import importlib
import importlib.util
import re
import subprocess
import sys

import pytest
from helpers.datasets import ROOT

FOLDER = "megatron_bfp.integrations.megatron_bridge"


@pytest.mark.skipif(bool(importlib.util.find_spec("megatron.bridge")), reason="Megatron-Bridge is installed")
def test_without_megatron_bridge_the_error_says_what_to_install():
    with pytest.raises(ModuleNotFoundError, match="needs Megatron-Bridge 0.6.2 or later") as error:
        importlib.import_module(FOLDER)
    assert error.value.name == "megatron.bridge" and "docs/megatron-bridge.md" in str(error.value)


def test_nothing_else_imports_it():
    lines = [
        (path, line)
        for path in (ROOT / "megatron_bfp").rglob("*.py")
        if path.parent.name != "megatron_bridge"
        for line in path.read_text().split("\n")
        if re.search(r"\bimport\b.*megatron_bridge|from .*megatron_bridge", line)
    ]
    assert not lines
    program = "import sys, megatron_bfp.commands.main, megatron_bfp.integrations.activation; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    assert "megatron_bfp.integrations.activation" in loaded.stdout.split()
    assert "megatron_bridge" not in loaded.stdout
