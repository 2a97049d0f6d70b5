"""Tests and benchmarks on several GPUs of one host: one rank per GPU, all peers real.

Every step has its own time limit, and what it found is kept whatever happens afterwards. The exit
status is 0 if all that was asked for ran, passed and met its goals, 1 if not, 2 if it can't run
here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import record
from run_all import DEEPSEEK, MIXTRAL, condensed, missing, run_limited, versions

WORK = record.ROOT / "build" / "multi_gpu"
TESTS = ("exchange", "cases", "buffer", "low_latency", "memory::test_fresh_objects")
TESTS += ("megatron", "faults", "training", "internode")
SMS = (16, 24, 8, 32, 64)  # the most telling first
TOKENS = (4096, 8192)
END_S = 10  # for the last words
LEAST_S = 15  # a command is not begun with less time than this


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_multi_gpu.sh", description=__doc__)
    add = parser.add_argument
    add("--gpus", type=int, help="ranks, one per GPU (default: all GPUs there are)")
    add("--shared", type=int, metavar="N", help="a rehearsal: N ranks on one GPU, under MPS")
    add("--only", default=",".join(STEPS), metavar="STEP[,...]", help=f"of {', '.join(STEPS)}")
    add("--quick", action="store_true", help="16 SMs and 4096 tokens only")
    add("--limit", type=float, default=590.0, help="seconds for everything (default: 590)")
    add("--out", type=Path, default=WORK, metavar="FOLDER", help=f"for {REPORT} and the logs")
    options = parser.parse_args()
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
        log = self.options.out / f"{name.split()[0]}.log"
        begin = time.monotonic()
        with log.open("a") as output:
            output.write(f"\n== {name}\n{' '.join(command)}\n")
            output.flush()
            start = output.tell()
            status = run_limited(command, output, limit_s)
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

    def on_ranks(self, *command: str) -> list[str]:
        """The command on every rank."""
        python = [sys.executable, *command]
        if self.options.shared:
            return ["scripts/with_mps.sh", str(self.ranks), *python]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*launcher, "--nproc-per-node", str(self.ranks), "--", *command]

    def num_sms(self) -> list[int]:
        """SMs per rank that can be resident together."""
        most = 132 // self.ranks if self.options.shared else max(SMS)
        fitting = [sms for sms in SMS if sms <= most] or [most]
        return fitting[:1] if self.options.quick else fitting


# -- steps ----------------------------------------------------------------------------------------


def build(session: Session) -> None:
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    arch = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    folder = str(WORK / "cmake")
    configure = ["cmake", "-S", ".", "-B", folder, f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (
        [*configure, f"-DMOE_EP_CUDA_ARCHS={arch.split()[0]}"],
        ["cmake", "--build", folder, "--parallel"],
        ["cmake", "--install", folder, "--prefix", "moe_ep"],
    ):
        if session.run("build", command, 300) is None:
            return
    session.keep("build", arch.split()[0])


def topology(session: Session) -> None:
    shown = {}
    for name, words in (
        ("links", "topo -m"),
        ("nvlink", "nvlink --status"),
        ("peers", "topo -p2p r"),
    ):
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
    found = {}
    for name in TESTS:
        file, _, test = name.partition("::")
        path = f"tests/gpu/test_gpu_{file}.py" + (f"::{test}" if test else "")
        command = [sys.executable, "-m", "pytest", path, "-q", "--no-header", "-x"]
        text = session.run(f"tests {file}", [*command, "-p", "no:cacheprovider"], 120)
        found[name] = None if text is None else text.strip().splitlines()[-1]
        session.keep("tests", found)


def bench(session: Session) -> None:
    """Both models; dispatch and combine by SMs and tokens, beside NCCL and Megatron's permute."""
    megatron = ["--peer", "megatron"] if importlib.util.find_spec("megatron") else []
    kept: list[Any] = []
    tokens = ",".join(map(str, TOKENS[:1] if session.options.quick else TOKENS))
    for sms in session.num_sms():
        for model, shape in (("deepseek", DEEPSEEK), ("mixtral", MIXTRAL)):
            peers = megatron if sms == session.num_sms()[0] else []
            dtypes = "bf16,fp8_e4m3" if model == "deepseek" else "bf16"
            words = f"bench --backend cuda --tokens {tokens} --iterations 20 --num-sms {sms}"
            flags = [*words.split(), *shape.split(), "--dtype", dtypes, *peers]
            report = _benchmark(session, f"bench {model}, {sms} SMs", flags)
            if report is not None:
                kept.append({"model": model, "num_sms": sms, "report": report})
                session.keep("bench", kept)


def low_latency(session: Session) -> None:
    words = "bench --mode low_latency --backend cuda --tokens 128 --hidden 7168 --top-k 8"
    words += f" --experts 256 --dtype fp8_e4m3 --iterations 200 --num-sms {session.num_sms()[-1]}"
    report = _benchmark(session, "low_latency deepseek", words.split())
    if report is not None:
        session.keep("low_latency", report)


def _benchmark(session: Session, name: str, flags: list[str]) -> Any:
    file = session.options.out / "bench.json"
    file.unlink(missing_ok=True)
    command = session.on_ranks("-m", "moe_ep", *flags, "--json", str(file))
    text = session.run(name, command, 120)
    if text is not None:
        print(text, flush=True)
    return condensed(json.loads(file.read_text())) if file.exists() else None


def training(session: Session) -> None:
    """Steps of a small Mixtral, its experts over all ranks: ms a step, the first ones left out."""
    times = {}
    ranks = str(session.ranks)
    for dispatcher in ("deepep", "alltoall"):
        out = session.options.out / f"training_{dispatcher}"
        flags = f"--model small --device cuda --nproc {ranks} --ep {ranks} --dtype bf16 --steps 30"
        flags += f" --micro-batch 4 --global-batch {4 * session.ranks} --eval-every 0"
        command = [sys.executable, "scripts/train_mixtral.py", *flags.split()]
        command += ["--dispatcher", dispatcher, "--out", str(out)]
        if session.run(f"training {dispatcher}", command, 100) is None:
            continue
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        times[dispatcher] = median(step["step_ms"] for step in steps[10:])
    session.keep("training", times)
    print(times, flush=True)


STEPS: dict[str, Callable[[Session], None]] = {
    "build": build,
    "topology": topology,
    "bandwidth": bandwidth,
    "bench": bench,
    "low_latency": low_latency,
    "training": training,
    "tests": tests,
}
REPORT = "multi_gpu.json"


# -- goals ----------------------------------------------------------------------------------------


def goals(report: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(what, measured, allowed): lower is better in all of them. Only what was measured."""
    steps, found = report["steps"], []
    push = steps.get("bandwidth", {}).get("deepseek", {}).get("push", {})
    for entry in steps.get("bench", []):
        for run in entry["report"]["runs"]:
            found += _goals_of_run(entry, run, push)
    for run in steps.get("low_latency", {}).get("runs", []):
        limits = {"dispatch": 40.0, "combine": 65.0} if report.get("ranks") == 8 else {}
        for timing in run["timings"]:
            if timing["name"] in limits and timing["graph_us"] is not None:
                what = f"low latency, {timing['name']}, us"
                found.append((what, timing["graph_us"]["median"], limits[timing["name"]]))
    times = steps.get("training", {})
    if len(times) == 2:
        found.append(
            ("training step, deepep over alltoall", times["deepep"] / times["alltoall"], 1.0)
        )
    return found


def _goals_of_run(entry: dict[str, Any], run: Any, push: Any) -> list[tuple[str, float, float]]:
    timings = {t["name"]: t for t in run["timings"] if t["error"] is None}
    sms, dtype = str(entry["num_sms"]), run["layout"]["dispatch"]["dtype"]
    what = f"{entry['model']} {dtype}, {run['tokens']} tokens, {sms} SMs"
    found = []
    for verb in ("dispatch, cached", "combine"):
        timing = timings.get(verb)
        if timing and timing["link_bytes"] and sms in push and sms in ("16", "24"):
            rate = timing["link_bytes"] / timing["median_us"] / 1e3
            found.append((f"{what}: peer-write rate over {verb}'s", push[sms] / rate, 1 / 0.75))
    if entry["model"] == "deepseek" and run["tokens"] == 4096:
        verb, limit_us = ("dispatch", 450.0) if dtype != "bf16" else ("combine", 900.0)
        if verb in timings:
            found.append((f"{what}: {verb}, us", timings[verb]["median_us"], limit_us))
    return found


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
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    session = Session(options)
    for name in options.only:
        STEPS[name](session)
    missed = []
    for what, measured, allowed in goals(session.report):
        met = "met" if measured <= allowed else "MISSED"
        print(f"{met:6}  {what}: {measured:.4g} (at most {allowed:.4g})")
        missed += [what] if measured > allowed else []
    session.report["missed"] = missed
    session.keep("end", time.strftime("%Y-%m-%d %H:%M"))
    return 1 if session.report["problems"] or missed else 0


if __name__ == "__main__":
    sys.exit(main())
