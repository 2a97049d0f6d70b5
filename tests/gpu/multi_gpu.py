"""Tests and benchmarks on several GPUs of one host: one rank per GPU, all peers real.

Every step has its own time limit, and what it found is kept whatever happens afterwards. The exit
status is 0 if all that was asked for ran, passed and met its goals, 1 if not, 2 if it can't run
here. A rehearsal (--shared) has no goals to meet: its peers are not real.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import record
from multi_gpu_report import goals, tables
from run_all import (
    DEEPSEEK,
    MIXTRAL,
    build_commands,
    condensed,
    missing,
    nvidia_smi,
    run_limited,
    versions,
)

WORK = record.ROOT / "build" / "multi_gpu"
TESTS = ("exchange", "training", "buffer", "low_latency", "internode", "faults")
TESTS += ("low_latency_internode", "internode_training", "megatron", "memory::test_fresh_objects")
ALONE = ("cases",)  # with nothing beside them
QUICK_TESTS = ("exchange::test_case_12_token_counts", "buffer::test_large_rows")
TESTS_AT_ONCE = 4
SMS = (16, 24, 8, 32, 64)
TOKENS = (4096, 8192)
MODELS = {"deepseek": DEEPSEEK, "mixtral": MIXTRAL}
END_S = 35  # to stop a command, and for the last words
LEAST_S = 15  # a command is not begun with less time than this


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_multi_gpu.sh", description=__doc__)
    add = parser.add_argument
    add("--gpus", type=int, help="ranks, one per GPU (default: all GPUs there are)")
    add("--shared", type=int, metavar="N", help="a rehearsal: N ranks on one GPU, under MPS")
    add("--only", default=",".join(STEPS), metavar="STEP[,...]", help=f"of {', '.join(STEPS)}")
    add("--quick", action="store_true", help="a little of every step")
    add("--limit", type=float, default=590.0, help="seconds for everything (default: 590)")
    add("--out", type=Path, default=WORK, metavar="FOLDER", help=f"for {REPORT}, {TABLES} and logs")
    options = parser.parse_args()
    options.out = options.out.absolute()  # the commands run in the checkout
    options.only = options.only.split(",")
    for step in options.only:
        if step not in STEPS:
            parser.error(f"--only {step}: choose from {', '.join(STEPS)}")
    if options.gpus and options.shared:
        parser.error("--gpus asks for real peers, --shared for none: leave one of them out")
    return options


class Session:
    """The commands of one call, their logs, and the report that grows with every one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ends = time.monotonic() + options.limit
        self.report: dict[str, Any] = versions() | {
            "ranks": options.shared or options.gpus,
            "gpus": 1 if options.shared else options.gpus,
            "steps": {},
            "problems": [],
        }
        options.out.mkdir(parents=True, exist_ok=True)

    @property
    def ranks(self) -> int:
        return int(self.report["ranks"])

    def run(self, name: str, command: list[str], limit_s: float) -> str | None:
        """Its output, None where it failed; then the report says why."""
        limit_s = min(limit_s, self.ends - time.monotonic() - END_S)
        if limit_s < LEAST_S:
            self.problem(f"{name}: no time left of --limit {self.options.limit:g} s")
            return None
        log = self.options.out / (re.sub(r"\W+", "_", name) + ".log")
        begin = time.monotonic()
        with log.open("a") as output:
            output.write(f"\n== {name}\n{' '.join(command)}\n")
            output.flush()
            start = output.tell()
            try:
                status = run_limited(command, output, limit_s)
            except OSError as error:  # such as a program that was not built
                self.problem(f"{name}: {error}")
                return None
        text = log.read_bytes()[start:].decode(errors="replace")
        print(f"== {name}: {time.monotonic() - begin:.0f} s", flush=True)
        if status == 0:
            return text
        why = f"stopped at {limit_s:.0f} s" if status is None else f"exit status {status}"
        self.problem(f"{name}: {why}: {text[-1500:]}")
        return None

    def problem(self, text: str) -> None:
        print(f"!! {text}", flush=True)
        self.report["problems"].append(text)

    def keep(self, step: str, value: Any) -> None:
        self.report["steps"][step] = value
        (self.options.out / REPORT).write_text(json.dumps(self.report, indent=1) + "\n")

    def on_ranks(self, module: str, *arguments: str) -> list[str]:
        """The module on every rank."""
        python, module_flags = sys.executable, ["-m", module, *arguments]
        if self.options.shared:
            return ["bash", "scripts/with_mps.sh", str(self.ranks), python, *module_flags]
        launcher = [python, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--nproc-per-node", str(self.ranks), *module_flags]

    def num_sms(self) -> list[int]:
        """SMs per rank that can be resident together, the most telling first."""
        most = 132 // self.ranks if self.options.shared else max(SMS)
        fitting = [sms for sms in SMS if sms <= most] or [most]
        return fitting[:1] if self.options.quick else fitting


# -- steps ----------------------------------------------------------------------------------------


def build(session: Session) -> None:
    arch = nvidia_smi("compute_cap")
    for command in build_commands(WORK / "cmake", arch):
        if session.run("build", command, 300) is None:
            return
    session.keep("build", arch)


def topology(session: Session) -> None:
    shown = {}
    queries = {"links": "topo -m"}
    if not session.options.shared:
        queries |= {"nvlink": "nvlink --status", "peers": "topo -p2p r"}
    for name, words in queries.items():
        shown[name] = session.run(f"topology {name}", ["nvidia-smi", *words.split()], 30)
    session.keep("topology", shown)
    print(shown["links"], flush=True)


def bandwidth(session: Session) -> None:
    rates = {}
    for model, row_bytes in (("deepseek", 7168 * 2), ("mixtral", 4096 * 2)):
        command = [
            str(WORK / "cmake" / "peer_bandwidth"),
            str(row_bytes),
            "4096",
            str(session.ranks),
        ]
        text = session.run(f"bandwidth {model}", command, 60)
        if text is not None:
            rates[model] = json.loads(text)
            print(text, flush=True)
    session.keep("bandwidth", rates)


def tests(session: Session) -> None:
    """Of every file what it found: a fault in one does not hide the others."""

    def run(name: str, mark: str) -> str | None:
        file, _, test = name.partition("::")
        path = f"tests/gpu/test_gpu_{file}.py" + (f"::{test}" if test else "")
        words = f"-m pytest {path} -q --no-header --tb=short -x -p no:cacheprovider"
        command = [sys.executable, *words.split(), "-m", mark]
        text = session.run(f"tests {file} ({mark})", command, 180)
        return None if text is None else text.strip().splitlines()[-1]

    quick = session.options.quick
    names = QUICK_TESTS if quick else TESTS
    with ThreadPoolExecutor(TESTS_AT_ONCE) as pool:
        found = pool.map(lambda name: run(name, "not alone"), names)
    session.keep("tests", dict(zip(names, found, strict=True)))
    if not quick:
        more = {f"{name}, alone": run(name, "alone") for name in ALONE}
        session.keep("tests", session.report["steps"]["tests"] | more)


def bench(session: Session) -> None:
    """Both models beside NCCL and Megatron's permute, and both numbers of tokens."""
    tokens = TOKENS[:1] if session.options.quick else TOKENS
    peers = ["--peer", "megatron"] if importlib.util.find_spec("megatron") else []
    _sweep(session, "bench", session.num_sms()[:1], tokens, peers)


def other_sms(session: Session) -> None:
    """The same with other numbers of SMs, without peers."""
    if session.num_sms()[1:]:
        _sweep(session, "other_sms", session.num_sms()[1:], TOKENS[:1], [])


def _sweep(
    session: Session, step: str, num_sms: list[int], tokens: tuple[int, ...], peers: list[str]
) -> None:
    kept: list[Any] = []
    for model, shape in MODELS.items():
        words = f"bench --backend cuda --iterations 20 --dtype bf16,fp8_e4m3 {shape}"
        flags = ["--num-sms", _joined(num_sms), "--tokens", _joined(tokens), *peers]
        report = _benchmark(session, f"{step} {model}", [*words.split(), *flags])
        if report is not None:
            kept.append({"model": model, "report": report})
            session.keep(step, kept)


def _joined(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def low_latency(session: Session) -> None:
    iterations = 50 if session.options.quick else 200
    words = "bench --mode low_latency --backend cuda --tokens 128 --dtype fp8_e4m3"
    words += f" --iterations {iterations} --num-sms {max(session.num_sms())} {DEEPSEEK}"
    report = _benchmark(session, "low_latency deepseek", words.split())
    if report is not None:
        session.keep("low_latency", report)


def _benchmark(session: Session, name: str, flags: list[str]) -> Any:
    file = session.options.out / "bench.json"
    file.unlink(missing_ok=True)
    command = session.on_ranks("moe_ep", *flags, "--json", str(file.absolute()))
    text = session.run(name, command, 150)
    if text is not None:
        print(text, flush=True)
    return condensed(json.loads(file.read_text())) if file.exists() else None


def training(session: Session) -> None:
    """Steps of a small Mixtral, its experts over all ranks: ms a step, the first ones left out."""
    times = {}
    ranks = str(session.ranks)
    model, steps = ("tiny", 8) if session.options.quick else ("small", 30)
    for dispatcher in ("deepep", "alltoall"):
        out = session.options.out / f"training_{dispatcher}"
        flags = f"--model {model} --steps {steps} --device cuda --nproc {ranks} --ep {ranks}"
        flags += f" --dtype bf16 --micro-batch 4 --global-batch {4 * session.ranks} --eval-every 0"
        command = [sys.executable, "scripts/train_mixtral.py", *flags.split()]
        command += ["--dispatcher", dispatcher, "--out", str(out)]
        if session.run(f"training {dispatcher}", command, 100) is None:
            continue
        found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        times[dispatcher] = median(step["step_ms"] for step in found[steps // 3 :])
    session.keep("training", times)
    print(times, flush=True)


STEPS: dict[str, Callable[[Session], None]] = {
    "build": build,
    "topology": topology,
    "bandwidth": bandwidth,
    "bench": bench,
    "tests": tests,
    "low_latency": low_latency,
    "training": training,
    "other_sms": other_sms,
}
REPORT, TABLES = "multi_gpu.json", "multi_gpu.txt"


def main() -> int:
    options = arguments()
    lacking = missing()
    if not lacking and not options.shared:
        query = ["nvidia-smi", "--list-gpus"]
        shown = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
        count = len(shown.stdout.splitlines())
        options.gpus = options.gpus or count
        if count < max(options.gpus, 2):
            lacking = [f"{max(options.gpus, 2)} GPUs are needed, there are {count}; --shared N "
                       "rehearses on one"]  # fmt: skip
    if lacking:
        print("bench_multi_gpu.sh cannot run here: " + "; ".join(lacking), file=sys.stderr)
        return 2
    # As timeout(1) ends a call: what was started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    session = Session(options)
    for name in options.only:
        STEPS[name](session)
        if name == "build" and name not in session.report["steps"]:
            break  # whatever module there is, it is not of these sources
    lines = [tables(session.report)]
    missed = []
    for what, measured, allowed in [] if options.shared else goals(session.report):
        met = "met" if measured <= allowed else "MISSED"
        lines.append(f"{met:6}  {what}: {measured:.4g} (at most {allowed:.4g})")
        missed += [what] if measured > allowed else []
    lines += [f"problem {text.partition(': ')[0]}" for text in session.report["problems"]]
    session.report["missed"] = missed
    session.keep("end", time.strftime("%Y-%m-%d %H:%M"))
    (options.out / TABLES).write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    return 1 if session.report["problems"] or missed else 0


if __name__ == "__main__":
    sys.exit(main())
