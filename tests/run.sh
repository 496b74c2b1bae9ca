#!/usr/bin/env bash
# Install what the tests need into a virtual environment of their own and run them.
#
#   bash tests/run.sh                     all but the slow ones
#   bash tests/run.sh --slow              also races, kills and fuzzing at length
#   bash tests/run.sh --integration       also those against real checkouts: MEGATRON_LM_PATH, MEGATRON_DEEPSPEED_PATH
#   bash tests/run.sh --ecosystem         only those with trackers, Hugging Face, object stores, lm-eval (installs them too)
#   bash tests/run.sh --python 3.12       the dataset and attention tests on another Python, with its megatron-core
#   bash tests/run.sh --install           only install; goes together with --integration, --ecosystem, --python
#
# Anything else is handed to pytest: -k NAME, -n 0 for one process, -s to see what tests print (in one process too).
# PYTHON chooses the interpreter (default python3).
#
# Without --slow and --integration, whose tests fill disks and change the environment, the files run in parallel: in one
# process more than there are cores, since many tests wait for processes that they start, but in at most 8, which take
# 1 GB of memory each. The tests of a file stay together, as they share runs of the trainer. Temporary folders are then in
# /dev/shm if it has room: on a disk, thousands of small writes are waited for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=""
integration=""
left_out="slow or integration"
only_install=""
ecosystem=""
in_parallel=yes
arguments=()
while [ $# -gt 0 ]; do
    case $1 in
        --python) version=$2; shift ;;
        --slow)
            left_out=${left_out/slow or /}
            left_out=${left_out/#slow/}
            in_parallel=""
            ;;
        --integration)
            integration=,integration
            left_out=${left_out/ or integration/}
            left_out=${left_out/#integration/}
            in_parallel=""
            ;;
        --ecosystem) ecosystem=,ecosystem ;;
        --install) only_install=yes ;;
        -s | --capture=no | --pdb | -n* | --dist*) in_parallel=""; arguments+=("$1") ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

if [ -n "$version" ]; then
    venv=.venv-$version
    python=$(bash tests/find_python.sh "$version")
    extras='.[test]'
    packages=(torch megatron-core)
    tests=(tests/{attention,megatron_core} tests/integrations/test_megatron_lm_{attention,positions}.py
        tests/guarantees/test_equivalence.py tests/trainer/test_{baseline,evaluation,trainer_data,trainer_log}.py)
else
    venv=.venv
    python=${PYTHON:-python3}
    extras=".[test,preprocess,deepspeed,docs$integration$ecosystem]"
    packages=()
    tests=(tests --ignore=tests/ecosystem)
    [ -z "$ecosystem" ] || tests=(tests/ecosystem)
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# Most modules of the ecosystem's libraries are never imported, and compiling them all takes minutes
"$venv/bin/pip" install --quiet --disable-pip-version-check ${ecosystem:+--no-compile} --constraint constraints.txt \
    --editable "$extras" ${packages[@]+"${packages[@]}"}
PYTHONWARNINGS=ignore "$venv/bin/python" -c 'import sys, numpy, torch, megatron.core as core
print(f"Python {sys.version.split()[0]}, numpy {numpy.__version__}, torch {torch.__version__}, megatron-core {core.__version__}")'
[ -z "$only_install" ] || exit 0

parallel=()
unset PYTHONDONTWRITEBYTECODE # tests start some hundred processes, and each would compile our modules again
if [ -n "$in_parallel" ]; then
    # Nothing is compiled on a CPU, and importing torch's compiler takes each rank a second. The slow tests import it
    export TORCHDYNAMO_DISABLE=1
    cores=$(nproc)
    parallel=(-n "$((cores < 8 ? cores + 1 : 8))" --dist loadscope --no-loadscope-reorder)
    free=$(df --output=avail -B1G /dev/shm 2>/dev/null | tail -n 1 || true)
    if [ "${free:-0}" -ge 8 ]; then
        export PYTEST_DEBUG_TEMPROOT=${PYTEST_DEBUG_TEMPROOT:-/dev/shm}
    fi
fi
exec "$venv/bin/python" -m pytest -c tests/pytest.ini ${parallel[@]+"${parallel[@]}"} \
    ${left_out:+-m "not ($left_out)"} "${tests[@]}" ${arguments[@]+"${arguments[@]}"}
