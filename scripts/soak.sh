#!/usr/bin/env bash
# Trains while ranks stall and die, and holds it against a quiet training:  bash scripts/soak.sh --help
# Needs no network where python3 has torch, pydantic and megatron.core, as beside a GPU.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

python=$here/../.venv/bin/python
if [ ! -x "$python" ]; then
    python=python3
fi
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

ready() {
    PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH} "$python" -c \
        'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "$@" 2>/dev/null
}
if [ -z "$help" ] && { [ "$python" != python3 ] || ! ready torch pydantic yaml megatron; }; then
    bash "$here/setup.sh" megatron plot
    python=$here/../.venv/bin/python
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
