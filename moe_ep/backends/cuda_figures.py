"""What the CUDA backend can tell about its traffic."""

from __future__ import annotations

from torch import Tensor

from moe_ep.backends.base import Arrivals
from moe_ep.backends.cuda_plan import CudaPlan
from moe_ep.layout import EPLayout


class CudaFigures:
    """See `moe_ep.backends.base.Backend`. The header of a plan holds all that arrives with it."""

    layout: EPLayout
    size: int
    num_local_experts: int
    _offsets: dict[str, int]  # of the header's parts, in words

    def rows_wait(self) -> tuple[int, int] | None:
        """The device notes waits for counts only."""
        return None

    def tally(self, plan: CudaPlan) -> Tensor:
        return plan.source[: self._offsets["total"]]

    def arrivals(self, tally: Tensor) -> Arrivals:
        words = tally.cpu()

        def part(name: str, length: int) -> Tensor:
            return words[self._offsets[name] : self._offsets[name] + length]

        # Begins add up as counts do. A row for several experts of a rank travels once.
        rank_rows = part("rank_row_begin", self.size + 1).diff().tolist()
        items = part("item_begin", self.size + 1).diff().tolist()
        experts = part("expert_count", self.num_local_experts).tolist()
        exact = self.layout.dispatch.exact_combine
        return Arrivals(experts, rank_rows, items if exact else rank_rows)
