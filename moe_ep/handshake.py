"""The first exchange of a group: one layout on all ranks, and what every rank can run."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.backends.base import Call
from moe_ep.backends.channel import Channel, Round
from moe_ep.errors import LayoutError, LayoutMismatchError, PeerError
from moe_ep.layout import EPLayout

_FRAME_BYTES = 8192
_REASON_LETTERS = 400


def with_environment(layout: EPLayout) -> tuple[EPLayout, Exception | None]:
    """The layout that environment variables make of it, and what is wrong with them.

    The handshake raises the latter, once the peers know.
    """
    try:
        chosen, seconds = env.backend(), env.timeout_s()
        env.statistics(), env.nvtx()  # are read later
        if chosen is not None:
            layout = layout.replace(backend=chosen)
        if seconds is not None:
            layout = layout.replace(timeouts={"first_s": seconds, "steady_s": seconds})
    except ValueError as error:
        return layout, error
    return layout, None


def handshake(
    layout: EPLayout,
    group: dist.ProcessGroup,
    timeout_s: float,
    reasons: dict[str, str | None],
    problem: Exception | None = None,
) -> tuple[Channel, dict[str, str | None]]:
    """Compares layouts across the group, and opens a channel whose number is equal on all ranks.

    Args:
        reasons: why each backend cannot run on this rank; None where it can.
        problem: of this rank, to be raised here; its peers get a LayoutMismatchError.

    Returns:
        The channel, and why each backend cannot run on some rank, the same on all ranks.

    Raises:
        LayoutError: the layout does not fit the group; its peers get a
            LayoutMismatchError.
        LayoutMismatchError: the ranks hold different layouts (raised on all of them).
        PeerTimeoutError: a rank did not come in time.
    """
    if dist.get_rank(group) < 0:
        raise LayoutError("this rank is not a member of the process group")
    channel = Channel(group)
    reasons = {name: reason and reason[:_REASON_LETTERS] for name, reason in reasons.items()}
    call = Call(0, "setup", timeout_s, problem or _misfit(layout, channel.size))
    frame = {"layout": layout.model_dump(), "channel": Channel.next_number, "reasons": reasons}
    data = json.dumps(frame).encode().ljust(_FRAME_BYTES)
    assert len(data) == _FRAME_BYTES, f"a frame of {len(data)} bytes"
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(channel.device())
    frames = {peer: torch.empty_like(mine) for peer in range(channel.size) if peer != channel.rank}
    with Round(channel, call, "setup") as exchange:
        for peer in exchange.peers():
            exchange.recv(peer, frames[peer])
        for peer in exchange.peers():
            exchange.send(peer, mine)
    try:
        exchange.finish()
    except PeerError as error:  # a peer's layout does not fit: so the layouts differ, or all fail
        raise LayoutMismatchError(str(error)) from None
    answers = {peer: json.loads(f.cpu().numpy().tobytes()) for peer, f in frames.items()}
    for peer, answer in sorted(answers.items()):
        different = layout.differences(EPLayout(**answer["layout"]))
        if different:
            raise LayoutMismatchError(
                f"ranks {channel.rank} and {peer} were given different layouts: "
                + "; ".join(different)
            )
    answers[channel.rank] = frame
    number = max(answer["channel"] for answer in answers.values())
    Channel.next_number = number + 1
    agreed = {name: _first_reason(name, answers) for name in reasons}
    return Channel(group, number), agreed


def _first_reason(backend: str, answers: dict[int, dict[str, Any]]) -> str | None:
    for rank, answer in sorted(answers.items()):
        reason = answer["reasons"][backend]
        if reason is not None:
            return f"rank {rank}: {reason}"
    return None


def _misfit(layout: EPLayout, num_ranks: int) -> LayoutError | None:
    parallel, experts = layout.parallel, layout.model.num_experts
    if num_ranks == parallel.group_size:
        return None
    fits = [n * parallel.expert_tensor for n in range(1, experts + 1) if experts % n == 0]
    return LayoutError(
        f"the layout is for {parallel.group_size} ranks (parallel.expert={parallel.expert} x "
        f"expert_tensor={parallel.expert_tensor}), the group has {num_ranks}; {experts} experts "
        f"fit groups of {', '.join(map(str, fits))}"
    )
