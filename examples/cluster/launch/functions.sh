# shellcheck shell=bash
# Functions of all launchers: errors, settings, commands, and quoting words for other hosts.
# shellcheck disable=SC2034  # words and hosts are read by the scripts that source this

hosts=() # the names of the nodes, if the launcher knows them

die() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

run() { # print a command, and run it unless this is a dry run
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ "${DRY_RUN:-0}" != 0 ] || "$@"
}

source_prologue() { # run PROLOGUE in this shell, if it is set
    local status=0
    [ -n "${PROLOGUE:-}" ] || return 0
    [ "${DRY_RUN:-0}" = 0 ] || printf '+ source %q\n' "$PROLOGUE"
    [ -r "$PROLOGUE" ] || die "PROLOGUE=$PROLOGUE: cannot be read on $HOSTNAME"
    set +eu # modules and conda use variables that are not set
    # shellcheck source=/dev/null
    source "$PROLOGUE" || status=$?
    set -euo pipefail
    [ "$status" = 0 ] || die "PROLOGUE=$PROLOGUE: ended with status $status on $HOSTNAME"
}

source_prologue_here() { # in the launcher, which needs python; not if it is for pyxis' container
    [[ -n ${CONTAINER_IMAGE:-} && ${CONTAINER_RUNTIME:-${can_use_pyxis:+pyxis}} = pyxis ]] || source_prologue
}

read_settings() { # RECIPE: run the prologue, and set the variables of the table [launch] of a TOML file that are not set
    local name value prologue=${PROLOGUE:-}
    source_prologue_here
    [[ ${1:-} = *.toml ]] || return 0
    while IFS= read -rd '' name && IFS= read -rd '' value; do
        [ -n "${!name:-}" ] || printf -v "$name" %s "$value"
    done < <(settings read "$1")
    wait $! || exit 2
    [ "${PROLOGUE:-}" = "$prologue" ] || source_prologue_here
}

settings() { # the launchers' variables in a TOML file, which examples/cluster/settings.py reads and writes
    local examples
    examples=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    PYTHONPATH=$examples:${examples%/*}${PYTHONPATH:+:$PYTHONPATH} python -m cluster.settings "$(basename "$0")" "$@"
}

split_words() { # split a text at spaces, tabs and line feeds (Windows' too) into the array words
    IFS=$' \t\n' read -rd '' -a words <<<"${1//$'\r'/ }" || true # read fails at the end of its input, as expected
}

read_hosts() { # read the hosts of HOSTFILE into the array hosts; set NODES to their number unless it is set
    local line number=0
    hosts=()
    [ -r "$HOSTFILE" ] || die "HOSTFILE=$HOSTFILE: cannot be read"
    while IFS= read -r line || [ -n "$line" ]; do # the last line may lack its line feed
        number=$((number + 1))
        [[ ! $line =~ ^[[:space:]]*(#|$) ]] || continue
        # Skipping such a line would only mean one node less
        [[ $line =~ ^[[:space:]]*([^[:space:]]+)[[:space:]]+slots=[0-9]+ ]] ||
            die "$HOSTFILE, line $number: '${line%$'\r'}' names no host; write: node-1 slots=8"
        [[ " ${hosts[*]-} " != *" ${BASH_REMATCH[1]} "* ]] ||
            die "$HOSTFILE, line $number: ${BASH_REMATCH[1]} is there twice"
        hosts+=("${BASH_REMATCH[1]}")
    done <"$HOSTFILE"
    [ ${#hosts[@]} -gt 0 ] || die "$HOSTFILE: names no host; write lines such as: node-1 slots=8"
    NODES=${NODES:-${#hosts[@]}}
    [[ $NODES =~ ^[1-9][0-9]*$ ]] || die "NODES=$NODES: give a number of nodes"
    [ "$NODES" -le ${#hosts[@]} ] || die "NODES=$NODES: $HOSTFILE has ${#hosts[@]} hosts"
}

# These return their result in REPLY: $() would remove line feeds at its end

for_pdsh() { # escape a text for pdsh, which replaces %n by the node's rank, and also %h and %u
    REPLY=${1//[%]/%%}
}

quoted() { # quote a word for any POSIX shell, as hosts have different login shells
    local escaped="'\\''"
    if [[ $1 =~ ^[[:alnum:]@%+=:,./_-]+$ ]]; then
        REPLY=$1
    else
        REPLY="'${1//\'/"$escaped"}'"
    fi
}

between_double_quotes() { # escape a word that will stand between double quotes; those in it are escaped later
    local character
    REPLY=$1
    for character in "\\" "\$" "\`"; do # the backslash first: the others add some
        REPLY=${REPLY//"$character"/"\\$character"}
    done
}
