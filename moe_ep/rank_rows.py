"""What travels in a dispatch of rank rows, and how it is laid out.

A rank row is one row per (token, destination rank), in DeepEP's order: by source rank, then by
token. Beside its payload a row has a meta row of 32-bit words: the token's K expert ids plus one,
its K weights, and the scales of an FP8 payload. Before rows travel, every rank sends a header to
every other: what it is about to send, how much, and the error if its input is bad.

Legend of shapes: T tokens, K top-k, R ranks, E experts, L = E/R local experts, N received rows,
S scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moe_ep.errors import LayoutMismatchError, OrderError, PeerError
from moe_ep.layout import MAX_EXPERTS

WORD_BYTES = 4
ROW_MULTIPLE_BYTES = 16
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)

META_UNIT = ROW_MULTIPLE_BYTES // WORD_BYTES
# Words of a header: magic, operation, the format, then these.
_MAGIC = 0x6D6F6521
_FORMAT, _NUM_TOPK, _NUM_EXPERTS = 2, 4, 6
_NUM_TOKENS, _LOW_ID, _HIGH_ID, _TO_YOU = 8, 9, 10, 11
_MOST_RANKS = 12
_TEXT, _TEXT_WORDS = 13, 115
_COUNTS = _TEXT + _TEXT_WORDS
HEADER_WORDS = _COUNTS + MAX_EXPERTS


@dataclass(frozen=True)
class RowFormat:
    """What one dispatch sends for a token; equal on all ranks."""

    hidden: int
    dtype: torch.dtype
    num_topk: int  # K; 0: no expert ids and weights
    num_scales: int  # S; 0: no scales
    num_experts: int
    num_worst_tokens: int  # 0: as many rows as arrive

    @property
    def meta_words(self) -> int:
        """Words of a meta row, whole units of 16 bytes; 0: there is none."""
        return round_up(2 * self.num_topk + self.num_scales, META_UNIT)

    @property
    def row_bytes(self) -> int:
        """The widest row of a dispatch and its combine, whose rows have at least 16 bits."""
        payload = self.hidden * max(self.dtype.itemsize, 2)
        return max(payload, WORD_BYTES * self.meta_words, ROW_MULTIPLE_BYTES)

    def num_slots(self, num_ranks: int) -> int:
        """Ranks that a token can go to."""
        return min(self.num_topk, num_ranks) if self.num_topk else num_ranks

    def words(self) -> list[int]:
        return [
            self.hidden,
            ROW_DTYPES.index(self.dtype),
            self.num_topk,
            self.num_scales,
            self.num_experts,
            self.num_worst_tokens,
        ]


@dataclass(frozen=True)
class Outgoing:
    """One rank's part in a dispatch with a new routing."""

    format: RowFormat | None = None  # None together with `error`
    num_worst_tokens: int = 0
    num_tokens: int = 0
    slots: Tensor | None = None  # [T, min(K, R)] destination ranks, -1 unused
    in_rank: Tensor | None = None  # [T, R] bool: what `slots` were made of
    topk_idx: Tensor | None = None  # [T, K]
    tokens_per_rank: Tensor | None = None  # [R]
    tokens_per_expert: Tensor | None = None  # [E]
    error: Exception | None = None

    def bad_tokens(self) -> Tensor:
        """[T] bool: tokens whose routing is what `bad_routing` says. Needs topk_idx. Does not wait
        for the device."""
        form, idx, in_rank = self.format, self.topk_idx, self.in_rank
        assert form is not None and idx is not None and in_rank is not None
        bad = (idx.clamp(-1, form.num_experts - 1) != idx).any(1)
        num_slots, num_ranks = form.num_slots(in_rank.shape[1]), in_rank.shape[1]
        return bad if num_slots == num_ranks else bad | (in_rank.sum(1) > num_slots)


def bad_routing(form: RowFormat, num_ranks: int) -> str:
    return (
        f"topk_idx holds ids that are neither -1 nor below num_experts={form.num_experts}, or "
        f"is_token_in_rank has more than {form.num_slots(num_ranks)} ranks for a token, which "
        "top-k and the ranks allow; take it from get_dispatch_layout"
    )


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def destination_slots(is_token_in_rank: Tensor, num_slots: int) -> Tensor:
    """[T, R] bool to [T, num_slots] int64: the ranks of each token, ascending; -1 unused.

    Ranks beyond num_slots are left out: whoever sends has to report such tokens.
    """
    num_ranks = is_token_in_rank.shape[1]
    ranks = torch.arange(num_ranks, device=is_token_in_rank.device)
    if num_slots == num_ranks:
        return torch.where(is_token_in_rank, ranks, -1)
    first = torch.where(is_token_in_rank, ranks, num_ranks).sort(dim=1).values[:, :num_slots]
    return torch.where(first == num_ranks, -1, first)


# -- meta rows ------------------------------------------------------------------------------------


def pack_meta(
    form: RowFormat, topk_idx: Tensor | None, topk_weights: Tensor | None, scales: Tensor | None
) -> Tensor:
    """Meta rows [T, meta_words] as fp32.

    Args:
        topk_idx: [T, K] integer expert ids over all ranks, -1 unused. topk_weights: [T, K] fp32.
        scales: [T, S] or [T] of any 32-bit dtype, any strides.
    """
    like = topk_idx if topk_idx is not None else scales
    assert like is not None
    words = torch.zeros(like.shape[0], form.meta_words, dtype=torch.int32, device=like.device)
    k = form.num_topk
    if topk_idx is not None and topk_weights is not None:
        words[:, :k] = topk_idx + 1
        words[:, k : 2 * k] = topk_weights.view(torch.int32)
    if scales is not None:
        words[:, 2 * k : 2 * k + form.num_scales] = scales_as_rows(scales).view(torch.int32)
    return words.view(torch.float32)


def unpack_topk(
    form: RowFormat, meta: Tensor, rank: int, num_ranks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Local expert ids [N, K] in `dtype`, -1 where the expert is of another rank; weights [N, K]
    fp32, zero there. A meta row of zeros, which no token filled, has no experts."""
    k, local = form.num_topk, form.num_experts // num_ranks
    ids = meta[:, :k].view(torch.int32) - (1 + rank * local)
    mine = (ids >= 0) & (ids < local)
    weights = meta[:, k : 2 * k]
    return torch.where(mine, ids, -1).to(dtype), torch.where(mine, weights, 0.0)


def unpack_scales(form: RowFormat, meta: Tensor, like: Tensor) -> Tensor:
    """Scales [N, S] (or [N], as `like`) in the dtype of `like`, row-major."""
    first = 2 * form.num_topk
    scales = meta[:, first : first + form.num_scales].contiguous().view(like.dtype)
    return scales.squeeze(1) if like.dim() == 1 else scales


def scales_as_rows(scales: Tensor) -> Tensor:
    return scales.unsqueeze(1) if scales.dim() == 1 else scales


# -- headers --------------------------------------------------------------------------------------


def pack_header(outgoing: Outgoing, operation: int, num_ranks: int, device: torch.device) -> Tensor:
    """[R, HEADER_WORDS] fp32: the header for every rank. Does not wait for the device."""
    words = torch.zeros(num_ranks, HEADER_WORDS, dtype=torch.int32, device=device)
    words[:, :_COUNTS] = _to_device(_facts(outgoing, operation), device)
    form, topk_idx = outgoing.format, outgoing.topk_idx
    if form is None:
        return words.view(torch.float32)
    assert outgoing.in_rank is not None
    assert outgoing.tokens_per_rank is not None and outgoing.tokens_per_expert is not None
    if topk_idx is not None and topk_idx.numel():
        low, high = torch.aminmax(topk_idx)
        words[:, _LOW_ID] = low.clamp(min=-2)
        words[:, _HIGH_ID] = high.clamp(max=form.num_experts)
    if form.num_slots(num_ranks) < num_ranks and outgoing.num_tokens:
        words[:, _MOST_RANKS] = outgoing.in_rank.sum(1).max()
    words[:, _TO_YOU] = outgoing.tokens_per_rank
    local = form.num_experts // num_ranks
    words[:, _COUNTS : _COUNTS + local] = outgoing.tokens_per_expert.view(num_ranks, local)
    return words.view(torch.float32)


@dataclass(frozen=True)
class Headers:
    """The headers of all ranks, by rank: [R, HEADER_WORDS] int32 on the CPU."""

    words: Tensor
    rank: int
    operation: int

    def check(self, outgoing: Outgoing) -> None:
        """Raises on all ranks if any has bad input or sends something else than the others.

        Raises:
            `outgoing.error`, ValueError: bad input on this rank.
            PeerError: bad input on another. LayoutMismatchError: ranks differ.
        """
        rows = self.words[:, :_TEXT].tolist()
        here = f"rank {self.rank}: dispatch, operation {self.operation}"
        for peer, row in enumerate(rows):
            if row[:2] != [_MAGIC, self.operation]:
                raise OrderError(f"{here}: rank {peer} is in another operation")
        if outgoing.error is not None:
            raise outgoing.error
        for peer, row in enumerate(rows):
            problem = self._text(peer) or _problem(row, len(rows))
            if problem and peer == self.rank:
                raise ValueError(f"{here}: {problem}")
            if problem:
                raise PeerError(f"{here}: rank {peer} gave bad input: {problem}")
        names = [field.name for field in fields(RowFormat)]
        for peer, row in enumerate(rows):
            for name, first, other in zip(names, rows[0][_FORMAT:], row[_FORMAT:], strict=False):
                if first != other:
                    raise LayoutMismatchError(
                        f"{here}: ranks 0 and {peer} send different rows: {name} {first} and "
                        f"{other} (dtype counts {', '.join(map(str, ROW_DTYPES))})"
                    )

    def _text(self, peer: int) -> str:
        data = self.words[peer, _TEXT : _TEXT + _TEXT_WORDS].contiguous().numpy().tobytes()
        return data.rstrip(b"\0").decode(errors="replace")

    @property
    def most_tokens(self) -> int:
        """T of the rank that has most."""
        return int(self.words[:, _NUM_TOKENS].max())

    def received_per_expert(self, num_local_experts: int, alignment: int) -> list[int]:
        """Rows of each local expert, rounded up to `alignment`."""
        counts = self.words[:, _COUNTS : _COUNTS + num_local_experts].sum(0).tolist()
        return [round_up(count, alignment) for count in counts]

    def rank_prefix_matrix(self) -> Tensor:
        """[R, R] int32: rows that the first i+1 ranks send to rank j; only this rank's column is
        known, the others are -1."""
        num_ranks = self.words.shape[0]
        matrix = torch.full((num_ranks, num_ranks), -1, dtype=torch.int32)
        matrix[:, self.rank] = self.words[:, _TO_YOU].cumsum(0)
        return matrix


def _facts(outgoing: Outgoing, operation: int) -> Tensor:
    """The first words of a header, equal for every destination."""
    words = torch.zeros(_COUNTS, dtype=torch.int32)
    words[:_FORMAT] = torch.tensor([_MAGIC, operation], dtype=torch.int32)
    if outgoing.format is not None:
        words[_FORMAT:_NUM_TOKENS] = torch.tensor(outgoing.format.words(), dtype=torch.int32)
    words[_NUM_TOKENS] = outgoing.num_tokens
    words[_LOW_ID] = words[_HIGH_ID] = -1
    if outgoing.error is not None:
        text = f"{type(outgoing.error).__name__}: {outgoing.error}".encode()
        size = _TEXT_WORDS * WORD_BYTES
        data = bytearray(text[:size].ljust(size, b"\0"))
        words[_TEXT : _TEXT + _TEXT_WORDS] = torch.frombuffer(data, dtype=torch.int32)
    return words


def _problem(row: list[int], num_ranks: int) -> str:
    """What is wrong with the routing that a header tells of; empty if nothing is."""
    num_experts, num_topk, most_ranks = row[_NUM_EXPERTS], row[_NUM_TOPK], row[_MOST_RANKS]
    if row[_LOW_ID] < -1 or row[_HIGH_ID] >= num_experts > 0:
        return f"topk_idx holds ids that are neither -1 nor below {num_experts=}"
    if most_ranks > min(num_topk, num_ranks) > 0:
        return (
            f"is_token_in_rank has {most_ranks} ranks for a token of {num_topk} experts; take it "
            "from get_dispatch_layout"
        )
    return ""


def _to_device(words: Tensor, device: torch.device) -> Tensor:
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words
