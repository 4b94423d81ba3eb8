#!/usr/bin/env bash
# TPU VMs of Compute Engine (v5p, v6e): one host as an instance, several as a managed instance group
#
#   pod=(--name=pod --project=PROJECT --zone=us-east5-a --topology=v6e:4x4)
#   bash launch/gce.sh create "${pod[@]}" --spot      # and wait until it is there
#   bash launch/gce.sh setup  "${pod[@]}"             # code and environment on every worker
#   bash launch/gce.sh run    "${pod[@]}" -- --config=configs/NAME.py --workdir=gs://BUCKET/RUN
#   bash launch/gce.sh logs   "${pod[@]}" --follow [--worker=0] [--lines=50]
#   bash launch/gce.sh status "${pod[@]}"
#   bash launch/gce.sh sync   "${pod[@]}"             # new code; no run may be going
#   bash launch/gce.sh resume "${pod[@]}" --spot -- --config=... --workdir=gs://BUCKET/RUN
#                             # all of the above until the run has finished, again after every preemption
#   bash launch/gce.sh stop   "${pod[@]}" [--keep] [--yes]   # end the run (--keep: only that), delete everything
#
#   --dry_run                 print the commands, run none
#   --secret=HF_TOKEN,...     setup, sync, run, resume: environment variables that the run gets too
#   --ssh=external|internal|iap   how the workers are reached (default external)
#   create, resume:  --spot | --flex_start=4h | --reservation=NAME    (default: on demand)
#                    --disk_gb=200, and --create_flag=--ANY=FLAG of gcloud, such as --create_flag=--network=NAME
#   resume:          --max_failures=5
set -euo pipefail
# shellcheck source=launch/cloud.sh
source "$(dirname "${BASH_SOURCE[0]}")/cloud.sh"

# Read in 2026, not tried: Google's "Create a MIG with multi-host TPU slice" and "Request TPU Spot VMs", and a public
# log of a v6e slice of two hosts that was made with these very commands. It found what the pages leave open: a group
# with a TPU topology needs the bulk mode, the workload policy must be a path with project and region, and the boot
# disk's default of 10 GB is too small for JAX.
image_project=ubuntu-os-accelerator-images
image_family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e
coordinator_port=8476 # jax.distributed's, free on these images

platform_flags="flex_start reservation disk_gb"
platform_switches="spot"

platform_check() {
    local given=0 name
    [[ $tpu_generation == v5p || $tpu_generation == v6e ]] ||
        wrong "--topology='${flags[topology]}'; allowed: v5p or v6e here, v4 and v5e with launch/queued.sh"
    for name in spot flex_start reservation; do
        if [[ -n ${flags[$name]:-} ]]; then given=$((given + 1)); fi
    done
    ((given <= 1)) || wrong "--spot, --flex_start and --reservation; allowed: one of them"
    region=${flags[zone]%-*}
    place=("--project=${flags[project]}" "--zone=${flags[zone]}")
}

machine_flags() { # of an instance and of a template alike
    machine=(
        "--machine-type=$tpu_machine" "--image-project=$image_project" "--image-family=$image_family"
        --maintenance-policy=TERMINATE "--boot-disk-size=${flags[disk_gb]:-200}GB"
        --scopes=cloud-platform # the default may only read buckets
    )
    if [[ -n ${flags[spot]:-} ]]; then
        machine+=(--provisioning-model=SPOT --instance-termination-action=STOP)
    elif [[ -n ${flags[flex_start]:-} ]]; then
        machine+=(--provisioning-model=FLEX_START "--max-run-duration=${flags[flex_start]}"
            --instance-termination-action=DELETE)
    elif [[ -n ${flags[reservation]:-} ]]; then
        machine+=(--reservation-affinity=specific "--reservation=${flags[reservation]}")
    fi
    machine+=("${create_flags[@]}")
}

platform_create() {
    local name=${flags[name]} waiting=()
    machine_flags
    if ((tpu_hosts == 1)); then
        if [[ -n ${flags[flex_start]:-} ]]; then waiting=(--request-valid-for-duration=2h); fi # the longest there is
        change gcloud compute instances create "$name" "${place[@]}" "${machine[@]}" "${waiting[@]}"
        return
    fi
    change gcloud compute resource-policies create workload-policy "$name" "--project=${flags[project]}" \
        "--region=$region" --type=HIGH_THROUGHPUT "--accelerator-topology=$tpu_shape" \
        --accelerator-topology-mode=AUTO_CONNECT &&
        change gcloud compute instance-templates create "$name" "--project=${flags[project]}" "${machine[@]}" &&
        change gcloud compute instance-groups managed create "$name" "${place[@]}" --size=0 "--template=$name" \
            --target-size-policy-mode=bulk --default-action-on-vm-failure=do-nothing \
            "--workload-policy=projects/${flags[project]}/regions/$region/resourcePolicies/$name" &&
        change gcloud compute instance-groups managed resize "$name" "${place[@]}" "--size=$tpu_hosts"
}

platform_delete() { # whatever of it is there, also when its making was interrupted
    local name=${flags[name]} status=0
    if ((tpu_hosts == 1)); then
        if is_there instances "--zones=${flags[zone]}"; then
            change gcloud compute instances delete "$name" "${place[@]}" --quiet || status=1
        fi
        return "$status"
    fi
    if is_there "instance-groups managed" "--zones=${flags[zone]}"; then
        change gcloud compute instance-groups managed delete "$name" "${place[@]}" --quiet || status=1
    fi
    if is_there instance-templates; then
        change gcloud compute instance-templates delete "$name" "--project=${flags[project]}" --quiet || status=1
    fi
    if is_there resource-policies "--regions=$region"; then
        change gcloud compute resource-policies delete "$name" "--project=${flags[project]}" "--region=$region" \
            --quiet || status=1
    fi
    return "$status"
}

is_there() { # is_there "KIND OF THING" [SCOPE]
    local kind
    read -ra kind <<<"$1"
    ask "${flags[name]}" gcloud compute "${kind[@]}" list "--project=${flags[project]}" "${@:2}" \
        "--filter=name=${flags[name]}" "--format=value(name)"
    [[ -n $answer ]]
}

platform_state() {
    local assumed='' counted
    if ((tpu_hosts == 1)); then
        if [[ $assumed_state == ready ]]; then assumed=RUNNING; fi
        ask "$assumed" gcloud compute instances list "--project=${flags[project]}" "--zones=${flags[zone]}" \
            "--filter=name=${flags[name]}" "--format=value(status)"
        detail=$answer
        case $answer in
            '') state=absent ;;
            RUNNING) state=ready ;;
            PENDING | PROVISIONING | STAGING | REPAIRING) state=waiting ;;
            *) state=lost ;; # STOPPING, TERMINATED, SUSPENDED: a stopped TPU VM has lost its chips
        esac
        return
    fi
    if [[ $assumed_state == ready ]]; then assumed=${flags[name]}; fi
    ask "$assumed" gcloud compute instance-groups managed list "--project=${flags[project]}" "--zones=${flags[zone]}" \
        "--filter=name=${flags[name]}" "--format=value(name)"
    detail=
    state=absent
    if [[ -z $answer ]]; then
        return
    fi
    list_instances
    counted=$(grep -c $'\tRUNNING$' <<<"$answer" || true)
    detail="$counted of $tpu_hosts hosts RUNNING"
    if ((counted == tpu_hosts)); then
        state=ready
    elif grep -qE $'\t(STOPPING|STOPPED|TERMINATED|SUSPENDING|SUSPENDED)$' <<<"$answer"; then
        state=lost
    else
        # Instances that are deleted (flex start at the end of its time) leave no trace but a group at rest that is too
        # small; one that still waits for capacity is not at rest.
        ask False gcloud compute instance-groups managed describe "${flags[name]}" "${place[@]}" \
            "--format=value(status.isStable)"
        state=waiting
        if [[ $answer == True ]]; then state=lost; fi
    fi
}

list_instances() { # NAME<tab>STATUS, one a line
    local assumed='' index
    for ((index = 0; index < tpu_hosts; index++)); do
        assumed+=${assumed:+$'\n'}${flags[name]}-worker$index$'\t'RUNNING
    done
    ask "$assumed" gcloud compute instance-groups managed list-instances "${flags[name]}" "${place[@]}" \
        "--format=value(name,instanceStatus)"
}

platform_workers() {
    workers=("${flags[name]}")
    if ((tpu_hosts > 1)); then
        list_instances
        mapfile -t workers < <(cut -f1 <<<"$answer" | sort)
    fi
}

# Explicitly, because JAX looks for metadata (agent-worker-number) of which no page says that groups have it. The names
# of instances resolve within the network.
platform_train_flags() {
    host_flags=()
    if ((tpu_hosts > 1)); then
        host_flags=("--coordinator=${workers[0]}:$coordinator_port" "--num_processes=$tpu_hosts" "--process_id=$1")
    fi
}

ssh_flags() {
    case ${flags[ssh]:-external} in
        internal) through=(--internal-ip) ;;
        iap) through=(--tunnel-through-iap) ;;
        *) through=() ;;
    esac
}
worker_shell() { # BatchMode: a connection in the background cannot ask for a passphrase; ssh-add the key before
    ssh_flags
    change gcloud compute ssh "${workers[$1]}" "${place[@]}" --quiet "${through[@]}" --ssh-flag=-oBatchMode=yes \
        "--command=$2"
}
worker_copy() {
    ssh_flags
    change gcloud compute scp "${@:2}" "${workers[$1]}:turnppo/" "${place[@]}" --quiet "${through[@]}" \
        --scp-flag=-oBatchMode=yes
}

main "$@"
