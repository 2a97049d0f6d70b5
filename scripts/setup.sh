#!/usr/bin/env bash
# Makes .venv in the checkout with everything the scripts need. Run again, it starts at once.
#
#   bash scripts/setup.sh [EXTRA ...]      extras of setup.cfg: megatron deepspeed nvshmem nvshmem-cu12
#                                          plot test
#
# PYTHON=... names the interpreter to build on (default: the first of 3.11, 3.12, 3.13, 3.10, or
# python3). pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) hold as usual;
# TORCH_INDEX_URL names an index for torch alone, such as PyTorch's index of CPU builds.

setup_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
setup_venv=$setup_root/.venv
setup_torch=torch==2.13.0

setup_fail() {
    echo "setup: $*" >&2
    exit 1
}

# Runs one step: prints what and how long, and the command's output only if it fails.
setup_step() {
    local what=$1 begin=$SECONDS log
    shift
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        setup_fail "$what failed: $*"
    fi
    rm -f "$log"
    echo "setup: $what ($((SECONDS - begin)) s)"
}

# The first Python that is new enough and can make a virtual environment.
setup_find_python() {
    local python found=
    for python in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3 python}; do
        command -v "$python" >/dev/null || continue
        # A version manager's stub may exist without the version behind it: ask it.
        "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' 2>/dev/null || {
            found+=" $python ($("$python" -c 'import platform; print(platform.python_version())' \
                2>/dev/null || echo "can't start"))"
            continue
        }
        "$python" -c 'import ensurepip, venv' 2>/dev/null || {
            found+=" $python (no venv module: install python3-venv)"
            continue
        }
        echo "$python"
        return
    done
    setup_fail "no usable Python: 3.10 or newer with venv is needed; found:${found:- none}." \
        "Install one, or name it: PYTHON=/path/to/python bash scripts/setup.sh"
}

# Whether this Python has a torch that sees a GPU: then it is reused, it may be built for this host.
setup_has_gpu_torch() {
    "$1" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null
}

setup_hash() {
    cat "$setup_root/setup.cfg" "$setup_root/scripts/setup.sh" | cksum | tr ' ' -
}

setup_main() {
    local stamp=$setup_venv/.setup-stamp extra extras known wanted python
    known=$(sed -n '/^\[options.extras_require\]/,/^\[/s/^\([a-z0-9-]*\) =.*/\1/p' "$setup_root/setup.cfg")
    for extra in "$@"; do
        case $extra in
        -h | --help)
            sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            return
            ;;
        esac
        grep -qxF -e "$extra" <<<"$known" || setup_fail "no extra $extra; there are:" $known
    done
    extras=$(printf '%s\n' "$@" | sort -u | paste -sd, -)
    # What an earlier run has installed stays installed: the stamp holds one line per set of extras.
    wanted="$(setup_hash) $extras"
    if [ -f "$stamp" ] && grep -qxF "$wanted" "$stamp" && [ -x "$setup_venv/bin/python" ]; then
        return
    fi
    if [ ! -x "$setup_venv/bin/python" ]; then
        python=$(setup_find_python) || exit 1
        local flags=()
        if setup_has_gpu_torch "$python"; then
            flags=(--system-site-packages)
        fi
        setup_step ".venv with $("$python" -V) ${flags[*]}" "$python" -m venv "${flags[@]}" "$setup_venv"
    fi
    python=$setup_venv/bin/python
    if ! setup_has_gpu_torch "$python"; then
        # First, and by exact version: what is installed later must not choose another build.
        setup_step "$setup_torch" "$python" -m pip install \
            ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$setup_torch"
    fi
    # Compiling the CUDA core takes minutes: without a driver nothing could run it.
    if [ -z "${MOE_EP_BUILD_CUDA:-}" ] &&
        ! "$python" -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null; then
        export MOE_EP_BUILD_CUDA=0
    fi
    setup_step "moe_ep${extras:+[$extras]}" "$python" -m pip install -e "$setup_root${extras:+[$extras]}"
    # A stamp of other versions of these files says nothing about the present ones.
    { grep -s "^$(setup_hash) " "$stamp"; echo "$wanted"; } >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

setup_main "$@"
