#!/usr/bin/env bash
# Trains while ranks stall and die, and holds it against a quiet training:  bash scripts/soak.sh --help
# Needs no network where python3 has torch, pydantic and megatron.core, as beside a GPU.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/python.sh"

mode=training
previous=
help=
for argument in "$@"; do
    case $argument in
        --mode=*) mode=${argument#*=} ;;
        -h | --help) help=1 ;;
        *) if [ "$previous" = --mode ]; then mode=$argument; fi ;;
    esac
    previous=$argument
done

if [ -z "$help" ]; then
    choose_python "megatron plot" torch pydantic yaml tqdm megatron.core
elif [ -x "$here/../.venv/bin/python" ]; then # --help needs nothing installed
    python=$here/../.venv/bin/python
else
    python=python3
fi
if [ "$mode" = low_latency ]; then
    arguments=()
    previous=
    for argument in "$@"; do # all but --mode low_latency
        if [ "$argument" != --mode ] && [ "$argument" != --mode=low_latency ] && [ "$previous" != --mode ]; then
            arguments+=("$argument")
        fi
        previous=$argument
    done
    exec "$python" "$here/soak_low_latency.py" "${arguments[@]}"
fi
exec "$python" "$here/soak" "$@"
