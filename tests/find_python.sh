#!/usr/bin/env bash
# Print the path of a Python of the version given (such as 3.12), or fail: on the path, or among pyenv's.
set -euo pipefail
version=$1
candidates=("python$version")
pyenv_root=""
if command -v pyenv >/dev/null; then
    pyenv_root=$(pyenv root || true)
fi
for root in "${PYENV_ROOT:-}" "$pyenv_root" ~/.pyenv; do
    [ -n "$root" ] || continue
    for candidate in "$root"/versions/"$version".*/bin/python; do
        candidates+=("$candidate")
    done
done
for candidate in "${candidates[@]}"; do
    if path=$("$candidate" -c "import sys
print(sys.executable) if '%d.%d' % sys.version_info[:2] == '$version' else sys.exit(1)" 2>/dev/null); then
        echo "$path"
        exit 0
    fi
done
echo "no Python $version found" >&2
exit 1
