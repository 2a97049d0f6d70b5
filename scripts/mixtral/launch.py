"""Before training: which device, how many processes, does it fit; then torchrun."""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import sys
from pathlib import Path

from mixtral import cli, memory, resume


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun (or the like) has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def num_gpus(options: argparse.Namespace) -> int:
    """GPUs to use on this host; 0 means the CPU.

    Raises:
        ValueError: `--device cuda` where torch sees no GPU.
    """
    if options.device == "cpu" or (options.device == "auto" and not _has_driver()):
        return 0
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if options.device == "cuda" and not count:
        raise ValueError(
            "--device cuda, but torch sees no GPU (torch "
            f"{torch.__version__}, built for {torch.version.cuda or 'the CPU only'}); "
            "use --device cpu, or install a CUDA build of torch and check the driver"
        )
    return count


def _has_driver() -> bool:
    """Whether NVIDIA's driver is there: far quicker to know than importing torch to ask it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def check_sharing(options: argparse.Namespace, gpus: int, local_ranks: int) -> None:
    """Refuses what ranks that share a GPU can't do.

    Raises:
        ValueError: pipeline stages would have to send GPU tensors through gloo.
    """
    if gpus and local_ranks > gpus and options.pp > 1:
        raise ValueError(
            f"{local_ranks} ranks would share {gpus} GPU(s): their data goes through gloo, which "
            "can't send GPU tensors between pipeline stages; use --pp 1, fewer ranks, or "
            "--device cpu"
        )


def names_backend(options: argparse.Namespace) -> bool:
    """Whether the run may insist on a backend; only then is it worth importing torch to ask."""
    named = options.backend not in ("auto", "reference") or options.layout is not None
    return named or "MOE_EP_BACKEND" in os.environ


def memory_available(options: argparse.Namespace, gpus: int, local_ranks: int) -> tuple:
    """Bytes one rank may use (None if unknown), and the words for where they are."""
    if gpus:
        import torch

        sharing = -(-local_ranks // gpus)
        free = min(torch.cuda.mem_get_info(i)[0] for i in range(min(gpus, local_ranks)))
        return free // sharing, f"free on a GPU, shared by {sharing} rank(s)"
    total = memory.host_memory_available()
    return total and total // local_ranks, f"free on this host, shared by {local_ranks} ranks"


def launch(options: argparse.Namespace, script: str, arguments: list[str]) -> int:
    """Checks the flags against this machine, then becomes torchrun. Returns only on an error."""
    try:
        gpus = num_gpus(options)
        nproc = cli.ranks_wanted(options, gpus)
        cli.resolve(options, nproc)
        check_sharing(options, gpus, nproc)
        if options.resume is not None and not options.megatron_lm:
            # The ranks check again; here a mistake is told without torchrun's report around it.
            resume.check(resume.latest(options.resume), resume.settings(options), options.steps)
        problem = memory.refusal(options, *memory_available(options, gpus, nproc))
        if not problem and options.dispatcher == "deepep" and names_backend(options):
            from mixtral import ep_layout

            problem = ep_layout.refusal(options, gpus > 0)
    except (ValueError, ModuleNotFoundError) as error:
        return fail(str(error))
    if problem:
        return fail(problem)
    if options.megatron_lm:
        from mixtral import megatron_lm

        try:
            target = megatron_lm.arguments(options)
        except ValueError as error:
            return fail(str(error))
        os.environ.update(megatron_lm.environment(options))
    else:
        target = [script, *arguments]
    _set_environment(nproc, gpus)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(nproc),
               "--", *target]  # fmt: skip  # -- : torchrun would take our --nproc for its own
    print(_plan(options, gpus), flush=True)
    command = [*_sharing(nproc, gpus), *command]
    # Becoming torchrun, not starting it: a signal to this process reaches the one that minds ranks.
    os.execv(command[0], command)


def _sharing(nproc: int, gpus: int) -> list[str]:
    """What goes before the command where ranks share a GPU: an MPS server of their own.

    Without one they take turns of milliseconds, and kernels that wait for each other crawl.
    """
    if not gpus or nproc <= gpus or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        return []
    if shutil.which("nvidia-cuda-mps-control") is None:
        print(
            f"train_mixtral: {nproc} ranks share {gpus} GPU(s) without MPS, which is slow: "
            "nvidia-cuda-mps-control (it comes with the driver) is not on the PATH",
            file=sys.stderr,
        )
        return []
    return [str(Path(__file__).resolve().parents[1] / "with_mps.sh"), "--"]


def _set_environment(nproc: int, gpus: int) -> None:
    if not gpus:
        threads = max(1, (os.cpu_count() or 1) // nproc)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else torchrun sets it, with a warning
    # Megatron asks for one queue, so that communication starts before the work that hides it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _plan(options: argparse.Namespace, gpus: int) -> str:
    device = f"{gpus} GPU(s)" if gpus else "the CPU"
    return (
        f"train_mixtral: {options.model} with {options.framework} on {device}: "
        f"{options.world} ranks, EP={options.ep} TP={options.tp} expert-TP={options.expert_tp} "
        f"PP={options.pp}, {options.dispatcher} dispatcher, {options.dtype}"
    )


def fail(message: str) -> int:
    """Tells the user what to change; the exit code of a wrong call."""
    print(f"train_mixtral: {message}", file=sys.stderr)
    return 2
