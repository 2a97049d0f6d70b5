"""What a machine can run, and what is wrong with it: the probes behind `moe-ep doctor`."""

from moe_ep.doctor import cuda, environment, gpu, network, nvshmem, packages
from moe_ep.doctor.probe import Probe

PROBES: tuple[Probe, ...] = (
    *packages.PROBES,
    *cuda.PROBES,
    *gpu.PROBES,
    *nvshmem.PROBES,
    *network.PROBES,
    *environment.PROBES,
)
