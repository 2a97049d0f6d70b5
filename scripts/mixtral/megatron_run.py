"""One rank of the training with Megatron-core: its DDP, optimizer, schedules and checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mixtral import cli, launch, memory, quiet, resume
from mixtral.data import Corpus, Windows, load_corpus, micro_batches
from mixtral.metrics import (
    ExpertCounter,
    MetricsLog,
    Progress,
    expert_metrics,
    summary,
    tensorboard_writer,
)

_EVAL_MICRO_BATCHES = 8


def run(options: argparse.Namespace) -> int:
    """Trains on this rank, in the ranks torchrun has started. Returns the exit code."""
    quiet.quiet()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    try:
        gpus = launch.num_gpus(options)
        cli.resolve(options, world)
        launch.check_sharing(options, gpus, local_ranks)
        problem = memory.refusal(options, *launch.memory_available(options, gpus, local_ranks))
        if problem:
            raise ValueError(problem)
        corpus = load_corpus(options.data)
        with contextlib.ExitStack() as stack:
            device = stack.enter_context(_process_group(options, gpus, local_rank, local_ranks))
            stack.enter_context(_megatron(options, device))
            Training(options, corpus, device).run()
    except ValueError as error:
        # Every rank finds the same mistake in the same flags: one of them tells it.
        return launch.fail(str(error)) if rank == 0 else 2
    return 0


@contextlib.contextmanager
def _process_group(
    options: argparse.Namespace, gpus: int, local_rank: int, local_ranks: int
) -> Iterator[torch.device]:
    """Joins the ranks; yields this rank's device. Every collective has a time limit."""
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    backend = "gloo"
    if gpus:
        torch.cuda.set_device(device)
        # NCCL refuses two ranks on one GPU; gloo moves their data through the host.
        shared = local_ranks > gpus
        backend = "cpu:gloo,cuda:gloo" if shared else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_s))
    try:
        yield device
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _megatron(options: argparse.Namespace, device: torch.device) -> Iterator[None]:
    """Megatron's parallel state and dispatcher, and its CPU shims where there is no GPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with contextlib.ExitStack() as stack:
        if device.type == "cpu":
            from moe_ep.integrations.megatron.cpu import cpu_shims

            stack.enter_context(cpu_shims())
        elif dist.get_backend_config().endswith("cuda:gloo"):
            stack.enter_context(_no_coalescing())
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=options.tp,
            pipeline_model_parallel_size=options.pp,
            expert_model_parallel_size=options.ep,
            expert_tensor_parallel_size=options.expert_tp,
            distributed_timeout_minutes=math.ceil(options.timeout_s / 60),
        )
        stack.callback(parallel_state.destroy_model_parallel)
        torch.manual_seed(options.seed)
        model_parallel_cuda_manual_seed(options.seed)
        if options.dispatcher == "deepep":
            stack.enter_context(_moe_ep_dispatcher(options, device))
        yield


@contextlib.contextmanager
def _no_coalescing() -> Iterator[None]:
    """Lets Megatron's DDP reduce its gradients over gloo, which can't coalesce GPU tensors.

    It groups its collectives only to start them together: one after the other does as well.
    """
    from megatron.core.distributed import param_and_grad_buffer

    original = param_and_grad_buffer._coalescing_manager
    param_and_grad_buffer._coalescing_manager = lambda *args, **kwargs: contextlib.nullcontext()
    try:
        yield
    finally:
        param_and_grad_buffer._coalescing_manager = original


@contextlib.contextmanager
def _moe_ep_dispatcher(options: argparse.Namespace, device: torch.device) -> Iterator[None]:
    """Makes `moe_token_dispatcher_type="deepep"` mean moe_ep, with this run's sizes."""
    from mixtral import ep_layout
    from moe_ep.integrations import megatron

    megatron.install(layout=ep_layout.layout_of(options, device.type != "cpu"))
    try:
        yield
    finally:
        megatron.uninstall()


class Training:
    """One run: the objects it trains with, and its loop. Collective over all ranks."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from mixtral import model

        self.options, self.corpus, self.device = options, corpus, device
        self.train = Windows(corpus.train, options.seq_len, options.seed)
        self.validation = Windows(corpus.validation, options.seq_len, None)
        self.is_main = dist.get_rank() == 0
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self.config = model.build_config(options)
        self.model = model.build_model(self.config, options, device)
        self.optimizer, self.scheduler = model.build_optimizer(self.config, self.model, options)
        self.aux_loss_coeff = model.AUX_LOSS_COEFF
        self.experts = ExpertCounter(
            model.routers(self.model), options.size.num_layers, options.size.num_experts
        )
        self.schedule = get_forward_backward_func()
        self.settings = resume.settings(options) | {"text": corpus.fingerprint}
        self.step = 0
        self.writer = None
        if options.statistics_every:
            self._statistics()  # the first call switches them on
            self.writer = tensorboard_writer(options.out) if self.is_main else None

    def run(self) -> None:
        """Resumes if asked to, trains, validates, saves, and reports."""
        options = self.options
        if options.resume is not None:
            self._resume()
        log = MetricsLog(options.out, self.step + 1) if self.is_main else None
        progress = Progress(self.step + 1, options.steps, self.is_main)
        try:
            while self.step < options.steps:
                record = self._train_step()
                if self._due(options.eval_every):
                    record["validation_loss"] = self._validate()
                if options.statistics_every and self.step % options.statistics_every == 0:
                    record["statistics"] = self._statistics()
                if log is not None:
                    log.write(record)
                progress.update(record)
                if options.save is not None and self._due(options.save_every):
                    self._save()
        finally:
            progress.close()
            self.experts.close()
            if log is not None:
                log.close()
            if self.writer is not None:
                self.writer.close()
        if self.is_main:
            self._report()

    def _statistics(self) -> dict[str, float]:
        """What moe_ep did since the last call. Collective."""
        from moe_ep.integrations import megatron

        return megatron.log_statistics(self.writer, self.step)

    def _due(self, every: int) -> bool:
        return self.step == self.options.steps or (every > 0 and self.step % every == 0)

    def _train_step(self) -> dict[str, Any]:
        options = self.options
        begin = time.perf_counter()
        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = micro_batches(
            self.train, self.step * options.global_batch, options.micro_batch,
            options.num_micro_batches, options.dp, self.dp_rank,
        )  # fmt: skip
        losses = self._pass(batches, options.num_micro_batches, forward_only=False)
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError(f"step {self.step + 1}: the optimizer refused its gradients")
        self.scheduler.step(1)
        self.step += 1
        lm_loss, counts = self._sum_over_ranks(losses, self.experts.take())
        aux_loss = self._aux_loss()
        seconds = time.perf_counter() - begin
        return {
            "step": self.step,
            # What was minimised: every layer adds its own balance loss.
            "loss": lm_loss + self.aux_loss_coeff * aux_loss * options.size.num_layers,
            "lm_loss": lm_loss,
            "aux_loss": aux_loss,
            "grad_norm": float(grad_norm),
            "tokens_per_s": options.global_batch * options.seq_len / seconds,
            "step_ms": seconds * 1000,
            **expert_metrics(counts),
        }

    def _validate(self) -> float:
        """Mean loss over the same windows each time, spread over the validation text."""
        options = self.options
        per_pass = options.micro_batch * options.dp
        num_samples = per_pass * _EVAL_MICRO_BATCHES
        stride = self.validation.num_windows / num_samples

        def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for number in range(_EVAL_MICRO_BATCHES):
                first = (number * options.dp + self.dp_rank) * options.micro_batch
                wanted = range(first, first + options.micro_batch)
                yield self.validation.samples(int(i * stride) for i in wanted)

        self.model.eval()
        with torch.no_grad():
            losses = self._pass(batches(), _EVAL_MICRO_BATCHES, forward_only=True)
        return self._sum_over_ranks(losses, self.experts.take())[0]

    def _pass(self, batches: Iterator, num_micro_batches: int, forward_only: bool) -> list:
        """Runs the micro-batches through Megatron's schedule; losses on the last stage only."""
        results = self.schedule(
            forward_step_func=self._forward,
            data_iterator=batches,
            model=[self.model],
            num_microbatches=num_micro_batches,
            seq_length=self.options.seq_len,
            micro_batch_size=self.options.micro_batch,
            forward_only=forward_only,
        )
        return [result["lm_loss"] for result in results]

    def _forward(self, batches: Iterator, model: torch.nn.Module) -> tuple:
        tokens, labels = (t.to(self.device) for t in next(batches))
        positions = torch.arange(tokens.shape[1], device=self.device).expand_as(tokens)
        # No mask: the local attention is causal by itself.
        output = model(tokens, positions, None, labels=labels)

        def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict]:
            loss = losses.float().mean()
            # A copy: the schedule divides the loss in place by the number of micro-batches.
            return loss, {"lm_loss": loss.detach().clone()}

        return output, loss_function

    def _sum_over_ranks(self, losses: list, counts: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Mean loss over all ranks and micro-batches, and the experts' counts over all ranks.

        Tensor-parallel ranks hold equal losses, which leaves the mean as it is, and route different
        tokens (sequence parallelism), so a sum over all ranks counts each token once per expert.
        """
        mine = [float(sum(losses)), float(len(losses))] if self.is_last_stage else [0.0, 0.0]
        numbers = torch.tensor(mine, dtype=torch.float64)
        numbers = torch.cat([numbers, counts.cpu().double().flatten()]).to(self.device)
        dist.all_reduce(numbers)
        numbers = numbers.cpu()
        return float(numbers[0] / numbers[1]), numbers[2:].long().reshape(counts.shape)

    def _aux_loss(self) -> float:
        """The balance loss, mean over layers and micro-batches, without its coefficient."""
        from megatron.core.transformer.moe import moe_utils

        name, totals = "load_balancing_loss", {}
        track = moe_utils.track_moe_metrics
        if hasattr(moe_utils, "get_moe_metrics_tracker"):  # 0.19 calls the above deprecated
            track = moe_utils.get_moe_metrics_tracker().report
        track(
            loss_scale=1 / self.options.num_micro_batches,
            iteration=self.step,
            total_loss_dict=totals,
            force_initialize=True,
            track_names=[name],
            num_layers=self.options.size.num_layers,
        )
        return float(totals[name])

    def _resume(self) -> None:
        from mixtral import checkpoint

        path = resume.latest(self.options.resume)
        self.step = resume.check(path, self.settings, self.options.steps)
        checkpoint.load(path, self.model, self.optimizer)
        self.scheduler.step(self.step)
        if self.is_main:
            print(f"resumed from {path}", flush=True)

    def _save(self) -> None:
        from mixtral import checkpoint

        checkpoint.save(self.options.save, self.step, self.model, self.optimizer, self.settings)

    def _report(self) -> None:
        from mixtral import plots

        problem = plots.draw(self.options.out)
        print(summary(self.options.out, self.corpus.description), flush=True)
        if problem:
            print(problem, flush=True)
        if self.options.save is not None:
            print(f"checkpoints       {self.options.save}", flush=True)
