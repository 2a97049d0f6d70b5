"""csrc/shared/rail_layout.h on the CPU: regions that never meet, inboxes of fixed size."""

from __future__ import annotations

import random
from dataclasses import astuple, dataclass

import csrc_programs
import pytest
from csrc_programs import Ask

LINE_BYTES = 128  # of the L2 cache
FLOAT_BYTES = 4


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    return csrc_programs.build("rail_layout.cpp", tmp_path_factory.mktemp("csrc"))


@dataclass(frozen=True)
class Shape:
    hosts: int
    slots: int
    row_bytes: int
    scales: int
    chunk: int
    tokens: int

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))


def random_shape(generator: random.Random) -> Shape:
    row_bytes = 16 * generator.randint(1, generator.choice([16, 4096]))
    return Shape(
        generator.choice([1, 2, 3, 4, 8, 64]),
        generator.randint(1, 32),
        row_bytes,
        generator.choice([0, row_bytes // 4 // 128]),
        generator.choice([1, 16, 1024, generator.randint(1, 2048)]),
        generator.choice([0, 1, 4096, generator.randint(1, 16384)]),
    )


def regions(shape: Shape, at: dict[str, int], slots: int, signals: int) -> list[tuple[str, int]]:
    """Every region in order, with the bytes that are written there."""
    host_tokens = shape.hosts * shape.chunk
    routing = shape.tokens * shape.slots * FLOAT_BYTES
    return [
        ("signals", signals * 64 * 8),
        ("routing_out", routing),
        ("routing_in", shape.hosts * routing),
        ("rows_out", slots * shape.chunk * at["message_bytes"]),
        ("rows_in", slots * host_tokens * at["message_bytes"]),
        ("sums_out", slots * host_tokens * shape.row_bytes),
        ("values_out", slots * host_tokens * shape.slots * FLOAT_BYTES),
        ("sums_in", slots * host_tokens * shape.row_bytes),
        ("values_in", slots * host_tokens * shape.slots * FLOAT_BYTES),
    ]


def test_nothing_overlaps_and_all_is_aligned(ask: Ask) -> None:
    generator = random.Random(6)
    shapes = [random_shape(generator) for _ in range(2000)]
    (constants,) = ask(["constants"])
    for shape, at in zip(shapes, ask([f"layout {shape}" for shape in shapes]), strict=True):
        end = 0
        for name, num_bytes in regions(shape, at, constants["slots"], constants["signals"]):
            assert at[name] >= end and at[name] % LINE_BYTES == 0, (shape, name)
            end = at[name] + num_bytes
        assert end <= at["total"] < end + 256, shape
        assert at["message_bytes"] % 16 == 0
        assert at["message_bytes"] >= shape.row_bytes + FLOAT_BYTES * (shape.scales + shape.slots)


def test_inboxes_do_not_grow_with_tokens(ask: Ask) -> None:
    """Rows move in chunks: more tokens make the lists of expert ids longer and nothing else."""
    few, many = ask(["layout 4 8 1024 0 64 100", "layout 4 8 1024 0 64 9000"])
    for at, tokens in ((few, 100), (many, 9000)):
        assert at["rows_out"] - at["routing_in"] < 4 * tokens * 8 * FLOAT_BYTES + 512
    assert few["total"] - few["rows_out"] == many["total"] - many["rows_out"]


def test_every_token_of_every_slot_and_host_has_its_own_place(ask: Ask) -> None:
    generator = random.Random(9)
    for _ in range(5):
        shape = random_shape(generator)
        shape = Shape(3, shape.slots, shape.row_bytes, shape.scales, 5, 40)
        places = [(slot, host, t) for slot in range(2) for host in range(3) for t in range(5)]
        (at,) = ask([f"layout {shape}"])
        answers = ask([f"inbox {shape} {slot} {host} {t}" for slot, host, t in places])
        rows = {"row": "rows_in", "sum": "sums_in", "values": "values_in"}
        widths = {
            "row": at["message_bytes"],
            "sum": shape.row_bytes,
            "values": shape.slots * FLOAT_BYTES,
        }
        for kind, region in rows.items():
            expected = [at[region] + i * widths[kind] for i in range(len(places))]
            assert [answer[kind] for answer in answers] == expected, (shape, kind)
        signals = {answer["signal"] for answer in answers}
        assert len(signals) == 3 and max(signals) + 8 <= at["routing_out"]


def test_messages_worked_by_hand(ask: Ask) -> None:
    """Row, scales, probabilities, each rounded up to 16 bytes."""
    bf16, fp8, backward = ask(["message 14336 0 8", "message 7168 56 8", "message 14336 0 0"])
    assert bf16 == {"scales": 14336, "probs": 14336, "bytes": 14368}
    assert fp8 == {"scales": 7168, "probs": 7392, "bytes": 7424}
    assert backward["bytes"] == 14336


def test_hosts_of_experts(ask: Ask) -> None:
    """Two ranks a host, three experts each."""
    answers = ask([f"host 2 3 {expert}" for expert in (-2, -1, 0, 5, 6, 11, 12)])
    assert [answer["host"] for answer in answers] == [-1, -1, 0, 0, 1, 1, 2]
