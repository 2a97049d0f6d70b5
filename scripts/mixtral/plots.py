"""Pictures of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from mixtral.metrics import read_metrics

# Beyond so many rows a heat map per layer and expert can't be read: layers are then summed.
_MAX_ROWS = 128


def draw(folder: Path) -> str | None:
    """Writes ``loss.png`` and ``experts.png`` into ``folder``.

    Returns:
        Why nothing was drawn, or None.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        return "matplotlib isn't installed: no pictures (pip install matplotlib)"
    matplotlib.use("Agg")
    records = read_metrics(folder / "metrics.jsonl")
    if not records:
        return "no step was run: no pictures"
    _draw_loss(records, folder / "loss.png")
    _draw_experts(records, folder / "experts.png")
    return None


def _draw_loss(records: list[dict], path: Path) -> None:
    import matplotlib.pyplot as plt

    steps = [record["step"] for record in records]
    figure, (loss, aux) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    loss.plot(steps, [record["lm_loss"] for record in records], label="training")
    validated = [record for record in records if "validation_loss" in record]
    if validated:
        loss.plot(
            [record["step"] for record in validated],
            [record["validation_loss"] for record in validated],
            "o-",
            label="validation",
        )
    loss.set_ylabel("language model loss (nats per byte)")
    loss.legend()
    loss.grid(alpha=0.3)
    aux.plot(steps, [record["aux_loss"] for record in records], color="tab:green")
    aux.set_ylabel("balance loss")
    aux.set_xlabel("step")
    aux.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_experts(records: list[dict], path: Path) -> None:
    import matplotlib.pyplot as plt
    import numpy as np

    load = np.array([record["tokens_per_expert"] for record in records], dtype=float)  # [S, L, E]
    _, num_layers, num_experts = load.shape
    if num_layers * num_experts > _MAX_ROWS:
        load, num_layers = load.sum(axis=1, keepdims=True), 1
    load /= load.mean(axis=2, keepdims=True)
    rows = load.reshape(len(records), -1).T  # [L*E, S]
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.16 * max(12, len(rows))), layout="constrained")
    first, last = records[0]["step"], records[-1]["step"]
    image = axes.imshow(
        rows, aspect="auto", interpolation="nearest", cmap="coolwarm", vmin=0, vmax=2,
        extent=(first - 0.5, last + 0.5, len(rows) - 0.5, -0.5),
    )  # fmt: skip
    for layer in range(1, num_layers):
        axes.axhline(layer * num_experts - 0.5, color="black", linewidth=0.8)
    middles = [layer * num_experts + (num_experts - 1) / 2 for layer in range(num_layers)]
    several = num_layers > 1
    axes.set_yticks(middles, [f"layer {i + 1}" for i in range(num_layers)] if several else ["all"])
    axes.set_ylabel(f"{num_experts} experts of each layer" if several else "experts, layers summed")
    axes.set_xlabel("step")
    axes.set_title("tokens per expert, relative to an even load")
    figure.colorbar(image, ax=axes, label="load / mean")
    figure.savefig(path, dpi=120)
    plt.close(figure)
