"""python -m moe_ep.integrations.megatron [--moe-ep-layout FILE] [--moe-ep-backend NAME] SCRIPT ARGS

Runs a Megatron training script (such as pretrain_gpt.py) with moe_ep installed, so that
`--moe-token-dispatcher-type deepep` works on its command line. Our two options may stand anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_ep.errors import LayoutError
from moe_ep.integrations.megatron import DISPATCHER_TYPE, install, uninstall
from moe_ep.layout import BACKENDS

_TYPE_OPTION = "--moe-token-dispatcher-type"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moe_ep.integrations.megatron",
        description="Run a Megatron script with moe_ep's token dispatcher available.",
        usage="%(prog)s [--moe-ep-layout FILE] [--moe-ep-backend NAME] SCRIPT ARGS...",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "--moe-ep-layout",
        help="EP layout (YAML); default: $MOE_EP_LAYOUT, or the model's own shape",
    )
    parser.add_argument(
        "--moe-ep-backend",
        choices=BACKENDS,
        metavar="NAME",
        help="auto, reference, cuda or nvshmem; default: the layout's",
    )
    options, rest = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if not rest or rest[0] in ("-h", "--help"):
        parser.print_help()
        sys.exit(0 if rest else 2)
    script = rest[0]
    if not Path(script).is_file():
        parser.error(f"{script}: no such script; it comes before its own arguments")
    try:
        install(options.moe_ep_layout, options.moe_ep_backend)
    except LayoutError as error:
        parser.error(str(error))
    sys.argv = rest
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with _accepting_our_type():
            runpy.run_path(script, run_name="__main__")
    finally:
        uninstall()


@contextlib.contextmanager
def _accepting_our_type() -> Iterator[None]:
    """Adds our type to the choices of Megatron's option, however the script declares it."""
    container = argparse._ActionsContainer
    original = container.add_argument

    def add_argument(self: Any, *names: Any, **options: Any) -> argparse.Action:
        if _TYPE_OPTION in names and options.get("choices"):
            options["choices"] = [*options["choices"], DISPATCHER_TYPE]
        return original(self, *names, **options)

    container.add_argument = add_argument  # type: ignore[method-assign]
    try:
        yield
    finally:
        container.add_argument = original  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
