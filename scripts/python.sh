# Sourced. choose_python "EXTRA ..." MODULE ...
#
# Sets `python` to that of .venv, which setup.sh makes with the extras. Where there is no .venv and
# python3 has all the modules, it is python3 with this checkout, and nothing is installed.
choose_python() {
    local root extras=$1
    shift
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    local path=$root${PYTHONPATH:+:$PYTHONPATH}
    local has_all='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))'
    if [ ! -x "$root/.venv/bin/python" ] &&
        PYTHONPATH=$path python3 -c "$has_all" "$@" 2>/dev/null; then
        export PYTHONPATH=$path
        python=python3
        return
    fi
    # shellcheck disable=SC2086
    bash "$root/scripts/setup.sh" $extras
    python=$root/.venv/bin/python
}
