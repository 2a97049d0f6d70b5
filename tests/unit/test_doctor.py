"""`moe-ep doctor` itself: the live machine, recording, guards, time limits, wrong arguments."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_ep import __version__, cli
from moe_ep.doctor import PROBES, facts, live
from moe_ep.doctor.commands import COMMANDS, Command, run_command
from moe_ep.doctor.finding import Finding, Wish
from moe_ep.doctor.gpu import pairs
from moe_ep.doctor.machine import LiveMachine, RecordedTree
from moe_ep.doctor.network import ports
from moe_ep.doctor.probe import Probe, examine
from moe_ep.doctor.variables import RULES

MACHINES = Path(__file__).parent / "machines"
LAPTOP = RecordedTree(MACHINES / "cpu_laptop")
LEVELS = {"ok", "warning", "failure", "not_applicable"}


def doctor(*arguments: object, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "moe_ep", "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **variables},
    )


def test_live_machine_recorded_and_replayed(tmp_path: Path) -> None:
    folder = tmp_path / "ticket"
    done = doctor("--json", "--record", folder, MOE_EP_TIMEOUT="3", SECRET_TOKEN="hunter2")
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] and done.returncode in (1, 2), done.stderr
    assert set(report) == {
        "schema", "moe_ep", "source", "backend_asked", "exit_code", "findings", "backends",
    }  # fmt: skip
    assert report["moe_ep"] == __version__ and report["backend_asked"] is None
    ids = [finding["id"] for finding in report["findings"]]
    assert len(set(ids)) == len(ids)
    silent = {f"env.{name}" for name in RULES} | {"python", "python.frameworks"}
    assert {probe.name for probe in PROBES} - silent <= set(ids)
    for finding in report["findings"]:
        assert set(finding) == {"id", "level", "seen", "why", "fix", "area", "probe_seconds"}
        assert finding["level"] in LEVELS and finding["seen"]
        assert not finding["seen"].startswith("could not be examined"), finding
        assert 0 <= finding["probe_seconds"] <= 100
    by_id = {finding["id"]: finding for finding in report["findings"]}
    version = ".".join(map(str, sys.version_info[:3]))
    assert by_id["python.version"]["seen"] == f"Python {version}"
    assert by_id["env.unknown"]["level"] == "warning"
    assert {verdict["backend"]: verdict["runs"] for verdict in report["backends"]}["reference"]

    text = "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "hunter2" not in text and "SECRET_TOKEN" not in text and "MOE_EP_TIMEOUT=3" in text
    replayed = doctor("--json", "--root", folder)
    assert replayed.returncode == done.returncode, replayed.stderr
    again = {f["id"]: (f["level"], f["seen"]) for f in json.loads(replayed.stdout)["findings"]}
    assert again == {f["id"]: (f["level"], f["seen"]) for f in report["findings"]}


def test_backend_cuda_asked_for_by_name(tmp_path: Path) -> None:
    layout = tmp_path / "layout.yaml"
    layout.write_text(
        "model: {hidden: 64, num_experts: 4, top_k: 2}\nparallel: {expert: 1}\nbackend: cuda\n"
    )
    done = doctor("--layout", layout)
    assert "backend.cuda" in done.stdout
    if not LiveMachine().has_gpus():
        assert done.returncode == 2
        assert "backend.cuda: cannot run" in done.stdout and "no NVIDIA GPU" in done.stdout


BAD_ARGUMENTS = [
    (["--root", "nowhere"], "not a recorded machine"),
    (["--root", str(MACHINES)], "not a recorded machine"),
    (["--root", "a", "--record", "b"], "give one"),
    (["--layout", "missing.yaml"], "missing.yaml: cannot be read"),
    (["--record", str(MACHINES / "cpu_laptop")], "not empty"),
    (["--wait", "0"], "positive"),
    (["--wait", "nan"], "positive"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and not printed.out


@pytest.mark.parametrize("command", [["doctor"], ["bench", "--backend", "reference"]])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_launcher_variable_that_is_no_number(
    command: list[str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1", name: "abc"}.items():
        monkeypatch.setenv(variable, value)
    assert cli.main(command) == 2
    assert f"{name}='abc' is not a number" in capsys.readouterr().err


def test_unknown_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--rot", "x"])
    assert stopped.value.code == 2
    assert "--rot" in capsys.readouterr().err


def test_a_probe_that_raises_is_a_finding() -> None:
    def broken(machine, wish):
        yield Finding("test.first", "ok", "seen")
        raise PermissionError(13, "Permission denied", "/proc/x")

    def well(machine, wish):
        yield Finding("test.well", "ok", "seen", "why", "fix")

    probes = [Probe("test.broken", "test", broken, 5.0), Probe("test.well", "test", well, 5.0)]
    first, second = examine(LAPTOP, Wish(), probes)
    assert [(f.id, f.level) for f in first.findings] == [("test.broken", "warning")]
    assert "PermissionError" in first.findings[0].seen and "/proc/x" in first.findings[0].seen
    assert second.findings == (Finding("test.well", "ok", "seen"),)  # nothing to mend, no fix


def test_late_probes_share_their_time() -> None:
    def hangs(machine, wish):
        time.sleep(20)
        yield Finding("test.hangs", "ok", "seen")

    probes = [Probe(f"test.{number}", "test", hangs, 0.5) for number in range(8)]
    started = time.monotonic()
    examined = examine(LAPTOP, Wish(), probes)
    assert time.monotonic() - started < 8  # not one after the other, not until they end
    assert [f.level for each in examined for f in each.findings] == ["failure"] * 8
    assert "within 0.5 s" in examined[0].findings[0].seen


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid}; wait"
    with pytest.raises(TimeoutError, match=r"bash.*no answer in 1 s"):
        run_command(Command(("bash", "-c", script), 1.0))
    child = int(pid.read_text())
    deadline = time.monotonic() + 10
    while _runs(child):
        assert time.monotonic() < deadline, f"process {child} still runs"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_command_that_gave_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run for all who ask, and a finding that names the command."""
    calls = []

    def hangs(command: Command) -> None:
        calls.append(command)
        raise TimeoutError("`nvcc --version` gave no answer in 10 s")

    monkeypatch.setattr("moe_ep.doctor.machine.run_command", hangs)
    machine = LiveMachine()

    def look(machine, wish):
        machine.command("nvcc")
        yield Finding("never", "ok", "seen")

    probes = [Probe(name, "test", look, 20.0) for name in ("test.a", "test.b")]
    found = [each.findings[0] for each in examine(machine, Wish(), probes)]
    assert [(f.id, f.level) for f in found] == [("test.a", "failure"), ("test.b", "failure")]
    assert "nvcc --version" in found[0].seen and len(calls) == 1


def test_commands_and_their_outputs() -> None:
    assert run_command(Command(("no-such-program-here",), 5.0)) is None
    output = run_command(Command(("bash", "-c", "echo out; echo err >&2; exit 3"), 20.0))
    assert output is not None
    assert (output.text, output.exit_code) == ("out\nerr\n", 3)
    for probe in PROBES:
        assert probe.limit_s >= 30
    assert all(0 < command.limit_s <= 90 for command in COMMANDS.values())


def test_what_was_not_recorded_is_not_applicable(tmp_path: Path) -> None:
    (tmp_path / "environment").write_text("")
    for each in examine(RecordedTree(tmp_path), Wish(), PROBES):
        for finding in each.findings:
            assert finding.level in ("ok", "not_applicable"), finding


def test_recorded_time_out(tmp_path: Path) -> None:
    (tmp_path / "environment").write_text("")
    (tmp_path / "commands").mkdir()
    (tmp_path / "commands/nvcc.timeout").write_text("`nvcc --version` gave no answer in 10 s\n")
    with pytest.raises(TimeoutError, match="nvcc --version"):
        RecordedTree(tmp_path).command("nvcc")


def test_second_process_writes_to_every_device() -> None:
    """On the CPU shared memory takes the place of CUDA IPC."""
    assert live.exchange(["cpu", "cpu", "cpu"]) == []


def test_exchange_reports_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_write", _dies)
    assert live.exchange(["cpu"]) == ["the second process ended with exit code 7"]
    monkeypatch.setattr(live, "_write", _lies)
    assert live.exchange(["cpu", "cpu"]) == ["cpu holds 0, not 1", "cpu holds 0, not 2"]


def _dies(tensors, devices, sender) -> None:
    os._exit(7)


def _lies(tensors, devices, sender) -> None:
    sender.send([])


def test_pairs_of_a_topology() -> None:
    text = (
        "\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-47\nGPU1\tNV12\t X \tSYS\t48-95\nNIC0\tPIX\tSYS\t X \n"
        "\nLegend:\n  X    = Self\n  NIC0: mlx5_0\n"
    )
    assert pairs(text) == {(0, 1): "NV18", (1, 0): "NV12"}
    assert pairs("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") == {}


def test_ports_of_a_roce_host() -> None:
    found = ports(RecordedTree(MACHINES / "roce_wrong_gid"))
    assert [port.name for port in found] == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"]
    assert found[0].ethernet and found[0].active
    assert sorted(found[0].gids) == [0, 1, 2, 3]  # the fifth is all zero
    assert found[0].roce_v2() == [3, 1]  # the one with an IPv4 address first


REQUIREMENTS = [
    'megatron-core<0.20,>=0.16.1; python_version >= "3.12" and extra == "megatron"',
    'megatron-core==0.16.1; python_version < "3.12" and extra == "megatron"',
    "torch>=2.6",
    "torchvision>=9; extra == 'plot'",
]


@pytest.mark.parametrize(
    ("name", "version", "fits"),
    [
        ("torch", "2.6.0+cu124", True),
        ("torch", "2.5.1", False),
        ("torch", None, None),
        ("megatron-core", "0.16.1", True),
        ("megatron-core", "0.16.0", False),
        ("megatron-core", "0.20.0", False),
        ("pydantic", "1.0", None),
    ],
)
def test_ranges(
    monkeypatch: pytest.MonkeyPatch, name: str, version: str | None, fits: bool | None
) -> None:
    pytest.importorskip("packaging")
    monkeypatch.setattr(facts, "_version", lambda asked: version)
    assert facts._package(name, REQUIREMENTS)["fits"] is fits


def test_ranges_without_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checkout on the PYTHONPATH the ranges come from setup.cfg: the same ones."""
    installed = facts.packages()

    def none(name: str) -> str:
        raise facts.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(facts.importlib.metadata, "metadata", none)
    assert set(facts._requirements()["requirements"]) >= {"torch>=2.6", "pydantic>=2.7"}
    assert facts.packages()["python_fits"] is True
    for name, package in facts.packages()["packages"].items():
        assert package["fits"] == installed["packages"][name]["fits"], name


def test_recorded_cores_are_what_a_core_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`_C` has a list of texts (csrc/bindings.cpp); so have the recorded machines."""
    (tmp_path / "_C.py").write_text('ARCHITECTURES = ["8.0", "9.0", "10.0"]\n')
    monkeypatch.setattr(facts, "PACKAGE", tmp_path)
    monkeypatch.setattr(facts.importlib.machinery, "EXTENSION_SUFFIXES", [".py"])
    printed = json.loads(json.dumps(facts.core()))
    recorded = [RecordedTree(path).facts("core") for path in MACHINES.iterdir()]
    assert [core for core in recorded if core["found"]] == [printed] * 4


@pytest.mark.parametrize("topic", ["packages", "core", "nvshmem"])
def test_facts_import_neither_torch_nor_moe_ep(topic: str) -> None:
    code = (
        f"import runpy, sys; sys.argv[1:] = [{topic!r}]; "
        f"runpy.run_path({facts.__file__!r}, run_name='__main__'); "
        "assert not {'torch', 'moe_ep'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)
