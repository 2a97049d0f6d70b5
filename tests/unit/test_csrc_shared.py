"""csrc/shared on the CPU: where everything lies in memory that several ranks read and write.

A small program says what the headers compute; what it should be follows from the shapes alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import csrc_programs
import pytest
import torch
from csrc_programs import Ask

from moe_ep.backends import cuda, cuda_errors, cuda_limits
from moe_ep.backends.hosts import staggered
from moe_ep.layout import FP8_BLOCK, MAX_TOP_K

LINE_BYTES = 128  # of the L2 cache: what different ranks write begins on lines of its own


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    return csrc_programs.build("shared_values.cc", tmp_path_factory.mktemp("csrc"))


@pytest.fixture(scope="module")
def constants(ask: Ask) -> dict[str, int]:
    return ask(["constants"])[0]


@dataclass(frozen=True)
class Shape:
    ranks: int = 1
    experts: int = 4
    slots: int = 2
    row_bytes: int = 256
    scales: int = 0
    exact: bool = False
    tokens: int = 1

    @property
    def question(self) -> str:
        return (
            f"layout {self.ranks} {self.experts} {self.slots} {self.row_bytes} {self.scales} "
            f"{int(self.exact)} {self.tokens}"
        )


def random_shape(generator: random.Random) -> Shape:
    ranks = generator.choice([1, 2, 3, 4, 6, 8, 16, 63, 64, generator.randint(1, 64)])
    row_bytes = 16 * generator.randint(1, generator.choice([8, 1000, 4096]))
    return Shape(
        ranks=ranks,
        experts=ranks * generator.randint(1, 2048 // ranks),
        slots=generator.randint(1, 32),
        row_bytes=row_bytes,
        scales=generator.choice([0, row_bytes // 4 // 128]),
        exact=generator.random() < 0.4,
        tokens=generator.choice([0, 1, 16384, generator.randint(1, 16384)]),
    )


def regions(shape: Shape, at: dict[str, int], constants: dict[str, int]) -> list[tuple[str, int]]:
    """Every region in order, with the bytes that are written there."""
    rows, slots, alone = shape.tokens, shape.slots, shape.ranks == 1
    destinations = sum(1 for _ in zip(range(slots), range(shape.ranks), strict=False))
    staged = shape.scales * 128 if alone else shape.row_bytes
    partials = 0 if alone else rows * (slots if shape.exact else destinations)
    stage = at["stage_probs"] + rows * slots * 4
    assert 0 <= rows * staged <= at["stage_scales"]
    assert at["stage_scales"] + rows * shape.scales * 4 <= at["stage_probs"]
    assert at["stage_probs"] < rows * (staged + shape.scales * 4) + 512
    return [
        ("signals", constants["num_signals"] * 64 * 8),
        ("counts", shape.ranks * at["columns"] * 8),
        ("rank_rows", rows * destinations * constants["rank_row_bytes"]),
        ("items", rows * slots * constants["item_bytes"]),
        ("stage_0", stage),
        ("stage_1", stage),
        ("slots", partials * shape.row_bytes),
        ("slot_weights", 0 if alone else rows * slots * 4),
        ("slot_values", 0 if alone else rows * slots * 4),
    ]


def test_nothing_in_symmetric_memory_overlaps(ask: Ask, constants: dict[str, int]) -> None:
    generator = random.Random(20240)
    shapes = [random_shape(generator) for _ in range(4000)]
    shapes.append(Shape(64, 2048, 32, 65536, 128, True, 16384))  # the largest one
    shapes.append(Shape(1, 1, 1, 16, 0, False, 0))
    for shape, at in zip(shapes, ask([shape.question for shape in shapes]), strict=True):
        end, used = 0, 0
        for name, num_bytes in regions(shape, at, constants):
            assert at[name] >= end, (shape, name)
            assert at[name] % LINE_BYTES == 0, (shape, name)
            end, used = at[name] + num_bytes, used + num_bytes
        assert end <= at["total"] < used + 4096, shape
        assert at["total"] % LINE_BYTES == 0
        for name in ("stage_scales", "stage_probs"):
            assert at[name] % LINE_BYTES == 0, (shape, name)
        check_count_columns(shape, at)


def check_count_columns(shape: Shape, at: dict[str, int]) -> None:
    """E experts, rank rows and items for each rank, and two columns behind."""
    assert at["columns"] == shape.experts + 2 * shape.ranks + 2, shape
    special = {at["bad_index_column"], at["num_tokens_column"]}
    assert special == {at["columns"] - 2, at["columns"] - 1}, shape


def test_no_buffer_is_a_multiple_of_ranks_times_tokens(ask: Ask) -> None:
    """Rows in symmetric memory: two staging slots of T, and min(K, R) T partial sums."""
    generator = random.Random(7)
    for _ in range(200):
        slots = generator.randint(1, 12)
        shape = Shape(2, 64, slots, 16 * generator.randint(64, 2048), 0, False, 4096)
        sizes = (2, slots, slots + 1, 16, 32, 64)
        asked = [Shape(r, r * 4, *list(vars(shape).values())[2:]) for r in sizes if r > 1]
        for more, at in zip(asked, ask([s.question for s in asked]), strict=True):
            row_bytes = more.tokens * more.row_bytes
            per_slot = more.tokens * (2 * 4 + 2 * 4 + 16 + 8) * slots  # probabilities and lists
            counts = more.ranks * at["columns"] * 8
            limit = (2 + min(slots, more.ranks)) * row_bytes + per_slot + counts + 8192
            assert at["total"] <= limit, more
            assert at["slot_weights"] - at["slots"] >= min(slots, more.ranks) * row_bytes


def test_room_grows_with_tokens(ask: Ask) -> None:
    """Growing memory never makes a region smaller."""
    for exact in (False, True):
        counts = [0, 1, 2, 31, 128, 129, 1000, 16384]
        answers = ask([Shape(8, 64, 8, 4096, 8, exact, t).question for t in counts])
        totals = [at["total"] for at in answers]
        assert totals == sorted(totals)
        assert len({at["rank_rows"] for at in answers}) == 1  # counts and signals stay in place


def test_layout_worked_by_hand(ask: Ask, constants: dict[str, int]) -> None:
    """Distances from the counts, every region rounded up to 256 bytes."""
    alone, pair, exact = ask(
        [
            Shape(ranks=1, experts=4, slots=2, row_bytes=256, tokens=1).question,
            Shape(ranks=2, experts=8, slots=3, row_bytes=512, scales=2, tokens=100).question,
            Shape(2, 8, 3, 512, 2, True, 100).question,
        ]
    )
    # One rank, one token: a few counts of 8 bytes, a rank row of 16, 2 items of 8, 2 probabilities.
    assert alone["rank_rows"] - alone["counts"] == 256
    assert alone["items"] - alone["counts"] == 512
    assert alone["stage_0"] - alone["counts"] == 768
    assert (alone["stage_scales"], alone["stage_probs"]) == (0, 0)
    assert alone["stage_1"] - alone["counts"] == 1024
    assert alone["slots"] == alone["slot_values"] == alone["total"] == alone["counts"] + 1280
    # Two ranks of 100 tokens. Counts: at most 2 x 14 x 8. Rank rows: 100 x 2 x 16 = 3200 -> 3328.
    assert pair["rank_rows"] - pair["counts"] == 256
    assert pair["items"] - pair["rank_rows"] == 3328
    # Items: 100 x 3 x 8 = 2400 -> 2560.
    assert pair["stage_0"] - pair["items"] == 2560
    # Staging: rows 51200 (a multiple of 256), scales 800 -> 1024, probabilities 1200.
    assert (pair["stage_scales"], pair["stage_probs"]) == (51200, 52224)
    assert pair["stage_1"] - pair["stage_0"] == 53504  # 53424 rounded up
    # Slots: 100 x 2 x 512 = 102400; 100 x 3 x 512 = 153600 where every expert row comes back.
    assert pair["slot_weights"] - pair["slots"] == 102400
    assert exact["slot_weights"] - exact["slots"] == 153600
    for at in (pair, exact):  # weights and values: 1200 -> 1280 each
        assert at["slot_values"] - at["slot_weights"] == 1280
        assert at["total"] - at["slot_values"] == 1280
    for at in (alone, pair, exact):
        assert at["signals"] == 0 and at["counts"] >= constants["num_signals"] * 64 * 8


def test_signals_are_words_of_their_own(ask: Ask, constants: dict[str, int]) -> None:
    pairs = [(k, p) for k in range(constants["num_signals"]) for p in range(64)]
    offsets = [a["offset"] for a in ask([f"signal {k} {p}" for k, p in pairs])]
    assert sorted(offsets) == [1000 + 8 * i for i in range(len(pairs))]
    assert offsets[65] == 1000 + 8 * 65  # kind 1, peer 1


def test_plan_header(ask: Ask) -> None:
    generator = random.Random(3)
    shapes = [(1, 1), (64, 32), (8, 32)] + [
        (generator.randint(1, 64), generator.randint(1, 512)) for _ in range(500)
    ]
    for (ranks, local), at in zip(shapes, ask([f"header {r} {n}" for r, n in shapes]), strict=True):
        sizes = {
            **dict.fromkeys(("num_rows", "num_rank_rows", "num_items", "status"), 1),
            "rank_row_begin": ranks + 1,
            "item_begin": ranks + 1,
            "source_rank_row": ranks,
            "source_item": ranks,
            "expert_begin": local + 1,
            "expert_count": local,
        }
        assert set(at) == {*sizes, "total"}
        taken = sorted((at[name], size) for name, size in sizes.items())
        end = 0
        for begin, size in taken:
            assert begin == end, (ranks, local, at)
            end += size
        assert at["total"] == end


def test_pieces_cover_a_row_exactly(ask: Ask, constants: dict[str, int]) -> None:
    """A piece is what fits the registers of a warp, at most eight vectors per lane."""
    widths = [*range(16, 20480, 16), *range(20480, 262145, 1040), 65536, 28672]
    largest = 32 * 8
    for width, at in zip(widths, ask([f"row {w}" for w in widths]), strict=True):
        assert at["row_bytes"] == width and at["vectors"] * 16 == width
        end = 0
        for piece in range(at["pieces"]):
            assert at[f"offset_{piece}"] == end, width
            vectors = at[f"vectors_{piece}"]
            assert 1 <= vectors <= largest, width
            if piece < at["pieces"] - 1:
                assert vectors == at["piece_vectors"] and vectors % constants["warp"] == 0
            end += 16 * vectors
        assert end == width
        assert at["pieces"] == -(-at["vectors"] // largest), width  # no more than it needs


def test_rows_worked_by_hand(ask: Ask) -> None:
    """bf16 rows: 7168 columns are 896 vectors in four pieces of 224; 2880 are 360 in two."""
    wide, odd, tiny = ask(["row 14336", "row 5760", "row 16"])
    assert (wide["pieces"], wide["piece_vectors"], wide["vectors_3"]) == (4, 224, 224)
    assert (odd["pieces"], odd["piece_vectors"], odd["vectors_1"]) == (2, 192, 168)
    assert (tiny["pieces"], tiny["vectors_0"], tiny["offset_0"]) == (1, 1, 0)


def test_destinations(ask: Ask) -> None:
    cases = {(1, 1): 1, (8, 4): 4, (4, 8): 4, (32, 64): 32, (2, 1): 1, (1, 64): 1, (8, 8): 8}
    answers = ask([f"destinations {k} {r}" for k, r in cases])
    assert [answer["max"] for answer in answers] == list(cases.values())


def test_peer_order_equals_python(ask: Ask) -> None:
    """On the device as on the host; the last step, which Python leaves out, is the rank itself."""
    asked = [
        (me, step, n) for n in (1, 2, 3, 8, 2048) for me in {0, n // 2, n - 1} for step in range(n)
    ]
    answers = ask([f"peer {me} {step} {n}" for me, step, n in asked])
    orders: dict[tuple[int, int], list[int]] = {}
    for (me, _, n), answer in zip(asked, answers, strict=True):
        orders.setdefault((me, n), []).append(answer["peer"])
    for (me, n), order in orders.items():
        assert order == [*staggered(me, n), me], (me, n)


def test_python_and_the_core_agree(constants: dict[str, int]) -> None:
    assert constants["max_ranks"] == cuda_limits.MAX_RANKS
    assert constants["max_experts"] == cuda_limits.MAX_EXPERT_SLOTS
    assert constants["vector_bytes"] == cuda_limits.ROW_MULTIPLE_BYTES
    assert constants["fp8_block"] == FP8_BLOCK
    assert constants["max_slots"] == MAX_TOP_K
    statuses = (cuda_errors.OK, cuda_errors.BAD_INPUT, cuda_errors.NEEDS_ROOM, cuda_errors.OVERFLOW)
    names = ("ok", "bad_input", "needs_room", "overflow")
    assert statuses == tuple(constants[name] for name in names)
    for dtype, number in cuda._TYPES.items():
        name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        assert constants[name] == number
        assert constants[f"{name}_bytes"] == dtype.itemsize
