#!/usr/bin/env bash
# Sets up .venv, then runs the tests. Arguments go to pytest:
#   bash scripts/test.sh                          everything
#   bash scripts/test.sh tests/unit -k layout     a part
# On a machine with a GPU: builds the CUDA core, runs its tests and benchmarks, writes the record
# tests/gpu/record.json. It needs no network where python3 has torch, pydantic, pytest, pybind11.
#   bash scripts/test.sh --gpu [--quick] [--only STEP,...] [--tests PATH,...] [--limit SECONDS]
#   bash scripts/test.sh --gpu --record-only REASON     notes that these sources were not run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case "${1:-}" in
-h | --help)
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
--gpu)
    shift
    python=python3
    # The note needs Python alone; where there is no GPU, run_all.py says so before any set-up.
    if [[ " $* " != *" --record-only"* ]] && compgen -G "/dev/nvidia[0-9]*" >/dev/null &&
        ! python3 -c 'import torch, pydantic, pytest, pybind11' 2>/dev/null; then
        MOE_EP_BUILD_CUDA=0 bash scripts/setup.sh megatron test # run_all.py builds the core
        source .venv/bin/activate
        python=python
    fi
    exec "$python" tests/gpu/run_all.py "$@"
    ;;
esac

bash scripts/setup.sh megatron deepspeed plot test
source .venv/bin/activate

# The second megatron-core that the integration is tested with. Its newest release wants Python
# 3.12, but its files run on older ones too, with triton beside them.
newest=build/megatron-core-0.19.2
if [ ! -e "$newest/.complete" ]; then
    started=$SECONDS
    rm -rf "$newest" && mkdir -p "$newest"
    pip download -qq --no-deps --only-binary=:all: --python-version 3.12 -d "$newest" \
        megatron-core==0.19.2
    python -m zipfile -e "$newest"/megatron_core-*.whl "$newest"
    rm "$newest"/megatron_core-*.whl
    python -c "import triton" 2>/dev/null ||
        pip install -qq --no-deps --target "$newest" "triton>=3.4,<4"
    touch "$newest/.complete"
    echo "test: megatron-core 0.19.2 unpacked beside the installed one, $((SECONDS - started)) s"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # each test starts several processes
exec python -m pytest "$@"
