"""csrc/shared/low_latency_layout.h on the CPU: two buffers that never meet, and the size hint."""

from __future__ import annotations

import itertools
import random

import csrc_programs
import pytest
from csrc_programs import Ask

from moe_ep import low_latency_exchange
from moe_ep.backends import low_latency_base as base
from moe_ep.low_latency import LowLatencyVerbs

LINE_BYTES = 128  # of the L2 cache
DATA = ("rows", "routes", "order", "expert_out", "returning")
HOST_WORDS = ("messages", "arrived", "arrived_host")


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


KINDS = ("dispatch", "combine")


def regions(shape: Shape, at: dict[str, int], kind: str) -> list[tuple[str, int, int]]:
    """(name, first byte, bytes) of everything that is written while both buffers are used by
    operations of a kind, as the kernels index it."""
    ranks, experts, slots, hidden, tokens = shape
    taken = [("marks", 0, 7 * 64 * 8), ("pings", at["pings"], ranks * 8)]
    for i in range(2):
        staged, returned = tokens * hidden * 2, tokens * slots * hidden * 2
        taken += [
            (f"counts_{i}", at[f"counts_{i}"], experts * 8),
            (f"places_{i}", at[f"places_{i}"], experts * 8),
            (f"senders_{i}", at[f"senders_{i}"], ranks * 8),
            (f"blocks_{i}", at[f"blocks_{i}"], ranks * base._MAX_BLOCKS * 8),
            (f"received_{i}", at[f"received_{i}"], ranks * base._MAX_BLOCKS * 8),
            (f"counts_out_{i}", at[f"counts_out_{i}"], experts * 8),
            *((f"{name}_{i}", at[f"{name}_{i}"], ranks * 8) for name in HOST_WORDS),
            (f"rows_{i}", at[f"rows_{i}"], staged if kind == "dispatch" else returned),
            (f"expert_out_{i}", at[f"expert_out_{i}"], experts * tokens * hidden * 2),
            (f"returning_{i}", at[f"returning_{i}"], experts * tokens * hidden * 2),
        ]
        if kind == "dispatch":
            taken.append((f"routes_{i}", at[f"routes_{i}"], tokens * slots * 8))
            taken.append((f"order_{i}", at[f"order_{i}"], experts * tokens * 4))
    return taken


def test_nothing_overlaps_and_all_is_aligned(ask: Ask) -> None:
    generator = random.Random(71)
    shapes = [random_shape(generator) for _ in range(4000)]
    shapes += [(64, 2048, 32, 16384, 2048), (1, 1, 1, 8, 1)]
    hints = ask([question(shape, 0) for shape in shapes])
    sizes = [at["total"] + generator.choice([0, 1, 255, 99991]) for at in hints]
    asked = [question(shape, n) for shape, n in zip(shapes, sizes, strict=True)]
    for shape, num_bytes, at in zip(shapes, sizes, ask(asked), strict=True):
        for kind in KINDS:
            end, signals_end = 0, at["signal_bytes"]
            for name, begin, length in sorted(regions(shape, at, kind), key=lambda r: r[1]):
                assert begin >= end, (shape, name)
                assert begin % LINE_BYTES == 0, (shape, name)
                end = begin + length
                is_data = name.startswith(DATA)
                assert (begin >= signals_end) if is_data else (end <= signals_end), (shape, name)
                if name.startswith("expert_out"):  # the last that is there on one host, too
                    assert end <= num_bytes, shape
            assert end <= at["hosts_bytes"], shape
        assert at["row_bytes"] == 2 * shape[3]
        if shape[3] % 128 == 0:  # an FP8 row with its scales
            assert shape[3] + shape[3] // 128 * 4 <= at["row_bytes"]


def test_operations_of_different_shapes_use_different_memory(ask: Ask) -> None:
    """The data of the two buffers and the two places for expert rows, of any two shapes that fit
    one memory, and their signals."""
    generator = random.Random(72)
    for _ in range(200):
        shapes = [random_shape(generator) for _ in range(6)]
        num_bytes = max(at["total"] for at in ask([question(s, 0) for s in shapes]))
        answers = ask([question(shape, num_bytes) for shape in shapes])
        parts: dict[str, list[int]] = {}
        for shape, at in zip(shapes, answers, strict=True):
            for name, begin, length in regions(shape, at, "dispatch") + regions(
                shape, at, "combine"
            ):
                if name.startswith(DATA):
                    part = name.replace("routes", "rows").replace("order", "rows")
                    parts.setdefault(part, []).extend([begin, begin + length])
        names = ("rows", "expert_out", "returning")
        order = [parts[f"{name}_{i}"] for name in names for i in range(2)]
        for one, other in itertools.pairwise(order):
            assert max(one) <= min(other)
        assert max(parts["expert_out_1"]) <= num_bytes
        words = ("counts", "counts_out", "places", "senders", "blocks", "received", *HOST_WORDS)
        for name in (*words, "rows", "expert_out", "returning"):
            for i in range(2):
                assert len({at[f"{name}_{i}"] for at in answers}) == 1


def test_sizes_worked_by_hand(ask: Ask) -> None:
    """Marks 4096; per buffer 3 x 2048 + 4 x 64 + 2 x 64 x 255 words of 8 bytes; 64 words; then four
    times the expert rows."""
    signals = 4096 + 2 * 312320 + 512
    few = ask([question((8, 32, 8, 4096, 1024), 0)])[0]
    # 32 x 1024 rows of 8192 bytes are 268435456. Four times that: 1073741824.
    assert few["signal_bytes"] == signals == 629248
    assert few["total"] == 629248 + 1073741824 == 1074371072
    assert LowLatencyVerbs.get_low_latency_rdma_size_hint(1024, 4096, 8, 32) == 1074371072
    many = ask([question((8, 256, 8, 7168, 128), 0)])[0]
    # 256 x 128 rows of 14336 bytes are 469762048. Four times that: 1879048192.
    assert many["total"] == 629248 + 1879048192 == 1879677440
    assert LowLatencyVerbs.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == 1879677440
    one = ask([question((1, 1, 1, 8, 100), 0)])[0]
    # 100 rows of 16 bytes, 100 routes of 8 and 100 indices of 4, each aligned to 256: 1792 + 1024 +
    # 512; once more the routes of one rank.
    assert one["total"] == 629248 + 4 * 4352
    # On up to four hosts, rows of 16 bytes: a stage for each, 4 x (256 + 256 + 256), beats 4 x 2
    # rows.
    small = ask([question((4, 4, 4, 8, 2), 0)])[0]
    assert small["total"] == 629248 + 4 * 3072


def test_other_hosts_have_places_of_their_own(ask: Ask) -> None:
    """What any two ranks put never meets, in either form, and fits the part of a buffer."""
    generator = random.Random(75)
    for _ in range(300):
        per_host, num_hosts = generator.choice([1, 2, 3, 4, 8]), generator.randint(2, 8)
        ranks = per_host * num_hosts
        local, hidden = generator.randint(1, 9), 8 * generator.randint(1, 40)
        tokens, me = generator.randint(1, 40), generator.randrange(ranks)
        asked = f"hosts {ranks} {per_host} {local * ranks} {hidden} {tokens} {me}"
        at = ask([asked])[0]
        far = [(me // per_host * per_host + per_host + i) % ranks for i in range(ranks - per_host)]
        assert at["far"] == [[rank, i] for i, rank in enumerate(far)]
        for form in ({"own", "inbox"}, {"own", "slots", "routes"}):
            taken = sorted(r[2:] + r[:2] for r in at["regions"] if r[0] in form)
            senders = {r[1] for r in at["regions"] if r[0] in form - {"own"}}
            rail = {h * per_host + me % per_host for h in range(num_hosts)} - {me}
            assert senders == (rail if "inbox" in form else set(far))
            assert taken[0] == [0, taken[0][1], "own", me]
            # A row and a slot's rows begin where 16 bytes can be loaded, all else at a line.
            for begin, _, name, _ in taken:
                assert begin % (16 if name == "slots" else LINE_BYTES) == 0, (asked, name)
            for (begin, length, *_), (after, *_) in itertools.pairwise(taken):
                assert begin + length <= after, asked
            assert taken[-1][0] + taken[-1][1] <= at["part"], asked


def test_rows_on_their_way_out_follow_all_else(ask: Ask) -> None:
    shape: Shape = (4, 16, 4, 64, 20)
    num_bytes = ask([question(shape, 0)])[0]["total"] + 1000
    at = ask([question(shape, num_bytes)])[0]
    length = 16 * 20 * 128  # all rows of a rank's experts
    assert at["returning_0"] >= at["expert_out_1"] + length
    assert at["returning_1"] >= at["returning_0"] + length
    assert at["hosts_bytes"] >= at["returning_1"] + length
    assert at["hosts_bytes"] <= num_bytes * 3 // 2


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
    places = [(0, 0), (1, 5), (2, (1 << 21) - 1)]
    for place, at in zip(places, ask([f"place {a} {b}" for a, b in places]), strict=True):
        assert (at["source"], at["begin"]) == place and at["fits"]
    received = [(0, 0), (1, 255), *((generator.getrandbits(50), n) for n in range(1, 256))]
    for word, at in zip(received, ask([f"received {a} {b}" for a, b in received]), strict=True):
        assert (at["operation"], at["blocks"]) == word
    # Only the low half of the operation's number travels.
    assert ask([f"word {(5 << 32) + 7} 0 0 1"])[0] == {
        "operation": 7,
        "tag": 0,
        "bad": 0,
        "count": 1,
    }


def test_divisor(ask: Ask) -> None:
    generator = random.Random(75)
    most = (1 << 31) - 1
    divisors = [1, 2, 3, 7, 64, 641, 65537, most, *(1 << i for i in range(31))]
    divisors += [generator.randint(1, 1 << generator.randint(1, 31)) for _ in range(2000)]
    pairs = []
    for divisor in (min(d, most) for d in divisors):
        multiple = most // divisor * divisor  # around it a quotient would be wrong first
        pairs += [(divisor, n) for n in (0, 1, divisor, multiple - 1, multiple, most)]
        pairs.append((divisor, generator.randint(0, most)))
    answers = ask([f"divide {divisor} {n}" for divisor, n in pairs])
    for (divisor, n), at in zip(pairs, answers, strict=True):
        assert (at["quotient"], at["remainder"]) == divmod(n, divisor), (divisor, n)


def test_python_and_the_core_agree(ask: Ask) -> None:
    at = ask(["constants"])[0]
    assert at["max_tokens"] == base.MAX_TOKENS
    assert at["max_slots"] == base.MAX_SLOTS
    assert at["max_experts"] == base.MAX_EXPERTS
    assert at["max_ranks"] == base._MAX_RANKS
    assert at["max_blocks"] == base._MAX_BLOCKS < at["tags"]
    assert at["mark_bytes"] == base._MARK_BYTES >= at["marks"]
    assert at["tags"] == low_latency_exchange._NUM_TAGS
    experts = [1, 2, 31, 32, 33, 2048]
    answers = [a["max"] for a in ask([f"slots {e}" for e in experts])]
    assert answers == [1, 2, 31, 32, 32, 32]


def test_bad_hint() -> None:
    with pytest.raises(ValueError, match=r"num_experts=10.*8 ranks"):
        LowLatencyVerbs.get_low_latency_rdma_size_hint(64, 128, 8, 10)
