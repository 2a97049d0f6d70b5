"""`python -m moe_ep` is the command `moe-ep`."""

import sys

from moe_ep.cli import main

if __name__ == "__main__":
    sys.exit(main())
