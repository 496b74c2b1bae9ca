# shellcheck shell=bash
# Functions of the launchers: errors, commands, and words on their way to other hosts. Sourced by all of them.
# shellcheck disable=SC2034  # words and hosts are for those who source this

die() {
    printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
    exit 2
}

run() { # a command: shown, and run unless this is a dry run
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ "${DRY_RUN:-0}" != 0 ] || "$@"
}

split_words() { # the words of a text, in the array words; spaces, tabs and line feeds separate them, Windows' too
    IFS=$' \t\n' read -rd '' -a words <<<"${1//$'\r'/ }" || true # it fails at the end of its input, as it should here
}

read_hosts() { # the hosts of HOSTFILE, in the array hosts, in its order; sets NODES to their number unless it is set
    local line number=0
    hosts=()
    [ -r "$HOSTFILE" ] || die "HOSTFILE=$HOSTFILE: cannot be read"
    while IFS= read -r line || [ -n "$line" ]; do # the last line may lack its line feed
        number=$((number + 1))
        [[ ! $line =~ ^[[:space:]]*(#|$) ]] || continue
        # A host that was skipped would be missed only as one node less
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

# These leave their result in REPLY: $() would take line feeds from its end

for_pdsh() { # a text as pdsh must get it, which writes its node's rank for %n, and more for %h and %u
    REPLY=${1//[%]/%%}
}

quoted() { # a word as it stands for itself in any POSIX shell, whatever the login shell of a host is
    local escaped="'\\''"
    if [[ $1 =~ ^[[:alnum:]@%+=:,./_-]+$ ]]; then
        REPLY=$1
    else
        REPLY="'${1//\'/"$escaped"}'"
    fi
}

between_double_quotes() { # a word as it must stand between double quotes; those in it are escaped later
    local character
    REPLY=$1
    for character in "\\" "\$" "\`"; do # the backslash first, or it would escape those of the others
        REPLY=${REPLY//"$character"/"\\$character"}
    done
}
