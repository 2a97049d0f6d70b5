"""`moe-ep doctor` on what the user asks for: a backend, by a layout or by the environment."""

from pathlib import Path

import pytest
from doctor_support import MACHINES, copy_machine, diagnose, finding, layout, levels, write

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

IBGDA = "ibgda.driver_options ibgda.privileges ibgda.gdrcopy"
NVSHMEM_NEEDS = f"{IBGDA} ibgda.peer_memory rdma.devices nvshmem.package host.memlock"


def test_case_51_asked_for_nvshmem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing of IBGDA is there: each thing is listed with its fix."""
    root, asked = MACHINES / "container_no_devices", layout(tmp_path, "nvshmem")
    code, report = diagnose(capsys, "--root", root, "--layout", asked)
    assert code == 2
    for name in NVSHMEM_NEEDS.split():
        assert finding(report, name)["level"] == "failure", name
    assert "--device=/dev/infiniband" in finding(report, "rdma.devices")["fix"]
    assert "gdrdrv" in finding(report, "ibgda.gdrcopy")["fix"]
    assert "NVreg_EnableStreamMemOPs=1" in finding(report, "ibgda.driver_options")["fix"]
    assert "modprobe nvidia_peermem" in finding(report, "ibgda.peer_memory")["fix"]
    assert "memlock" in finding(report, "host.memlock")["fix"]
    assert finding(report, "host.shm")["level"] == "warning"  # slow, but not a missing need
    assert finding(report, "backend.nvshmem")["level"] == "failure"


@pytest.mark.parametrize(
    ("name", "backend", "code"),
    [
        ("h20_no_driver_options", "cuda", 0),
        ("h20_no_driver_options", "reference", 0),
        ("h20_no_driver_options", "nvshmem", 2),
        ("h20_no_driver_options", "auto", 0),
        ("cpu_laptop", "auto", 0),
        ("cpu_laptop", "reference", 0),
        ("cpu_laptop", "cuda", 2),
        ("cpu_laptop", "nvshmem", 2),
        ("h100_healthy", "nvshmem", 0),
        ("h100_healthy", "cuda", 0),
    ],
)
def test_level_follows_what_is_asked(
    name: str, backend: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root, asked = MACHINES / name, layout(tmp_path, backend)
    found, report = diagnose(capsys, "--root", root, "--layout", asked)
    assert found == code
    by_name = f"backend.{backend}" in levels(report)
    assert by_name == (backend != "auto")
    if name == "h20_no_driver_options":
        wanted = "failure" if backend == "nvshmem" else "not_applicable"
        assert {levels(report)[each] for each in IBGDA.split()} == {wanted}


@pytest.mark.parametrize(
    ("backend", "ranks_per_host", "level"),
    [
        ("auto", 8, "not_applicable"),  # 8 EP ranks on one host
        ("auto", 4, "warning"),
        ("cuda", 4, "not_applicable"),
        ("nvshmem", 8, "failure"),
    ],
)
def test_needs_of_nvshmem_follow_the_group(
    backend: str,
    ranks_per_host: int,
    level: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    root, asked = MACHINES / "container_no_devices", layout(tmp_path, backend, ranks_per_host)
    _, report = diagnose(capsys, "--root", root, "--layout", asked)
    assert {levels(report)[name] for name in NVSHMEM_NEEDS.split()} == {level}


@pytest.mark.parametrize(
    ("backend", "level"),
    [
        ("cuda", "not_applicable"),
        ("reference", "not_applicable"),
        ("auto", "warning"),
        ("nvshmem", "failure"),
        ("nvshmen", "warning"),  # misspelled: nobody knows what was meant
    ],
)
def test_needs_of_nvshmem_follow_the_environment(
    backend: str, level: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = copy_machine("container_no_devices", tmp_path)
    write(root, "environment", f"MOE_EP_BACKEND={backend}\n")
    _, report = diagnose(capsys, "--root", root)
    assert {levels(report)[name] for name in NVSHMEM_NEEDS.split()} == {level}


def test_a_port_that_nobody_needs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = copy_machine("h100_healthy", tmp_path)
    write(root, "sys/class/infiniband/mlx5_3/ports/1/state", "1: DOWN")
    for backend, level in (("cuda", "not_applicable"), ("nvshmem", "warning")):
        _, report = diagnose(capsys, "--root", root, "--layout", layout(tmp_path, backend))
        assert levels(report)["rdma.ports"] == level


def test_backend_in_the_environment_asks_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = copy_machine("cpu_laptop", tmp_path)
    write(root, "environment", "MOE_EP_BACKEND=cuda\n")
    code, report = diagnose(capsys, "--root", root)
    assert code == 2
    assert levels(report)["gpu.devices"] == levels(report)["backend.cuda"] == "failure"


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_layouts_of_configs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = diagnose(capsys, "--root", MACHINES / "h100_healthy", "--layout", CONFIGS / name)
    assert code == 0
