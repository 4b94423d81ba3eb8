#!/usr/bin/env bash
# TPU VMs by queued resources of the Cloud TPU API (v4, v5e and older quota of v5p, v6e, such as that of TRC)
#
#   pod=(--name=pod --project=PROJECT --zone=us-west4-a --topology=v5e:4x4)
#   bash launch/queued.sh create "${pod[@]}" --spot      # and wait until it is ACTIVE
#   bash launch/queued.sh setup  "${pod[@]}"             # code and environment on every worker
#   bash launch/queued.sh run    "${pod[@]}" -- --config=configs/NAME.py --workdir=gs://BUCKET/RUN
#   bash launch/queued.sh logs   "${pod[@]}" --follow [--worker=0] [--lines=50]
#   bash launch/queued.sh status "${pod[@]}"
#   bash launch/queued.sh sync   "${pod[@]}"             # new code; no run may be going
#   bash launch/queued.sh resume "${pod[@]}" --spot -- --config=... --workdir=gs://BUCKET/RUN
#                                # all of the above until the run has finished, again after every preemption
#   bash launch/queued.sh stop   "${pod[@]}" [--keep] [--yes]   # end the run (--keep: only that), delete everything
#
#   --dry_run                    print the commands, run none
#   --secret=HF_TOKEN,...        setup, sync, run, resume: environment variables that the run gets too
#   --ssh=external|internal|iap  how the workers are reached (default external)
#   create, resume:  --spot | --reserved    (default: on demand)
#                    --runtime_version=NAME, and --create_flag=--ANY=FLAG of gcloud
#   resume:          --max_failures=5
set -euo pipefail
# shellcheck source=launch/cloud.sh
source "$(dirname "${BASH_SOURCE[0]}")/cloud.sh"

# This API gets corrections only ("no longer under active development", Google, 2026) and is the way to v4 and v5e.
platform_flags="runtime_version"
platform_switches="spot reserved"

platform_check() {
    [[ -z ${flags[spot]:-} || -z ${flags[reserved]:-} ]] || wrong "--spot and --reserved; allowed: one of them"
    place=("--project=${flags[project]}" "--zone=${flags[zone]}")
}

platform_create() { # the node has the name of the request: one request, one node
    change gcloud compute tpus queued-resources create "${flags[name]}" "--node-id=${flags[name]}" "${place[@]}" \
        "--accelerator-type=$tpu_type" "--runtime-version=${flags[runtime_version]:-$tpu_runtime}" \
        ${flags[spot]:+--spot} ${flags[reserved]:+--reserved} "${create_flags[@]}"
}

platform_delete() { # --force: its node too
    ask "$(printf '%s\tACTIVE' "${flags[name]}")" gcloud compute tpus queued-resources list "${place[@]}" \
        "--format=value(name.basename(),state.state)"
    if [[ -n $(of_name) ]]; then
        change gcloud compute tpus queued-resources delete "${flags[name]}" "${place[@]}" --force --quiet
    fi
}

of_name() { # the second column of the line of $answer that is about --name
    awk -F'\t' -v name="${flags[name]}" '$1 == name { print $2 }' <<<"$answer"
}

platform_state() {
    local assumed=
    if [[ $assumed_state == ready ]]; then assumed=$(printf '%s\tACTIVE' "${flags[name]}"); fi
    ask "$assumed" gcloud compute tpus queued-resources list "${place[@]}" "--format=value(name.basename(),state.state)"
    detail=$(of_name)
    case $detail in
        '') state=absent ;;
        ACTIVE) node_state ;;
        # CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING; SUSPENDING and DELETING end in another state
        SUSPENDED | FAILED) state=lost ;;
        *) state=waiting ;;
    esac
}
node_state() { # a request can still be ACTIVE when its node has been taken away
    ask "$(printf '%s\tREADY' "${flags[name]}")" gcloud compute tpus tpu-vm list "${place[@]}" \
        "--format=value(name.basename(),state)"
    detail="ACTIVE, its node $(of_name)"
    case $(of_name) in
        READY) state=ready ;;
        CREATING | STARTING | RESTARTING | REPAIRING | REIMAGING) state=waiting ;;
        *) state=lost ;; # PREEMPTED, TERMINATED, STOPPED, or no longer there
    esac
}

platform_workers() {
    local index
    workers=()
    for ((index = 0; index < tpu_hosts; index++)); do
        workers+=("worker $index")
    done
}

platform_train_flags() { # these machines know one another: their metadata names all workers
    host_flags=()
    if ((tpu_hosts > 1)); then host_flags=(--multihost); fi
}

ssh_flags() {
    tpus=(gcloud compute tpus)
    through=()
    case ${flags[ssh]:-external} in
        internal) through=(--internal-ip) ;;
        iap)
            tpus=(gcloud alpha compute tpus) # the others do not have it
            through=(--tunnel-through-iap)
            ;;
    esac
}
# One connection a worker instead of --worker=all, so that a failure has a name. BatchMode: a connection in the
# background cannot ask for a passphrase; ssh-add the key before.
worker_shell() {
    ssh_flags
    change "${tpus[@]}" tpu-vm ssh "${flags[name]}" "${place[@]}" "--worker=$1" --quiet "${through[@]}" \
        --ssh-flag=-oBatchMode=yes "--command=$2"
}
worker_copy() {
    ssh_flags
    change "${tpus[@]}" tpu-vm scp "${@:2}" "${flags[name]}:turnppo/" "${place[@]}" "--worker=$1" --quiet \
        "${through[@]}" --scp-flag=-oBatchMode=yes
}

main "$@"
