"""What an EP layout costs on a cluster: bytes per link, times, memory. A model, no measurement.

`predict` is the entrance; docs/plan.md has the formulas and compares them with published figures.
"""

from moe_ep.cost.choices import Choice, ExpertWeights, choices, recommend
from moe_ep.cost.cluster import Cluster
from moe_ep.cost.memory import symmetric_bytes
from moe_ep.cost.routing import Routing
from moe_ep.cost.times import Cost, Prediction, Step, predict, step

__all__ = [
    "Choice",
    "Cluster",
    "Cost",
    "ExpertWeights",
    "Prediction",
    "Routing",
    "Step",
    "choices",
    "predict",
    "recommend",
    "step",
    "symmetric_bytes",
]
