#!/usr/bin/env bash
# Check style, shell scripts and types, with the versions in .venv (made by tests/run.sh --install).
#
#   bash tests/lint.sh                    all of them
#   bash tests/lint.sh style scripts      some of them
#
#   style      ruff: lint and format
#   scripts    shellcheck, and hadolint for the Dockerfile
#   types      mypy over the package
set -euo pipefail
shopt -s globstar
cd "$(dirname "${BASH_SOURCE[0]}")/.."

style() {
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
}

scripts() {
    .venv/bin/shellcheck --external-sources --source-path=SCRIPTDIR --norc .ci/run {examples,tests}/**/*.sh
    .venv/bin/hadolint examples/cluster/container/Dockerfile
    echo "shellcheck and hadolint: no findings"
}

types() {
    .venv/bin/mypy
}

[ $# -gt 0 ] || set -- style scripts types
for check in "$@"; do
    "$check"
done
