#!/usr/bin/env bash
# Runs the tests. Makes the environment first where there is none.
#
#   bash launch/test.sh [any options of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

turnppo_say "running the tests"
exec "$PYTHON" -m pytest -q "$@"
