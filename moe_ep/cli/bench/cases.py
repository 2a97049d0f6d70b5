"""What is timed of moe_ep itself, for one layout and one backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ep.backends.base import Call
from moe_ep.cli.bench import traffic
from moe_ep.cli.bench.ranks import Ranks
from moe_ep.cli.bench.traffic import Counts, RowBytes, Traffic
from moe_ep.dispatcher import ExpertParallel
from moe_ep.layout import DTYPE_BYTES, EPLayout

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8_e4m3": torch.bfloat16,
}


@dataclass(frozen=True)
class Case:
    """One line of the table. `by`: who is timed, a backend or a peer."""

    name: str
    by: str
    action: Callable[[], object]
    traffic: Traffic | None = None


@dataclass(frozen=True)
class Workload:
    """Random tokens with uniform routing on this rank.

    Attributes:
        x: [T, H]. topk_idx: [T, K] int64. weights: [T, K] fp32.
        expert_slots: [T, K * copies] ids over all expert slots of the group: topk_idx itself unless
            `parallel.expert_tensor` ranks share an expert.
    """

    layout: EPLayout
    ranks: Ranks
    x: Tensor
    topk_idx: Tensor
    weights: Tensor
    expert_slots: Tensor

    @classmethod
    def random(cls, layout: EPLayout, ranks: Ranks, seed: int) -> Workload:
        model, device = layout.model, ranks.device
        generator = torch.Generator(device).manual_seed(seed * 1000 + ranks.rank)
        num_tokens = layout.tokens_per_rank
        assert num_tokens is not None
        dtype = DTYPES[layout.dispatch.dtype]
        x = torch.randn(num_tokens, model.hidden, generator=generator, device=device).to(dtype)
        scores = torch.rand(num_tokens, model.num_experts, generator=generator, device=device)
        topk_idx = scores.topk(model.top_k, dim=1).indices
        weights = torch.rand(num_tokens, model.top_k, generator=generator, device=device)
        local, copies = layout.num_local_experts, layout.parallel.expert_tensor
        first = (topk_idx // local * copies) * local + topk_idx % local
        part = torch.arange(copies, device=device) * local
        slots = (first.unsqueeze(2) + part).flatten(1)
        return cls(layout, ranks, x, topk_idx, weights, slots)


class Session:
    """An ExpertParallel with a known routing, its cases, and their bytes.

    Construction and `destroy` are collective.
    """

    def __init__(self, work: Workload, capacity: int | None = None) -> None:
        layout, ranks = work.layout, work.ranks
        if capacity is not None:
            layout = layout.replace(**{"dispatch.capacity": capacity})
        self.work = work
        self.ep = ExpertParallel(layout, ranks.new_group())
        try:
            first = self.ep.dispatch(work.x, work.topk_idx, work.weights)
            self._handle = first.handle
            self._rows = torch.randn_like(first.tokens)
            self.ep.combine(self._rows, self._handle)
            tiny = self.ep.dispatch(work.x[:1], work.topk_idx[:1])
            self._tiny, self._tiny_row = tiny.handle, tiny.tokens
            self.ep.combine(self._tiny_row, self._tiny)
            arriving = int(self._handle.valid_tokens_per_expert.sum())
        except BaseException:
            self.ep.destroy()
            raise
        local = layout.num_local_experts
        self.counts = Counts.of(work.expert_slots, ranks.rank, ranks.size, local, arriving)
        self.num_rows = self._handle.num_rows

    @property
    def name(self) -> str:
        return self.ep.backend.name

    def destroy(self) -> None:
        self.ep.destroy()

    def line_up(self) -> None:
        """Ends on all ranks at once, on the device."""
        if self.work.ranks.size > 1:
            self.ep.combine(self._tiny_row, self._tiny)

    def notify(self) -> None:
        call = Call(0, "bench.notify", self.ep.layout.timeouts.steady_s)
        # Only num_rows waits for the counts, where they come from a device.
        _ = self.ep.backend.prepare(self.work.expert_slots, call).num_rows

    def dispatch(self) -> None:
        self.ep.dispatch(self.work.x, self.work.topk_idx, self.work.weights)

    def dispatch_cached(self) -> None:
        self._handle.in_flight = 0  # the rows are thrown away: no combine is to follow
        self.ep.dispatch(self.work.x, handle=self._handle, topk_weights=self.work.weights)

    def dispatch_fp8_rows(self) -> None:
        work = self.work
        self._handle.in_flight = 0
        self.ep.dispatch(work.x, handle=self._handle, topk_weights=work.weights, dequantize=False)

    def combine(self) -> None:
        self.ep.combine(self._rows, self._handle)

    def whole_way(self) -> None:
        there = self.ep.dispatch(self.work.x, self.work.topk_idx, self.work.weights)
        self.ep.combine(there.tokens, there.handle)

    def forward_backward(self) -> None:
        leaf = self.work.x.detach().requires_grad_()
        there = self.ep.dispatch(leaf, self.work.topk_idx, self.work.weights)
        self.ep.combine(there.tokens, there.handle).backward(self.work.x)

    def cases(self) -> list[Case]:
        layout = self.ep.layout
        dispatch, cast, combine, backward = self._traffic()
        found = [
            Case("notify", self.name, self.notify),
            Case("dispatch", self.name, self.dispatch, dispatch),
            Case("dispatch, cached", self.name, self.dispatch_cached, dispatch),
        ]
        if layout.dispatch.dtype == "fp8_e4m3":
            found.append(
                Case("dispatch, cached, fp8 rows", self.name, self.dispatch_fp8_rows, cast)
            )
        return [
            *found,
            Case("combine", self.name, self.combine, combine),
            Case("whole way", self.name, self.whole_way, dispatch + combine),
            Case(
                "forward + backward",
                self.name,
                self.forward_backward,
                dispatch + combine + backward + combine,
            ),
        ]

    def _traffic(self) -> tuple[Traffic, Traffic, Traffic, Traffic]:
        """Of dispatch, dispatch that leaves FP8 rows, combine, and the dispatch of a gradient,
        which is never quantised."""
        options = self.ep.layout.dispatch
        row, payload = RowBytes.of(self.ep.layout), DTYPE_BYTES[options.dtype]
        payload *= self.ep.layout.model.hidden
        if self.name == "reference":
            there = traffic.without_sharing(self.counts, row.wire, payload)
            back = traffic.without_sharing(self.counts, row.x, row.x)
            return there, there, back, back
        plain = RowBytes(row.x, row.x)
        return (
            traffic.dispatch(self.counts, row, row.x, payload),
            traffic.dispatch(self.counts, row, row.wire, payload),
            traffic.combine(self.counts, row.x, options.exact_combine),
            traffic.dispatch(self.counts, plain, row.x, row.x),
        )
