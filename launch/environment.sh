# shellcheck shell=bash
# Makes the virtual environment that the other scripts run in, or reuses it, and leaves its interpreter in $PYTHON.
#
#   source launch/environment.sh
#
# TURNPPO_VENV    where the environment is (default .venv; a relative path counts from the repository). One that these
#                 scripts did not make is used as it is when it has what is needed, and never changed.
# TURNPPO_PYTHON  the Python to make it with (default: the first of python3, python3.13, python3.12, python3.11 that is
#                 3.11 or newer).

turnppo_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
turnppo_venv=${TURNPPO_VENV:-$turnppo_root/.venv}
turnppo_mark=$turnppo_venv/.made_by_turnppo_jax # holds the hash of the requirements that are installed

turnppo_say() { printf 'turnppo_jax: %s\n' "$*"; }
turnppo_fail() {
    printf 'turnppo_jax: error: %s\n' "$*" >&2
    exit 1
}

turnppo_find_python() {
    local candidate
    for candidate in ${TURNPPO_PYTHON:+"$TURNPPO_PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
        if [[ $candidate == "${TURNPPO_PYTHON:-}" ]]; then
            break # asked for by name: no other will do
        fi
    done
    return 1
}

turnppo_hash() {
    "$1" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
        "$turnppo_root/requirements.txt"
}

turnppo_environment() {
    local python hash
    PYTHON=$turnppo_venv/bin/python

    if [[ -e $turnppo_venv && ! -e $turnppo_mark ]]; then
        "$PYTHON" - "$turnppo_root/requirements.txt" <<'CHECK' ||
import importlib.metadata, re, sys
missing = []
for line in open(sys.argv[1], encoding="utf-8"):
    name = re.match(r"[A-Za-z0-9._-]+", line)
    if name:
        try:
            importlib.metadata.version(name[0])
        except importlib.metadata.PackageNotFoundError:
            missing.append(name[0])
sys.exit(f"turnppo_jax: it lacks {', '.join(missing)}" if missing else 0)
CHECK
            turnppo_fail "$turnppo_venv is there and was not made by this script, so it is left alone; install" \
                "requirements.txt into it, or set TURNPPO_VENV to a folder that does not exist yet"
        turnppo_say "using $turnppo_venv as it is"
        return
    fi

    # A marked environment without a working interpreter is one whose making was interrupted.
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        python=$(turnppo_find_python) ||
            turnppo_fail "found no Python 3.11 or newer with venv${TURNPPO_PYTHON:+ at TURNPPO_PYTHON=$TURNPPO_PYTHON}"
        turnppo_say "making $turnppo_venv with $("$python" --version 2>&1)"
        mkdir -p "$turnppo_venv"
        : >"$turnppo_mark"
        "$python" -m venv "$turnppo_venv"
    fi

    hash=$(turnppo_hash "$PYTHON")
    if [[ $(cat "$turnppo_mark") == "$hash" ]]; then
        turnppo_say "using $turnppo_venv"
        return
    fi
    turnppo_say "installing requirements.txt into $turnppo_venv (a few minutes the first time)"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --requirement "$turnppo_root/requirements.txt" ||
        turnppo_fail "pip could not install requirements.txt; its message is above"
    printf '%s\n' "$hash" >"$turnppo_mark"
}

turnppo_environment
