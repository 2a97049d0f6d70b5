"""csrc/shared/low_latency_layout.h on the CPU: two buffers that never meet, and the size hint."""

from __future__ import annotations

import random

import csrc_programs
import pytest
from csrc_programs import Ask

from moe_ep import low_latency_exchange
from moe_ep.backends import low_latency_base as base
from moe_ep.low_latency import LowLatencyVerbs

LINE_BYTES = 128  # of the L2 cache


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    return csrc_programs.build("low_latency_layout.cpp", tmp_path_factory.mktemp("csrc"))


Shape = tuple[int, int, int, int, int]  # ranks, experts, slots, hidden, tokens


def random_shape(generator: random.Random) -> Shape:
    ranks = generator.choice([1, 2, 3, 4, 6, 8, 16, 63, 64, generator.randint(1, 64)])
    experts = ranks * generator.randint(1, generator.choice([4, 2048 // ranks]))
    hidden = 8 * generator.randint(1, generator.choice([16, 2048]))
    tokens = generator.choice([1, 128, generator.randint(1, 2048)])
    return ranks, experts, generator.randint(1, min(32, experts)), hidden, tokens


def question(shape: Shape, num_bytes: int) -> str:
    return f"layout {' '.join(map(str, shape))} {num_bytes}"


def regions(shape: Shape, at: dict[str, int]) -> list[tuple[str, int, int]]:
    """(name, first byte, bytes) of everything that is written, as the kernels index it."""
    ranks, experts, slots, hidden, tokens = shape
    taken = [("marks", 0, 7 * 64 * 8)]
    for i in range(2):
        dispatched = (experts // ranks) * ranks * tokens
        rows = max(dispatched, tokens * slots) * hidden * 2
        taken += [
            (f"dispatch_ready_{i}", at[f"dispatch_ready_{i}"], experts * 8),
            (f"combine_ready_{i}", at[f"combine_ready_{i}"], ranks * 8),
            (f"received_{i}", at[f"received_{i}"], ranks * 8),
            (f"rows_{i}", at[f"rows_{i}"], rows),
            (f"slots_{i}", at[f"slots_{i}"], dispatched * 4),
        ]
    return taken


def test_nothing_overlaps_and_all_is_aligned(ask: Ask) -> None:
    generator = random.Random(71)
    shapes = [random_shape(generator) for _ in range(4000)]
    shapes += [(64, 2048, 32, 16384, 2048), (1, 1, 1, 8, 1)]
    hints = ask([question(shape, 0) for shape in shapes])
    sizes = [at["total"] + generator.choice([0, 1, 255, 99991]) for at in hints]
    asked = [question(shape, n) for shape, n in zip(shapes, sizes, strict=True)]
    for shape, num_bytes, at in zip(shapes, sizes, ask(asked), strict=True):
        end, signals_end = 0, at["signal_bytes"]
        for name, begin, length in sorted(regions(shape, at), key=lambda region: region[1]):
            assert begin >= end, (shape, name)
            assert begin % LINE_BYTES == 0, (shape, name)
            end = begin + length
            is_data = name.startswith(("rows", "slots"))
            assert (begin >= signals_end) if is_data else (end <= signals_end), (shape, name)
        assert end <= num_bytes, shape
        assert at["row_bytes"] == 2 * shape[3]
        if shape[3] % 128 == 0:  # an FP8 row with its scales
            assert shape[3] + shape[3] // 128 * 4 <= at["row_bytes"]


def test_operations_of_different_shapes_use_different_memory(ask: Ask) -> None:
    """The two buffers of any two shapes that fit one memory, and their signals."""
    generator = random.Random(72)
    for _ in range(200):
        shapes = [random_shape(generator) for _ in range(6)]
        num_bytes = max(at["total"] for at in ask([question(s, 0) for s in shapes]))
        answers = ask([question(shape, num_bytes) for shape in shapes])
        ends: list[list[int]] = [[], []]
        for shape, at in zip(shapes, answers, strict=True):
            for name, begin, length in regions(shape, at):
                if name.startswith(("rows", "slots")):
                    ends[int(name[-1])] += [begin, begin + length]
        assert max(ends[0]) <= min(ends[1]) and max(ends[1]) <= num_bytes
        for name in ("dispatch_ready", "combine_ready", "received", "rows"):
            for i in range(2):
                assert len({at[f"{name}_{i}"] for at in answers}) == 1


def test_sizes_worked_by_hand(ask: Ask) -> None:
    """Marks 4096; per buffer 2048 + 64 + 64 words of 8 bytes; rows of 2H bytes and 4 for a slot."""
    signals = 4096 + 2 * 17408
    few = ask([question((8, 32, 8, 4096, 1024), 0)])[0]
    # 32 x 1024 rows of 8192 bytes are 268435456; their slots 131072. Twice that: 537133056.
    assert few["signal_bytes"] == signals == 38912
    assert few["total"] == 38912 + 537133056 == 537171968
    assert LowLatencyVerbs.get_low_latency_rdma_size_hint(1024, 4096, 8, 32) == 537171968
    many = ask([question((8, 256, 8, 7168, 128), 0)])[0]
    # 256 x 128 rows of 14336 bytes are 469762048; their slots 131072. Twice that: 939786240.
    assert many["total"] == 38912 + 939786240 == 939825152
    assert LowLatencyVerbs.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == 939825152


def test_size_hint_of_python(ask: Ask) -> None:
    generator = random.Random(73)
    shapes = [random_shape(generator) for _ in range(3000)]
    answers = ask([question(shape, 1 << 40) for shape in shapes])
    for (ranks, experts, _, hidden, tokens), at in zip(shapes, answers, strict=True):
        hint = LowLatencyVerbs.get_low_latency_rdma_size_hint(tokens, hidden, ranks, experts)
        assert hint == at["total"]


def test_words_keep_their_parts(ask: Ask) -> None:
    generator = random.Random(74)
    parts = [
        (generator.getrandbits(31) + 1, generator.randrange(256), generator.randrange(2), count)
        for count in [0, 1, (1 << 23) - 1, *(generator.randrange(1 << 23) for _ in range(500))]
    ]
    answers = ask([f"word {' '.join(map(str, p))}" for p in parts])
    for part, at in zip(parts, answers, strict=True):
        assert (at["operation"], at["tag"], at["bad"], at["count"]) == part
    # Only the low half of the operation's number travels.
    assert ask([f"word {(5 << 32) + 7} 0 0 1"])[0] == {
        "operation": 7,
        "tag": 0,
        "bad": 0,
        "count": 1,
    }


def test_python_and_the_core_agree(ask: Ask) -> None:
    at = ask(["constants"])[0]
    assert at["max_tokens"] == base.MAX_TOKENS
    assert at["max_slots"] == base.MAX_SLOTS
    assert at["max_experts"] == base.MAX_EXPERTS
    assert at["max_ranks"] == base._MAX_RANKS
    assert at["mark_bytes"] == base._MARK_BYTES >= at["marks"]
    assert at["tags"] == low_latency_exchange._NUM_TAGS
    experts = [1, 2, 31, 32, 33, 2048]
    answers = [a["max"] for a in ask([f"slots {e}" for e in experts])]
    assert answers == [1, 2, 31, 32, 32, 32]


def test_bad_hint() -> None:
    with pytest.raises(ValueError, match=r"num_experts=10.*8 ranks"):
        LowLatencyVerbs.get_low_latency_rdma_size_hint(64, 128, 8, 10)
