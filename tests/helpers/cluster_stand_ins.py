"""A cluster on this host: programs that stand in for SLURM's, pdsh and Apptainer, and a run of two nodes for them."""

import os
import subprocess

from helpers import launching
from helpers.recipes import RECIPES

SRUN = """#!/usr/bin/env bash
# As SLURM's: a task on each node, with SLURM's variables and none of torch's; the status of one that failed. The tasks
# are noted for scancel. pyxis' options are accepted, and the tasks started on this host.
nodes=$SLURM_NNODES
while [[ $1 == --* ]]; do
    case $1 in
        --nodes) nodes=$2; shift 2 ;;
        --ntasks | --ntasks-per-node | --container-*) shift 2 ;;
        *) shift ;;
    esac
done
unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
status=0 tasks=()
for ((node = 0; node < nodes; node++)); do
    SLURM_NODEID=$node SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_NTASKS=$nodes "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" >"${0%/*}/step"
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
rm "${0%/*}/step"
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >>"${0%/*}/scontrol.log"
[ "$*" != "show hostnames $SLURM_JOB_NODELIST" ] || printf 'localhost\\nlocalhost\\n'
"""
SCANCEL = """#!/usr/bin/env bash
# As SLURM's with --signal=NAME: to all processes of the step, and not to the job's script.
[ "$2" = "$SLURM_JOB_ID" ] || exit 1
[ -f "${0%/*}/step" ] || { echo "scancel: error: no step" >&2; exit 1; }
signal_all() {
    for child in $(ps -o pid= --ppid "$1"); do signal_all "$child"; done
    kill -s "$signal" "$1"
}
signal=${1#--signal=}
for task in $(<"${0%/*}/step"); do signal_all "$task"; done
"""
PDSH = """#!/usr/bin/env bash
# As pdsh over ssh: the words joined, run by a shell on each host that knows nothing of this one's environment.
while [[ $1 == -* ]]; do
    case $1 in
        -w) IFS=, read -ra hosts <<<"$2"; shift 2 ;;
        -S) shift ;;
        *) shift 2 ;;
    esac
done
status=0 tasks=() number=0
for host in "${hosts[@]}"; do
    command="$*"
    command=${command//%n/$number}
    env -i HOME="$HOME" PATH=/usr/bin:/bin CUDA_VISIBLE_DEVICES= bash -c "${command//%%/%}" &
    tasks+=($!) number=$((number + 1))
done
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
APPTAINER = """#!/usr/bin/env bash
# As Apptainer's exec: the command, here on this host, in the folder of --pwd. It notes its words.
printf '%s\\0' "$@" >>"${0%/*}/apptainer.log"
[ "$1" = exec ] || exit 1
shift
while [[ $1 == --* ]]; do
    case $1 in
        --pwd) cd "$2" || exit; shift 2 ;;
        --bind) shift 2 ;;
        *) shift ;;
    esac
done
shift
IN_CONTAINER=yes exec "$@"
"""
SLURM = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}


def install(folder, programs):
    """Write programs to a folder."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def slurm_job(folder, nodes=2):
    """The variables of a job, and a PATH on which SLURM's programs are those of a folder."""
    install(folder, SLURM)
    job = {"SLURM_JOB_ID": 4711, "SLURM_NNODES": nodes, "SLURM_JOB_NODELIST": f"node[1-{nodes}]"}
    return job | {"PATH": f"{folder}{os.pathsep}{launching.ENVIRONMENT['PATH']}"}


def tiny_run(folder, train_iters=2):
    """Make a corpus and a recipe in a folder, for two nodes that are this host, of one rank each.

    Returns:
        The recipe, and the launchers' variables.
    """
    launching.make_corpus(folder)
    recipe = folder / "two_steps.sh"
    settings = f"seq_length=128\nsplit=90,5,5\ntrain_iters={train_iters}\nhidden_size=64\n"
    recipe.write_text(f'source "{RECIPES}/tiny.sh"\n{settings}')
    variables = {"DATA_PATH": "data_text_document", "TOKENIZER_MODEL": "tokenizer.json", "EOD_TOKEN": "<eod>"}
    variables |= {
        "MASTER_PORT": launching.free_port(),
        "GPUS_PER_NODE": 1,
        "ALL_REDUCE_MB": 0,
        "OUTPUT": folder / "run",
    }
    variables |= {"PATH": f"{folder}{os.pathsep}{launching.ENVIRONMENT['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    return recipe, variables


def environment(variables):
    """The tests' own variables and those given."""
    return launching.ENVIRONMENT | {name: str(value) for name, value in variables.items()}


def launch(folder, script, *words, seconds=200, **variables):
    """Exit status of a launcher that runs in a folder, and all that it prints."""
    command = ["bash", *map(str, (script, *words))]
    settings = {"capture_output": True, "text": True, "cwd": folder, "timeout": seconds}
    done = subprocess.run(command, env=environment(variables), **settings)
    return done.returncode, done.stdout + done.stderr
