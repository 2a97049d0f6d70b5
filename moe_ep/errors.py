"""The errors of moe_ep. Each message gives the value, the limit, and what to do."""

from __future__ import annotations


class MoEEPError(Exception):
    """Base of all errors raised by moe_ep."""


class LayoutError(MoEEPError, ValueError):
    """An EP layout is invalid, or does not fit the process group it is used with."""


class LayoutMismatchError(LayoutError):
    """Ranks of one group were given different layouts (raised on all of them)."""


class BackendUnavailableError(MoEEPError, RuntimeError):
    """A backend was asked for by name and cannot run here."""


class CapacityError(MoEEPError, RuntimeError):
    """More rows were routed to a rank than `dispatch.capacity` allows (raised on all ranks)."""


class PeerError(MoEEPError, RuntimeError):
    """Another rank reported bad input in the operation this rank also takes part in."""


class PeerTimeoutError(MoEEPError, TimeoutError):
    """A peer did not take part in an operation in time, or its connection was lost."""


class OrderError(MoEEPError, RuntimeError):
    """Ranks are in different operations, or a call came out of turn on this rank."""


class BrokenError(MoEEPError, RuntimeError):
    """The object was used after `destroy()` or after a communication fault."""
