"""Symmetric memory as the cost model counts it, and as csrc/shared/symmetric_layout.h does."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moe_ep import Buffer, cli
from moe_ep.backends import cuda, cuda_limits
from moe_ep.cost import memory, symmetric_bytes
from moe_ep.layout import EPLayout

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = r"""
#include <cstdio>
#include "shared/symmetric_layout.h"
int main() {
  using namespace moe_ep;
  SymmetricShape s{};
  long long tokens = 0;
  std::printf("%d\n", kMaxRanks);
  while (std::scanf("%d %d %d %d %d %d %lld", &s.num_ranks, &s.num_experts, &s.num_slots,
                    &s.max_row_bytes, &s.max_scales, &s.exact_combine, &tokens) == 7) {
    s.max_tokens = tokens;
    std::printf("%lld %d\n", static_cast<long long>(symmetric_layout(s).total),
                count_columns(s.num_experts, s.num_ranks));
  }
}
"""
FIELDS = (
    "num_ranks",
    "num_experts",
    "num_slots",
    "max_row_bytes",
    "max_scales",
    "exact_combine",
    "max_tokens",
)


def header_says(folder: Path, shapes: list[dict[str, Any]]) -> list[str]:
    compiler = shutil.which("g++")
    assert compiler is not None, "g++ is not on the PATH; the tests need a C++17 compiler"
    source, program = folder / "total.cc", folder / "total"
    source.write_text(PROGRAM)
    built = subprocess.run(
        [compiler, "-std=c++17", "-ftrapv", "-I", str(ROOT / "csrc"), source, "-o", program],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    lines = [" ".join(str(int(shape[field])) for field in FIELDS) for shape in shapes]
    done = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def random_shape(generator: random.Random) -> dict[str, Any]:
    ranks = generator.choice([1, 2, 3, 8, 63, 64])
    row_bytes = 16 * generator.randint(1, generator.choice([8, 1000, 4096]))
    return {
        "num_ranks": ranks,
        "num_experts": ranks * generator.randint(1, 2048 // ranks),
        "num_slots": generator.randint(1, 32),
        "max_row_bytes": row_bytes,
        "max_scales": generator.choice([0, row_bytes // 4 // 128]),
        "exact_combine": generator.random() < 0.4,
        "max_tokens": generator.choice([0, 1, 16384, generator.randint(1, 16384)]),
    }


def test_equal_to_the_core(tmp_path: Path) -> None:
    generator = random.Random(11)
    shapes = [random_shape(generator) for _ in range(2000)]
    limit, *answers = header_says(tmp_path, shapes)
    assert int(limit) == memory.MAX_CORE_RANKS == cuda_limits.MAX_RANKS
    assert len(answers) == len(shapes)
    for shape, answer in zip(shapes, answers, strict=True):
        columns = memory.count_columns(shape["num_experts"], shape["num_ranks"])
        assert answer == f"{memory.layout_bytes(**shape)} {columns}", shape


def test_shape_of_a_layout(tmp_path: Path) -> None:
    """As backend cuda fills it in."""
    assert memory.WIDEST_BYTES == cuda_limits.WIDEST_BYTES
    assert memory._SMALLEST_TOKENS == cuda._SMALLEST_TOKENS
    layout = EPLayout(
        model={"hidden": 256, "num_experts": 8, "top_k": 3},
        parallel={"expert": 4, "expert_tensor": 2},
        tokens_per_rank=100,
        dispatch={"dtype": "fp8_e4m3", "exact_combine": True},
    )
    shape = dict(zip(FIELDS, (8, 16, 6, 1024, 2, 1, 100), strict=True))
    plain = {**shape, "max_row_bytes": 512, "max_scales": 0, "exact_combine": 0}
    unlimited = [{**plain, "max_tokens": tokens} for tokens in (128, 1250)]
    _, *answers = header_says(tmp_path, [shape, *unlimited])
    totals = [int(answer.split()[0]) for answer in answers]
    assert symmetric_bytes(layout) == totals[0]
    assert symmetric_bytes(layout, 5000) == totals[0]  # the layout's limit counts
    bare = layout.replace(
        **{"dispatch.dtype": "bf16", "dispatch.exact_combine": False, "tokens_per_rank": None}
    )
    # Without a limit: 128 at first; for 1000 tokens it has grown to 1000 and a quarter.
    assert symmetric_bytes(bare) == symmetric_bytes(bare, 128) == totals[1]
    assert symmetric_bytes(bare, 1000) == totals[2]


def test_every_shipped_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `moe-ep plan` prints is what the core allocates for the shape backend cuda gives it."""
    files = sorted((ROOT / "configs").glob("*.yaml"))
    assert len(files) >= 5
    layouts = [EPLayout.from_yaml(file) for file in files]
    plans = []
    for file in files:
        assert cli.main(["plan", str(file), "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    shapes = [
        {
            "num_ranks": layout.parallel.group_size,
            "num_experts": layout.parallel.group_size * layout.num_local_experts,
            "num_slots": layout.model.top_k * layout.parallel.expert_tensor,
            "max_row_bytes": layout.model.hidden * cuda_limits.WIDEST_BYTES[layout.dispatch.dtype],
            "max_scales": layout.model.hidden // 128 * (layout.dispatch.dtype == "fp8_e4m3"),
            "exact_combine": layout.dispatch.exact_combine,
            # Without a limit memory has grown for these tokens, and a quarter more.
            "max_tokens": layout.tokens_per_rank or plan["tokens"] + plan["tokens"] // 4,
        }
        for layout, plan in zip(layouts, plans, strict=True)
    ]
    _, *answers = header_says(tmp_path, shapes)
    for file, layout, plan, answer in zip(files, layouts, plans, answers, strict=True):
        planned = plan["buffer_bytes"]
        if layout.dispatch.mode == "low_latency":  # held equal to its header elsewhere
            tokens, model = layout.tokens_per_rank, layout.model
            assert tokens is not None
            ranks, experts = layout.parallel.group_size, model.num_experts
            sizes = (tokens, model.hidden, ranks, experts)
            assert planned == Buffer.get_low_latency_rdma_size_hint(*sizes)
        else:
            assert planned == int(answer.split()[0]), file.name


@pytest.mark.parametrize(
    "change",
    [
        {"dispatch.dtype": "fp64"},
        {"dispatch.mode": "low_latency", "dispatch.dtype": "fp32"},
        {"dispatch.mode": "low_latency", "tokens_per_rank": None},
    ],
)
def test_layouts_without_kernels(change: dict[str, Any]) -> None:
    layout = EPLayout.from_yaml(ROOT / "configs" / "mixtral_8x7b_ep8.yaml")
    assert symmetric_bytes(layout) is not None
    assert symmetric_bytes(layout.replace(**change)) is None
