#!/usr/bin/env bash
# Google Kubernetes Engine: runs as a JobSet, submitted by Cluster Toolkit (gcluster job submit) or by kubectl
#
#   pod=(--name=sokoban --project=PROJECT --cluster=CLUSTER --location=us-east5-b --topology=v6e:4x4)
#   bash launch/gke.sh create "${pod[@]}" --zone=us-east5-b --blueprint=FILE   # the cluster, once; FILE: of Cluster
#                             # Toolkit, such as examples/gke-tpu-v6e/gke-tpu-v6e.yaml; its other variables, such as the
#                             # reservation, by --create_flag=--vars=reservation=NAME,authorized_cidr=IP/32
#   bash launch/gke.sh image  "${pod[@]}" --image=REGISTRY/turnppo:1   # code and packages
#   bash launch/gke.sh run    "${pod[@]}" --image=... -- --config=configs/NAME.py --workdir=gs://BUCKET/RUN
#   bash launch/gke.sh logs   "${pod[@]}" --follow
#   bash launch/gke.sh status "${pod[@]}"
#   bash launch/gke.sh resume "${pod[@]}" --image=... -- ...     # again, when it is not going and has not finished
#   bash launch/gke.sh stop   "${pod[@]}" [--delete_cluster] [--yes]
#
#   --dry_run                print the commands, run none
#   --tool=gcluster|kubectl  kubectl fills in launch/jobset.yaml; it needs no Cluster Toolkit on this machine, and is
#                            the one that takes --secret=HF_TOKEN,... (as a Kubernetes secret) and --spot
#   run, resume: --image=... an image of `image`, or --base_image=... such an image under the code as it is now (gcluster
#                only; GCLUSTER_IMAGE_REPO names the repository it goes to); --restarts=20, --grace_period=2m, --queue=NAME,
#                --service_account=NAME. A pod that is lost is replaced by the cluster itself: the JobSet restarts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/flags.sh
source launch/flags.sh
# shellcheck source=launch/topology.sh
source launch/topology.sh
# shellcheck source=launch/workers.sh
source launch/workers.sh
# shellcheck source=launch/jobset.sh
source launch/jobset.sh

# Read in 2026, not tried: Cluster Toolkit's guides of `gcluster job` and of the migration from xpk (the fields of --mount
# are parted by ";" since then), its generated JobSets, and GKE's pages of multi-host TPU slices and of Cloud Storage
# FUSE. Without the caches, because what one host writes the others must see at once; checkpoints are moved as folders.
mount_options="implicit-dirs,metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0"
mount_options+=",file-system:kernel-list-cache-ttl-secs:0,file-system:rename-dir-limit:200000"
main() {
    local command=${1:-help}
    local common="name project cluster location topology tool"
    local run_flags="image base_image restarts grace_period queue service_account secret train"
    (($#)) && shift
    case $command in
        create) read_flags "$common zone blueprint create_flag" "dry_run yes" "$@" ;;
        image) read_flags "$common image" dry_run "$@" ;;
        run | resume) read_flags "$common $run_flags" "dry_run spot" "$@" ;;
        logs) read_flags "$common lines" "dry_run follow" "$@" ;;
        status) read_flags "$common" dry_run "$@" ;;
        stop) read_flags "$common" "dry_run yes delete_cluster" "$@" ;;
        help | --help | -h)
            sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"
            return
            ;;
        *) wrong "'$command' is no command; known: create, image, run, logs, status, resume, stop, help" ;;
    esac
    need name project cluster location topology
    # Pods are named after the job, with room left for what JobSet adds.
    ((${#flags[name]} <= 28)) || wrong "--name='${flags[name]}'; allowed: at most 28 characters on GKE"
    tool=${flags[tool]:-gcluster}
    place=("--project=${flags[project]}" "--cluster=${flags[cluster]}" "--location=${flags[location]}")
    "command_$command"
}

command_create() {
    local vars="project_id=${flags[project]},deployment_name=${flags[cluster]}"
    need blueprint zone
    vars+=",region=${flags[zone]%-*},zone=${flags[zone]},num_slices=1,machine_type=$tpu_machine,tpu_topology=$tpu_shape"
    change gcluster deploy "${flags[blueprint]}" --vars "$vars" "${create_flags[@]}" ${flags[yes]:+--auto-approve}
}

# The code as git sees it, in a folder of its own; $1: where in that folder.
stage_code() {
    staged=runs/launch/${flags[name]}
    if [[ -n ${flags[dry_run]:-} ]]; then
        say "$staged/context: the files that git tracks or would track"
        return
    fi
    rm -rf "$staged/context"
    mkdir -p "$staged/context$1"
    list_code | tar --null -T - -cf - | tar -xf - -C "$staged/context$1"
}

command_image() {
    need image
    stage_code ""
    if [[ -z ${flags[dry_run]:-} ]]; then cp launch/Dockerfile "$staged/context/"; fi
    change gcloud builds submit "runs/launch/${flags[name]}/context" "--project=${flags[project]}" "--tag=${flags[image]}"
}

check_run() {
    local argument
    check_train_args shared
    [[ $workdir == gs://* ]] || wrong "--workdir='$workdir'; allowed on GKE: gs://BUCKET/PATH"
    bucket=${workdir#gs://}
    bucket=${bucket%%/*}
    check_secrets
    if [[ $tool == gcluster ]]; then
        ((${#secrets[@]} == 0)) || wrong "--secret=${flags[secret]}; allowed with --tool=kubectl: gcluster would show it"
        [[ -z ${flags[spot]:-} ]] || wrong "--spot; allowed with --tool=kubectl (with gcluster the node pool decides)"
        [[ -z ${flags[image]:-} || -z ${flags[base_image]:-} ]] || wrong "--image and --base_image; allowed: one of them"
        [[ -n ${flags[image]:-}${flags[base_image]:-} ]] || wrong "--image is missing (or --base_image)"
        [[ -z ${flags[base_image]:-} || -n ${GCLUSTER_IMAGE_REPO:-} ]] ||
            wrong "GCLUSTER_IMAGE_REPO is not set; --base_image needs the Artifact Registry repository for the new image"
    else
        [[ -z ${flags[base_image]:-} ]] || wrong "--base_image; allowed with --tool=gcluster"
        need image
    fi
    train_command=(/turnppo/venv/bin/python -m turnppo_jax.train)
    for argument in "${train_args[@]}"; do
        train_command+=("${argument/#--workdir=gs:\/\//--workdir=\/gcs\/}")
    done
    if ((tpu_hosts > 1)); then train_command+=(--multihost); fi
}

command_run() {
    check_run
    "run_with_$tool"
    if [[ -z ${flags[dry_run]:-} ]]; then say "submitted ${flags[name]}; logs --follow shows what it prints"; fi
}

run_with_gcluster() {
    local image=("--image=${flags[image]:-}") optional=()
    if [[ -n ${flags[base_image]:-} ]]; then # the context lies over / of the image
        stage_code /turnppo/code
        image=("--base-image=${flags[base_image]}" "--build-context=runs/launch/${flags[name]}/context")
    fi
    if [[ -n ${flags[queue]:-} ]]; then optional+=("--queue=${flags[queue]}"); fi
    if [[ -n ${flags[service_account]:-} ]]; then optional+=("--service-account=${flags[service_account]}"); fi
    quote "${train_command[@]}"
    # Run by bash -c, so exec: python becomes process 1 and gets the SIGTERM.
    change gcluster job submit "--name=${flags[name]}" "${place[@]}" "--compute-type=$tpu_machine" \
        "--topology=$tpu_shape" "${image[@]}" \
        "--command=cd /turnppo/code && PYTHONUNBUFFERED=1 exec ${quoted//\$/"$doubled"}" \
        "--mount=gs://$bucket;/gcs/$bucket;rw;options=$mount_options" \
        "--restarts=${flags[restarts]:-20}" "--grace-period=${flags[grace_period]:-2m}" "${optional[@]}"
}

credentials() {
    change gcloud container clusters get-credentials "${flags[cluster]}" "--project=${flags[project]}" \
        "--location=${flags[location]}"
}

# What the job is doing, in $state: absent, Pending, Suspended, Running, Succeeded, Failed.
job_state() {
    local assumed=${1:-Running}
    if [[ $tool == gcluster ]]; then
        ask "${flags[name]} $assumed" gcluster job list "${place[@]}" "--name-contains=${flags[name]}"
        state=$(awk -v name="${flags[name]}" '$1 == name { print $2 }' <<<"$answer")
    else
        credentials
        ask "$assumed" kubectl get jobset "${flags[name]}" --ignore-not-found \
            "-o=jsonpath={.status.terminalState}{\"|\"}{.metadata.name}"
        case $answer in
            '') state= ;;
            Completed\|*) state=Succeeded ;;
            Failed\|*) state=Failed ;;
            *) state=Running ;;
        esac
    fi
    state=${state:-absent}
}

command_status() {
    job_state
    say "${flags[name]} is $state"
}

command_logs() {
    if [[ $tool == gcluster ]]; then
        change gcluster job logs "${flags[name]}" "${place[@]}" ${flags[follow]:+--follow}
    else
        credentials
        change kubectl logs "--selector=jobset.sigs.k8s.io/jobset-name=${flags[name]}" --container=train --prefix \
            "--tail=${flags[lines]:-50}" "--max-log-requests=$tpu_hosts" ${flags[follow]:+--follow}
    fi
}

command_resume() {
    check_run
    job_state absent
    case $state in
        Succeeded) say "the run has finished" ;;
        absent) command_run ;;
        Failed)
            cancel
            command_run
            ;;
        *) say "${flags[name]} is $state: the cluster itself restarts what is lost" ;;
    esac
}

cancel() {
    if [[ $tool == gcluster ]]; then
        change gcluster job cancel "${flags[name]}" "${place[@]}"
    else
        change kubectl delete jobset "${flags[name]}"
        change kubectl delete secret "${flags[name]}" --ignore-not-found
    fi
}

command_stop() {
    job_state
    if [[ $state != absent ]]; then
        confirm "cancel ${flags[name]} on cluster ${flags[cluster]} of project ${flags[project]}?"
        cancel
    fi
    if [[ -n ${flags[delete_cluster]:-} ]]; then
        confirm "delete cluster ${flags[cluster]} of project ${flags[project]}, with all that runs on it?"
        change gcluster destroy "${flags[cluster]}" --auto-approve
    fi
}

main "$@"
