#!/usr/bin/env bash
# Random programs of dispatches and combines, each result checked against a dense fp64 model.
# Arguments go to tests/fuzz/fuzz.py; --help lists them. With --backend cuda the ranks share one GPU
# under an MPS server of their own.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=python3
if ! python3 -c 'import torch, pydantic' 2>/dev/null; then
    bash "$root/scripts/setup.sh" test
    source "$root/.venv/bin/activate"
    python=python
fi
launch=()
if [[ " $* " == *[\ =]"cuda "* && " $* " != *" --save"* ]]; then
    launch=(bash "$root/scripts/with_mps.sh" 1)
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${launch[@]}" "$python" "$root/tests/fuzz/fuzz.py" "$@"
