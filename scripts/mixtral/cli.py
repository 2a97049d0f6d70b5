"""The command line of `train_mixtral`. Standard library only: `--help` works before any install."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

from flag_types import positive
from mixtral import deepspeed_options
from mixtral.presets import MODELS

ROOT = Path(__file__).resolve().parents[2]

# framework -> "module:function"; the function takes the resolved options and returns an exit code.
FRAMEWORKS = {
    "megatron": "mixtral.megatron_run:run",
    "deepspeed": "mixtral.deepspeed_run:run",
}

_DESCRIPTION = """\
Train a Mixtral (grouped-query attention, RoPE, SwiGLU, RMSNorm, 8 experts, top-2) on real text
with expert parallelism: each rank holds a part of the experts, and moe_ep carries every token to
its experts and back. Without flags, a tiny model learns from the Python standard library's own
sources, in two processes on the CPU, in about a minute."""

_EXAMPLES = """\
examples
  the tiny run on any machine, then look at runs/mixtral_tiny/loss.png:
      bash scripts/train_mixtral.sh
  the same run over Megatron's own dispatcher; the losses should be the same:
      bash scripts/train_mixtral.sh --dispatcher allgather --out runs/stock
  your own text, more steps, a checkpoint every 50 steps:
      bash scripts/train_mixtral.sh --data notes.txt --steps 200 --save runs/ckpt --save-every 50
  go on from the last checkpoint; the losses are those of a run that never stopped:
      bash scripts/train_mixtral.sh --data notes.txt --steps 400 --save runs/ckpt --resume
  four processes, experts over two ranks, layers over two pipeline stages:
      bash scripts/train_mixtral.sh --nproc 4 --ep 2 --pp 2
  four processes, attention over two ranks (tensor parallel), whole experts over four:
      bash scripts/train_mixtral.sh --nproc 4 --tp 2 --ep 4 --expert-tp 1
  eight GPUs, one expert of each layer per GPU:
      bash scripts/train_mixtral.sh --model small --nproc 8 --ep 8 --dtype bf16
  the same model with DeepSpeed, over its own MoE layers or as Hugging Face's Mixtral by AutoEP:
      bash scripts/train_mixtral.sh --framework deepspeed
      bash scripts/train_mixtral.sh --framework deepspeed --autoep --dtype bf16
  hand the same model and flags to a Megatron-LM checkout (what follows -- goes to it unchanged):
      bash scripts/train_mixtral.sh --megatron-lm PATH --model mixtral_8x7b -- --bf16

how the ranks divide
  nproc = tp x pp x (data-parallel size), and the experts divide the same ranks anew:
  nproc = expert-tp x ep x pp x (expert-data-parallel size)."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags; values that depend on others are filled in by `resolve`."""
    parser = argparse.ArgumentParser(
        prog="train_mixtral.sh",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_flags(parser.add_argument_group("model and text"))
    _add_parallel_flags(parser.add_argument_group("machine and parallelism"))
    _add_training_flags(parser.add_argument_group("training"))
    _add_output_flags(parser.add_argument_group("results and checkpoints"))
    return parser


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--framework",
        choices=FRAMEWORKS,
        default="megatron",
        help="who trains: megatron-core (default) or DeepSpeed",
    )
    add(
        "--model",
        choices=MODELS,
        default="tiny",
        help="tiny: 2 layers, hidden 64; small: 8 layers, hidden 512; mixtral_8x7b: the real "
        "sizes, refused where memory won't do (default: tiny)",
    )
    add("--top-k", type=positive, default=2, help="experts per token (default: 2)")
    add(
        "--data",
        type=Path,
        metavar="FILE_OR_FOLDER",
        help="text to learn, read as bytes; in .jsonl files each line's key 'text'. "
        "Default: the sources of the Python standard library",
    )
    add(
        "--megatron-lm",
        type=Path,
        metavar="PATH",
        help="run PATH/pretrain_gpt.py of this Megatron-LM checkout instead, with the same model "
        "and parallel flags and the moe_ep dispatcher, on its mock data unless -- ARGS say else",
    )
    deepspeed_options.add_flags(group)


def _add_parallel_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto takes the GPUs if torch sees any (default: auto)",
    )
    add(
        "--nproc",
        type=positive,
        help="processes on this host. Default: one per GPU; on the CPU 2, or what the flags below "
        "need. More processes than GPUs share them under MPS, their other data goes through gloo",
    )
    add(
        "--ep",
        type=positive,
        help="expert parallelism: over how many ranks a layer's experts are spread. Default: as "
        "many as there are ranks and experts for",
    )
    add(
        "--tp",
        type=positive,
        default=1,
        help="tensor parallelism of attention and embeddings, with sequence parallelism "
        "(default: 1)",
    )
    add(
        "--expert-tp",
        type=positive,
        default=1,
        help="tensor parallelism inside each expert (default: 1)",
    )
    add(
        "--pp",
        type=positive,
        default=1,
        help="pipeline parallelism: stages the layers are divided into (default: 1)",
    )
    add(
        "--dispatcher",
        choices=("deepep", "alltoall", "allgather"),
        default="deepep",
        help="who moves the tokens: deepep is this library; the others are the framework's own, "
        "for comparison (DeepSpeed: alltoall only) (default: deepep)",
    )
    add(
        "--layout",
        type=Path,
        metavar="YAML",
        help="EP layout for the deepep dispatcher; sizes and dtype are set to this run's. "
        "Default: configs/mixtral_tiny_cpu.yaml",
    )
    add(
        "--backend",
        choices=("auto", "reference", "cuda", "nvshmem"),
        default="auto",
        help="how moe_ep moves data: torch collectives (reference), GPU peer memory (cuda), or "
        "RDMA between hosts (nvshmem) (default: auto)",
    )
    add(
        "--timeout-s",
        type=positive,
        help="seconds a rank waits for another before the run fails; replaces both time-outs of "
        "the EP layout (default: 300, and the layout's own)",
    )


def _add_training_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--steps",
        type=positive,
        default=60,
        help="optimizer steps in all, resumed ones included (default: 60)",
    )
    add(
        "--micro-batch",
        type=positive,
        default=4,
        help="sequences a rank handles at once (default: 4)",
    )
    add(
        "--global-batch",
        type=positive,
        help="sequences per step over all ranks. Default: 2 micro-batches per data-parallel rank",
    )
    add("--seq-len", type=positive, help="bytes per sequence. Default: the model's own")
    add("--dtype", choices=("fp32", "bf16"), help="default: fp32; mixtral_8x7b: bf16")
    add("--lr", type=float, help="learning rate after the warm-up. Default: the model's own")
    add("--warmup", type=int, default=10, help="steps of linear warm-up (default: 10)")
    add(
        "--seed",
        type=int,
        default=1234,
        help="of the weights and of the order of the text; same seed, same losses (default: 1234)",
    )
    add(
        "--eval-every",
        type=int,
        default=20,
        help="steps between validation losses, 0 for none (default: 20)",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--out",
        type=Path,
        help="folder of metrics.jsonl, loss.png and experts.png "
        "(default: runs/mixtral_MODEL, with DeepSpeed runs/mixtral_MODEL_deepspeed)",
    )
    add(
        "--statistics-every",
        type=int,
        default=0,
        metavar="N",
        help="every N steps note what the deepep dispatcher moved, how long it took and who was "
        "waited for: in metrics.jsonl, and where tensorboard is installed in OUT/tensorboard; "
        "docs/operating.md tells the names (default: 0, none)",
    )
    add("--save", type=Path, metavar="DIR", help="write checkpoints to this folder")
    add(
        "--save-every",
        type=int,
        default=0,
        help="steps between checkpoints; 0: only after the last step (default: 0)",
    )
    add(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="go on from the newest checkpoint of DIR, by default the folder of --save",
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags and fills in what doesn't depend on the number of ranks."""
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    # Split here: argparse would take flags after "--" for its own as soon as one stood before it.
    end = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:end])
    options.extra = argv[end + 1 :]
    model = MODELS[options.model]
    options.size = model
    options.seq_len = options.seq_len or model.seq_len
    options.lr = model.lr if options.lr is None else options.lr
    options.dtype = options.dtype or model.dtype
    options.timeout_given = options.timeout_s is not None
    options.timeout_s = options.timeout_s or 300
    suffix = "" if options.framework == "megatron" else f"_{options.framework}"
    options.out = options.out or ROOT / "runs" / f"mixtral_{model.name}{suffix}"
    if options.extra and not options.megatron_lm:
        parser.error("arguments after -- are for --megatron-lm only")
    problem = deepspeed_options.problem(options)
    if problem:
        parser.error(problem)
    if options.resume == "":
        if options.save is None:
            parser.error("--resume needs a folder, or --save to name it")
        options.resume = options.save
    if options.resume is not None:
        options.resume = Path(options.resume)
    if options.data is not None and not options.data.exists():
        parser.error(f"--data {options.data} does not exist")
    written = {"--out": None if options.megatron_lm else options.out, "--save": options.save}
    for flag, folder in written.items():
        problem = None if folder is None else _folder_problem(folder)
        if problem:
            parser.error(f"{flag} {folder}: no files can be written there ({problem})")
    if options.layout is not None and not options.layout.is_file():
        parser.error(f"--layout {options.layout} is not a file")
    if not (options.lr > 0 and math.isfinite(options.lr)):
        parser.error(f"--lr {options.lr} must be a positive number")
    if options.top_k > model.num_experts:
        parser.error(f"--top-k {options.top_k} is more than the {model.num_experts} experts")
    if options.statistics_every and options.dispatcher != "deepep":
        parser.error("--statistics-every counts for --dispatcher deepep only")
    for flag in ("warmup", "eval_every", "save_every", "statistics_every"):
        if getattr(options, flag) < 0:
            parser.error(f"--{flag.replace('_', '-')} {getattr(options, flag)} is negative")
    return options


def _folder_problem(folder: Path) -> str | None:
    """Why a folder, which may have to be made first, can't be written to; None where it can."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return error.strerror
    return None


def resolve(options: argparse.Namespace, world: int) -> None:
    """Fills in what depends on the number of ranks, and checks that all of it fits together.

    Raises:
        ValueError: the sizes don't fit; the message names both numbers and a way out.
    """
    size, tp, pp, etp = options.size, options.tp, options.pp, options.expert_tp
    _check_divides("--nproc", world, "--tp x --pp", tp * pp)
    _check_divides("--nproc", world, "--expert-tp x --pp", etp * pp)
    _check_divides("the number of layers", size.num_layers, "--pp", pp)
    _check_divides("the number of key/value heads", size.num_kv_heads, "--tp", tp)
    _check_divides("--seq-len", options.seq_len, "--tp", tp)
    _check_divides("an expert's hidden size", size.expert_hidden, "--expert-tp", etp)
    if options.ep is None:
        options.ep = math.gcd(world // (etp * pp), size.num_experts)
    _check_divides("--nproc", world, "--ep x --expert-tp x --pp", options.ep * etp * pp)
    _check_divides("the number of experts", size.num_experts, "--ep", options.ep)
    options.world = world
    options.dp = world // (tp * pp)
    per_pass = options.micro_batch * options.dp
    options.global_batch = options.global_batch or 2 * per_pass
    _check_divides("--global-batch", options.global_batch,
                   "--micro-batch x data-parallel size", per_pass)  # fmt: skip
    options.num_micro_batches = options.global_batch // per_pass


def ranks_wanted(options: argparse.Namespace, num_gpus: int) -> int:
    """Processes to start: `--nproc`, else one per GPU, else two, but enough for the flags."""
    if options.nproc:
        return options.nproc
    needed = math.lcm(options.tp * options.pp, (options.ep or 1) * options.expert_tp * options.pp)
    least = num_gpus or 2
    return needed * max(1, math.ceil(least / needed))


def _check_divides(what: str, number: int, by_what: str, divisor: int) -> None:
    if number % divisor:
        raise ValueError(f"{what} ({number}) must be a multiple of {by_what} ({divisor})")
