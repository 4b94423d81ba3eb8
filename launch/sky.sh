#!/usr/bin/env bash
# SkyPilot: finds a place for a slice, on demand or spot, and runs the code there
#
#   pod=(--name=pod --topology=v6e:4x4)
#   bash launch/sky.sh run    "${pod[@]}" -- --config=configs/NAME.py --workdir=gs://BUCKET/RUN
#                             # machines, code, environment, run; again with new arguments or code on the same machines
#   bash launch/sky.sh resume "${pod[@]}" --spot -- --config=... --workdir=gs://BUCKET/RUN
#                             # as a managed job: machines of its own, made again after every preemption
#   bash launch/sky.sh logs   "${pod[@]}" [--follow] [--managed]     # --managed: of what resume has started
#   bash launch/sky.sh status "${pod[@]}"
#   bash launch/sky.sh stop   "${pod[@]}" [--yes]                    # ends both kinds, deletes the machines
#
#   --dry_run            print the commands, run none
#   --secret=HF_TOKEN,...   run, resume: environment variables that the run gets too
#   --zone=us-east5-b    run, resume: only there (default: wherever SkyPilot finds the chips)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/flags.sh
source launch/flags.sh
# shellcheck source=launch/topology.sh
source launch/topology.sh
# shellcheck source=launch/workers.sh
source launch/workers.sh

# Read in SkyPilot's pages and in the help of its 0.14.1, not tried on a cloud. On GKE it was said to take single-host
# slices only, so this asks for TPU VMs. SkyPilot leaves out what .gitignore names when it copies the code.

main() {
    local command=${1:-help}
    local common="name topology"
    (($#)) && shift
    case $command in
        run | resume) read_flags "$common zone secret train" "dry_run spot" "$@" ;;
        logs) read_flags "$common lines" "dry_run follow managed" "$@" ;;
        status) read_flags "$common" dry_run "$@" ;;
        stop) read_flags "$common" "dry_run yes" "$@" ;;
        help | --help | -h)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
            return
            ;;
        *) wrong "'$command' is no command; known: run, resume, logs, status, stop, help" ;;
    esac
    need name topology
    "command_$command"
}

task_flags() { # what run and resume have in common
    local argument secret infra=gcp arguments=()
    check_train_args shared
    check_secrets
    [[ $workdir == gs://* ]] || wrong "--workdir='$workdir'; allowed with SkyPilot: gs://BUCKET/PATH"
    bucket=${workdir#gs://}
    bucket=${bucket%%/*}
    for argument in "${train_args[@]}"; do
        arguments+=("${argument/#--workdir=gs:\/\/"$bucket"\//--workdir=\/gcs\/}")
    done
    if ((tpu_hosts > 1)); then arguments+=(--multihost); fi
    if [[ -n ${flags[zone]:-} ]]; then infra=gcp/${flags[zone]%-*}/${flags[zone]}; fi
    quote "${arguments[@]}"
    task=(launch/sky.yaml "--infra=$infra" "--gpus=tpu-$tpu_type" "--env=TURNPPO_BUCKET=$bucket"
        "--env=TURNPPO_ARGUMENTS=$quoted")
    if [[ -n ${flags[spot]:-} ]]; then task+=(--use-spot); fi
    for secret in "${secrets[@]}"; do
        task+=("--secret=$secret") # by name: SkyPilot takes the value from the environment
    done
}

command_run() {
    task_flags
    change sky launch "--cluster=${flags[name]}" "${task[@]}" --detach-run --yes
}

command_resume() {
    task_flags
    change sky jobs launch "--name=${flags[name]}" "${task[@]}" --detach-run --yes
}

command_logs() {
    local follow=--no-follow
    if [[ -n ${flags[follow]:-} ]]; then follow=--follow; fi
    if [[ -n ${flags[managed]:-} ]]; then
        change sky jobs logs "--name=${flags[name]}" "--tail=${flags[lines]:-50}" "$follow"
    else
        change sky logs "${flags[name]}" "--tail=${flags[lines]:-50}" "$follow"
    fi
}

command_status() {
    local status=0
    change sky status "${flags[name]}" || status=1
    change sky jobs queue || status=1
    return "$status"
}

command_stop() {
    local status=0
    confirm "end ${flags[name]}, as a managed job and as a cluster, and delete its machines?"
    change sky jobs cancel "--name=${flags[name]}" --yes || status=1
    change sky down "${flags[name]}" --yes || status=1
    ((status == 0)) || say "one of the two did not answer well; when there was only one, that is as it should be"
    return "$status"
}

main "$@"
