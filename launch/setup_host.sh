#!/usr/bin/env bash
# On a TPU host, or in a container: a Python 3.12 of its own and what turnppo_jax needs, with JAX for TPU
#
#   bash launch/setup_host.sh
#
# Does nothing where it is done already, goes on where it was interrupted. The images have Python 3.10 and JAX needs
# 3.11: uv brings one without touching the system's. Also ends stale processes that hold the TPU.
#
# TURNPPO_HOME  where the environment is made (default ~/turnppo; in it: venv, tools)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python_version=3.12
home=${TURNPPO_HOME:-$HOME/turnppo}
venv=$home/venv
mark=$venv/.made_by_turnppo_jax # holds the checksum of what is installed

say() { printf 'turnppo_jax: %s\n' "$*"; }
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# The same bounds as everywhere, with the extra that brings libtpu.
jax=$(sed -n 's/^jax\([<>=~!].*\)$/jax[tpu]\1/p' requirements.txt)
[[ -n $jax && $jax != *$'\n'* ]] || fail "requirements.txt: needs one line that begins with jax and its bounds"
checksum=$({ cat requirements.txt && echo "$jax $python_version"; } | cksum)

find_uv() {
    uv=$home/tools/bin/uv
    if command -v uv >/dev/null; then
        uv=$(command -v uv)
    elif [[ ! -x $uv ]]; then
        say "installing uv"
        if ! python3 -m pip --version >/dev/null 2>&1; then
            local sudo=()
            if ((EUID != 0)); then sudo=(sudo -n); fi
            if ! "${sudo[@]}" apt-get update -q || ! "${sudo[@]}" apt-get install -y -q python3-pip; then
                fail "this machine has no pip and apt-get could not install python3-pip; its message is above"
            fi
        fi
        python3 -m pip install --quiet --disable-pip-version-check --target "$home/tools" --upgrade uv ||
            fail "pip could not install uv; its message is above"
    fi
}

if [[ -f $mark && $(cat "$mark") == "$checksum" ]] && "$venv/bin/python" -c '' 2>/dev/null; then
    say "using $venv"
else
    mkdir -p "$home"
    find_uv
    if ! "$venv/bin/python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$python_version')" 2>/dev/null; then
        say "making $venv with Python $python_version"
        rm -rf "$venv"
        "$uv" venv --quiet --python "$python_version" "$venv" ||
            fail "uv could not make $venv; its message is above"
    fi
    say "installing requirements.txt and $jax (a few minutes the first time)"
    rm -f "$mark"
    "$uv" pip install --quiet --python "$venv/bin/python" --requirement requirements.txt "$jax" ||
        fail "uv could not install requirements.txt and $jax; its message is above"
    printf '%s\n' "$checksum" >"$mark"
fi
# Without a look at the devices: on a slice of several hosts that would wait for all the others.
"$venv/bin/python" -c "
from importlib.metadata import version
print('turnppo_jax: ready: jax', version('jax'), 'libtpu', version('libtpu'))"
bash launch/host.sh free_tpu
