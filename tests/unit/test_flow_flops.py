"""FLOPs of the flow model by formula against torch's own count, on meta tensors, for every preset and both conditions."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from seedbed.config import Config
from seedbed.recipes import find
from seedbed.recipes.flow.model import FlowTransformer
from seedbed.recipes.flow.objective import errors

PRESETS = find("flow")[0].presets
CLASSES = 1000


def counted(model: FlowTransformer) -> float:
    """FLOPs of a forward and a backward pass on one image; meta tensors, so that no number is ever computed."""
    x = torch.empty(1, *model.shape, device="meta")
    time, label = torch.empty(1, device="meta"), torch.zeros(1, dtype=torch.int64, device="meta")
    # Flash is counted as two products of the forward and five of the backward; six by convention, as the plain kernel has.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        errors(model(x, time, label), x, time, x, model.config.predict).mean().backward()
    return counter.get_total_flops()


def on_meta(config: Config, **changes) -> FlowTransformer:
    with torch.device("meta"):
        return FlowTransformer(replace(config.model, **changes), (3, config.data.size, config.data.size), CLASSES)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("condition", ["adaln", "context"])
def test_flops_formula_equals_torch_counts(name: str, condition: str) -> None:
    """Every block costs the same, so a model of one block and one of two tell what one of any depth costs."""
    config = PRESETS[name]()
    one, two = (counted(on_meta(config, condition=condition, depth=depth)) for depth in (1, 2))
    wanted = one + (config.model.depth - 1) * (two - one)
    assert on_meta(config, condition=condition).flops_per_image() == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("changes", [{"context_tokens": 5, "context_start": 2}, {"condition": "context", "context_tokens": 3}])
def test_flops_count_context_tokens(changes: dict) -> None:
    model = on_meta(PRESETS["demo"](), depth=3, **changes)
    assert model.flops_per_image() == pytest.approx(counted(model), rel=1e-3)


def test_flops_of_seed_256_to_the_digit() -> None:
    model = on_meta(PRESETS["seed-256"]())
    assert model.flops_per_image() == 14_538_057_646_080
    # Counted whole, not by blocks.
    assert counted(model) == 14_538_057_646_080
    assert on_meta(PRESETS["seed-256-h4"]()).flops_per_image() == 14_538_057_646_080


def test_flops_of_s2_32_equal_those_of_sit() -> None:
    assert on_meta(PRESETS["s2-32"]()).flops_per_image() == pytest.approx(36.31e9, rel=0.02)


def test_flops_plain_formula_overstates_adaln() -> None:
    """Six FLOPs per parameter and token count the modulation 256 times; a third of the blocks' parameters is modulation."""
    model = on_meta(PRESETS["s2-32"]())
    naive = 6 * model.num_patches * (model.token_parameters() + model.image_parameters())
    assert naive > 1.3 * model.flops_per_image()
