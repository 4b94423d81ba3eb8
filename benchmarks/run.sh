#!/usr/bin/env bash
# Measures us, and others beside us in the same sitting, on one pinned core; prints the ratios of medians.
#
#   bash benchmarks/run.sh                                       ours alone
#   TUNIX_PY=/path/to/python bash benchmarks/run.sh              and tunix (a Python with google-tunix==0.1.7)
#
# CORE      the core to pin to (default 1)
# PRESET    s8m (default) or s29m
# BENCH_OUT where the rows go (default a new file in runs/bench)
# PYTHON    our interpreter (default: the environment of launch/environment.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z ${PYTHON:-} ]]; then
    source launch/environment.sh
fi
shared=${TURNPPO_SHARED:-$PWD/../shared}
preset=${PRESET:-s8m}
core=${CORE:-1}
export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 BENCH_WAIT_S=${BENCH_WAIT_S:-20} TURNPPO_SHARED=$shared
export BENCH_OUT=${BENCH_OUT:-$PWD/runs/bench/$(date +%Y%m%d-%H%M%S).jsonl}
mkdir -p "$(dirname "$BENCH_OUT")"

ours() { taskset -c "$core" "$PYTHON" -m "benchmarks.$1" "$preset"; }
tunix() {
    if [[ -n ${TUNIX_PY:-} ]]; then
        taskset -c "$core" "$TUNIX_PY" "$shared/bench/bench_tunix_$1.py" "$preset"
    fi
}

# Alternating, so that a slow spell of the machine meets both.
tunix sampler
ours bench_sampler
tunix ppo
ours bench_ppo
tunix turns
echo
"$PYTHON" -m benchmarks.table "$BENCH_OUT"
echo "rows: $BENCH_OUT"
