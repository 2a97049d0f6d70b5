"""DeepSpeed's AutoEP: a Hugging Face Mixtral over our exchange and over DeepSpeed's own."""

import pytest
import torch
from deepspeed_support import config, engine_for, start

from moe_ep.testing import RankServer

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip(
    "deepspeed.module_inject.auto_ep_layer", reason="this DeepSpeed release has no AutoEP"
)
pytestmark = pytest.mark.timeout(180)

VOCAB = 64


def _engine(zero: int, bf16: bool, ours: bool, checkpointing: bool | None = None, **section):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        )
    )  # fmt: skip
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    expert_parallel = {"enabled": True, "autoep_size": 2, "preset_model": "mixtral", **section}
    content = config(zero, bf16, ours=ours, expert_parallel=expert_parallel)
    return engine_for(model, content, model_parameters=list(model.parameters()))


def _train(engine, rank: int, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        first = torch.randint(0, VOCAB, (2, 1), generator=generator)
        tokens = (first + torch.arange(16)) % VOCAB
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _against_stock(rank: int) -> list[tuple[str, float]]:
    start()
    found = []
    for zero, bf16 in ((0, False), (2, True), (3, True), (2, False)):
        theirs = _train(_engine(zero, bf16, ours=False), rank, 6)
        seam = {"comm_backend": "deepep", "comm_max_tokens_per_rank": 64}
        engine = _engine(zero, bf16, ours=True, **seam)
        assert len(engine.moe_ep.layers) == 2 and len(engine.moe_ep.pool) == 1
        mine = _train(engine, rank, 6)
        assert engine.moe_ep.rows_received > 0
        assert mine[-1] < mine[0]
        engine.destroy()
        difference = max(abs(a - b) / b for a, b in zip(mine, theirs, strict=True))
        found.append((f"ZeRO {zero}, {'bf16' if bf16 else 'fp32'}", difference))
    return found


def test_losses_equal_those_over_deepspeeds_exchange(deepspeed_ranks: RankServer) -> None:
    for of_rank in deepspeed_ranks.run(_against_stock, 2, limit_s=150):
        print(of_rank)
        for name, difference in of_rank:
            assert difference <= (2e-3 if "bf16" in name else 1e-6), name


def _recompute(rank: int) -> None:
    start()
    for bf16 in (False, True):
        plain = _train(_engine(0, bf16, ours=True), rank, 4)
        for reentrant in (False, True):
            engine = _engine(0, bf16, ours=True, checkpointing=reentrant)
            assert _train(engine, rank, 4) == plain, f"bf16 {bf16}, reentrant {reentrant}"
            (ep,) = engine.moe_ep.pool._members.values()
            assert ep.live_handles == 0


def test_activation_checkpointing(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_recompute, 2, limit_s=100)


def _who_moves(rank: int) -> None:
    start()
    # The switch alone is enough; an explicit "comm" leaves the layers to DeepSpeed.
    assert len(_engine(0, False, ours=True).moe_ep.layers) == 2
    stock = _engine(0, False, ours=True, comm_backend="comm")
    assert stock.moe_ep.layers == [] and stock.moe_ep.rows_received == 0
    engine = _engine(0, False, ours=True, comm_backend="deepep", comm_max_tokens_per_rank=8)
    with pytest.raises(ValueError, match="tokens_per_rank=8"):
        engine(input_ids=torch.zeros(2, 16, dtype=torch.long))
    # Checkpoints keep their names and go back to a stock engine.
    names = list(engine.module.state_dict())
    engine.moe_ep.restore()
    kinds = {type(m).__name__ for m in engine.module.modules()}
    assert "AutoEPMoELayer" in kinds and "CoreAutoEPLayer" not in kinds
    assert list(engine.module.state_dict()) == names == list(stock.module.state_dict())


def test_switch_limit_and_restore(deepspeed_ranks: RankServer) -> None:
    deepspeed_ranks.run(_who_moves, 2)
