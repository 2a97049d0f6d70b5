"""One rank of the training with DeepSpeed: its engine, ZeRO, optimizer and checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import time
import types
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mixtral import cli, launch, memory, quiet, resume
from mixtral.data import Corpus, Windows, load_corpus, micro_batches
from mixtral.metrics import ExpertCounter, MetricsLog, Progress, expert_metrics, summary

_EVAL_MICRO_BATCHES = 8


def run(options: argparse.Namespace) -> int:
    """Trains on this rank, in the ranks torchrun has started. Returns the exit code."""
    quiet.quiet()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.setdefault("LOCAL_RANK", str(rank)))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    try:
        gpus = launch.num_gpus(options)
        cli.resolve(options, world)
        problem = memory.refusal(options, *launch.memory_available(options, gpus, local_ranks))
        if problem:
            raise ValueError(problem)
        if options.autoep and importlib.util.find_spec("transformers") is None:
            raise ValueError(
                "--autoep needs Hugging Face's models: pip install 'transformers>=5.20,<5.23'"
            )
        corpus = load_corpus(options.data)
        with _deepspeed(options, gpus, local_rank, local_ranks) as device:
            Training(options, corpus, device).run()
    except ValueError as error:
        # Every rank finds the same mistake in the same flags: one of them tells it.
        return launch.fail(str(error)) if rank == 0 else 2
    return 0


@contextlib.contextmanager
def _deepspeed(
    options: argparse.Namespace, gpus: int, local_rank: int, local_ranks: int
) -> Iterator[torch.device]:
    """Joins the ranks and lets DeepSpeed know; yields this rank's device."""
    if not gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"
    _quiet_deepspeed()
    import deepspeed

    from moe_ep.integrations.deepspeed.cpu import no_op_compilation

    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    backend = "gloo"
    if gpus:
        torch.cuda.set_device(device)
        # NCCL refuses two ranks on one GPU; gloo moves their data through the host.
        backend = "cpu:gloo,cuda:gloo" if local_ranks > gpus else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_s))
    with no_op_compilation():
        deepspeed.init_distributed(dist_backend=backend.split(":")[-1])
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _quiet_deepspeed() -> None:
    """DeepSpeed logs every setting of a start on every rank: only errors are kept."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(deepspeed|torch)\b.*")
    # DeepSpeed gives its loggers a level when it is imported; this holds for all of them.
    logging.disable(logging.WARNING)


class LoadCounter(ExpertCounter):
    """Counts from modules whose third output is the tokens per expert, [E]."""

    def _hook_of(self, layer: int) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, output: tuple) -> None:
            if module.training:
                self._counts[layer] += output[2].detach().to(self._counts.device).long()

        return hook


class Training:
    """One run: the objects it trains with, and its loop. Collective over all ranks."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
        from mixtral import deepspeed_config, deepspeed_model

        self.options, self.corpus, self.device = options, corpus, device
        self.train = Windows(corpus.train, options.seq_len, options.seed)
        self.validation = Windows(corpus.validation, options.seq_len, None)
        self.rank = dist.get_rank()
        if options.layout is not None and self.rank == 0:
            deepspeed_config.write_layout(options, device.type == "cpu")
        dist.barrier()  # the others read that file
        self.config = deepspeed_config.build(options, device.type == "cpu")
        self.engine = self._engine(deepspeed_model)
        self.losses_of = deepspeed_model.losses_of
        self.aux_loss_coeff = deepspeed_model.AUX_LOSS_COEFF
        self.experts = LoadCounter(
            deepspeed_model.counted_modules(self.engine.module, options.autoep),
            options.size.num_layers,
            options.size.num_experts,
        )
        self.settings = resume.settings(options) | {
            "text": corpus.fingerprint,
            "framework": "deepspeed",
            "autoep": options.autoep,
            "zero": options.zero,
        }
        self.step = 0
        if options.statistics_every:
            self._statistics()  # the first call switches them on

    def _engine(self, models: Any) -> Any:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        from moe_ep.integrations.deepspeed import initialize
        from moe_ep.integrations.deepspeed.clipping import clip_fp32_gradients

        options = self.options
        if options.autoep:
            model = models.build_hugging_face(options)
            parameters: Any = list(model.parameters())
        else:
            model = models.build_native(options, self.rank)
            parameters = split_params_into_different_moe_groups_for_optimizer(
                {"params": list(model.parameters()), "name": "parameters"}
            )
        # What DeepSpeed prints while it makes groups is no news to the user.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            engine = initialize(model=model, model_parameters=parameters, config=self.config)[0]
        # DeepSpeed's fp32 clipping averages the ranks' norms. With any dispatcher the run clips by
        # the norm of all gradients, so that dispatchers can be compared.
        engine.clip_fp32_gradients = types.MethodType(clip_fp32_gradients, engine)
        return engine

    def run(self) -> None:
        """Resumes if asked to, trains, validates, saves, and reports."""
        options = self.options
        if options.resume is not None:
            self._resume()
        log = MetricsLog(options.out, self.step + 1) if self.rank == 0 else None
        progress = Progress(self.step + 1, options.steps, self.rank == 0)
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
        self.engine.destroy()
        if self.rank == 0:
            self._report()

    def _statistics(self) -> dict[str, float]:
        """What moe_ep did since the last call; DeepSpeed's monitors get it too. Collective."""
        from moe_ep.integrations.deepspeed import log_statistics

        return log_statistics(self.engine)

    def _due(self, every: int) -> bool:
        return self.step == self.options.steps or (every > 0 and self.step % every == 0)

    def _train_step(self) -> dict[str, Any]:
        options, engine = self.options, self.engine
        begin = time.perf_counter()
        engine.train()
        self._set_learning_rate()
        batches = micro_batches(
            self.train,
            self.step * options.global_batch,
            options.micro_batch,
            options.num_micro_batches,
            options.dp,
            self.rank,
        )
        sums = torch.zeros(2, dtype=torch.float64)
        rows_before = self._rows()
        for tokens, labels in batches:
            lm_loss, aux_loss = self._losses(tokens, labels)
            engine.backward(lm_loss + self.aux_loss_coeff * options.size.num_layers * aux_loss)
            engine.step()
            sums += torch.tensor([lm_loss.item(), aux_loss.item()], dtype=torch.float64)
        self.step += 1
        rows = self._rows() - rows_before
        means, counts, rows = self._over_ranks(sums / options.num_micro_batches, rows)
        seconds = time.perf_counter() - begin
        norm = engine.get_global_grad_norm()
        return {
            "step": self.step,
            # What was minimised: every layer adds its own balance loss.
            "loss": means[0] + self.aux_loss_coeff * means[1] * options.size.num_layers,
            "lm_loss": means[0],
            "aux_loss": means[1],
            "grad_norm": None if norm is None else float(norm),
            "tokens_per_s": options.global_batch * options.seq_len / seconds,
            "step_ms": seconds * 1000,
            # Rows that experts received, summed over layers and ranks; 0 if others moved them.
            "rows_moved": rows,
            **expert_metrics(counts),
        }

    def _losses(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple:
        tokens, labels = tokens.to(self.device), labels.to(self.device)
        return self.losses_of(self.engine, self.options.autoep, tokens, labels)

    def _set_learning_rate(self) -> None:
        """Linear warm-up, then constant, as a function of the step alone."""
        options = self.options
        share = min(1.0, (self.step + 1) / (options.warmup + 1))
        for group in self.engine.optimizer.param_groups:
            group["lr"] = options.lr * share

    def _rows(self) -> int:
        conversion = getattr(self.engine, "moe_ep", None)
        return conversion.rows_received if conversion is not None else 0

    def _validate(self) -> float:
        """Mean loss over the same windows each time, spread over the validation text."""
        options = self.options
        num_samples = options.micro_batch * options.dp * _EVAL_MICRO_BATCHES
        stride = self.validation.num_windows / num_samples
        self.engine.eval()
        total = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for number in range(_EVAL_MICRO_BATCHES):
                first = (number * options.dp + self.rank) * options.micro_batch
                wanted = range(first, first + options.micro_batch)
                batch = self.validation.samples(int(i * stride) for i in wanted)
                total[0] += self._losses(*batch)[0].item()
        return self._over_ranks(total / _EVAL_MICRO_BATCHES, 0)[0][0]

    def _over_ranks(self, means: torch.Tensor, rows: int) -> tuple:
        """Mean of the losses, sum of the experts' counts and of the rows, over all ranks."""
        counts = self.experts.take()
        parts = [means / dist.get_world_size(), torch.tensor([rows]), counts.cpu().flatten()]
        numbers = torch.cat([part.double() for part in parts]).to(self.device)
        dist.all_reduce(numbers)
        numbers = numbers.cpu()
        return (
            numbers[:2].tolist(),
            numbers[3:].long().reshape(counts.shape),
            int(numbers[2]),
        )

    def _resume(self) -> None:
        from mixtral import deepspeed_checkpoint

        path = resume.latest(self.options.resume)
        self.step = resume.check(path, self.settings, self.options.steps)
        deepspeed_checkpoint.load(path, self.engine)
        if self.rank == 0:
            print(f"resumed from {path}", flush=True)

    def _save(self) -> None:
        from mixtral import deepspeed_checkpoint

        deepspeed_checkpoint.save(self.options.save, self.step, self.engine, self.settings)

    def _report(self) -> None:
        from mixtral import plots

        problem = plots.draw(self.options.out)
        print(summary(self.options.out, self.corpus.description), flush=True)
        if problem:
            print(problem, flush=True)
        if self.options.save is not None:
            print(f"checkpoints       {self.options.save}", flush=True)
