#!/usr/bin/env bash
# Trains a small Mixtral with expert parallelism on any machine:  bash scripts/train_mixtral.sh --help
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
framework=megatron
previous=
for argument in "$@"; do
    case $argument in
        --) break ;;
        -h | --help)
            # Needs nothing installed.
            for python in "$here/../.venv/bin/python" python3.11 python3.12 python3.13 python3; do
                "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' 2>/dev/null &&
                    exec "$python" "$here/train_mixtral.py" --help
            done
            echo "train_mixtral: --help needs Python 3.10 or newer" >&2
            exit 1
            ;;
        --framework=*) framework=${argument#*=} ;;
        *) [ "$previous" = --framework ] && framework=$argument ;;
    esac
    previous=$argument
done

case $framework in
    megatron | deepspeed) bash "$here/setup.sh" "$framework" plot ;;
    *) ;; # the parser says what is allowed
esac
if [ ! -x "$here/../.venv/bin/python" ]; then
    bash "$here/setup.sh" megatron plot
fi
exec "$here/../.venv/bin/python" "$here/train_mixtral.py" "$@"
