#!/usr/bin/env bash
# Everything there is to know of several GPUs of one host, in one call of at most ten minutes:
# topology and peer bandwidth, the GPU tests on real peers, benchmarks of both models against NCCL and
# Megatron's permute, low-latency mode, and Mixtral steps with either dispatcher.
#   bash scripts/bench_multi_gpu.sh --help
#   bash scripts/bench_multi_gpu.sh --out runs/multi_gpu      tables there, and all figures as JSON
#   bash scripts/bench_multi_gpu.sh --shared 4 --only topology,bandwidth,bench     rehearsal on one GPU
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Multicast adds nothing here, and a fault in it can take a host's GPUs out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

python=python3
# Help needs Python alone; where there is no GPU, multi_gpu.py says so before any set-up.
if [[ " $* " != *" --help "* && " $* " != *" -h "* ]] && compgen -G "/dev/nvidia[0-9]*" >/dev/null &&
    ! python3 -c 'import torch, pydantic, pytest, pybind11' 2>/dev/null; then
    MOE_EP_BUILD_CUDA=0 bash "$root/scripts/setup.sh" megatron test # the build step compiles the core
    source "$root/.venv/bin/activate"
    python=python
fi
exec "$python" "$root/tests/gpu/multi_gpu.py" "$@"
