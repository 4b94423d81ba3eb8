# shellcheck shell=bash
# The sub-commands that machines reached by ssh have in common: create, setup, sync, run, logs, status, resume, stop
#
# An entry point sources this, defines its platform and calls main. The platform gives:
#   platform_flags, platform_switches   flags of its own for `create`
#   platform_check                      checks flags against each other
#   platform_state                      leaves $state: absent, waiting, ready or lost, and $detail
#   platform_create, platform_delete    make and remove everything that belongs to --name
#   platform_workers                    fills workers
#   platform_train_flags INDEX          leaves in host_flags what tells a worker of several about the others
#   worker_shell, worker_copy           see workers.sh

cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/flags.sh
source launch/flags.sh
# shellcheck source=launch/topology.sh
source launch/topology.sh
# shellcheck source=launch/workers.sh
source launch/workers.sh

poll_seconds=30
retry_seconds=600
stop_seconds=180 # what a run may take to save its last step
assumed_state=ready

main() {
    local command=${1:-help}
    local common="name zone project topology ssh" switches="dry_run"
    (($#)) && shift
    case $command in
        create) read_flags "$common create_flag $platform_flags" "$switches $platform_switches" "$@" ;;
        setup | sync) read_flags "$common secret" "$switches" "$@" ;;
        run) read_flags "$common secret train" "$switches" "$@" ;;
        logs) read_flags "$common worker lines" "$switches follow" "$@" ;;
        status) read_flags "$common" "$switches" "$@" ;;
        stop) read_flags "$common" "$switches keep yes" "$@" ;;
        resume)
            read_flags "$common create_flag secret max_failures train $platform_flags" \
                "$switches $platform_switches" "$@"
            ;;
        help | --help | -h)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
            return
            ;;
        *) wrong "'$command' is no command; known: create, setup, sync, run, logs, status, resume, stop, help" ;;
    esac
    need name zone project topology
    platform_check
    check_secrets
    stopped=runs/launch/${flags[name]}/stopped # there since stop was called, so that no resume undoes it
    "command_$command"
}

command_create() {
    assumed_state=absent
    platform_state
    case $state in
        ready) say "${flags[name]} is there already" ;;
        waiting) wait_until_ready || fail "${flags[name]} is $state ($detail)" ;;
        absent) create || fail "${flags[name]} was not made, the message is above; stop removes what is there already" ;;
        lost) fail "${flags[name]} is lost ($detail); allowed now: resume, or stop and then create" ;;
    esac
}

create() {
    platform_create || return
    assumed_state=ready
    wait_until_ready || { say "${flags[name]} is $state ($detail)" && return 1; }
}

wait_until_ready() { # interrupted, it goes on with the same command: the request stays
    local told=
    while platform_state && [[ $state == waiting ]]; do
        if [[ $detail != "$told" ]]; then say "waiting: ${flags[name]} is $detail"; fi
        told=$detail
        sleep "$poll_seconds"
    done
    [[ $state == ready ]] || return
    say "${flags[name]} is ready: ${tpu_chips} chips, $tpu_hosts host(s)"
}

need_ready() {
    platform_state
    [[ $state == ready ]] || fail "${flags[name]} is $state${detail:+ ($detail)}; create or resume it first"
    find_workers
}

find_workers() {
    platform_workers
    ((${#workers[@]} == tpu_hosts)) ||
        fail "${flags[name]} has ${#workers[@]} worker(s); --topology=${flags[topology]} has $tpu_hosts"
    choose "${flags[worker]:-all}"
}

command_setup() {
    need_ready
    setup
}
setup() {
    connect_all && send_code && on_workers "setting up" worker_shell 'bash turnppo/code/launch/setup_host.sh'
}

command_sync() {
    need_ready
    send_code
}

command_run() {
    if ((tpu_hosts > 1)); then check_train_args shared; else check_train_args; fi
    need_ready
    send_code && start
}

start() {
    on_workers "starting" start_worker
}
start_worker() {
    platform_train_flags "$1"
    host "$1" start "$(run_id)" "${train_args[@]}" "${host_flags[@]}"
}
run_id() { # tells the run of these arguments from one of others
    printf '%s\n' "${train_args[@]}" | cksum | cut -d' ' -f1
}

command_logs() {
    [[ ${flags[worker]:-all} == all ]] || ((flags[worker] < tpu_hosts)) ||
        wrong "--worker='${flags[worker]}'; allowed: all, or 0 to $((tpu_hosts - 1))"
    need_ready
    if [[ -n ${flags[follow]:-} ]]; then
        at_once=${#workers[@]}
    fi
    on_workers "reading the log" host logs "${flags[lines]:-50}" ${flags[follow]:+follow}
}

command_status() {
    platform_state
    say "${flags[name]} is $state${detail:+ ($detail)}"
    if [[ $state == ready ]]; then
        find_workers
        on_workers "asking for the state" ask_state
    fi
}
ask_state() {
    worker_shell "$1" 'if [ -e turnppo/host.sh ]; then bash turnppo/host.sh status; else echo none; fi'
}

# What the workers are doing about the run of these arguments, in $run_state: finished (all), running, failed (one at
# least), broken (some go, some do not), idle, or unknown (one gives no answer).
ask_run() {
    local id same
    id=$(run_id)
    if [[ -n ${flags[dry_run]:-} ]]; then
        on_workers "asking for the state" ask_state
        run_state=$assumed_run
        return
    fi
    if ! told=$(on_workers "asking for the state" ask_state 2>&1); then
        run_state=unknown
        return
    fi
    same=$(grep -cE "^\[.*\] (running|finished) $id( |$)" <<<"$told" || true)
    if grep -qE "^\[.*\] failed $id " <<<"$told"; then
        run_state=failed
    elif [[ $(grep -cE "^\[.*\] finished $id$" <<<"$told" || true) == "${#workers[@]}" ]]; then
        run_state=finished
    elif ((same == ${#workers[@]})); then
        run_state=running
    elif ((same)); then
        run_state=broken
    else
        run_state=idle
    fi
}

# Until the run has finished: makes the machines when they are not there, again when they were taken away, and starts
# the same command, which goes on from its last checkpoint.
command_resume() {
    local failures=0 silent=0 first=yes begun='' made=''
    check_train_args shared
    if [[ -n ${flags[dry_run]:-} ]]; then
        assumed_state=absent
        assumed_run=finished
    else
        rm -f "$stopped"
    fi
    while :; do
        [[ ! -e $stopped ]] || fail "ended by stop"
        begun=
        platform_state
        case $state in
            lost)
                say "${flags[name]} is lost ($detail): it is made again"
                make_again
                begun=yes
                ;;
            absent)
                if [[ -n $made ]]; then
                    make_again
                else
                    create || fail "${flags[name]} was not made, the message is above; stop removes what is there already"
                fi
                begun=yes
                ;;
            waiting) wait_until_ready || continue ;;
        esac
        made=yes
        find_workers
        if [[ -n $begun ]]; then run_state=idle; else ask_run; fi
        # What failed before this command was given may have been mended since.
        if [[ -n $first && $run_state == failed ]]; then run_state=idle; fi
        first=
        if [[ $run_state == unknown ]]; then silent=$((silent + 1)); else silent=0; fi
        [[ ! -e $stopped ]] || fail "ended by stop"
        case $run_state in
            finished)
                say "the run has finished; stop removes the machines"
                return
                ;;
            running) pause "$poll_seconds" ;;
            unknown)
                ((silent < 10)) || fail "${flags[name]} is there but gives no answer: $told"
                pause "$poll_seconds"
                ;;
            idle)
                if ! { setup && start; }; then count_failure; fi
                pause "$poll_seconds"
                ;;
            failed | broken) start_again ;;
        esac
    done
}

make_again() { # where machines are taken away they may be short for hours
    until platform_delete && create; do
        say "tried again in $((retry_seconds / 60)) min"
        pause "$retry_seconds"
        [[ ! -e $stopped ]] || fail "ended by stop"
    done
}

start_again() {
    printf '%s\n' "$told"
    if grep -qE "^\[.*\] failed .* exit status 2$" <<<"$told"; then
        on_workers "reading the log" host logs 20 || true
        fail "the command is wrong; its message is above"
    fi
    # When machines are taken away, the others fail first: a look at them before it is counted as a failure.
    pause "$poll_seconds"
    platform_state
    if [[ $state == ready ]]; then
        count_failure
        if ! { on_workers "stopping the run" stop_worker && start; }; then count_failure; fi
    fi
}

count_failure() {
    failures=$((failures + 1))
    if ((failures > ${flags[max_failures]:-5})); then
        on_workers "reading the log" host logs 20 || true
        fail "the run has failed $failures times (--max_failures=${flags[max_failures]:-5}); the ends of its logs are above"
    fi
    say "failure $failures, of which ${flags[max_failures]:-5} are borne"
}
pause() {
    if [[ -z ${flags[dry_run]:-} ]]; then sleep "$1"; fi
}

command_stop() {
    if [[ -z ${flags[dry_run]:-} ]]; then
        mkdir -p "${stopped%/*}"
        : >"$stopped"
    fi
    platform_state
    if [[ $state == ready ]]; then
        platform_workers
        choose all
        if ! on_workers "stopping the run" stop_worker && [[ -n ${flags[keep]:-} ]]; then
            exit 1
        fi
    fi
    if [[ -n ${flags[keep]:-} ]]; then
        return
    fi
    confirm "delete ${flags[name]} in ${flags[zone]} of project ${flags[project]}?"
    platform_delete || fail "not all of ${flags[name]} was deleted, the message is above; stop can be called again"
    if [[ -z ${flags[dry_run]:-} ]]; then say "nothing of ${flags[name]} is left"; fi
}
stop_worker() { # SIGTERM first, so that the run saves its last step
    worker_shell "$1" "if [ -e turnppo/host.sh ]; then bash turnppo/host.sh stop $stop_seconds; fi"
}
