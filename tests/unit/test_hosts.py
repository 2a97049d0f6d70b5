"""Ranks on hosts, the order of peers, and the transport between hosts."""

from __future__ import annotations

import re

import pytest

from moe_ep.backends import nvshmem_transport
from moe_ep.backends.hosts import Hosts, number_hosts, staggered
from moe_ep.errors import BackendUnavailableError
from moe_ep.layout import InternodeOptions


def test_staggered_worked_by_hand() -> None:
    assert staggered(0, 4) == [1, 2, 3]
    assert staggered(2, 4) == [3, 0, 1]
    assert staggered(0, 1) == []
    assert staggered(1, 2) == [0]


@pytest.mark.parametrize("n", [2, 3, 5, 8, 17])
def test_staggered_aims_at_no_target_twice(n: int) -> None:
    orders = [staggered(me, n) for me in range(n)]
    for me, order in enumerate(orders):
        assert sorted([*order, me]) == list(range(n))
    for step in range(n - 1):
        assert len({order[step] for order in orders}) == n, step


def test_numbers_worked_by_hand() -> None:
    hosts = Hosts(rank=4, num_ranks=6, ranks_per_host=2)  # ranks 0 1 | 2 3 | 4 5
    assert (hosts.num_hosts, hosts.host, hosts.local) == (3, 2, 0)
    assert [hosts.host_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [hosts.local_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert hosts.rank_of(1, 1) == 3
    assert [hosts.same_host(rank) for rank in range(6)] == [False] * 4 + [True] * 2
    assert hosts.rail_peers() == [0, 2]
    assert Hosts(rank=3, num_ranks=6, ranks_per_host=2).rail_peers() == [5, 1]


@pytest.mark.parametrize(("hosts", "each"), [(1, 1), (1, 4), (2, 2), (3, 1), (2, 8)])
def test_machines_are_hosts(hosts: int, each: int) -> None:
    ids = [f"id{host}" for host in range(hosts) for _ in range(each)]
    for rank in range(hosts * each):
        found = number_hosts(rank, ids, ids)
        assert found == Hosts(rank, hosts * each, each)
        assert found.num_hosts == hosts and not found.simulated


def test_simulated_hosts_are_parts_of_a_machine() -> None:
    found = number_hosts(5, ["a"] * 6, ["a"] * 6, simulated=2)
    assert found == Hosts(5, 6, 2, simulated=True)
    two = ["a"] * 4 + ["b"] * 4
    assert number_hosts(0, two, two, simulated=2).num_hosts == 4


@pytest.mark.parametrize(
    ("ids", "simulated", "parts"),
    [
        ("aab", None, ["different numbers", "2 on host-a", "1 on host-b", "reference"]),
        ("aabbb", None, ["2 on host-a", "3 on host-b"]),
        ("aaa", 2, ["MOE_EP_RANKS_PER_HOST=2", "2 on host 0", "1 on host 1"]),
        ("abab", None, ["in a row", "rank 1 on host-b"]),
        ("aabb", 3, ["MOE_EP_RANKS_PER_HOST=3", "2 machines", "host 0"]),
    ],
)
def test_what_does_not_fit_is_said(ids: str, simulated: int | None, parts: list[str]) -> None:
    for rank in range(len(ids)):
        with pytest.raises(BackendUnavailableError) as caught:
            number_hosts(rank, list(ids), [f"host-{id}" for id in ids], simulated)
        for part in parts:
            assert part in str(caught.value)


ADAPTERS, NONE = True, False
OPTIONS = InternodeOptions()


@pytest.mark.parametrize(
    ("options", "variables", "adapters", "name"),
    [
        (OPTIONS, {}, NONE, "p2p"),
        (OPTIONS, {}, ADAPTERS, "ibrc"),
        (OPTIONS, {"NVSHMEM_IB_ENABLE_IBGDA": "1"}, ADAPTERS, "ibgda"),
        (OPTIONS, {"NVSHMEM_IB_ENABLE_IBGDA": "true"}, ADAPTERS, "ibgda"),
        (OPTIONS, {"NVSHMEM_IB_ENABLE_IBGDA": "0"}, ADAPTERS, "ibrc"),
        (OPTIONS, {"NVSHMEM_IB_ENABLE_IBGDA": "1"}, NONE, "p2p"),
        (OPTIONS, {"NVSHMEM_REMOTE_TRANSPORT": "none"}, ADAPTERS, "p2p"),
        (OPTIONS, {"NVSHMEM_REMOTE_TRANSPORT": "libfabric"}, NONE, "libfabric"),
        (OPTIONS, {"NVSHMEM_REMOTE_TRANSPORT": "ibdevx"}, ADAPTERS, "ibdevx"),
        (InternodeOptions(transport="ibgda"), {}, ADAPTERS, "ibgda"),
        (InternodeOptions(transport="p2p"), {}, ADAPTERS, "p2p"),
        (InternodeOptions(transport="ibrc"), {}, ADAPTERS, "ibrc"),
        # A variable that is set wins.
        (InternodeOptions(transport="ibgda"), {"NVSHMEM_IB_ENABLE_IBGDA": "0"}, ADAPTERS, "ibrc"),
        (
            InternodeOptions(transport="p2p"),
            {"NVSHMEM_REMOTE_TRANSPORT": "ibrc"},
            ADAPTERS,
            "ibrc",
        ),
    ],
)
def test_transport(
    options: InternodeOptions, variables: dict[str, str], adapters: bool, name: str
) -> None:
    chosen = nvshmem_transport.choose(options, variables, adapters)
    assert chosen.name == name and chosen.why
    assert (chosen.problem is not None) == (name == "p2p")
    assert not set(chosen.variables) & set(variables), "what is set stays"
    seen_by_nvshmem = {**chosen.variables, **variables}
    if name == "p2p":
        assert seen_by_nvshmem["NVSHMEM_REMOTE_TRANSPORT"] in ("none", "libfabric")
    if name == "ibgda":
        assert seen_by_nvshmem["NVSHMEM_IB_ENABLE_IBGDA"] in ("1", "true")


def test_only_what_the_layout_asks_for_is_set() -> None:
    assert nvshmem_transport.choose(OPTIONS, {}, ADAPTERS).variables == {
        "NVSHMEM_DISABLE_NVLS": "1"
    }
    options = InternodeOptions(ibgda_qp_depth=512, ib_sl=3)
    asked = nvshmem_transport.choose(options, {}, ADAPTERS).variables
    assert asked["NVSHMEM_QP_DEPTH"] == "512" and asked["NVSHMEM_IB_SL"] == "3"
    variables = {"NVSHMEM_QP_DEPTH": "64", "NVSHMEM_IB_SL": "1"}
    assert set(nvshmem_transport.choose(options, variables, ADAPTERS).variables) == {
        "NVSHMEM_DISABLE_NVLS"
    }


def test_the_old_name_of_the_queue_depth_is_passed_on() -> None:
    variables = {"NVSHMEM_IBGDA_QP_DEPTH": "1024"}
    for options in (OPTIONS, InternodeOptions(ibgda_qp_depth=512)):
        asked = nvshmem_transport.choose(options, variables, ADAPTERS).variables
        assert asked["NVSHMEM_QP_DEPTH"] == "1024"


@pytest.mark.parametrize("name", ["MOE_EP_RANKS_PER_HOST", "DEEP_EP_NUM_MAX_RDMA_TOKENS"])
def test_numbers_in_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from moe_ep import env

    read = env.ranks_per_host if name == env.RANKS_PER_HOST else env.max_rdma_tokens
    monkeypatch.delenv(name, raising=False)
    assert read() is None
    monkeypatch.setenv(name, "12")
    assert read() == 12
    for text in ("0", "-1", "two", "1.5"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=re.escape(f"{name}={text!r}")):
            read()


def test_form_of_low_latency_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_ep import env

    monkeypatch.delenv(env.LOW_LATENCY_FORM, raising=False)
    assert env.low_latency_form() is None
    for form in ("layered", "slots"):
        monkeypatch.setenv(env.LOW_LATENCY_FORM, form)
        assert env.low_latency_form() == form
    monkeypatch.setenv(env.LOW_LATENCY_FORM, "Layered")
    with pytest.raises(ValueError, match="MOE_EP_LOW_LATENCY_FORM='Layered' is neither"):
        env.low_latency_form()
