"""Buffer: the public interface of DeepEP V1 (v1.2.1) over our backends. This file is throughput
mode; `moe_ep.low_latency` has the rest.

Names, arguments, shapes and the order of rows are those of `deep_ep.Buffer`
(https://github.com/deepseek-ai/DeepEP); docs/deep_ep.md lists what differs. It runs on CPU tensors
with the reference backend, on GPUs with the cuda backend and, on several hosts, nvshmem.

Legend of shapes: T tokens of this rank, H hidden, K top-k, R ranks, E experts, L = E/R local
experts, N received rows, S scales of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep import buffer_checks as checks
from moe_ep import buffer_verbs as verbs
from moe_ep.buffer_verbs import Handle, Rows
from moe_ep.eager import eager
from moe_ep.events import CommStream, EventHandle, EventOverlap
from moe_ep.low_latency import LowLatencyVerbs
from moe_ep.low_latency_exchange import LowLatency
from moe_ep.rank_exchange import RankExchange


@dataclass(frozen=True)
class Config:
    """DeepEP's tuning knobs.

    Attributes:
        num_sms: blocks of a kernel at most; at least 1, else ValueError.
        num_max_nvl_chunked_recv_tokens: takes part in the size hint only: DeepEP's ring buffer,
            whose chunks it sizes, does not exist here.
        num_max_nvl_chunked_send_tokens, num_max_rdma_chunked_send_tokens,
            num_max_rdma_chunked_recv_tokens: likewise without effect.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms < 1:
            raise ValueError(f"num_sms={self.num_sms}; it must be at least 1")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of symmetric memory for one chunk of rows of `hidden_bytes` bytes: two for staging,
        one for the sums of each of `num_ranks`. A hint: a Buffer makes room for what it is given.
        """
        return self.num_max_nvl_chunked_recv_tokens * hidden_bytes * (2 + num_ranks)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0, whatever `hidden_bytes` and `num_ranks`: a Buffer makes room for what it is given."""
        return 0


class Buffer(LowLatencyVerbs):
    """Expert-parallel dispatch and combine of one process group, with DeepEP's interface.

    Construction is collective, and so are `dispatch` and `combine`: all ranks call them in one
    order, with rows of one shape. Results are not differentiable. Tensors of a call are dense and
    on one device: on a GPU, or anywhere with backend reference. Symmetric memory grows to what is
    dispatched; all waits for peers are bounded (`MOE_EP_TIMEOUT_S`).

    Args:
        group: process group of all expert-parallel ranks.
        num_nvl_bytes, num_rdma_bytes: kept as attributes; without low-latency mode they don't size
            anything.
        low_latency_mode: the low_latency_ methods work too, in `num_rdma_bytes` of symmetric
            memory (half as much again between hosts), equal on all ranks: see
            `get_low_latency_rdma_size_hint`.
        explicitly_destroy: memory is freed by `destroy()` only, not when the object is dropped.
        num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric,
            enable_shrink: accepted, without effect.
        comm: not supported.

    Raises:
        ValueError: no `group`.
        BackendUnavailableError: `MOE_EP_BACKEND` names a backend that cannot run here.
        PeerTimeoutError: a rank did not come in time.
    """

    num_sms: int = 20
    """Of the configs made from now on. Shared by all objects because `set_num_sms` is a static
    method of DeepEP's class; nothing else here is."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if group is None:
            raise ValueError("Buffer needs group, a torch process group (comm= is not supported)")
        self.group = group
        self.rank, self.group_size = dist.get_rank(group), dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._exchange = RankExchange(group)
        self._low_latency: LowLatency | None = None
        try:
            if low_latency_mode:
                self._low_latency = LowLatency(group, num_rdma_bytes)
        except Exception:
            self._exchange.destroy()
            raise
        if not explicitly_destroy:
            self._exchange.destroy_when_dropped()
            if self._low_latency is not None:
                self._low_latency.destroy_when_dropped()
        self._comm = CommStream(self._exchange.device, always=True)
        self._local: dict[bool, Tensor] = {}

    # -- settings ---------------------------------------------------------------------------------

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 rows can be dispatched: on every GPU, and on the CPU."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets `Buffer.num_sms` to `new_num_sms` blocks; ValueError unless even and positive."""
        if new_num_sms < 2 or new_num_sms % 2:
            raise ValueError(f"num_sms={new_num_sms}; it must be even and at least 2")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The config `dispatch` uses where none is given; the same for any `num_ranks`."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The config `combine` uses where none is given; the same for any `num_ranks`."""
        return Config(Buffer.num_sms)

    @staticmethod
    def capture() -> EventOverlap:
        """An event that marks the work queued on the current stream so far."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of asynchronous operations. RuntimeError where tensors are on the CPU."""
        return self._comm.stream

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: tuple[int, ...] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Memory of `num_nvl_bytes` (`num_rdma_bytes`) bytes that lives as long as this object.

        It is the caller's alone: no operation reads or writes it.

        Args:
            size: shape of the result, a torch.Size or another tuple of ints; None: all of it, one
                dimension.
            offset: its first element, counted in `dtype`.
            use_rdma_buffer: the memory of `num_rdma_bytes` bytes.

        Raises:
            TypeError: not ints. ValueError: a negative one, or there is not as much memory.
        """
        offset = checks.integer("offset", offset, 0)
        if size is not None:
            size = torch.Size([checks.integer("a dimension of size", n, 0) for n in size])
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        if use_rdma_buffer not in self._local:
            self._local[use_rdma_buffer] = torch.zeros(
                num_bytes, dtype=torch.uint8, device=self._exchange.device
            )
        whole = num_bytes - num_bytes % dtype.itemsize
        tensor = self._local[use_rdma_buffer][:whole].view(dtype)[offset:]
        if size is None:
            return tensor
        if tensor.numel() < size.numel():
            raise ValueError(
                f"size={list(size)} from offset {offset} is more than the {num_bytes} bytes there "
                "are; ask for more when the Buffer is made"
            )
        return tensor[: size.numel()].view(size)

    # -- verbs ------------------------------------------------------------------------------------

    @eager
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Counts what each rank and expert is sent by this rank. Nothing is communicated.

        Args:
            topk_idx: [T, K] int64 (or int32) expert ids, -1 unused. num_experts: E.
            previous_event, async_finish, allocate_on_comm_stream: see `dispatch`.

        Returns:
            num_tokens_per_rank [R] int32, None (there are no RDMA ranks), num_tokens_per_expert [E]
            int32, is_token_in_rank [T, R] bool, event.

        Raises:
            TypeError, ValueError: bad input.
        """
        checks.check_topk_idx(topk_idx, self._exchange.device)
        checks.check_num_experts(num_experts, self.group_size)
        layout, event = self._comm.run(
            lambda: verbs.count(topk_idx, num_experts, self.group_size),
            topk_idx,
            previous_event=previous_event,
            async_finish=async_finish,
        )
        per_rank, per_expert, in_rank = layout
        return per_rank, None, per_expert, in_rank, event

    @eager
    def dispatch(
        self,
        x: Rows,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        """Sends each token row once to every rank that has one of its experts.

        Args:
            x: [T, H] bf16, fp16 or fp32; or (data [T, H] float8_e4m3fn, scales [T, S] or [T], fp32
                or int32, of any strides). A row is a multiple of 16 bytes.
            handle: of an earlier dispatch, to repeat its routing; nothing else describes the
                routing then, and nothing but rows travels. x has the dtype (and as many scales)
                of that dispatch; or, where it was FP8, bf16 on all ranks.
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: from
                `get_dispatch_layout`; needed without a handle. num_tokens_per_rdma_rank: unused.
            topk_idx: [T, K] int64 or int32. topk_weights: [T, K] fp32. Both or neither; neither
                with a handle.
            expert_alignment: rounds up the counts in num_recv_tokens_per_expert_list.
            num_worst_tokens: rows of the results whatever the routing (T * R is always enough).
                The host doesn't wait, so that a CUDA graph can capture it, once a dispatch of the
                same shapes has run eagerly. Rows left over are zero and have no experts. Equal on
                all ranks.
            config: of num_sms; None: `get_dispatch_config`.
            previous_event: the operation starts after it instead of after all work queued so far.
            async_finish: the current stream doesn't wait for the end; wait for the event.
            allocate_on_comm_stream: no effect: results belong to the stream that writes them.

        Returns:
            recv_x: as x, [N, H]; scales [N, S] row-major (or [N]). Rows are ordered by source rank,
                then token.
            recv_topk_idx: [N, K] local expert ids in topk_idx's dtype, -1 for experts of other
                ranks. None without topk_idx.
            recv_topk_weights: [N, K] fp32, zero beside -1. None without topk_weights.
            num_recv_tokens_per_expert_list: L ints. Empty with num_worst_tokens; None with a
                handle.
            handle: a Handle. None with a handle.
            event: an EventOverlap.

        Raises:
            TypeError, ValueError: bad input on this rank. Its peers get a PeerError, and all can go
                on. With a handle or num_worst_tokens, on backend cuda they get it at a later call
                (so does this rank, of bad expert ids), and what moved these rows stops:
                docs/deep_ep.md tells what else goes on.
            OrderError: the handle is of a Buffer of another group; PeerError or PeerTimeoutError
                on the peers, who wait for rows, and what moved them stops.
            LayoutMismatchError: ranks send rows of different shapes or dtypes (on all ranks).
            CapacityError: more than num_worst_tokens rows for some rank (on all ranks; on backend
                cuda at a later call, and what moved these rows stops).
            PeerTimeoutError: a peer did not come in time; or, with num_worst_tokens, sends rows of
                another shape or dtype.
            OrderError: a peer is in another operation.
        """
        routing = {
            "num_tokens_per_rank": num_tokens_per_rank,
            "is_token_in_rank": is_token_in_rank,
            "num_tokens_per_expert": num_tokens_per_expert,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
        }
        options = {"alignment": expert_alignment, "num_worst_tokens": num_worst_tokens}
        num_sms = self.get_dispatch_config(self.group_size).num_sms
        output, event = self._comm.run(
            lambda: verbs.dispatch(self._exchange, x, handle, routing, config, num_sms, **options),
            (x, *routing.values()),
            previous_event=previous_event,
            async_finish=async_finish,
        )
        return (*output, event)

    @eager
    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor | None, Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Returns rank rows to their tokens and adds them up, without weights.

        Args:
            x: [N, H] in the order of the dispatch and in its dtype, bf16 where that was FP8.
            handle: of that dispatch.
            topk_weights: [N, K] fp32, added up likewise; on all ranks or on none. K is that of the
                dispatch or, where that had none, one on all ranks.
            bias: one or two [T, H] in the dtype of x, added to the sums in fp32.
            config, previous_event, async_finish, allocate_on_comm_stream: see `dispatch`.

        Returns:
            [T, H] in the dtype of x, summed in rank order in fp32 and rounded once (and once more
            with a bias); [T, K] fp32 or None; an EventOverlap.

        Raises:
            TypeError, ValueError, OrderError: bad input on this rank. Its peers get a PeerError, on
                backend cuda at a later call, and there what moved these rows stops. Peers of a
                handle that is of no dispatch of this group: see `dispatch`.
            OrderError: only some ranks gave topk_weights (backend reference, on all ranks).
            PeerTimeoutError: a peer did not come in time.
        """
        num_sms = self.get_combine_config(self.group_size).num_sms
        output, event = self._comm.run(
            lambda: verbs.combine(self._exchange, x, handle, topk_weights, bias, config, num_sms),
            (x, topk_weights, bias),
            previous_event=previous_event,
            async_finish=async_finish,
        )
        return (*output, event)

    def destroy(self) -> None:
        """Frees everything, handles included. Idempotent; does not wait for a dead peer."""
        self._local.clear()
        if self._low_latency is not None:
            self._low_latency.destroy()
        self._exchange.destroy()
