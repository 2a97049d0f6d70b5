"""One rank of one stretch of a training, disturbed or not."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mixtral import cli, megatron_run, model
from moe_ep.backends.base import Call
from moe_ep.errors import MoEEPError
from soak import workload
from soak.events import EventLog
from soak.faults import Disturbance
from soak.memory import held

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LINGER_S = 30.0  # for other survivors, so that none mistakes this rank's end for the death
_CHECKPOINTS_KEPT = 2
_REASONS = ("", "call", "budget")  # why a stretch ends before its last step


class SoakTraining(megatron_run.Training):
    """A training that does what `workload` says and notes what `report` reads."""

    def __init__(self, plan: dict[str, Any], *arguments: Any) -> None:
        super().__init__(*arguments)
        from moe_ep.integrations.megatron.integration import MegatronIntegration

        self.plan = plan
        self.rank = dist.get_rank()
        self.log = EventLog(Path(plan["logs"]) / f"rank_{self.rank}.jsonl")
        installed = MegatronIntegration.installed()
        assert installed is not None
        (self.ep,) = installed.pool  # all layers share one
        self.ep.set_timeouts(first_s=120.0, steady_s=plan["timeout_s"])
        self.ep.collect_stats()
        routers = [router for _, router in model.routers(self.model)]
        self.skew = workload.SkewedRouters(routers, self.options.size.num_experts, self.device)
        self.disturbance = None
        if plan["disturbed"]:
            seed = f"{plan['seed']} {plan['logs']} {self.rank}"
            self.disturbance = Disturbance(self.rank, seed, plan["kill"], self.log)
            self.disturbance.watch(self.ep.backend)
        self.step_seconds: list[float] = []

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            self._note(error)
            raise
        self.log.write(event="end", step=self.step)

    def _pass(self, batches: Any, num_micro_batches: int, forward_only: bool) -> list:
        options = self.options
        wanted = workload.lengths(self.plan["seed"], self.step, self.dp_rank, options.seq_len)
        return super()._pass(workload.shortened(batches, wanted), num_micro_batches, forward_only)

    def _train_step(self) -> dict[str, Any]:
        options, seed, begin = self.options, self.plan["seed"], time.monotonic()
        if self.disturbance is not None:
            self.disturbance.begin_step(self.step + 1)
        self.skew.set(workload.skew(seed, self.step, options.size.num_experts))
        record = super()._train_step()
        sent = workload.exchange(self.ep, seed, self.step, _DTYPES[options.dtype], self.device)
        rows = self._check_rows(record["tokens_per_expert"], sent)
        self.step_seconds.append(time.monotonic() - begin)
        gc.collect()  # what waits for it is no leak
        if len(self.step_seconds) == 1:
            gc.freeze()  # and later collections are quick
        self.log.write(event="step", step=self.step, loss=record["lm_loss"], rows=rows, **held())
        return record

    def _check_rows(self, routed: list[list[int]], sent: int) -> int:
        """Holds what routers decided, for all ranks, against what experts got. Collective.

        Returns:
            Rows that were dispatched in this step, over all ranks.

        Raises:
            AssertionError: a row is missing, or there is one too many.
        """
        group = self.ep.gather_stats(reset=True)
        for layer, wanted in enumerate(routed, 1):
            got = group.tokens_per_expert(str(layer))
            assert got == wanted, f"layer {layer} routed {wanted} rows to experts that got {got}"
        every = torch.tensor(sent)
        dist.all_reduce(every)
        got = sum(group.tokens_per_expert("exchange"))
        assert got == int(every), f"{int(every)} rows were sent in the exchange, {got} arrived"
        verbs = [one.total.verbs for one in group.by_rank]
        for one, back in (("dispatch", "combine_backward"), ("combine", "dispatch_backward")):
            rows = [
                sum(way.rows for verb in verbs for way in verb[name].links.values())
                for name in (one, back)
            ]
            assert rows[0] == rows[1], f"{one} moved {rows[0]} rows, {back} {rows[1]}"
        return sum(group.tokens_per_expert())

    def _save(self) -> None:
        super()._save()
        if self.rank == 0:
            for old in sorted(self.options.save.glob("step_*"))[:-_CHECKPOINTS_KEPT]:
                shutil.rmtree(old)
        reason = torch.tensor(self._reason_to_stop() if self.rank == 0 else 0)
        dist.broadcast(reason, 0)
        if int(reason) and self.step < self.options.steps:
            self.options.steps = self.step  # ends the loop
            self.log.write(event="stop", step=self.step, reason=_REASONS[int(reason)])

    def _reason_to_stop(self) -> int:
        """Whether time is up: of this call, or, with what the other training will need, of all."""
        now = time.time()
        if now > self.plan["call_ends"]:
            return _REASONS.index("call")
        if self.plan["budget_ends"] is None:
            return 0
        usual = sorted(self.step_seconds)[len(self.step_seconds) // 2]
        to_come = self.plan["start_s"] + self.step * usual
        return _REASONS.index("budget") if now + to_come > self.plan["budget_ends"] else 0

    def _note(self, error: Exception) -> None:
        """Writes down what this rank was told, and lets the other survivors be told too."""
        told = f"{type(error).__name__}: {error}"
        if not isinstance(error, MoEEPError):
            told = self._what_the_device_saw() or told
        self.log.write(event="error", step=self.step + 1, text=told, time=time.time())
        folder = Path(self.plan["logs"])
        (folder / f"told_{self.rank}").touch()
        survivors = dist.get_world_size() - (self.plan["kill"] is not None)
        deadline = time.monotonic() + _LINGER_S
        while len(list(folder.glob("told_*"))) < survivors and time.monotonic() < deadline:
            time.sleep(0.1)

    def _what_the_device_saw(self) -> str | None:
        """On a GPU other libraries may complain of the dead rank before the device does."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.ep.backend.check(Call(self.ep.operations, "soak", 1.0))
        except MoEEPError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _report(self) -> None:
        """The soak has a report of its own."""


def run(plan: dict[str, Any]) -> int:
    """The exit status: 0 at the end of the stretch, 3 after an error, which the rank's log has."""
    megatron_run.Training = lambda *arguments: SoakTraining(plan, *arguments)  # type: ignore[misc]
    try:
        return megatron_run.run(cli.parse(plan["flags"]))
    except Exception as error:
        print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(3)  # no collective of an exit handler may wait for the dead
