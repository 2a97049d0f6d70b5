"""The CPU shims: what they answer inside their block, and that nothing is left behind."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from moe_ep.integrations.megatron.cpu import cpu_shims

TOUCHED = [
    (torch.cuda, "current_device"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "Stream"),
    (torch.cuda, "manual_seed"),
    (megatron_random, "_get_cuda_rng_state"),
    (megatron_random.CudaRNGStatesTracker, "fork"),
    (moe_utils, "te_general_gemm"),
    (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream"),
]


def state():
    return [vars(owner).get(name, "absent") for owner, name in TOUCHED]


def test_everything_is_undone_even_after_an_error():
    before = state()
    with pytest.raises(RuntimeError, match="mine"), cpu_shims():
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = torch.cuda.Stream()
        raise RuntimeError("mine")
    assert state() == before


def test_cuda_requests_are_answered_by_the_cpu():
    with cpu_shims():
        x = torch.ones(2, device="cuda")
        assert x.device.type == x.cuda().device.type == x.to("cuda:0").device.type == "cpu"
        assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
        assert torch.nn.Linear(2, 2).cuda()(x).device.type == "cpu"
        assert x.type() == "torch.cuda.FloatTensor"
        assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            x.record_stream(torch.cuda.current_stream())
            torch.cuda.current_stream().record_event().synchronize()
        torch.cuda.synchronize()
    assert x.type() == "torch.FloatTensor"


def test_torch_may_load_its_compiler_inside():
    """As an import of parts of Megatron does: it looks at every function that it has a rule for."""
    from torch._dynamo import trace_rules

    with cpu_shims():
        assert torch.cuda.synchronize in trace_rules.get_torch_obj_rule_map.__wrapped__()


def test_blocks_may_be_nested():
    with cpu_shims():
        with cpu_shims():
            pass
        assert torch.ones(1, device="cuda").device.type == "cpu"


def test_forks_draw_from_their_own_states_and_disturb_no_other():
    with cpu_shims():
        tracker = megatron_random.CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("a", 11)
        tracker.add("b", 12)
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)
        first = torch.rand(1)
        with tracker.fork("a"):
            a1 = torch.rand(1)
            with tracker.fork("b"):
                b1 = torch.rand(1)
            a2 = torch.rand(1)
        second = torch.rand(1)
        assert torch.equal(torch.cat([first, second]), expected)
        for seed, drawn in ((11, [a1, a2]), (12, [b1])):
            generator = torch.Generator().manual_seed(seed)
            assert torch.equal(torch.cat(drawn), torch.rand(len(drawn), generator=generator))
        with tracker.fork("a"):
            assert not torch.equal(torch.rand(1), a1)  # it goes on where it stopped
        with pytest.raises(KeyError, match="never added"), tracker.fork("c"):
            pass
