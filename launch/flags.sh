# shellcheck shell=bash
# Flags of the cloud scripts: reads --name=value and --switch, checks every value, says in one line what is wrong
#
#   read_flags "VALUES" "SWITCHES" "$@"   # fills flags (a switch that is on: "yes"), create_flags and train_args

if ((BASH_VERSINFO[0] * 10 + BASH_VERSINFO[1] < 44)); then # older ones call an empty array unset
    echo "error: bash ${BASH_VERSION}; allowed: 4.4 and later" >&2
    exit 2
fi

declare -gA flags=()
create_flags=() # of --create_flag, which may be given several times
train_args=()   # what stands after "--", for turnppo_jax.train
secrets=()      # names of --secret=A,B

say() {
    if [[ -n ${flags[dry_run]:-} ]]; then printf '# %s\n' "$*"; else printf 'turnppo_jax: %s\n' "$*"; fi
}
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}
wrong() { # the call itself is wrong
    printf 'error: %s\n' "$*" >&2
    exit 2
}

read_flags() {
    local values=" $1 " switches=" $2 " argument name value
    shift 2
    while (($#)); do
        argument=$1
        shift
        if [[ $argument == -- ]]; then
            [[ $values == *" train "* ]] || wrong "nothing can follow '--' here"
            train_args=("$@")
            break
        fi
        [[ $argument == --* ]] || wrong "unexpected argument '$argument'; options are written --name=value"
        name=${argument#--}
        value=${name#*=}
        name=${name%%=*}
        if [[ $argument == *=* && $name != train && $values == *" $name "* ]]; then
            check_flag "$name" "$value"
            case $name in
                create_flag) create_flags+=("$value") ;;
                *) flags[$name]=$value ;;
            esac
        elif [[ $argument != *=* && $switches == *" $name "* ]]; then
            flags[$name]=yes
        elif [[ $switches == *" $name "* ]]; then
            wrong "--$name='$value'; allowed: --$name without a value"
        elif [[ $name != train && $values == *" $name "* ]]; then
            wrong "--$name is without a value; allowed: --$name=VALUE"
        else
            values=${values/ train / }
            # shellcheck disable=SC2086 # a list of words
            wrong "unknown flag --$name; known here:$(printf ' --%s' $values $switches)"
        fi
    done
    if [[ -n ${flags[secret]:-} ]]; then
        IFS=, read -ra secrets <<<"${flags[secret]}"
    fi
}

need() { # the flags that must be there
    local name
    for name in "$@"; do
        [[ -n ${flags[$name]:-} ]] || wrong "--$name is missing"
    done
}

confirm() {
    local reply=
    if [[ -n ${flags[yes]:-}${flags[dry_run]:-} ]]; then
        return
    fi
    printf '%s [y/N] ' "$1" >&2
    read -r reply || true
    [[ $reply == [yY]* ]] || fail "nothing was deleted; --yes deletes without asking"
}

check_flag() {
    local name=$1 value=$2 pattern allowed
    case $name in
        name | cluster | deployment)
            pattern='^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$'
            allowed="1 to 40 of a-z, 0-9 and -, the first a letter, the last no -"
            ;;
        project)
            pattern='^([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]$'
            allowed="a project id, such as my-project-123"
            ;;
        zone)
            pattern='^[a-z]+-[a-z]+[0-9]+-[a-z0-9]+$'
            allowed="a zone, such as us-east5-b"
            ;;
        location)
            pattern='^[a-z]+-[a-z]+[0-9]+(-[a-z0-9]+)?$'
            allowed="a region or zone, such as us-east5 or us-east5-b"
            ;;
        topology)
            read_topology "$value"
            return
            ;;
        ssh)
            pattern='^(external|internal|iap)$'
            allowed="external, internal, iap"
            ;;
        tool)
            pattern='^(gcluster|kubectl)$'
            allowed="gcluster, kubectl"
            ;;
        flex_start | grace_period)
            pattern='^([0-9]+[dhms])+$'
            allowed="a duration, such as 4h or 1h30m"
            ;;
        disk_gb | lines)
            pattern='^[1-9][0-9]{0,4}$'
            allowed="1 to 99999"
            ;;
        max_failures | restarts)
            pattern='^[0-9]{1,4}$'
            allowed="0 to 9999"
            ;;
        worker)
            pattern='^(all|[0-9]{1,4})$'
            allowed="all, or a worker's number from 0"
            ;;
        secret)
            pattern='^[A-Za-z_][A-Za-z0-9_]*(,[A-Za-z_][A-Za-z0-9_]*)*$'
            allowed="names of environment variables, separated by commas, such as HF_TOKEN"
            ;;
        create_flag)
            pattern='^--[a-z]'
            allowed="a flag of the command that creates, such as --create_flag=--network=NAME"
            ;;
        image | base_image)
            pattern='^[a-z0-9][^[:space:]]*$'
            allowed="a container image, such as REGISTRY/NAME:TAG"
            ;;
        *)
            pattern='^[^[:cntrl:]]+$'
            allowed="some text on one line"
            ;;
    esac
    [[ $value =~ $pattern ]] || wrong "--$name='$value'; allowed: $allowed"
}

check_secrets() { # their values come from the environment and never stand on a command line
    local name
    for name in "${secrets[@]}"; do
        [[ -n ${!name:-} ]] || wrong "--secret=$name; allowed: names of environment variables that are set"
    done
}

# Checks what turnppo_jax.train will be given, before a machine is paid for. Leaves $workdir.
#   check_train_args shared   # "shared": the workdir must outlive the machine and be the same for all hosts
check_train_args() {
    local argument config=
    workdir=
    for argument in "${train_args[@]}"; do
        case $argument in
            --config=*) config=${argument#*=} ;;
            --workdir=*) workdir=${argument#*=} ;;
        esac
    done
    [[ -n $config ]] || wrong "--config=FILE.py is missing after '--'"
    [[ -n $workdir ]] || wrong "--workdir=DIR is missing after '--'"
    [[ $config != /* && -f ${config%%:*} ]] ||
        wrong "--config='$config'; allowed: a config file of this repository, its path from the repository's folder"
    if [[ ${1:-} == shared && $workdir != gs://?*/?* && $workdir != /* ]]; then
        wrong "--workdir='$workdir'; allowed: gs://BUCKET/PATH, or an absolute path on a disk that outlives the" \
            "machines and that all of them share"
    fi
    if [[ $workdir == gs://* && ! $workdir =~ ^gs://[a-z0-9][-_.a-z0-9]+/[^[:cntrl:]]+$ ]]; then
        wrong "--workdir='$workdir'; allowed: gs://BUCKET/PATH"
    fi
}
