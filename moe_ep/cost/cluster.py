"""A cluster as the cost model sees it: rates and latencies, written as YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_ep.layout import EPLayout, read_mapping

DEFAULT_CLUSTER = "h100_cx7"


class Cluster(BaseModel):
    """GPUs, hosts and links. Rates are in GB/s (10^9 bytes), of one GPU and one direction.

    What has a default was fitted, on the figures that docs/plan.md names; the rest is hardware.

    Attributes:
        gpus_per_host: GPUs that reach each other over NVLink; of a rack, where NVLink spans it.
        ranks_per_gpu: more than one where ranks share a GPU; their links are then its memory.
        sms: streaming multiprocessors of a GPU.
        hbm_GBps: of a large copy, bytes read and written counted.
        nvlink_GBps: nominal; none: the GPUs of a host have no such link.
        nic_GBps: nominal, of the network card of one GPU; none: there is one host.
        hbm_efficiency, nvlink_efficiency, nic_efficiency: part of these rates that kernels reach.
        sm_load_GBps, sm_store_GBps: what one SM loads and stores, if it does nothing else.
        launch_us: a kernel's start and end.
        nvlink_signal_us, rdma_signal_us: from a store to its being seen by a peer.
        notify_us: exchange of counts in one rank, its wait on the host included.
        low_latency_us: what a low-latency verb takes beside bytes, launch and signal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = ""
    gpus_per_host: int = Field(ge=1)
    ranks_per_gpu: int = Field(default=1, ge=1)
    sms: int = Field(ge=1)
    hbm_GBps: float = Field(gt=0)
    nvlink_GBps: float | None = Field(default=None, gt=0)
    nic_GBps: float | None = Field(default=None, gt=0)
    hbm_efficiency: float = Field(default=0.85, gt=0, le=1)
    nvlink_efficiency: float = Field(default=0.70, gt=0, le=1)
    nic_efficiency: float = Field(default=0.88, gt=0, le=1)
    sm_load_GBps: float = Field(default=94.0, gt=0)
    sm_store_GBps: float = Field(default=63.0, gt=0)
    launch_us: float = Field(default=4.0, ge=0)
    nvlink_signal_us: float = Field(default=2.0, ge=0)
    rdma_signal_us: float = Field(default=6.0, ge=0)
    notify_us: float = Field(default=40.0, ge=0)
    low_latency_us: float = Field(default=15.0, ge=0)

    @property
    def ranks_per_host(self) -> int:
        return self.gpus_per_host * self.ranks_per_gpu

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Reads a cluster description; its name is the file's.

        Raises:
            ValueError: no such file, not YAML, a key that stands twice, or not a valid description;
                names the key.
        """
        try:
            data = read_mapping(
                path, f"a cluster is a mapping with the keys {', '.join(cls.model_fields)}"
            )
            return cls(**{"name": Path(path).stem, **data})
        except ValidationError as error:
            raise ValueError(f"{path}: {_explain(error, cls)}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def named(cls, name: str) -> Cluster:
        """A description by its file, or by its name in configs/clusters.

        Raises:
            ValueError: there is none; lists those there are.
        """
        if name.endswith((".yaml", ".yml")) or "/" in name:
            return cls.from_yaml(name)
        for folder in _folders():
            if (file := folder / f"{name}.yaml").is_file():
                return cls.from_yaml(file)
        known = sorted({file.stem for folder in _folders() for file in folder.glob("*.yaml")})
        raise ValueError(
            f"no cluster {name!r}; known: {', '.join(known) or 'none'}; or give the path of a "
            "description (docs/plan.md has its keys)"
        )

    def check(self, layout: EPLayout) -> None:
        """Raises ValueError where the layout needs a link that the cluster lacks."""
        ranks = layout.parallel.group_size
        if ranks > self.ranks_per_gpu and self.nvlink_GBps is None:
            raise ValueError(
                f"cluster {self.name}: no nvlink_GBps, but {ranks} ranks need more than one GPU "
                f"(ranks_per_gpu is {self.ranks_per_gpu}); add the rate of the links between GPUs"
            )
        if ranks > self.ranks_per_gpu > 1:
            raise ValueError(
                f"cluster {self.name}: {ranks} ranks, {self.ranks_per_gpu} of them on each GPU; "
                "ranks either share one GPU or have one each: set ranks_per_gpu to 1"
            )
        if ranks > self.ranks_per_host and self.nic_GBps is None:
            raise ValueError(
                f"cluster {self.name}: no nic_GBps, but {ranks} ranks need more than one host of "
                f"{self.ranks_per_host}; add the rate of a GPU's network card"
            )


def _folders() -> list[Path]:
    """Where descriptions lie: a checkout's, beside the installed package, the working folder's."""
    package = Path(__file__).resolve().parents[1]
    clusters = Path("configs", "clusters")
    return [package.parent / clusters, package / "clusters", clusters]


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    lines: list[str] = []
    for problem in error.errors():
        key, value = ".".join(map(str, problem["loc"])), problem["input"]
        told: dict[str, Any] = {
            "extra_forbidden": f"{key}: unknown key; known: {', '.join(model.model_fields)}",
            "missing": f"{key}: missing",
        }
        lines.append(told.get(problem["type"], f"{key}: {value!r}: {problem['msg'].lower()}"))
    return "; ".join(lines)
