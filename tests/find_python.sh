#!/usr/bin/env bash
# Print the path of a Python of the version given (such as 3.12), or fail: on the path, or among pyenv's.
set -euo pipefail
version=$1
candidates=("python$version")
for root in "${PYENV_ROOT:-}" "$(command -v pyenv >/dev/null && pyenv root || true)" ~/.pyenv; do
    [ -n "$root" ] || continue
    for candidate in "$root"/versions/"$version".*/bin/python; do
        candidates+=("$candidate")
    done
done
for candidate in "${candidates[@]}"; do
    if found=$("$candidate" -c "import sys
print(sys.executable) if '%d.%d' % sys.version_info[:2] == '$version' else sys.exit(1)" 2>/dev/null); then
        echo "$found"
        exit 0
    fi
done
echo "no Python $version found" >&2
exit 1
