#!/usr/bin/env bash
# Builds the CUDA core for the GPU at hand, runs its tests and its timings, in one call.
#
#   scripts/gpu_check.sh [--no-build] [--no-tests] [--no-timings] [--quick] [--out FOLDER]
#
# --quick times two shapes instead of all. Logs go to FOLDER (build/gpu_check by default). The exit
# status is not zero if a test or a timing failed.
set -u
cd "$(dirname "$0")/.."
build=1 tests=1 timings=1 quick=0 out=build/gpu_check
while [[ $# -gt 0 ]]; do
  case $1 in
    --no-build) build=0 ;;
    --no-tests) tests=0 ;;
    --no-timings) timings=0 ;;
    --quick) quick=1 ;;
    --out) out=$2; shift ;;
    *) echo "usage: see the top of $0" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
status=0

if [[ $build -eq 1 ]]; then
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1)
  {
    MOE_EP_CUDA_ARCHS=$arch cmake -S . -B build/gpu -G Ninja -DPython_EXECUTABLE="$(command -v python3)" &&
      cmake --build build/gpu && cmake --install build/gpu --prefix moe_ep
  } >"$out/build.log" 2>&1 || { tail -30 "$out/build.log"; exit 1; }
  echo "built for $arch"
fi

if [[ $tests -eq 1 ]]; then
  python3 -m pytest tests/gpu -q -x --no-header --durations=8 -p no:cacheprovider 2>&1 | tee "$out/tests.log"
  status=${PIPESTATUS[0]}
fi

# ranks, SMs per rank, hidden, top-k, experts, more flags
shapes=(
  "1 132 7168 8 256 --fp8"
  "8 16 7168 8 256 --fp8"
  "1 24 7168 8 256"
  "8 16 4096 2 8"
  "2 24 7168 8 256"
  "4 24 7168 8 256"
  "4 24 4096 2 8"
  "1 132 4096 2 8"
  "8 16 7168 8 256 --exact"
)
if [[ $quick -eq 1 ]]; then shapes=("${shapes[@]:0:4}"); fi
if [[ $timings -eq 1 ]]; then
  : >"$out/timings.jsonl"
  for shape in "${shapes[@]}"; do
    # shellcheck disable=SC2086
    set -- $shape
    timeout 120 scripts/with_mps.sh "$1" python3 tests/gpu/timing.py --num-sms "$2" --hidden "$3" \
      --top-k "$4" --experts "$5" "${@:6}" 2>"$out/timing_stderr.log" | tee -a "$out/timings.jsonl"
    if [[ ${PIPESTATUS[0]} -ne 0 ]]; then
      echo "timing failed: $shape"
      tail -5 "$out/timing_stderr.log"
      status=1
    fi
  done
fi
exit "$status"
