"""File descriptors between the processes of one host, over UNIX-domain sockets (SCM_RIGHTS).

Every rank listens on a socket of its own, tells the others its address by some other way, and then
each sends its descriptor to all: no rank waits for another before it has sent everything.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence

_HEADER = struct.Struct("16sI")  # the receiver's key, the sender's rank
_BACKLOG = 128  # more than a host has ranks: connecting never waits for an accept


class FdExchangeError(Exception):
    """Some peers' descriptors did not come. `problems`: one text per rank, empty where all went
    well; none of the descriptors that did come is left open."""

    def __init__(self, problems: list[str]) -> None:
        first = next(rank for rank, text in enumerate(problems) if text)
        super().__init__(f"rank {first}: {problems[first]}")
        self.problems = problems


class FdExchange:
    """One rank's end of an exchange; a context manager.

    Its socket has a random name in the abstract namespace: nothing lies in a file system, and
    nothing is left when the process dies. Messages without the key in `address` are ignored.
    All ranks must be in one network namespace.

    Args:
        rank, size: of the group that exchanges.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._key = secrets.token_bytes(16)
        name = f"moe_ep-{secrets.token_hex(16)}"
        self._listener = _socket()
        try:
            self._listener.bind("\0" + name)
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self.address = f"{name} {self._key.hex()}"
        """What peers need to send to this rank: ASCII, less than 100 letters."""

    def __enter__(self) -> FdExchange:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._listener.close()

    def exchange(self, fd: int, addresses: Sequence[str], timeout_s: float) -> dict[int, int]:
        """Sends `fd`, which stays open, to every peer, and receives theirs.

        Args:
            addresses: of every rank, by rank. timeout_s: for everything together.

        Returns:
            A new descriptor per peer; the caller closes them.

        Raises:
            FdExchangeError: some peer can't be reached, or sent nothing in time.
        """
        deadline = time.monotonic() + timeout_s
        problems = [""] * self._size
        for i in range(1, self._size):
            peer = (self._rank + i) % self._size
            problems[peer] = self._send(fd, addresses[peer], deadline)
        # A peer that can't be reached is not waited for, the others are: they may send later.
        wanted = {p for p in range(self._size) if p != self._rank and not problems[p]}
        received: dict[int, int] = {}
        try:
            num_strangers = self._receive(wanted, received, deadline)
        except BaseException:
            _close_all(received)
            raise
        for peer in wanted - set(received):
            problems[peer] = f"it sent no file descriptor within {timeout_s:g} s"
            if num_strangers:
                problems[peer] += f"; {num_strangers} messages that are no peer's were ignored"
        if any(problems):
            _close_all(received)
            raise FdExchangeError(problems)
        return received

    def _send(self, fd: int, address: str, deadline: float) -> str:
        """Why it failed; empty if it didn't."""
        name, _, key = address.partition(" ")
        try:
            with _socket() as connection:
                connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                connection.connect("\0" + name)
                message = _HEADER.pack(bytes.fromhex(key), self._rank)
                socket.send_fds(connection, [message], [fd])
        except ConnectionRefusedError:
            return (
                "nobody listens on its UNIX socket: its process has ended, or is in another "
                "network namespace"
            )
        except (OSError, ValueError) as error:
            return f"a file descriptor cannot be sent to it: {error}"
        return ""

    def _receive(self, wanted: set[int], received: dict[int, int], deadline: float) -> int:
        """Fills `received` until it has all of `wanted`; returns how many messages were not theirs.

        A connection that says nothing holds nobody up.
        """
        num_strangers = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while wanted - set(received):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    for key, _ in selector.select(left):
                        ready = key.fileobj
                        assert isinstance(ready, socket.socket)
                        if ready is self._listener:
                            connection, _ = ready.accept()
                            selector.register(connection, selectors.EVENT_READ)
                            continue
                        selector.unregister(ready)
                        with ready:
                            num_strangers += not self._take(ready, received)
            finally:
                for key in list(selector.get_map().values()):
                    if key.fileobj is not self._listener:
                        assert isinstance(key.fileobj, socket.socket)
                        key.fileobj.close()
        return num_strangers

    def _take(self, connection: socket.socket, received: dict[int, int]) -> bool:
        """Takes the one message of a connection; false where it is no peer's."""
        try:
            message, fds, _, _ = socket.recv_fds(connection, _HEADER.size + 1, 1)
        except OSError:
            return False
        key, rank = _HEADER.unpack(message) if len(message) == _HEADER.size else (b"", -1)
        peers = set(range(self._size)) - {self._rank} - set(received)
        if not secrets.compare_digest(key, self._key) or rank not in peers or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            return False
        received[rank] = fds[0]
        return True


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _close_all(fds: dict[int, int]) -> None:
    for fd in fds.values():
        os.close(fd)
    fds.clear()
