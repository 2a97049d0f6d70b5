#!/usr/bin/env bash
# Trains a small Mixtral with expert parallelism on any machine:  bash scripts/train_mixtral.sh --help
# Needs no network where python3 has torch, pydantic and the framework, and, beside a GPU, a built core.
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

source "$here/python.sh"
modules=(torch pydantic yaml tqdm)
if compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
    modules+=(moe_ep._C)
fi
case $framework in
    deepspeed) choose_python "deepspeed plot" "${modules[@]}" deepspeed ;;
    *) choose_python "megatron plot" "${modules[@]}" megatron.core ;; # the parser knows no others
esac
exec "$python" "$here/train_mixtral.py" "$@"
