#!/usr/bin/env bash
# Runs N ranks of a command on one GPU, under an MPS server of their own.
#
#   scripts/with_mps.sh N CMD [ARG...]
#   scripts/with_mps.sh -- CMD [ARG...]      CMD starts its ranks itself, as torchrun does
#
# Every rank gets RANK, LOCAL_RANK (0), WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Without MPS,
# processes that share a GPU take turns of milliseconds, and kernels that wait for each other crawl.
# MPS is started in fresh folders and stopped whatever happens. The exit status is that of the first
# rank that failed, or of CMD.
set -u

if [[ $# -lt 2 || ! $1 =~ ^([1-9][0-9]*|--)$ ]]; then
  echo "usage: $0 N|-- CMD [ARG...]" >&2
  exit 2
fi
num_ranks=$1
shift

if ! command -v nvidia-cuda-mps-control >/dev/null; then
  echo "$0: nvidia-cuda-mps-control is not on the PATH; it comes with the NVIDIA driver" >&2
  exit 2
fi

folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
pids=()

stop() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null; done
  echo quit -t 5 | timeout 20 nvidia-cuda-mps-control >/dev/null 2>&1
  rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT TERM

nvidia-cuda-mps-control -d || exit 1

if [[ $num_ranks == -- ]]; then
  "$@" &
  pids=($!)
  wait "${pids[0]}"
  status=$?
  pids=()
  exit "$status"
fi

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
for ((rank = 0; rank < num_ranks; rank++)); do
  RANK=$rank LOCAL_RANK=0 WORLD_SIZE=$num_ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$@" &
  pids+=($!)
done

status=0
for pid in "${pids[@]}"; do
  wait "$pid"
  result=$?
  if [[ $status -eq 0 ]]; then status=$result; fi
done
pids=()
exit "$status"
