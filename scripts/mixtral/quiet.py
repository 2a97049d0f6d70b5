"""Keeps the frameworks' start-up notes off the terminal: a run shows its own lines only."""

from __future__ import annotations

import logging
import warnings


def quiet() -> None:
    """Silences notes that call for no action. Errors, and warnings of this project, stay."""
    for category in (UserWarning, FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(megatron|torch)\b.*")
    # Told when a file is compiled, before it has a module name to filter by.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
