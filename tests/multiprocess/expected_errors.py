"""What every rank must raise when one of them gives bad input."""

from __future__ import annotations

from collections.abc import Callable

from moe_ep import PeerError


def expect(
    rank: int,
    bad: int,
    name: str,
    action: Callable[[], object],
    kind: type[Exception],
    parts: tuple[str, ...],
) -> None:
    """`kind` on rank `bad`, a PeerError that names both ranks on the others; all quote `parts`."""
    try:
        action()
    except Exception as error:
        assert type(error) is (kind if rank == bad else PeerError), f"{name}: {error!r}"
        assert all(part in str(error) for part in parts), f"{name}: {error}"
        named = () if rank == bad else (f"rank {bad}", f"rank {rank}")
        assert all(part in str(error) for part in named), f"{name}: {error}"
        return
    raise AssertionError(f"{name}: no error on rank {rank}")
