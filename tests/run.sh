#!/usr/bin/env bash
# Install what the tests need into a virtual environment of their own and run them.
#
#   bash tests/run.sh                     all but the slow ones
#   bash tests/run.sh --slow              also races, kills and fuzzing at length
#   bash tests/run.sh --integration       also those against real checkouts: MEGATRON_LM_PATH, MEGATRON_DEEPSPEED_PATH
#   bash tests/run.sh --python 3.12       the dataset and attention tests on another Python, with its megatron-core
#
# Anything else is handed to pytest. PYTHON chooses the interpreter (default python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=""
integration=""
left_out="slow or integration"
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --python) version=$2; shift ;;
        --slow) left_out=${left_out/slow or /}; left_out=${left_out/#slow/} ;;
        --integration) integration=,integration; left_out=${left_out/ or integration/}; left_out=${left_out/#integration/} ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

if [ -n "$version" ]; then
    venv=.venv-$version
    python=$(bash tests/find_python.sh "$version")
    extras='.[test]'
    packages=(torch megatron-core)
    tests=(tests/{attention,megatron_core} tests/integrations/test_megatron_lm_attention.py
        tests/guarantees/test_equivalence.py tests/trainer/test_{baseline,evaluation,trainer_data,trainer_log}.py)
else
    venv=.venv
    python=${PYTHON:-python3}
    extras=".[test,preprocess,deepspeed$integration]"
    packages=()
    tests=(tests)
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt --editable "$extras" \
    ${packages[@]+"${packages[@]}"}
PYTHONWARNINGS=ignore "$venv/bin/python" -c 'import sys, numpy, torch, megatron.core as core
print(f"Python {sys.version.split()[0]}, numpy {numpy.__version__}, torch {torch.__version__}, megatron-core {core.__version__}")'
exec "$venv/bin/python" -m pytest -c tests/pytest.ini ${left_out:+-m "not ($left_out)"} "${tests[@]}" \
    ${arguments[@]+"${arguments[@]}"}
