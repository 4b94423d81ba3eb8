#!/usr/bin/env bash
# On a TPU host: starts the training command so that it outlives the ssh session, tells how it is, ends it
#
#   bash host.sh unpack                 # turnppo/code.tar.gz becomes turnppo/code
#   bash host.sh start ID ARGUMENT...   # python -m turnppo_jax.train ARGUMENT..., in the background
#   bash host.sh status                 # none | running | finished | stopped | failed STATUS | interrupted, and the ID
#   bash host.sh logs LINES [follow]    # the last lines; follow: until the run ends
#   bash host.sh stop SECONDS           # SIGTERM to python, so that it saves; SIGKILL when it takes longer
#   bash host.sh free_tpu               # ends other processes that hold the TPU
#
# TURNPPO_HOME             where all of it lies (default ~/turnppo): code, venv, secrets.env, gcs, run
# TURNPPO_TPU_DEVICES      device files of the TPU (default "/dev/accel* /dev/vfio/*")
# TURNPPO_TERM_SECONDS     how long a process that holds the TPU may take to end (default 20)
# TURNPPO_GCSFUSE_VERSION  the gcsfuse to install where there is none (default 3.11.1)
set -euo pipefail

home=${TURNPPO_HOME:-$HOME/turnppo}
run=$home/run
read -ra devices <<<"${TURNPPO_TPU_DEVICES:-/dev/accel* /dev/vfio/*}"
sudo=()
if ((EUID != 0)) && sudo -n true 2>/dev/null; then
    sudo=(sudo -n)
fi

say() { printf 'turnppo_jax: %s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

read_file() { # what a file of the run says, nothing when it is not there
    if [[ -s $run/$1 ]]; then cat "$run/$1"; fi
}

alive() { # is there a process of that number that is still the one meant? Numbers are given out again after a reboot.
    local pid
    pid=$(read_file "$1")
    [[ -n $pid && -r /proc/$pid/cmdline ]] && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q -- "$2"
}
training() { alive pid turnppo_jax.train; }
supervised() { alive supervisor "host.sh supervise"; }
going() { training || supervised; }

unpack() {
    if going; then
        fail "a run is going here, and its environments start from this code; stop it first"
    fi
    cd "$home"
    rm -rf code.new code.old
    mkdir code.new
    tar -xzf code.tar.gz -C code.new
    if [[ -e code ]]; then mv code code.old; fi
    mv code.new code
    rm -rf code.old code.tar.gz
}

# The package knows files, not buckets: gs://BUCKET/PATH becomes a path under a mount of the bucket, in $mounted.
mount_bucket() {
    local bucket=${1#gs://} path folder
    path=${bucket#*/}
    bucket=${bucket%%/*}
    folder=$home/gcs/$bucket
    mounted=$folder/$path
    if mountpoint -q "$folder" 2>/dev/null; then
        return
    fi
    command -v gcsfuse >/dev/null || install_gcsfuse
    mkdir -p "$folder"
    # Without the caches, because what one host writes the others must see at once (left alone, gcsfuse keeps entries
    # for good on large machines). Checkpoints are moved into place as directories; in a bucket with hierarchical
    # namespace that is one operation, in a flat one a copy of every file, refused above the limit.
    gcsfuse --implicit-dirs --rename-dir-limit=200000 --metadata-cache-ttl-secs=0 \
        --metadata-cache-negative-ttl-secs=0 --kernel-list-cache-ttl-secs=0 "$bucket" "$folder" >&2 ||
        fail "gcsfuse could not mount gs://$bucket; its message is above"
}

install_gcsfuse() { # from its release page; this version's flags are the ones used above
    local version=${TURNPPO_GCSFUSE_VERSION:-3.11.1} file
    file=$(mktemp --suffix=.deb)
    say "installing gcsfuse $version"
    if ! curl -fsSL -o "$file" \
        "https://github.com/GoogleCloudPlatform/gcsfuse/releases/download/v$version/gcsfuse_${version}_amd64.deb" ||
        ! chmod 644 "$file" || ! "${sudo[@]}" apt-get install -y -q "$file" >&2; then
        fail "gcsfuse could not be installed, which --workdir=gs://... needs; the message is above"
    fi
    rm -f "$file"
}

start() {
    local id=$1 arguments=() argument
    shift
    if going; then
        fail "a run is going here already ($(state)); stop it first"
    fi
    [[ -x $home/venv/bin/python ]] || fail "no $home/venv; run setup first"
    [[ -d $home/code ]] || fail "no $home/code; run setup first"
    for argument in "$@"; do
        if [[ $argument == --workdir=gs://* ]]; then
            mount_bucket "${argument#--workdir=}"
            argument=--workdir=$mounted
        fi
        arguments+=("$argument")
    done
    free_tpu
    mkdir -p "$run"
    rm -f "$run/pid" "$run/exit_status" "$run/supervisor"
    printf '%s\n' "$id" >"$run/id"
    # A session of its own, deaf to the hang-up of this one, and with none of its files open: so ssh returns at once
    # and nothing that happens to it reaches the run.
    nohup setsid bash "${BASH_SOURCE[0]}" supervise "${arguments[@]}" </dev/null >>"$run/log" 2>&1 &
    for _ in {1..100}; do
        if [[ -s $run/pid || -s $run/exit_status ]]; then
            say "started (pid $(read_file pid)), log in $run/log"
            return
        fi
        sleep 0.1
    done
    fail "the run did not start within 10 s; see $run/log"
}

supervise() {
    local status=0 child
    echo $$ >"$run/supervisor"
    if [[ -f $home/secrets.env ]]; then
        chmod 600 "$home/secrets.env"
        set -a
        # shellcheck source=/dev/null
        source "$home/secrets.env"
        set +a
    fi
    cd "$home/code"
    # When the machine goes down every process gets its own SIGTERM. Passing ours on would be python's second one, which
    # ends it before it has saved; so it is only noticed here.
    trap ':' TERM HUP
    printf '\n--- %s started: %s\n' "$(date -u +%FT%TZ)" "$*"
    PYTHONUNBUFFERED=1 "$home/venv/bin/python" -m turnppo_jax.train "$@" &
    child=$!
    echo "$child" >"$run/pid"
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do # a signal ended the waiting, not the child
        status=0
        wait "$child" || status=$?
    done
    printf -- '--- %s ended with exit status %s\n' "$(date -u +%FT%TZ)" "$status"
    echo "$status" >"$run/exit_status.new"
    mv "$run/exit_status.new" "$run/exit_status"
}

state() {
    local status
    status=$(read_file exit_status)
    if training || { supervised && [[ -z $status ]]; }; then
        echo "running $(read_file id) pid $(read_file pid)"
    elif [[ $status == 0 ]]; then
        echo "finished $(read_file id)"
    elif [[ $status == 143 ]]; then # what turnppo_jax.train ends with after SIGTERM, and what SIGTERM itself gives
        echo "stopped $(read_file id)"
    elif [[ -n $status ]]; then
        echo "failed $(read_file id) exit status $status"
    elif [[ -s $run/id ]]; then
        echo "interrupted $(read_file id)" # nobody was left to write the exit status: a reboot, or memory ran out
    else
        echo none
    fi
}

logs() {
    [[ -f $run/log ]] || fail "no log yet"
    if [[ ${2:-} == follow ]] && supervised; then
        tail -n "$1" -F --pid="$(read_file supervisor)" "$run/log"
    else
        tail -n "$1" "$run/log"
    fi
}

stop() {
    local seconds=$1 pid waited
    pid=$(read_file pid)
    if training; then
        kill -TERM "$pid"
        for ((waited = 0; waited < seconds * 10; waited++)); do
            training || break
            sleep 0.1
        done
        if training; then
            say "pid $pid has not ended within $seconds s of SIGTERM: killed; the last checkpoint is what remains"
            kill -KILL "$pid"
        fi
    fi
    for _ in {1..50}; do # until the exit status is written
        supervised || break
        sleep 0.1
    done
    state
}

tpu_holders() {
    local pattern expression=()
    for pattern in "${devices[@]}"; do
        expression+=(-o -lname "$pattern")
    done
    # Processes end while their files are looked at; find complains of them, which is no news.
    { "${sudo[@]}" find /proc -mindepth 3 -maxdepth 3 -path '/proc/[0-9]*/fd/*' \( "${expression[@]:1}" \) \
        2>/dev/null || true; } | cut -d/ -f3 | sort -nu
}

free_tpu() {
    local pid pids waited
    mapfile -t pids < <(tpu_holders)
    if ((${#pids[@]} == 0)); then
        return
    fi
    for pid in "${pids[@]}"; do
        say "ending process $pid, which holds the TPU: $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null || true)"
        "${sudo[@]}" kill -TERM "$pid" 2>/dev/null || true
    done
    # SIGKILL is the last resort: killed within libtpu, a process has been seen to leave the device unusable till reboot.
    for ((waited = 0; waited < ${TURNPPO_TERM_SECONDS:-20} * 10; waited++)); do
        mapfile -t pids < <(tpu_holders)
        if ((${#pids[@]} == 0)); then
            break
        fi
        sleep 0.1
    done
    for pid in "${pids[@]}"; do
        say "process $pid ignores SIGTERM: killed"
        "${sudo[@]}" kill -KILL "$pid" 2>/dev/null || true
    done
    "${sudo[@]}" rm -f "${TMPDIR:-/tmp}/libtpu_lockfile" # may belong to another user, whom libtpu would wait for
}

case ${1:-} in
    unpack | start | supervise | logs | stop) "$@" ;;
    status) state ;;
    free_tpu)
        if going; then
            say "a run is going here: what it holds is left alone"
        else
            free_tpu
        fi
        ;;
    *)
        echo "error: '${1:-}' is no command; known: unpack, start, status, logs, stop, free_tpu" >&2
        exit 2
        ;;
esac
