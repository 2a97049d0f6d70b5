"""The errors of moe_ep. Each message gives the value, the limit, and what to do."""

from __future__ import annotations

from typing import ClassVar

_PAGE = "docs/troubleshooting.md"


class MoEEPError(Exception):
    """Base of all errors raised by moe_ep. The text ends with where to read more.

    Attributes:
        anchor: the section of docs/troubleshooting.md on this kind of error.
    """

    anchor: ClassVar[str] = ""

    def __str__(self) -> str:
        text = super().__str__()
        if not self.anchor or f"{_PAGE}#" in text:  # a quoted error has told already
            return text
        return f"{text} [{_PAGE}#{self.anchor}]"


class LayoutError(MoEEPError, ValueError):
    """An EP layout is invalid, or does not fit the process group it is used with."""

    anchor = "layout"


class LayoutMismatchError(LayoutError):
    """Ranks of one group were given different layouts (raised on all of them)."""

    anchor = "layout-mismatch"


class BackendUnavailableError(MoEEPError, RuntimeError):
    """A backend was asked for by name and cannot run here."""

    anchor = "backend-unavailable"


class CapacityError(MoEEPError, RuntimeError):
    """More rows were routed to a rank than `dispatch.capacity`, or a Buffer's `num_worst_tokens`,
    allows (raised on all ranks)."""

    anchor = "capacity"


class PeerError(MoEEPError, RuntimeError):
    """Another rank reported bad input in the operation this rank also takes part in."""

    anchor = "peer-error"


class PeerTimeoutError(MoEEPError, TimeoutError):
    """A peer did not take part in an operation in time, or its connection was lost."""

    anchor = "peer-timeout"


class OrderError(MoEEPError, RuntimeError):
    """Ranks are in different operations, or a call came out of turn on this rank."""

    anchor = "order"


class BrokenError(MoEEPError, RuntimeError):
    """The object was used after `destroy()` or after a communication fault."""

    anchor = "broken"
