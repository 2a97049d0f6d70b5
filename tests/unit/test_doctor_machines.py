"""`moe-ep doctor` on recorded machines: exactly the expected findings (case 51 among them)."""

import json
from pathlib import Path

import pytest
from doctor_support import MACHINES, copy_machine, diagnose, finding, layout, levels, write

from moe_ep import cli
from moe_ep.doctor.variables import RULES

PYTHON = "python.version python.dependencies python.torch "
GPUS = "python.core cuda.driver cuda.runtime gpu.devices gpu.p2p gpu.nvlink gpu.mig gpu.ipc "
NVSHMEM = "nvshmem.package nvshmem.module nvshmem.transports "
NETWORK = "rdma.devices rdma.ports ibgda.driver_options ibgda.peer_memory ibgda.privileges "
HOST = "env.unknown host.shm host.memlock "

EXPECTED = {
    "h100_healthy": {
        "ok": f"{PYTHON} {GPUS} {NVSHMEM} {NETWORK} {HOST} python.megatron-core python.deepspeed "
        "cuda.toolkit env.CUDA_DEVICE_MAX_CONNECTIONS env.NCCL_NVLS_ENABLE "
        "env.NVSHMEM_IB_ENABLE_IBGDA env.NVSHMEM_IB_SL env.NVSHMEM_HCA_LIST",
        "not_applicable": "gpu.mps rdma.gids ibgda.gdrcopy",
    },
    "h20_no_driver_options": {
        "ok": f"{PYTHON} {GPUS} {NVSHMEM} {HOST} python.megatron-core cuda.toolkit rdma.devices "
        "rdma.ports ibgda.peer_memory env.NCCL_IB_HCA",
        "warning": "ibgda.driver_options ibgda.privileges ibgda.gdrcopy",
        "not_applicable": "python.deepspeed gpu.mps rdma.gids",
    },
    "roce_wrong_gid": {
        "ok": f"{PYTHON} {GPUS} {NVSHMEM} {NETWORK} {HOST} python.megatron-core cuda.toolkit "
        "rdma.gids env.NCCL_IB_GID_INDEX",
        "failure": "env.NVSHMEM_IB_GID_INDEX",
        "not_applicable": "python.deepspeed gpu.mps ibgda.gdrcopy",
    },
    "container_no_devices": {
        "ok": f"{PYTHON} {GPUS} rdma.ports env.unknown",
        "warning": "nvshmem.package nvshmem.module rdma.devices ibgda.driver_options "
        "ibgda.peer_memory ibgda.privileges ibgda.gdrcopy host.shm host.memlock",
        "not_applicable": "python.megatron-core python.deepspeed cuda.toolkit gpu.mps "
        "nvshmem.transports rdma.gids",
    },
    "cpu_laptop": {
        "ok": f"{PYTHON} python.megatron-core env.unknown host.shm",
        "not_applicable": f"{GPUS} {NVSHMEM} {NETWORK} python.deepspeed cuda.toolkit gpu.mps "
        "rdma.gids ibgda.gdrcopy host.memlock",
    },
}
EXIT_CODES = {
    "h100_healthy": 0,
    "h20_no_driver_options": 1,
    "roce_wrong_gid": 2,
    "container_no_devices": 1,
    "cpu_laptop": 0,
}
RUNS = {
    "h100_healthy": "nvshmem cuda reference",
    "h20_no_driver_options": "nvshmem cuda reference",
    "roce_wrong_gid": "nvshmem cuda reference",
    "container_no_devices": "cuda reference",
    "cpu_laptop": "reference",
}


def test_every_recorded_machine_is_expected() -> None:
    assert {path.name for path in MACHINES.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_findings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = diagnose(capsys, "--root", MACHINES / name)
    wanted = {id: level for level, ids in EXPECTED[name].items() for id in ids.split()}
    assert levels(report) == wanted
    assert code == EXIT_CODES[name]
    runs = [backend["backend"] for backend in report["backends"] if backend["runs"]]
    assert runs == RUNS[name].split()
    for each in report["findings"]:
        assert each["seen"]
        bad = each["level"] in ("warning", "failure")
        assert bool(each["why"]) == bad and bool(each["fix"]) == bad, each


@pytest.mark.parametrize("name", EXPECTED)
def test_text_is_short_and_gives_every_fix(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = diagnose(capsys, "--root", MACHINES / name)
    cli.main(["doctor", "--root", str(MACHINES / name)])
    text = capsys.readouterr().out
    assert 8 <= len(text.splitlines()) <= 45
    for each in report["findings"]:
        area = each["id"].partition(".")[0]
        assert each["id"] in text or f" {area}.*" in text
        if each["level"] in ("warning", "failure"):
            assert each["fix"] in text


IBGDA = "ibgda.driver_options ibgda.privileges ibgda.gdrcopy"


# One change to a healthy machine, and the one finding it must bring.
H100 = "570.124.06"
CHANGES = {
    "mig": (
        "commands/nvidia-smi.txt",
        f"0, NVIDIA H100 80GB HBM3, 81559, 9.0, Enabled, Default, {H100}\n"
        f"1, NVIDIA H100 80GB HBM3, 81559, 9.0, Disabled, Default, {H100}\n",
        ("gpu.mig", "warning", "-mig 0"),
    ),
    "exclusive": (
        "commands/nvidia-smi.txt",
        f"0, NVIDIA H100, 81559, 9.0, Disabled, Exclusive_Process, {H100}\n",
        ("gpu.compute_mode", "warning", "nvidia-smi -c DEFAULT"),
    ),
    "mismatch": (
        "commands/nvidia-smi.txt",
        "Failed to initialize NVML: Driver/library version mismatch\n",
        ("gpu.devices", "failure", "reboot"),
    ),
    "p2p": (
        "commands/nvidia-smi-p2p.txt",
        " \tGPU0\tGPU1\t\n GPU0\tX\tCNS\t\n GPU1\tCNS\tX\t\n\nLegend:\n\n  X    = Self\n",
        ("gpu.p2p", "warning", "ACS"),
    ),
    "pcie": (
        "commands/nvidia-smi-topo.txt",
        "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-63\nGPU1\tPHB\t X \t0-63\n",
        ("gpu.nvlink", "warning", "nvidia-fabricmanager"),
    ),
    "ipc": (
        "commands/ipc.txt",
        '{"tested": 8, "problems": ["cuda:1 to cuda:0: invalid resource handle"]}',
        ("gpu.ipc", "warning", "--ipc=host"),
    ),
    "cpu torch": (
        "commands/torch.txt",
        '{"version": "2.7.1+cpu", "cuda": null, "error": "AssertionError"}',
        ("cuda.runtime", "warning", "whl/cu126"),
    ),
    "old driver": (
        "commands/torch.txt",
        '{"version": "2.11.0+cu130", "cuda": "13.0", "error": "RuntimeError: too old"}',
        ("cuda.runtime", "failure", "update the driver"),
    ),
    "fabric manager": (
        "commands/torch.txt",
        '{"version": "2.7.1+cu126", "cuda": "12.6", "error": "RuntimeError: Error 802: x"}',
        ("cuda.runtime", "failure", "nvidia-fabricmanager"),
    ),
    "toolkit": (
        "commands/nvcc.txt",
        "Cuda compilation tools, release 13.0, V13.0.48",
        ("cuda.toolkit", "warning", "older CUDA"),
    ),
    "core for Blackwell": (
        "commands/core.txt",
        '{"found": true, "architectures": ["10.0"], "built": null}',
        ("python.core", "warning", 'MOE_EP_CUDA_ARCHS="9.0"'),
    ),
    "core broken": (
        "commands/core.txt",
        '{"found": true, "error": "undefined symbol: x"}',
        ("python.core", "failure", "pip install"),
    ),
    "nvshmem mixed": (
        "commands/nvshmem.txt",
        '{"backend": true, "found": true, "built": "3.3.9", "loaded": "3.4.5", "library": "l", '
        '"transports": ["ibgda"]}',
        ("nvshmem.module", "failure", "pip install"),
    ),
    "no ibgda plugin": (
        "commands/nvshmem.txt",
        '{"backend": true, "found": true, "built": null, "loaded": "3.3.9", "library": "l", '
        '"transports": ["ibrc"]}',
        ("nvshmem.transports", "warning", "IBGDA support"),
    ),
    "port down": (
        "sys/class/infiniband/mlx5_3/ports/1/state",
        "1: DOWN",
        ("rdma.ports", "warning", "ibstat"),
    ),
    "option written, not loaded": (
        "etc/modprobe.d/nvidia.conf",
        'options nvidia NVreg_RegistryDwords="PeerMappingOverride=1;"',
        None,
    ),
    "memlock": (
        "proc/self/limits",
        "Max locked memory         65536                65536                bytes",
        ("host.memlock", "warning", "ulimit -l unlimited"),
    ),
    "misspelled": (
        "environment",
        "MOE_EP_TIMEOUT=3\n",
        ("env.unknown", "warning", "MOE_EP_TIMEOUT_S"),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_one_change(change: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = copy_machine("h100_healthy", tmp_path)
    path, text, wanted = CHANGES[change]
    write(root, path, text)
    if change == "mismatch":
        write(root, "commands/nvidia-smi.exit", "18")
    _, report = diagnose(capsys, "--root", root)
    bad = {id: level for id, level in levels(report).items() if level in ("warning", "failure")}
    if wanted is None:
        assert not bad
        return
    name, level, fix = wanted
    assert bad == {name: level}
    assert fix in finding(report, name)["fix"]


@pytest.mark.parametrize(
    ("architectures", "level", "seen"),
    [
        (["9.0"], "ok", "for 9.0"),
        (["8.0"], "ok", "for 8.0"),  # the driver compiles its PTX for 9.0
        (["10.0", "8.0"], "ok", "for 10.0 8.0"),
        (["9.1"], "failure", "not for 9.0"),
        (["10.0", "12.0"], "failure", "for 10.0 12.0, not for 9.0"),  # 10.0 is after 9.0
    ],
)
def test_architectures_of_the_core(
    architectures: list[str],
    level: str,
    seen: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    root = copy_machine("h100_healthy", tmp_path)
    core = {"found": True, "architectures": architectures, "built": None}
    write(root, "commands/core.txt", json.dumps(core))
    _, report = diagnose(capsys, "--root", root, "--layout", layout(tmp_path, "cuda"))
    judged = finding(report, "python.core")
    assert judged["level"] == level and judged["seen"].endswith(seen)


@pytest.mark.parametrize(
    ("memory", "level", "why"),
    [
        ("", "warning", "falls back on CUDA IPC"),
        ("MOE_EP_MEMORY=auto\n", "warning", "falls back on CUDA IPC"),
        ("MOE_EP_MEMORY=fd\n", "warning", "does not fall back on it"),
        ("MOE_EP_MEMORY=ipc\n", "failure", "only by CUDA IPC"),
    ],
)
def test_ipc_is_the_second_way(
    memory: str, level: str, why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = copy_machine("h100_healthy", tmp_path)
    write(root, *CHANGES["ipc"][:2])
    write(root, "environment", memory)
    code, report = diagnose(capsys, "--root", root, "--layout", layout(tmp_path, "cuda"))
    judged = finding(report, "gpu.ipc")
    assert (judged["level"], code) == (level, 2 if level == "failure" else 1)
    assert why in judged["why"] and "--ipc=host" in judged["fix"]
    assert ("unset MOE_EP_MEMORY" in judged["fix"]) == (level == "failure")


@pytest.mark.parametrize(
    ("was", "instead", "ids"),
    [
        ("MemOPs: 1", "MemOPs: 0", "ibgda.driver_options ibgda.gdrcopy"),
        ("PeerMappingOverride=1;", "", IBGDA),
    ],
)
def test_one_of_two_driver_options(
    was: str, instead: str, ids: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = copy_machine("h100_healthy", tmp_path)
    params = (root / "proc/driver/nvidia/params").read_text()
    assert was in params
    write(root, "proc/driver/nvidia/params", params.replace(was, instead))
    _, report = diagnose(capsys, "--root", root)
    bad = {id for id, level in levels(report).items() if level in ("warning", "failure")}
    assert bad == set(ids.split())


def test_driver_options_written_but_not_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = copy_machine("h20_no_driver_options", tmp_path)
    write(root, *CHANGES["option written, not loaded"][:2])
    _, report = diagnose(capsys, "--root", root)
    options = finding(report, "ibgda.driver_options")
    assert options["level"] == "warning" and "modprobe.d/nvidia.conf" in options["seen"]
    assert "reboot" in options["fix"] and "tee" not in options["fix"]


def test_gdrcopy_and_new_nvshmem_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = copy_machine("h20_no_driver_options", tmp_path)
    packages = json.loads((root / "commands/packages.txt").read_text())
    packages["nvshmem_wheels"] = {"nvidia-nvshmem-cu12": "3.4.5"}
    write(root, "commands/packages.txt", json.dumps(packages))
    _, report = diagnose(capsys, "--root", root)
    assert "cpu_host_memory" in finding(report, "ibgda.driver_options")["why"]
    write(root, "dev/gdrdrv", "")
    _, report = diagnose(capsys, "--root", root)
    assert levels(report)["ibgda.gdrcopy"] == "ok"
    assert "NIC_HANDLER=cpu lets" in finding(report, "ibgda.driver_options")["why"]


def test_nvshmem_dir(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = copy_machine("h100_healthy", tmp_path)
    write(root, "environment", "NVSHMEM_DIR=/opt/nvshmem\n")
    _, report = diagnose(capsys, "--root", root)
    assert levels(report)["nvshmem.package"] == "failure"
    macros = ("MAJOR", 3), ("MINOR", 4), ("PATCH", 5)
    text = "\n".join(f"#define NVSHMEM_VENDOR_{name}_VERSION {n}" for name, n in macros)
    write(root, "opt/nvshmem/include/non_abi/nvshmem_version.h", text)
    _, report = diagnose(capsys, "--root", root)
    assert levels(report)["nvshmem.package"] == "warning"  # the wheel is 3.3.9
    assert "3.4.5" in finding(report, "nvshmem.package")["seen"]


def test_container_started_without_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = copy_machine("container_no_devices", tmp_path)
    for path in (root / "dev").glob("nvidia*"):
        path.unlink()
    code, report = diagnose(capsys, "--root", root)
    bad = {id: level for id, level in levels(report).items() if level in ("warning", "failure")}
    assert (code, bad) == (1, {"gpu.devices": "warning"})
    assert "--gpus all" in finding(report, "gpu.devices")["fix"]


def test_the_docs_list_every_finding() -> None:
    text = (MACHINES.parents[2] / "docs" / "doctor.md").read_text()
    ids = {id for machine in EXPECTED.values() for ids in machine.values() for id in ids.split()}
    names = {id for id in ids if not id.startswith("env.")} | set(RULES)
    assert len(names) > 50
    assert not [name for name in sorted(names) if f"`{name}`" not in text]


@pytest.mark.parametrize(("machine", "lines"), [("cpu_laptop", 10), ("h100_healthy", 10)])
def test_ten_lines_say_what_runs(
    machine: str, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["doctor", "--root", str(MACHINES / machine)])
    text = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(text) <= lines, text
    answers = {line.split()[0]: line.split()[1] for line in text[2:5]}
    runs = RUNS[machine].split()
    assert {name: word == "yes" for name, word in answers.items()} == {
        name: name in runs for name in ("nvshmem", "cuda", "reference")
    }
