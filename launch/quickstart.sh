#!/usr/bin/env bash
# Trains a tiny agent on Sokoban with turn-level PPO, on a CPU. Makes the environment first where there is none.
#
#   bash launch/quickstart.sh [--config.a.b=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

turnppo_say "training; results go to runs/quickstart, the same command continues an interrupted run"
exec "$PYTHON" -m turnppo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart "$@"
