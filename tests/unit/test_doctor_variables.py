"""`moe-ep doctor` on environment variables: valid values, and what contradicts the machine."""

from pathlib import Path

import pytest
from doctor_support import copy_machine, diagnose, finding, layout, levels, write

from moe_ep.doctor.names import BUILD_VARIABLES, OURS
from moe_ep.doctor.variables import RULES

ROOT = Path(__file__).resolve().parents[2]

# A variable, a value, the machine, and what is wrong with it.
VARIABLES = [
    ("NVSHMEM_IB_GID_INDEX=3", "roce_wrong_gid", "ok", ""),
    ("NVSHMEM_IB_GID_INDEX=-1", "roce_wrong_gid", "ok", ""),
    ("NVSHMEM_IB_GID_INDEX=4", "roce_wrong_gid", "failure", "set it to 3"),  # all zero: not set
    ("NVSHMEM_IB_GID_INDEX=7", "roce_wrong_gid", "failure", "set it to 3"),
    ("NVSHMEM_IB_GID_INDEX=0", "roce_wrong_gid", "failure", "set it to 3"),
    ("NVSHMEM_IB_GID_INDEX=three", "roce_wrong_gid", "failure", ""),
    ("NCCL_IB_GID_INDEX=2", "roce_wrong_gid", "failure", "set it to 3"),
    ("NVSHMEM_IB_GID_INDEX=3", "h100_healthy", "ok", ""),  # InfiniBand does not use it
    ("NVSHMEM_IB_SL=15", "h100_healthy", "ok", ""),
    ("NVSHMEM_IB_SL=16", "h100_healthy", "failure", ""),
    ("NVSHMEM_QP_DEPTH=1024", "h100_healthy", "ok", ""),
    ("NVSHMEM_QP_DEPTH=64", "h100_healthy", "failure", ""),
    ("NVSHMEM_IBGDA_QP_DEPTH=1024", "h100_healthy", "warning", "export NVSHMEM_QP_DEPTH=1024"),
    ("DEEP_EP_NUM_MAX_RDMA_TOKENS=2048", "h100_healthy", "ok", ""),
    ("DEEP_EP_NUM_MAX_RDMA_TOKENS=0", "h100_healthy", "failure", ""),
    ("NVSHMEM_REMOTE_TRANSPORT=none", "h100_healthy", "ok", ""),
    ("NVSHMEM_REMOTE_TRANSPORT=tcp", "h100_healthy", "failure", "ibrc"),
    ("NVSHMEM_IBGDA_NIC_HANDLER=cpu", "h100_healthy", "failure", "GDRCopy"),
    ("NVSHMEM_IBGDA_NIC_HANDLER=gpu", "h100_healthy", "ok", ""),
    ("NVSHMEM_HCA_LIST=mlx5_9:1", "h100_healthy", "failure", "mlx5_0"),
    ("NCCL_IB_HCA=^mlx5_1", "h100_healthy", "ok", ""),
    ("NCCL_NVLS_ENABLE=yes", "h100_healthy", "failure", ""),
    ("NCCL_P2P_DISABLE=1", "h100_healthy", "warning", "unset"),
    ("NCCL_P2P_DISABLE=0", "h100_healthy", "ok", ""),
    ("CUDA_DEVICE_MAX_CONNECTIONS=64", "h100_healthy", "failure", ""),
    ("CUDA_VISIBLE_DEVICES=0,7", "h100_healthy", "ok", ""),
    ("CUDA_VISIBLE_DEVICES=0,8", "h100_healthy", "failure", "from 0 to 7"),
    ("CUDA_VISIBLE_DEVICES=1,1", "h100_healthy", "failure", "once"),
    ("CUDA_VISIBLE_DEVICES=", "h100_healthy", "warning", "unset"),
    ("CUDA_VISIBLE_DEVICES=", "cpu_laptop", "ok", ""),
    ("CUDA_VISIBLE_DEVICES=GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "h100_healthy", "ok", ""),
    ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "h100_healthy", "ok", ""),
    ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments=True", "h100_healthy", "failure", ":True"),
    ("GLOO_SOCKET_IFNAME=eth0", "h100_healthy", "ok", ""),
    ("GLOO_SOCKET_IFNAME=bond0", "h100_healthy", "failure", "eth0"),
    ("MOE_EP_BACKEND=gpu", "h100_healthy", "failure", "reference"),
    ("MOE_EP_MEMORY=fd", "h100_healthy", "ok", ""),
    ("MOE_EP_MEMORY=nvlink", "h100_healthy", "failure", "use one of: auto, fd, ipc"),
    ("MOE_EP_MEMORY=IPC", "h100_healthy", "failure", "ipc"),
    ("MOE_EP_LOW_LATENCY_FORM=slots", "h100_healthy", "ok", ""),
    ("MOE_EP_LOW_LATENCY_FORM=Layered", "h100_healthy", "failure", "layered, slots"),
    ("MOE_EP_RANKS_PER_HOST=2", "h100_healthy", "ok", ""),
    ("MOE_EP_RANKS_PER_HOST=+2", "h100_healthy", "failure", ""),
    ("MOE_EP_BACKEND=CUDA", "h100_healthy", "failure", "cuda"),
    ("NVSHMEM_REMOTE_TRANSPORT=IBRC", "h100_healthy", "ok", ""),
    ("MOE_EP_TIMEOUT_S=-1", "h100_healthy", "failure", ""),
    ("CUDA_LAUNCH_BLOCKING=1", "h100_healthy", "warning", ""),
]


@pytest.mark.parametrize(("setting", "machine", "level", "fix"), VARIABLES)
def test_variables(
    setting: str,
    machine: str,
    level: str,
    fix: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    root = copy_machine(machine, tmp_path)
    write(root, "environment", setting + "\n")
    _, report = diagnose(capsys, "--root", root)
    judged = finding(report, f"env.{setting.split('=')[0]}")
    assert judged["level"] == level, judged
    assert fix in judged["fix"]
    assert not [
        id
        for id, worst in levels(report).items()
        if id != judged["id"] and worst in ("warning", "failure") and id.startswith("env.")
    ]


def test_every_variable_of_ours_has_a_rule_and_a_row_in_the_readme() -> None:
    assert not OURS - set(RULES) - set(BUILD_VARIABLES)
    text = (ROOT / "README.md").read_text()
    assert not [name for name in sorted(OURS) if f"| `{name}` |" not in text]


def test_variables_that_contradict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    root = copy_machine("h100_healthy", tmp_path)
    settings = [
        "NVSHMEM_IB_ENABLE_IBGDA=1",
        "NVSHMEM_REMOTE_TRANSPORT=none",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "PYTORCH_ALLOC_CONF=expandable_segments:False",
        "NVSHMEM_QP_DEPTH=128",
        "CUDA_MPS_PIPE_DIRECTORY=/tmp/mps",
    ]
    write(root, "environment", "\n".join(settings))
    asked = layout(tmp_path, "auto", mode="low_latency")
    _, report = diagnose(capsys, "--root", root, "--layout", asked)
    bad = {id: level for id, level in levels(report).items() if level in ("warning", "failure")}
    assert bad == {
        "env.NVSHMEM_IB_ENABLE_IBGDA": "warning",
        "env.PYTORCH_CUDA_ALLOC_CONF": "warning",
        "env.NVSHMEM_QP_DEPTH": "failure",  # 128 tokens need 2 * 129
        "gpu.mps": "warning",
    }
    assert "258" in finding(report, "env.NVSHMEM_QP_DEPTH")["fix"]
    write(root, "tmp/mps/control", "")
    _, report = diagnose(capsys, "--root", root, "--layout", asked)
    assert levels(report)["gpu.mps"] == "ok"


@pytest.mark.parametrize(("nccl", "level"), [("3", "ok"), ("5", "warning"), ("-1", "ok")])
def test_contradictory_gid_indices(
    nccl: str, level: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = copy_machine("h100_healthy", tmp_path)
    write(root, "environment", f"NVSHMEM_IB_GID_INDEX=3\nNCCL_IB_GID_INDEX={nccl}\n")
    _, report = diagnose(capsys, "--root", root)
    judged = finding(report, "env.NVSHMEM_IB_GID_INDEX")
    assert judged["level"] == level, judged
    assert ("NCCL_IB_GID_INDEX=5" in judged["seen"]) == (level == "warning")
