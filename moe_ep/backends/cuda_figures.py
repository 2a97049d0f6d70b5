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
        rank_rows, items, experts = self._parts(tally, self.size, self.num_local_experts)
        return Arrivals(
            experts, rank_rows, items if self.layout.dispatch.exact_combine else rank_rows
        )

    def _parts(
        self, tally: Tensor, num_ranks: int, num_experts: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Rank rows and items of each source, rows of each expert. Begins add up as counts do; a
        row for several experts of a rank travels once."""
        words = tally.cpu()

        def part(name: str, length: int) -> Tensor:
            return words[self._offsets[name] : self._offsets[name] + length]

        rank_rows = part("rank_row_begin", num_ranks + 1).diff().tolist()
        items = part("item_begin", num_ranks + 1).diff().tolist()
        return rank_rows, items, part("expert_count", num_experts).tolist()
