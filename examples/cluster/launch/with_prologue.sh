#!/usr/bin/env bash
# Source a file, such as one that loads modules or activates a conda environment, then become a command:
#
#   bash with_prologue.sh FILE COMMAND...
#
# SIGUSR1 is ignored, for the reason that torchrun_node.sh has.
set -euo pipefail
trap '' USR1
source "$(dirname "${BASH_SOURCE[0]}")/functions.sh"
PROLOGUE=$1
shift
source_prologue
exec "$@"
