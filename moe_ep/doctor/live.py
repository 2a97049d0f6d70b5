"""What must be tried on the running machine: `python -m moe_ep.doctor.live ipc|backends`. Prints
one JSON object; runs in a process of its own, because a driver may hang or crash it."""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from moe_ep.backends import reasons
from moe_ep.layout import EPLayout

_EXCHANGE_S = 60.0


def backends(layout_json: str) -> dict[str, str | None]:
    """Why each backend cannot run the layout here; None where it can."""
    return reasons(EPLayout(**json.loads(layout_json)))


def ipc() -> dict[str, Any]:
    """Whether a second process can map memory of every GPU and write to it from the next one."""
    if not torch.cuda.is_available():
        return {"skipped": "torch sees no GPU (cuda.runtime says why)"}
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return {"tested": len(names), "problems": exchange(names)}


def exchange(devices: list[str]) -> list[str]:
    """A second process writes index + 1 to a tensor on each device, from the device after it.

    Args:
        devices: torch devices ("cpu" too, where shared memory takes the place of CUDA IPC).

    Returns:
        What went wrong, one text per device.
    """
    tensors = [torch.zeros(1, device=device) for device in devices]  # pickling shares them
    context = torch.multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_write, args=(tensors, devices, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(_EXCHANGE_S):
            return [f"the second process did not answer in {_EXCHANGE_S:g} s"]
        problems = list(receiver.recv())
    except EOFError:
        process.join()
        return [f"the second process ended with exit code {process.exitcode}"]
    finally:
        receiver.close()
        process.join(1.0)
        process.kill()
    return problems or [
        f"{device} holds {tensor.item():g}, not {number}"
        for number, (device, tensor) in enumerate(zip(devices, tensors, strict=True), start=1)
        if tensor.item() != number
    ]


def _write(tensors: list[Tensor], devices: list[str], sender: Connection) -> None:
    problems = []
    for index, tensor in enumerate(tensors):
        writer = devices[(index + 1) % len(devices)]
        try:
            tensor.copy_(torch.full((1,), index + 1.0, device=writer))
            if tensor.is_cuda:
                torch.cuda.synchronize(writer)
                torch.cuda.synchronize(tensor.device)
        except RuntimeError as error:
            problems.append(f"{writer} to {devices[index]}: {str(error).splitlines()[0]}")
    sender.send(problems)


if __name__ == "__main__":
    answer = ipc() if sys.argv[1] == "ipc" else backends(sys.argv[2])
    print(json.dumps(answer))
