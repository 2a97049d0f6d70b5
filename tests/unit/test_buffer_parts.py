"""The parts of Buffer that need one process only: words of a row, layouts, events, deep_ep."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_ep import Buffer, Config, EventHandle, EventOverlap, LayoutMismatchError, PeerError
from moe_ep.buffer_verbs import count
from moe_ep.errors import OrderError
from moe_ep.events import CommStream
from moe_ep.rank_rows import (
    HEADER_WORDS,
    Headers,
    Outgoing,
    RowFormat,
    destination_slots,
    pack_header,
    pack_meta,
    unpack_scales,
    unpack_topk,
)

CPU = torch.device("cpu")
FORM = RowFormat(128, torch.bfloat16, 2, 0, 4, 0)


def test_counts_worked_by_hand() -> None:
    idx = torch.tensor([[0, 1], [3, -1], [-1, -1], [5, 0]])
    per_rank, per_expert, in_rank = count(idx, 6, 3)
    assert per_rank.tolist() == [2, 1, 1] and per_expert.tolist() == [2, 1, 0, 1, 0, 1]
    assert in_rank.int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 0, 1]]


def test_counts_leave_out_what_is_out_of_range() -> None:
    per_rank, per_expert, in_rank = count(torch.tensor([[6, -7], [1 << 40, 2]]), 6, 3)
    assert per_rank.tolist() == [0, 1, 0] and per_expert.tolist() == [0, 0, 1, 0, 0, 0]
    assert in_rank.int().tolist() == [[0, 0, 0], [0, 1, 0]]


def test_counts_of_no_tokens() -> None:
    per_rank, per_expert, in_rank = count(torch.empty(0, 4, dtype=torch.int64), 4, 2)
    assert per_rank.tolist() == [0, 0] and per_expert.tolist() == [0] * 4
    assert in_rank.shape == (0, 2)


def test_destination_slots() -> None:
    in_rank = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    assert destination_slots(in_rank, 2).tolist() == [[1, 3], [0, -1], [-1, -1]]
    assert destination_slots(in_rank, 4).tolist() == [[-1, 1, -1, 3], [0, -1, -1, -1], [-1] * 4]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_meta_rows(dtype: torch.dtype) -> None:
    form = RowFormat(128, torch.float8_e4m3fn, 3, 1, 6, 0)
    idx = torch.tensor([[4, -1, 1], [2, 3, 5]], dtype=dtype)
    weights = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, float("nan")]])
    scales = torch.tensor([3.0, 4.0])
    meta = pack_meta(form, idx, weights, scales)
    assert meta.shape == (2, 8) and form.meta_words == 8
    meta = torch.cat([meta, torch.zeros(1, 8)])  # a row that no token filled
    local, row_weights = unpack_topk(form, meta, rank=1, num_ranks=3, dtype=dtype)
    assert local.dtype == dtype and local.tolist() == [[-1, -1, -1], [0, 1, -1], [-1, -1, -1]]
    expected = torch.tensor([[0.0, 0.0, 0.0], [0.4, 0.5, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(row_weights, expected)
    assert unpack_scales(form, meta, scales).tolist() == [3.0, 4.0, 0.0]


def test_meta_words_survive_whatever_their_bits_mean() -> None:
    form = RowFormat(256, torch.float8_e4m3fn, 0, 2, 4, 0)
    scales = torch.tensor([[0x7F800001, -1], [0x7FC00000, -(2**31)]], dtype=torch.int32)
    column_major = scales.T.contiguous().T
    back = unpack_scales(form, pack_meta(form, None, None, column_major), scales)
    assert torch.equal(back, scales) and back.is_contiguous() and back.dtype == torch.int32


@pytest.mark.parametrize(
    ("form", "row_bytes", "slots"),
    [
        (FORM, 256, 2),
        (RowFormat(128, torch.float8_e4m3fn, 8, 1, 64, 0), 256, 4),
        (RowFormat(128, torch.float32, 0, 0, 4, 0), 512, 4),
        (RowFormat(8, torch.bfloat16, 9, 0, 64, 0), 80, 4),  # the meta row is the widest
    ],
)
def test_row_formats(form: RowFormat, row_bytes: int, slots: int) -> None:
    assert form.row_bytes == row_bytes and form.num_slots(4) == slots


def _headers(*outgoing: Outgoing, rank: int = 0, operations: tuple[int, ...] = ()) -> Headers:
    """What `rank` receives."""
    numbers = operations or (7,) * len(outgoing)
    sent = [
        pack_header(o, n, len(outgoing), CPU)[rank] for o, n in zip(outgoing, numbers, strict=True)
    ]
    words = torch.stack(sent).view(torch.int32)
    assert words.shape == (len(outgoing), HEADER_WORDS)
    return Headers(words, rank, 7)


def _outgoing(ids: list[list[int]], form: RowFormat = FORM) -> Outgoing:
    idx = torch.tensor(ids)
    per_rank, per_expert, in_rank = count(idx, form.num_experts, 2)
    return Outgoing(form, 0, len(ids), None, in_rank, idx, per_rank, per_expert)


def test_headers_tell_what_arrives() -> None:
    first, second = _outgoing([[0, 1], [2, 3]]), _outgoing([[1, -1], [1, 3], [0, 1]])
    headers = _headers(first, second, rank=0)
    headers.check(first)
    assert headers.most_tokens == 3
    assert headers.received_per_expert(2, 1) == [2, 4]
    assert headers.received_per_expert(2, 8) == [8, 8]
    assert headers.rank_prefix_matrix().tolist() == [[1, -1], [4, -1]]


def test_headers_carry_errors() -> None:
    good, bad = _outgoing([[0, 1]]), Outgoing(error=TypeError("x is " + "a" * 600))
    with pytest.raises(PeerError, match=r"rank 0: .*operation 7: rank 1 .*TypeError: x is aaa"):
        _headers(good, bad, rank=0).check(good)
    with pytest.raises(TypeError, match="x is aaa"):
        _headers(good, bad, rank=1).check(bad)


@pytest.mark.parametrize("wrong", [4, -2, 1 << 40, -(1 << 40)])
def test_headers_find_bad_ids(wrong: int) -> None:
    good, bad = _outgoing([[0, 1]]), _outgoing([[0, wrong]])
    with pytest.raises(ValueError, match="num_experts=4"):
        _headers(good, bad, rank=1).check(bad)
    with pytest.raises(PeerError, match=r"rank 1 gave bad input.*num_experts=4"):
        _headers(good, bad, rank=0).check(good)


def test_headers_find_tokens_of_more_ranks_than_experts() -> None:
    form = RowFormat(128, torch.bfloat16, 1, 0, 4, 0)
    good, bad = _outgoing([[0], [3]], form), _outgoing([[0], [3]], form)
    assert bad.in_rank is not None
    bad.in_rank[1] = True
    assert good.bad_tokens().tolist() == [False, False]
    assert bad.bad_tokens().tolist() == [False, True]
    _headers(good, good).check(good)
    with pytest.raises(ValueError, match="is_token_in_rank has 2 ranks for a token of 1 experts"):
        _headers(good, bad, rank=1).check(bad)
    with pytest.raises(PeerError, match="rank 1 gave bad input: is_token_in_rank has 2"):
        _headers(good, bad, rank=0).check(good)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_with_bad_ids(dtype: torch.dtype) -> None:
    idx = torch.tensor([[0, 3], [-1, -1], [4, 0], [1, -2]], dtype=dtype)
    in_rank = torch.zeros(4, 2, dtype=torch.bool)
    outgoing = Outgoing(FORM, 8, 4, None, in_rank, idx)
    assert outgoing.bad_tokens().tolist() == [False, False, True, True]
    none = Outgoing(FORM, 8, 0, None, in_rank[:0], idx[:0])
    assert none.bad_tokens().shape == (0,)


def test_headers_find_ranks_that_differ() -> None:
    good = _outgoing([[0, 1]])
    other = _outgoing([[0, 1]], RowFormat(64, torch.bfloat16, 2, 0, 4, 0))
    for rank, mine in enumerate((good, other)):
        with pytest.raises(LayoutMismatchError, match=r"ranks 0 and 1 .*hidden 128 and 64"):
            _headers(good, other, rank=rank).check(mine)
    with pytest.raises(OrderError, match="rank 1 is in another operation"):
        _headers(good, good, operations=(7, 8)).check(good)


def test_interface_of_deep_ep() -> None:
    """Positional order and names, as published with v1.2.1."""

    def names(function: object) -> list[str]:
        return [name for name in inspect.signature(function).parameters if name != "self"]

    overlap = ["previous_event", "async_finish", "allocate_on_comm_stream"]
    layout = ["num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank"]
    layout += ["num_tokens_per_expert"]
    assert names(Buffer.__init__) == [
        *("group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank"),
        *("allow_nvlink_for_low_latency_mode", "allow_mnnvl", "use_fabric"),
        *("explicitly_destroy", "enable_shrink", "comm"),
    ]
    assert names(Buffer.get_dispatch_layout) == ["topk_idx", "num_experts", *overlap]
    assert names(Buffer.dispatch) == [
        *("x", "handle", *layout, "topk_idx", "topk_weights"),
        *("expert_alignment", "num_worst_tokens", "config", *overlap),
    ]
    assert names(Buffer.combine) == ["x", "handle", "topk_weights", "bias", "config", *overlap]
    assert names(Buffer.get_local_buffer_tensor) == ["dtype", "size", "offset", "use_rdma_buffer"]
    assert names(Config) == [
        "num_sms",
        *(f"num_max_{n}_chunked_{d}_tokens" for n in ("nvl", "rdma") for d in ("send", "recv")),
    ]
    assert Buffer.is_sm90_compiled() is True


def test_num_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffer, "num_sms", 20)
    assert Buffer.get_dispatch_config(3) == Buffer.get_combine_config(8) == Config(20)
    Buffer.set_num_sms(8)
    assert Buffer.num_sms == Buffer.get_dispatch_config(2).num_sms == 8
    for wrong in (7, 0, -2):
        with pytest.raises(ValueError, match=f"num_sms={wrong}"):
            Buffer.set_num_sms(wrong)
    with pytest.raises(ValueError, match="num_sms=0"):
        Config(0)


def test_size_hints_grow_with_rows_and_ranks() -> None:
    config = Config(20, 6, 256)
    assert config.get_nvl_buffer_size_hint(1024, 2) == 256 * 1024 * 4
    assert config.get_nvl_buffer_size_hint(2048, 2) > config.get_nvl_buffer_size_hint(1024, 2)
    assert config.get_rdma_buffer_size_hint(1024, 16) == 0


def test_events_without_a_gpu() -> None:
    handle = EventHandle()
    handle.current_stream_wait()
    with EventOverlap(handle, (torch.ones(1),)) as event:
        assert event.event is handle and len(event.extra_tensors or ()) == 1
    EventOverlap().current_stream_wait()
    Buffer.capture().current_stream_wait()
    stream = CommStream(CPU)
    result, event = stream.run(lambda: 5, (torch.ones(1),), async_finish=True)
    assert result == 5 and event.event is not None
    assert stream.run(lambda: 5, previous_event=event)[1].event is None
    with pytest.raises(RuntimeError, match="without a GPU"):
        _ = stream.stream


def _run(code: str, *paths: Path) -> None:
    """In a process of its own: what is imported there stays there."""
    head = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_install_deep_ep() -> None:
    _run("""
import moe_ep, moe_ep.deep_ep as ours
ours.install()
ours.install()
import deep_ep
from deep_ep import Buffer, Config, EventOverlap, topk_idx_t
from deep_ep.utils import EventHandle, EventOverlap as Same
import deep_ep.utils as utils
assert deep_ep is ours and Buffer is moe_ep.Buffer and Same is EventOverlap is moe_ep.EventOverlap
assert utils.EventHandle is EventHandle is moe_ep.EventHandle and Config is moe_ep.Config
assert deep_ep.__version__ == "1.2.1"
try:
    from deep_ep import HybridEPBuffer
except ImportError:
    pass
else:
    raise AssertionError
ours.uninstall()
ours.uninstall()
assert not any(name == "deep_ep" or name.startswith("deep_ep.") for name in sys.modules)
try:
    import deep_ep
except ModuleNotFoundError:
    pass
else:
    raise AssertionError
""")


@pytest.mark.parametrize("imported", [False, True])
def test_install_beside_another_deep_ep(tmp_path: Path, imported: bool) -> None:
    package = tmp_path / "deep_ep"
    package.mkdir()
    (package / "__init__.py").write_text("name = 'the other'\n")
    (package / "utils.py").write_text("name = 'the other'\n")
    first = "import deep_ep.utils\n" if imported else ""
    _run(
        first
        + """
import moe_ep.deep_ep as ours
try:
    ours.install()
except RuntimeError as error:
    assert "replace=True" in str(error) and "deep_ep/__init__.py" in str(error), error
else:
    raise AssertionError
ours.install(replace=True)
import deep_ep, deep_ep.utils
assert deep_ep is ours and deep_ep.utils is ours.utils
ours.uninstall()
import deep_ep, deep_ep.utils
assert deep_ep.name == deep_ep.utils.name == "the other"
""",
        tmp_path,
    )


def test_install_after_an_early_importer() -> None:
    _run("""
import types
name = "megatron.core.transformer.moe.fused_a2a"
module = sys.modules[name] = types.ModuleType(name)
import moe_ep.deep_ep as ours
for found in (None, object):
    if found is not None:
        module.Buffer = found
    try:
        ours.install(replace=True)
    except RuntimeError as error:
        assert "before the first import of megatron.core" in str(error)
    else:
        raise AssertionError
    assert "deep_ep" not in sys.modules
module.Buffer = ours.Buffer
ours.install()
""")
