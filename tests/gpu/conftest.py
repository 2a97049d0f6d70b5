"""GPU tests: several ranks share one GPU under MPS. Skipped where there is no GPU or no module."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
# Models and references of the CPU tests.
sys.path.append(str(Path(__file__).parents[1] / "integrations"))
sys.path.append(str(Path(__file__).parents[1] / "multiprocess"))

from mps import MpsServer


def _missing() -> str | None:
    if shutil.which("nvidia-cuda-mps-control") is None:
        return "nvidia-cuda-mps-control is not on the PATH"
    try:
        from moe_ep import _C  # noqa: F401
    except ImportError as error:
        return f"moe_ep/_C is not built ({error})"
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return "no GPU"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _missing()
    here = Path(__file__).parent
    for item in items:
        if reason is not None and here in Path(item.fspath).parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def _mps_session() -> Iterator[MpsServer]:
    server = MpsServer()
    server.start()
    yield server
    server.remove()


@pytest.fixture(autouse=True)
def mps(_mps_session: MpsServer) -> MpsServer:
    """The server every test's ranks use."""
    return _mps_session


@pytest.fixture
def fresh_mps(mps: MpsServer) -> Iterator[MpsServer]:
    """Starts MPS anew before and after a test whose ranks die."""
    mps.stop()
    mps.start()
    yield mps
    mps.stop()
    mps.start()
