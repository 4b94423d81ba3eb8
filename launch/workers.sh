# shellcheck shell=bash
# The workers of a slice, seen from here: commands and files for all of them at once, output under each one's name
#
# The platform gives: workers (their names), worker_shell INDEX COMMAND, worker_copy INDEX FILE... (into turnppo/).

workers=()
chosen=()      # indices of the workers that on_workers addresses
at_once=16     # connections at a time
children=()    # process groups of the connections that are open
staged=        # runs/launch/NAME, where what is sent is put together

trap 'end_children' EXIT
trap 'end_children; exit 130' INT
trap 'end_children; exit 143' TERM
end_children() {
    local child
    for child in "${children[@]}"; do
        kill -TERM -- "-$child" 2>/dev/null || true
    done
    children=()
    if [[ -n $staged ]]; then rm -f "$staged/secrets.env"; fi
}

quote() { # leaves in $quoted the words as any shell reads them back; those that need no quotes stay readable
    local word single="'" escaped="'\\''"
    quoted=
    for word in "$@"; do
        if [[ ! $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
            word=${word//$single/"$escaped"}
            word="'$word'"
        fi
        quoted+=" $word"
    done
    quoted=${quoted# }
}

change() { # runs a command that changes something; a dry run prints it instead
    if [[ -n ${flags[dry_run]:-} ]]; then
        quote "$@"
        printf '%s\n' "$quoted"
    else
        "$@" </dev/null
    fi
}

# shellcheck disable=SC2034 # answer is read by those who ask
ask() { # ask ASSUMED COMMAND...: leaves what a command prints in $answer; a dry run prints the command, assumes ASSUMED
    local assumed=$1
    shift
    if [[ -n ${flags[dry_run]:-} ]]; then
        change "$@"
        answer=$assumed
    else
        answer=$("$@" </dev/null) || fail "$1 could not tell what there is; its message is above"
    fi
}

label() { # every line under the worker's name
    local line
    while IFS= read -r line || [[ -n $line ]]; do
        printf '[%s] %s\n' "$1" "$line"
    done
}

# on_workers WHAT FUNCTION [ARGUMENT...]: FUNCTION INDEX ARGUMENT... for every chosen worker, at once. Names those that
# failed and returns 1 then.
on_workers() {
    local what=$1 function=$2 index status failed=()
    local -A pids=()
    shift 2
    if [[ -n ${flags[dry_run]:-} ]]; then
        for index in "${chosen[@]}"; do
            "$function" "$index" "$@"
        done
        return
    fi
    set -m # each in a process group of its own, so that it can be ended with all that it started
    for index in "${chosen[@]}"; do
        (
            set +m -o pipefail
            "$function" "$index" "$@" 2>&1 | label "${workers[index]}"
        ) </dev/null &
        pids[$index]=$!
        children+=("$!")
        if ((${#pids[@]} >= at_once)); then
            collect
        fi
    done
    set +m
    collect
    if ((${#failed[@]})); then
        printf 'error: %s failed on%s\n' "$what" "$(printf ', %s' "${failed[@]}" | cut -c2-)" >&2
        return 1
    fi
}
collect() { # waits for $pids of on_workers and adds to its $failed
    local index status
    for index in $(printf '%s\n' "${!pids[@]}" | sort -n); do
        status=0
        wait "${pids[$index]}" || status=$?
        if ((status)); then failed+=("${workers[index]} (exit status $status)"); fi
    done
    pids=()
    children=()
}

choose() { # the workers of --worker=all or --worker=N
    chosen=("${!workers[@]}")
    if [[ $1 != all ]]; then chosen=("$1"); fi
}

host() { # host INDEX ARGUMENT...: bash host.sh ARGUMENT... over there
    local index=$1
    shift
    quote bash turnppo/host.sh "$@"
    worker_shell "$index" "$quoted"
}

# A new machine says that it runs before it answers. The first worker goes alone: the first connection ever makes a key.
connect_all() {
    chosen=(0)
    on_workers "connecting" connect || return
    chosen=("${!workers[@]}")
    chosen=("${chosen[@]:1}")
    on_workers "connecting" connect || return
    choose all
}
connect() {
    local try
    for try in {1..20}; do
        worker_shell "$1" 'mkdir -p -m 700 turnppo' && return
        if ((try == 20)); then return 1; fi
        sleep 15
    done
}

# The files that git tracks, and those that it neither tracks nor ignores, as they are now.
pack_code() {
    staged=runs/launch/${flags[name]}
    if [[ -n ${flags[dry_run]:-} ]]; then
        say "$staged/code.tar.gz: the files that git tracks or would track"
        return
    fi
    mkdir -p "$staged"
    list_code | tar --null -T - -czf "$staged/code.tar.gz" || fail "could not pack the code; the message is above"
}
list_code() {
    local file
    git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
        if [[ -e $file || -L $file ]]; then # deleted files are still listed until the next commit
            printf './%s\0' "$file"
        fi
    done
}

# Values of secrets go from the environment into a file that only the user reads, and with it to the workers.
write_secrets() {
    local variable
    staged=runs/launch/${flags[name]}
    if [[ -n ${flags[dry_run]:-} ]]; then
        say "$staged/secrets.env: the values of ${secrets[*]}, for the user's eyes only"
        return
    fi
    mkdir -p "$staged"
    rm -f "$staged/secrets.env"
    (
        umask 077
        for variable in "${secrets[@]}"; do
            printf '%s=%q\n' "$variable" "${!variable}"
        done >"$staged/secrets.env"
    )
}

send_code() {
    local files=("runs/launch/${flags[name]}/code.tar.gz" launch/host.sh)
    pack_code
    if ((${#secrets[@]})); then
        write_secrets
        files+=("$staged/secrets.env")
    fi
    on_workers "copying the code" worker_copy "${files[@]}" || return
    rm -f "$staged/secrets.env"
    on_workers "unpacking the code" host unpack
}
