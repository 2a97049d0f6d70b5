"""Low-latency mode: the decode-size dispatch and combine of DeepEP V1 (v1.2.1), with receive hooks.

`LowLatencyVerbs` are the methods of `moe_ep.Buffer` for it, with the names, arguments, shapes and
return tuples of `deep_ep.Buffer` (https://github.com/deepseek-ai/DeepEP).

Legend of shapes: T tokens of this rank, Tmax = num_max_dispatch_tokens_per_rank, H hidden, K top-k,
R ranks, E experts, L = E/R local experts, N = R*Tmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from moe_ep import low_latency_checks as checks
from moe_ep.backends.low_latency_base import Receive, Result
from moe_ep.eager import eager
from moe_ep.errors import OrderError
from moe_ep.events import CommStream, EventOverlap
from moe_ep.low_latency_exchange import LowLatency, LowLatencyHandle

Hook = Callable[[], None]
Rows = Tensor | tuple[Tensor, Tensor]


class LowLatencyVerbs:
    """The low-latency part of `moe_ep.Buffer`."""

    num_sms: int
    _comm: CommStream
    _low_latency: LowLatency | None

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of symmetric memory that low-latency operations of this shape need, on however many
        hosts.

        Args:
            num_max_dispatch_tokens_per_rank: Tmax. hidden: H. num_ranks: R. num_experts: E.

        Raises:
            TypeError: not an int. ValueError: below 1, or R does not divide E.
        """
        return checks.size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing, whatever `num_max_dispatch_tokens_per_rank`, `hidden` and `num_experts`:
        signals carry the number of their operation."""

    @eager
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Sends each token row to its experts, whose rows come packed. The host does not wait.

        All ranks call it with the same Tmax, H, K, E and `use_fp8`; T may differ and be 0. The
        first call of a shape compares it between the ranks, so a CUDA graph can capture the later
        ones. At most two operations may be sent and not yet received.

        Args:
            x: [T, H] bf16, T <= Tmax, H a multiple of 8 (FP8: of 128).
            topk_idx: [T, K] int64 or int32 expert ids, -1 unused; K at most 32 and at most E.
            num_max_dispatch_tokens_per_rank: Tmax. num_experts: E.
            cumulative_local_expert_recv_stats: [L] int32; received rows are added to it.
            dispatch_wait_recv_cost_stats: [R] int64; nanoseconds waited for each rank are added.
            use_fp8: rows are quantised to e4m3 with one scale per 128 columns before they travel.
            round_scale: scales are powers of two. use_ue8m0: and four of them come as the bytes of
                an int32 (H a multiple of 512).
            async_finish: the current stream doesn't wait for the end; wait for the event.
            return_recv_hook: only send; rows are received when the hook is called, on the stream
                that is current then. Nothing runs on the GPU in between.

        Returns:
            recv_x: [L, N, H] bf16, or (float8_e4m3fn, scales [L, N, H/128] fp32 or [L, N, H/512]
                int32, the last two dimensions column-major). Rows of an expert are ordered by
                source rank, then token; those beyond its count are undefined.
            recv_count: [L] int32.
            handle: for `low_latency_combine`.
            event: an EventOverlap. hook: None without `return_recv_hook`.

        Raises:
            TypeError, ValueError: bad input on this rank. Its peers get a PeerError; on backends
                cuda and nvshmem, from the second use of a shape on, they get it at a later call and
                the Buffer stops. Arguments that make no shape (no tensor, no int, one out of range)
                count as the known shape that most of them fit; if the peers use another, the Buffer
                stops on all ranks.
            LayoutMismatchError (a ValueError): ranks call it with different shapes, all for the
                first time.
            OrderError: ranks call it with different shapes, one of them known, and the Buffer stops
                (on backends cuda and nvshmem at a later call, or as a PeerTimeoutError).
            OrderError: two operations have not been received yet. All ranks can go on if it is so
                on all; else the peers get a PeerError (on backends cuda and nvshmem a
                PeerTimeoutError), and the Buffer stops.
            PeerTimeoutError: a peer did not come in time (on backends cuda and nvshmem at a later
                call).
        """
        low_latency = self._in_low_latency_mode()
        arguments = {
            "x": x,
            "topk_idx": topk_idx,
            "max_tokens": num_max_dispatch_tokens_per_rank,
            "num_experts": num_experts,
            "recv_stats": cumulative_local_expert_recv_stats,
            "wait_stats": dispatch_wait_recv_cost_stats,
            "use_fp8": use_fp8,
            "round_scale": round_scale,
            "use_ue8m0": use_ue8m0,
            "one_ending": not (async_finish and return_recv_hook),
        }
        (tensors, handle, hook), event = self._run(
            lambda: _flat(*low_latency.dispatch(arguments, self.num_sms, not return_recv_hook)),
            tuple(arguments.values()),
            async_finish,
            return_recv_hook,
        )
        rows, scales, count = tensors
        return (rows if scales is None else (rows, scales)), count, handle, event, hook

    @eager
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        block_signals: Tensor | None = None,
        block_signal_value: int = 1,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Returns expert rows to their tokens and adds them up with their weights.

        Args:
            x: [L, N, H] bf16, in the order of the dispatch.
            topk_idx: [T, K], as dispatched. topk_weights: [T, K] fp32.
            handle: of that dispatch.
            use_logfmt: must be false.
            zero_copy: the rows are in the buffer that `get_next_low_latency_combine_buffer` gave
                last for this handle, whatever x holds. Their readers then take them from there.
            out: [T, H] bf16, contiguous, for the result.
            block_signals: [L] or [L, B] int32. Rows b*N/B to (b+1)*N/B of an expert are sent as
                soon as its signal b has reached block_signal_value, so that the combine can be
                called before the rows are there: whoever computes them, on another stream, writes
                a block and then raises its signal (a release of device scope, or at a kernel's
                end). Blocks are sent in ascending order; those that hold no row are not waited
                for. The combine only reads the signals. The caller zeroes them before the rows of
                the next combine are computed (in a captured graph, too), launches that work before
                the combine (streams may share a hardware queue: CUDA_DEVICE_MAX_CONNECTIONS), and
                leaves SMs for it: `Buffer.set_num_sms`. Backend reference waits on the host.
            block_signal_value: what a signal counts up to.
            combine_wait_recv_cost_stats, async_finish, return_recv_hook: see the dispatch.

        Returns:
            [T, H] bf16, summed in k order in fp32 and rounded once; an EventOverlap; the hook or
            None.

        Raises:
            As `low_latency_dispatch`. OrderError also: the dispatch has not been received yet.
                TypeError, ValueError of a handle that is not one of this Buffer: it stops, unless
                (backend reference) all ranks gave such a one.
            PeerTimeoutError: a signal was not raised in time; names the expert and the block (on
                backends cuda and nvshmem at a later call).
        """
        low_latency = self._in_low_latency_mode()
        arguments = {
            "x": x,
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "use_logfmt": use_logfmt,
            "out": out,
            "wait_stats": combine_wait_recv_cost_stats,
            "one_ending": not (async_finish and return_recv_hook),
            "zero_copy": zero_copy,
            "block_signals": block_signals,
            "block_signal_value": block_signal_value,
        }

        def send() -> tuple[Tensor, None, Receive]:
            total, receive = low_latency.combine(
                handle, arguments, self.num_sms, not return_recv_hook
            )
            return total, None, receive

        (total, _, hook), event = self._run(
            send, tuple(arguments.values()), async_finish, return_recv_hook
        )
        return total, event, hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """[L, N, H] bf16 for the expert rows of the handle's next combine with zero_copy.

        With backends cuda and nvshmem it lies in symmetric memory where one of the two places for
        it is free, and a combine copies nothing but what it puts to other hosts. Ask again before
        each combine: the rows of the last one may still be read by a peer, and the current stream
        waits for that if need be. It is not to be used after `destroy`.

        Args:
            handle: of the dispatch whose rows they are.
        """
        return self._in_low_latency_mode().combine_buffer(handle)

    def _in_low_latency_mode(self) -> LowLatency:
        if self._low_latency is None:
            raise OrderError(
                "this Buffer was built without low_latency_mode=True and num_rdma_bytes="
                "Buffer.get_low_latency_rdma_size_hint(...)"
            )
        return self._low_latency

    def _run(
        self, send: Callable[[], Any], inputs: Any, async_finish: bool, with_hook: bool
    ) -> tuple[Any, EventOverlap]:
        """send returns (tensors, handle, receive); the last becomes the hook, or is called."""
        if with_hook:
            return send(), EventOverlap()

        def all_at_once() -> Any:
            tensors, handle, receive = send()
            receive()
            return tensors, handle, None

        return self._comm.run(all_at_once, inputs, async_finish=async_finish)


def _flat(
    result: Result, handle: LowLatencyHandle, receive: Receive
) -> tuple[tuple[Tensor, Tensor | None, Tensor], LowLatencyHandle, Receive]:
    return (result.rows, result.scales, result.count), handle, receive
