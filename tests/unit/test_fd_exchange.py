"""Descriptors of ordinary files between ranks that are threads of this process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_ep import env
from moe_ep.backends.fd_exchange import FdExchange, FdExchangeError


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def file_with(text: str) -> int:
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


def content(fd: int) -> str:
    return os.pread(fd, 100, 0).decode()


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


class Ranks:
    """Ends of one exchange, and a file of each rank."""

    def __init__(self, size: int) -> None:
        self.ends = [FdExchange(rank, size) for rank in range(size)]
        self.addresses = [end.address for end in self.ends]
        self.files = [file_with(f"file of rank {rank}") for rank in range(size)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()
        for fd in self.files:
            os.close(fd)

    def run(self, rank: int, timeout_s: float) -> tuple[dict[int, str], list[str]]:
        """What `rank` reads in the files it was sent, and its problems."""
        try:
            fds = self.ends[rank].exchange(self.files[rank], self.addresses, timeout_s)
        except FdExchangeError as error:
            return {}, error.problems
        texts = {peer: content(fd) for peer, fd in fds.items()}
        for fd in fds.values():
            assert fd not in self.files
            os.close(fd)
        return texts, []

    def run_all(self, ranks: list[int], timeout_s: float) -> list[tuple[dict[int, str], list[str]]]:
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(lambda rank: self.run(rank, timeout_s), ranks))


def stranger(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + address.split()[0])
    return connection


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
def test_every_rank_gets_every_file(size: int) -> None:
    with Ranks(size) as ranks:
        for rank, (texts, problems) in enumerate(ranks.run_all(list(range(size)), 10.0)):
            assert problems == []
            assert texts == {p: f"file of rank {p}" for p in range(size) if p != rank}


def test_addresses_fit_a_message_and_differ() -> None:
    with Ranks(4) as ranks:
        assert len(set(ranks.addresses)) == 4
        assert all(len(address) < 100 and address.isascii() for address in ranks.addresses)


def test_a_silent_peer_is_named_in_time() -> None:
    with Ranks(3) as ranks:
        started = time.monotonic()
        for texts, problems in ranks.run_all([0, 2], 0.5):
            assert texts == {} and problems[0] == problems[2] == ""
            assert "no file descriptor within 0.5 s" in problems[1]
        assert 0.4 < time.monotonic() - started < 10


def test_a_dead_peer_is_named_at_once() -> None:
    with Ranks(3) as ranks:
        ranks.ends[1].close()
        started = time.monotonic()
        for _texts, problems in ranks.run_all([0, 2], 30.0):
            assert "nobody listens" in problems[1]
            assert problems[0] == problems[2] == ""
        assert time.monotonic() - started < 15


def test_a_late_peer_is_waited_for() -> None:
    with Ranks(2) as ranks, ThreadPoolExecutor(1) as pool:
        early = pool.submit(ranks.run, 0, 20.0)
        time.sleep(0.3)
        assert not early.done()
        assert ranks.run(1, 20.0) == ({0: "file of rank 0"}, [])
        assert early.result() == ({1: "file of rank 1"}, [])


def test_wrong_keys_ranks_and_silent_strangers_do_no_harm() -> None:
    with Ranks(2) as ranks:
        key = bytes.fromhex(ranks.addresses[0].split()[1])
        rank_1, rank_0, rank_9 = ((n).to_bytes(4, "little") for n in (1, 0, 9))
        bad = file_with("not what rank 0 wants")
        strangers = [stranger(ranks.addresses[0]) for _ in range(7)]
        for connection, message in zip(
            strangers,
            [bytes(16) + rank_1, key + rank_0, key + rank_9, key, key + rank_1 + b"more", b""],
            strict=False,  # the last one says nothing
        ):
            if message:
                socket.send_fds(connection, [message], [bad, bad])
            else:
                connection.close()
        os.close(bad)
        assert ranks.run_all([0, 1], 10.0) == [
            ({1: "file of rank 1"}, []),
            ({0: "file of rank 0"}, []),
        ]
        for connection in strangers:
            connection.close()


def test_strangers_are_counted_in_the_error() -> None:
    with Ranks(2) as ranks:
        with stranger(ranks.addresses[0]) as connection:
            connection.send(bytes(20))
            _texts, problems = ranks.run(0, 0.3)
        assert "1 messages that are no peer's were ignored" in problems[1]


def test_a_second_message_of_the_same_rank_is_ignored() -> None:
    with Ranks(3) as ranks, ThreadPoolExecutor(3) as pool:
        first = pool.submit(ranks.run, 0, 20.0)
        assert ranks.run(1, 0.3)[1][2] != ""  # has sent to rank 0, gives up on rank 2
        again, ranks.files[1] = ranks.files[1], file_with("the second file of rank 1")
        os.close(again)
        assert ranks.run(1, 0.3)[1][2] != ""
        assert ranks.run(2, 20.0)[0][0] == "file of rank 0"
        assert first.result()[0] == {1: "file of rank 1", 2: "file of rank 2"}


def test_a_message_without_a_file_is_ignored() -> None:
    with Ranks(2) as ranks:
        key = bytes.fromhex(ranks.addresses[0].split()[1])
        with stranger(ranks.addresses[0]) as connection:
            connection.send(key + (1).to_bytes(4, "little"))
            _texts, problems = ranks.run(0, 0.3)
        assert "no file descriptor" in problems[1]


def test_what_is_no_file_is_an_error_of_every_pair() -> None:
    with Ranks(2) as ranks:
        with pytest.raises(FdExchangeError) as raised:
            ranks.ends[0].exchange(1 << 30, ranks.addresses, 0.3)
        assert "cannot be sent to it" in raised.value.problems[1]
        assert "rank 1" in str(raised.value)


def test_many_exchanges_at_once() -> None:
    """Exchanges of several objects in one process do not meet."""
    errors: list[str] = []

    def one(number: int) -> None:
        with Ranks(3) as ranks:
            for rank, (texts, problems) in enumerate(ranks.run_all([0, 1, 2], 20.0)):
                if problems or len(texts) != 2 or rank in texts:
                    errors.append(f"{number}: {rank} {texts} {problems}")

    threads = [threading.Thread(target=one, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("text", ["", "auto", "ipc", "fd"])
def test_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(env.MEMORY, text)
    assert env.memory() == (text or "auto")
    monkeypatch.delenv(env.MEMORY)
    assert env.memory() == "auto"


@pytest.mark.parametrize("text", ["IPC", "vmm", "ipc,fd"])
def test_a_bad_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(env.MEMORY, text)
    with pytest.raises(ValueError, match=f"{env.MEMORY}='{text}' is none of auto, ipc, fd"):
        env.memory()
