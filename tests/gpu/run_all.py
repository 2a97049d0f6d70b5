"""Builds the CUDA core for the GPU at hand, runs its tests and the standard benchmarks, and writes
the GPU record (see record.py).

Every step has its own time limit, and what it found is kept whatever happens afterwards: a later
call with --only adds its steps to those of an earlier one, as long as the sources are the same.
The exit status is 0 if all that was asked for ran and passed, 1 if not, 2 if it cannot run here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import record

WORK = record.ROOT / "build" / "gpu"
TESTS = "tests/gpu"
STEPS = ("build", "tests", "bench")
LIMITS_S = {"build": 420, "tests": 540, "bench": 150}
# With pytest-xdist, files of tests run at once, each worker's ranks under an MPS server of its own.
AT_ONCE = ["-n", "4", "--dist", "loadfile"]
NO_TESTS = 5  # pytest's exit status where a selection is empty
END_S = 40  # an interrupted step may take this long to stop its ranks and its MPS server
LEAST_S = 20  # a step is not begun with less time than this

DEEPSEEK = "--hidden 7168 --top-k 8 --experts 256"
MIXTRAL = "--hidden 4096 --top-k 2 --experts 8"
# (ranks, arguments); --quick takes the first four. {megatron} is there if Megatron-core is.
SHAPES = (
    (8, f"--num-sms 16 {DEEPSEEK} --dtype bf16,fp8_e4m3"),
    (8, f"--num-sms 16 {MIXTRAL}"),
    (1, f"--num-sms 132 {DEEPSEEK} {{megatron}}"),
    (1, f"--num-sms 24 {DEEPSEEK}"),
    (2, f"--num-sms 24 {DEEPSEEK}"),
    (4, f"--num-sms 24 {DEEPSEEK}"),
    (4, f"--num-sms 24 {MIXTRAL}"),
    (1, f"--num-sms 132 {MIXTRAL} {{megatron}}"),
    (8, f"--num-sms 16 {DEEPSEEK} --exact-combine"),
)
OTHER_SHAPES = "other benchmarks"
COMMON = "--backend cuda --tokens 4096 --iterations 20"


def main() -> int:
    options = arguments()
    if options.record_only is not None:
        try:
            note = record.not_run(options.record_only)
        except ValueError as error:
            print(f"test.sh --gpu: {error}", file=sys.stderr)
            return 2
        record.write(note, record.FILE, *copies(options.out))
        print(f"written: {record.FILE}")
        return 0
    lacking = missing()
    if lacking:
        print("test.sh --gpu cannot run here: " + "; ".join(lacking), file=sys.stderr)
        return 2
    return Run(options).all()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="test.sh --gpu", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="the first four benchmarks only")
    add("--only", default=",".join(STEPS), metavar="STEP[,...]", help=f"of {', '.join(STEPS)}")
    add("--tests", metavar="PATH[,...]", help="of the tests only these; the record names them")
    add("--resume", action="store_true", help="keep benchmarks that an earlier call has finished")
    add("--limit", type=float, default=3600.0, help="seconds for everything (default: 3600)")
    add("--out", type=Path, metavar="FOLDER", help="where logs and the record are copied to")
    add("--record-only", metavar="REASON", help="run nothing; note why these sources did not run")
    options = parser.parse_args()
    options.only = options.only.split(",")
    for step in options.only:
        if step not in STEPS:
            parser.error(f"--only {step}: choose from {', '.join(STEPS)}")
    return options


def missing() -> list[str]:
    """What a GPU run needs and this machine lacks."""
    lacking = []
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        lacking.append("no GPU (/dev/nvidia*)")
    tools = ("nvidia-smi", "nvidia-cuda-mps-control", "nvcc", "cmake")
    lacking += [f"{tool} is not on the PATH" for tool in tools if shutil.which(tool) is None]
    modules = ("torch", "pydantic", "pytest", "pybind11")
    lacking += [
        f"{sys.executable} has no module {name}"
        for name in modules
        if importlib.util.find_spec(name) is None
    ]
    return lacking


def copies(out: Path | None) -> list[Path]:
    return [] if out is None else [out / "record.json"]


def nvidia_smi(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()[0].strip()


def build_commands(folder: Path, arch: str) -> list[list[str]]:
    """That build the core for one architecture in the folder and put it into this checkout."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", ".", "-B", str(folder), *generator]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DMOE_EP_CUDA_ARCHS={arch}"]
    build = ["cmake", "--build", str(folder), "--parallel"]
    return [configure, build, ["cmake", "--install", str(folder), "--prefix", "moe_ep"]]


def versions() -> dict[str, str]:
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    torch, cuda = (done.stdout.split() or ["unknown", "unknown"])[:2]
    return {
        "gpu": nvidia_smi("name"),
        "driver": nvidia_smi("driver_version"),
        "cuda": cuda,
        "torch": torch,
        "python": platform.python_version(),
    }


class Run:
    """One call: its steps, its logs, and the record that grows with every step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ends = time.monotonic() + options.limit
        self.ok = True
        WORK.mkdir(parents=True, exist_ok=True)
        self.kept = WORK / "record.json"
        self.state = self._earlier() or {
            "ran": True,
            "sources": record.sources_hash(),
            "tests": None,
            "bench": [],
            "not_run": {},
            "built": False,
        }
        self.state.update(versions())

    def _earlier(self) -> dict[str, Any] | None:
        """The record of an earlier call with the same sources."""
        try:
            state: dict[str, Any] = json.loads(self.kept.read_text())
        except (OSError, ValueError):
            return None
        return state if state.get("sources") == record.sources_hash() else None

    def all(self) -> int:
        wanted = self.options.only
        if "build" in wanted and not self.build():
            for step in ("tests", "bench"):
                if step in wanted:
                    self.skip(step, "the build failed")
            return 1
        if not self.state["built"]:
            print("these sources are not built yet: add build to --only", file=sys.stderr)
            return 1
        if "tests" in wanted:
            self.tests()
        if "bench" in wanted:
            self.bench()
        if record.sources_hash() != self.state["sources"]:
            print("the sources changed while they were tested: run again", file=sys.stderr)
            return 1
        for problem in record.problems(self.state, self.state["sources"]):
            print(f"the record would not pass: {problem}", flush=True)
        return 0 if self.ok else 1

    # -- steps ------------------------------------------------------------------------------------

    def build(self) -> bool:
        arch = nvidia_smi("compute_cap")
        for command in build_commands(WORK / "cmake", arch):
            if self.step("build", command, LIMITS_S["build"]) is not None:
                return False
        self.state["built"] = True
        self.save()
        print(f"built for {arch}", flush=True)
        return True

    def tests(self) -> None:
        part = self.options.tests.split(",") if self.options.tests else None
        at_once = AT_ONCE if importlib.util.find_spec("xdist") is not None else []
        command = [sys.executable, "-m", "pytest", *(part or [TESTS]), "-q", "--no-header"]
        command += ["--durations=8", "-p", "no:cacheprovider"]
        self.state["tests"] = None
        found: list[dict[str, int]] = []
        for name, options in (
            ("tests", ["-m", "not alone", *at_once]),
            ("tests that need the GPU alone", ["-m", "alone"]),
        ):
            file = WORK / "tests.xml"
            file.unlink(missing_ok=True)
            whole = [*command, *options, f"--junitxml={file}"]
            self.step(name, whole, LIMITS_S["tests"], fine=(0, NO_TESTS))
            if file.exists():  # an interrupted run writes it too
                found.append(counts(file))
        if found:
            total = {key: sum(each[key] for each in found) for key in found[0]}
            self.state["tests"] = total | ({"only": part} if part else {})
        self.save()
        print(f"tests: {self.state['tests']}", flush=True)

    def bench(self) -> None:
        has_megatron = importlib.util.find_spec("megatron") is not None
        megatron = "--peer megatron" if has_megatron else ""
        self.state["not_run"].pop("bench --peer megatron", None)
        if not has_megatron:
            self.state["not_run"]["bench --peer megatron"] = "no Megatron-core on PYTHONPATH"
        finished = {
            (entry["ranks"], entry["arguments"]): entry
            for entry in (self.state["bench"] if self.options.resume else [])
            if "problem" not in entry
        }
        self.state["bench"] = []
        self.state["not_run"].pop(OTHER_SHAPES, None)
        for ranks, text in SHAPES[:4] if self.options.quick else SHAPES:
            shape = text.format(megatron=megatron).strip()
            name, arguments = f"bench {ranks} x {shape}", f"{COMMON} {shape}"
            if (ranks, arguments) in finished:
                self.state["bench"].append(finished[ranks, arguments])
                continue
            file = WORK / "bench.json"
            file.unlink(missing_ok=True)
            command = ["scripts/with_mps.sh", str(ranks), sys.executable, "-m", "moe_ep", "bench"]
            command += [*arguments.split(), "--json", str(file)]
            problem = self.step(name, command, LIMITS_S["bench"])
            entry: dict[str, Any] = {"ranks": ranks, "arguments": arguments}
            if problem is not None:
                entry["problem"] = problem
            if file.exists():
                entry["report"] = condensed(json.loads(file.read_text()))
            self.state["bench"].append(entry)
            self.save()
        self.save()
        if self.options.quick:
            self.skip(OTHER_SHAPES, "--quick")

    # -- one command ------------------------------------------------------------------------------

    def step(
        self, name: str, command: list[str], limit_s: float, fine: tuple[int, ...] = (0,)
    ) -> str | None:
        """Runs it with its output in a log; returns what went wrong, and notes it in the record.

        Args:
            fine: exit statuses of a command that did what it should.
        """
        limit_s = min(limit_s, self.ends - time.monotonic() - END_S)
        if limit_s < LEAST_S:
            problem = f"no time left of --limit {self.options.limit:g}"
            self.skip(name, problem)
            return problem
        log = WORK / f"{name.split()[0]}.log"
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        with log.open("a") as output:
            output.write(f"\n== {name}\n{' '.join(command)}\n")
            output.flush()
            start = output.tell()
            status = run_limited(command, output, limit_s)
        seconds = time.monotonic() - begin
        text = log.read_bytes()[start:].decode(errors="replace")
        print("\n".join(text.splitlines()[-30:]), flush=True)
        problem = None
        if status is None:
            problem = f"stopped at its limit of {limit_s:.0f} s"
        elif status not in fine:
            problem = f"exit status {status} after {seconds:.0f} s"
        if problem is None:
            self.state["not_run"].pop(name, None)
            self.save()
        else:
            self.skip(name, problem)
        return problem

    def skip(self, name: str, reason: str) -> None:
        if reason != "--quick":
            self.ok = False
        print(f"== {name}: {reason}", flush=True)
        self.state["not_run"][name] = reason
        self.save()

    def save(self) -> None:
        now = datetime.datetime.now(datetime.timezone.utc)
        self.state["date"] = now.strftime("%Y-%m-%d %H:%M UTC")
        record.write(self.state, self.kept, record.FILE, *copies(self.options.out))
        if self.options.out is not None:
            for log in WORK.glob("*.log"):
                shutil.copy(log, self.options.out / log.name)


def run_limited(command: list[str], output: Any, limit_s: float) -> int | None:
    """Exit status; None where it had to be stopped. Nothing it started outlives it."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    paths = [str(record.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = subprocess.Popen(
        command,
        cwd=record.ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # First the polite way: pytest then writes its report, with_mps.sh stops its MPS server.
        for number, seconds in ((signal.SIGINT, END_S / 2), (signal.SIGTERM, END_S / 4)):
            if process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    os.killpg(process.pid, number)
                    process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def counts(file: Path) -> dict[str, int]:
    """Numbers of tests from a JUnit report; errors count as failed."""
    suites = list(ElementTree.parse(file).getroot().iter("testsuite"))
    total = {
        key: sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    failed = total["failures"] + total["errors"]
    passed = max(total["tests"] - failed - total["skipped"], 0)
    return {"passed": passed, "failed": failed, "skipped": total["skipped"]}


def condensed(report: dict[str, Any]) -> dict[str, Any]:
    """A benchmark's JSON without the keys that it repeats at the top."""
    repeated = set(report["runs"][0]) if report["runs"] else set()
    return {key: value for key, value in report.items() if key not in repeated}


if __name__ == "__main__":
    sys.exit(main())
