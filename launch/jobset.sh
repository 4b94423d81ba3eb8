# shellcheck shell=bash
# The run as a JobSet without Cluster Toolkit: fills in jobset.yaml, makes the Kubernetes secret, applies both

run_with_kubectl() {
    credentials
    if ((${#secrets[@]})); then
        write_secret
    fi
    fill_in
    change kubectl apply -f "runs/launch/${flags[name]}/jobset.yaml"
}

write_secret() { # values through a file that only the user reads; replaced when it is there
    local variable file=runs/launch/${flags[name]}/secrets.env
    staged=runs/launch/${flags[name]}
    change kubectl delete secret "${flags[name]}" --ignore-not-found
    if [[ -z ${flags[dry_run]:-} ]]; then
        mkdir -p "$staged"
        rm -f "$file"
        for variable in "${secrets[@]}"; do
            [[ ${!variable} != *$'\n'* ]] || wrong "--secret=$variable; allowed: a value of one line"
            (umask 077 && printf '%s=%s\n' "$variable" "${!variable}" >>"$file")
        done
    fi
    change kubectl create secret generic "${flags[name]}" "--from-env-file=$file"
    rm -f "$file"
}

doubled='$$' # what Kubernetes reads as one $, in commands

json() { # leaves in $quoted a word as a JSON string
    local word=$1
    [[ ! $word =~ [[:cntrl:]] ]] || wrong "'$word'; allowed on GKE: arguments without control characters"
    word=${word//\\/\\\\}
    word=${word//\"/\\\"}
    quoted=\"${word//\$/"$doubled"}\"
}

fill_in() { # launch/jobset.yaml with the values of this run, in runs/launch/NAME
    local word command='' secret='' out=runs/launch/${flags[name]}/jobset.yaml grace=${flags[grace_period]:-2m}
    for word in "${train_command[@]}"; do
        json "$word"
        command+=${command:+, }$quoted
    done
    if ((${#secrets[@]})); then secret="[{secretRef: {name: ${flags[name]}}}]"; fi
    duration_seconds "$grace"
    local -A values=(
        [NAME]=${flags[name]} [QUEUE]=${flags[queue]:-} [RESTARTS]=${flags[restarts]:-20} [HOSTS]=$tpu_hosts
        [SERVICE_ACCOUNT]=${flags[service_account]:-} [GRACE_SECONDS]=$seconds [NODE_LABEL]=$tpu_node_label
        [TPU_SHAPE]=\"$tpu_shape\" [SPOT]=${flags[spot]:+\"true\"} [IMAGE]=${flags[image]} [COMMAND]="[$command]"
        [SECRET]=$secret [CHIPS]=$tpu_chips_per_host [BUCKET]=$bucket [MOUNT_OPTIONS]=$mount_options
    )
    if [[ -n ${flags[dry_run]:-} ]]; then
        printf "cat >%s <<'END'\n" "$out"
        fill
        echo END
    else
        mkdir -p "runs/launch/${flags[name]}"
        fill >"$out"
    fi
}
fill() {
    local line key
    while IFS= read -r line; do
        if [[ $line =~ ^[[:space:]]*# ]]; then continue; fi
        while [[ $line =~ @([A-Z_]+)@ ]]; do
            key=${BASH_REMATCH[1]}
            if [[ -z ${values[$key]} ]]; then continue 2; fi
            # What has been filled in may hold anything and is not searched again.
            printf '%s%s' "${line%%@"$key"@*}" "${values[$key]}"
            line=${line#*@"$key"@}
        done
        printf '%s\n' "$line"
    done <launch/jobset.yaml
}

duration_seconds() { # leaves in $seconds what 1h2m3s is
    local rest=$1 number
    seconds=0
    while [[ $rest =~ ^([0-9]+)([dhms])(.*)$ ]]; do
        number=$((10#${BASH_REMATCH[1]}))
        case ${BASH_REMATCH[2]} in
            d) number=$((number * 86400)) ;;
            h) number=$((number * 3600)) ;;
            m) number=$((number * 60)) ;;
        esac
        seconds=$((seconds + number))
        rest=${BASH_REMATCH[3]}
    done
}
