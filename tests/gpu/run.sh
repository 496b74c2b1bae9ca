#!/usr/bin/env bash
# The tests and the benchmark that need a GPU, in one command and under 10 minutes.
#
#   bash tests/gpu/run.sh                    packages come from the index that pip uses
#   bash tests/gpu/run.sh --wheels FOLDER    from the wheels in a folder, and from archives of unpacked ones (*.tar,
#                                            *.tar.zst), without a network; torch, numpy and pytest are those of the
#                                            machine
#
# Transformer Engine and flash-attn 3 are used if they are there; what is missing is skipped, with that reason.
#
# PYTHON chooses the interpreter (default python3). Without a GPU everything is skipped, with that reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
if [ "${1:-}" = --wheels ]; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    for archive in "$2"/*.tar "$2"/*.tar.zst; do
        [ ! -e "$archive" ] || tar -xf "$archive" -C "$packages"
    done
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$2"/*.whl
    export PYTHONPATH=$PWD:$packages${PYTHONPATH:+:$PYTHONPATH} PATH=$packages/bin:$PATH
else
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    python=.venv/bin/python
    "$python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
        --editable '.[test,preprocess,deepspeed]'
fi
"$python" -m pytest -c tests/pytest.ini tests/gpu -s -p no:cacheprovider || [ $? = 5 ]  # all are skipped without a GPU
"$python" benchmarks/attention.py
