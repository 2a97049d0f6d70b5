"""Where a token's rows go, on average, under uniform routing: exact, without replacement.

Legend: T tokens of a rank, E experts, K top-k, R ranks, L experts of a rank, S expert rows of a
token (K times the expert-tensor ranks), D distinct ranks and Q other hosts a token goes to.
"""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass
from fractions import Fraction

from moe_ep.layout import EPLayout


@dataclass(frozen=True)
class Routing:
    """Expected numbers for one token, averaged over the ranks it may be on.

    Attributes:
        ranks, hosts: of the group.
        slots: expert rows (S). destinations: distinct ranks, the token's own included (D).
        host_destinations: distinct hosts, its own included. remote_hosts: without it (Q).
        same_host: part of all rows whose rank is on the token's own host, that rank included.
        max_slots: expert rows a rank can get of one token (min(K, L)).
        padding_rows: rows that a rank's result has beyond those that arrive.
    """

    ranks: int
    hosts: int
    slots: float
    destinations: float
    host_destinations: float
    remote_hosts: float
    same_host: float
    max_slots: int
    padding_rows: float

    @property
    def over_nvlink(self) -> float:
        """Part of rank rows that leave their holder (the source, or its rail peer): of the ranks
        of each host, all but one."""
        return 1 - self.hosts / self.ranks

    @property
    def slots_over_nvlink(self) -> float:
        """Part of rows sent straight to their rank that stay on the host but leave the rank."""
        return self.same_host - 1 / self.ranks

    @classmethod
    def uniform(
        cls, layout: EPLayout, tokens: int, ranks_per_host: int, host_limit: int | None = None
    ) -> Routing:
        """Every token takes K different experts, each set of K as likely as any other.

        Args:
            tokens: of each rank.
            host_limit: as with group-limited gating: a token takes this many hosts at random, then
                its experts among theirs.

        Raises:
            ValueError: `host_limit` is not possible with this layout.
        """
        model, parallel, local = layout.model, layout.parallel, layout.num_local_experts
        ranks, copies = parallel.group_size, parallel.expert_tensor
        starts = range(0, ranks, ranks_per_host)
        sizes = [min(ranks_per_host, ranks - start) for start in starts]
        held = [  # experts of each host
            local * ((start + size - 1) // copies - start // copies + 1)
            for start, size in zip(starts, sizes, strict=True)
        ]
        pool, part = model.num_experts, Fraction(1)
        if host_limit is not None:
            pool = _limited_pool(layout, sizes, held, host_limit)
            part = Fraction(host_limit, len(sizes))
        reaches = [part * chance(pool, experts, model.top_k) for experts in held]
        remote = sum(
            (p * (1 - Fraction(size, ranks)) for p, size in zip(reaches, sizes, strict=True)),
            Fraction(0),
        )
        return cls(
            ranks=ranks,
            hosts=len(sizes),
            slots=model.top_k * copies,
            destinations=float(ranks * part * chance(pool, local, model.top_k)),
            host_destinations=float(sum(reaches)),
            remote_hosts=float(remote),
            same_host=sum(size * size for size in sizes) / ranks**2,
            max_slots=min(model.top_k, local),
            padding_rows=_padding_rows(layout, tokens),
        )


def chance(num_experts: int, of_a_group: int, top_k: int) -> Fraction:
    """That a token's K of E experts include one of a group's: 1 - C(E-n, K) / C(E, K)."""
    return 1 - Fraction(math.comb(num_experts - of_a_group, top_k), math.comb(num_experts, top_k))


def expected_padding(num_tokens: int, share: float, multiple: int) -> float:
    """Mean rows that round an expert's rows up to a multiple, none where it has no rows.

    Args:
        num_tokens: that may choose the expert, each on its own with the probability `share`.

    Returns:
        E[-n mod multiple] for a binomial n, from its characteristic function at the roots of unity.
    """
    total = (multiple - 1) / 2
    for k in range(1, multiple):
        root = cmath.exp(2j * math.pi * k / multiple)
        total += (((1 - share + share * root) ** num_tokens) / (root - 1)).real
    return max(total, 0.0)


def _padding_rows(layout: EPLayout, tokens: int) -> float:
    model, ranks, local = layout.model, layout.parallel.group_size, layout.num_local_experts
    if layout.dispatch.capacity is not None:
        arriving = tokens * model.top_k * layout.parallel.expert_tensor
        return float(max(layout.dispatch.capacity - arriving, 0))
    share = model.top_k / model.num_experts
    return local * expected_padding(ranks * tokens, share, layout.dispatch.row_alignment)


def _limited_pool(layout: EPLayout, sizes: list[int], held: list[int], limit: int) -> int:
    """Experts that a token can choose from once it has chosen its hosts."""
    model = layout.model
    if len(set(sizes)) > 1 or sum(held) != model.num_experts:
        raise ValueError(
            f"host limit {limit}: needs hosts with equal numbers of experts, each expert on one "
            f"host; here hosts of {sorted(set(sizes))} ranks hold {sorted(set(held))} experts each"
        )
    if not 1 <= limit <= len(sizes):
        raise ValueError(f"host limit {limit}: there are {len(sizes)} hosts; give 1 to that")
    if limit * held[0] < model.top_k:
        raise ValueError(
            f"host limit {limit}: {limit * held[0]} experts on so many hosts, fewer than "
            f"model.top_k={model.top_k}"
        )
    return limit * held[0]
