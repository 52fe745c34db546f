"""The flow model: patches, positions, conditions, what depends on what, and what it is at initial."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seedbed.errors import UserError
from seedbed.nn.layers import Attention, apply_rope, rms_norm
from seedbed.nn.modulate import gate_and_norm, modulated_norm
from seedbed.nn.patchify import depatchify, patchify, raster, sincos_table
from seedbed.recipes import find
from seedbed.recipes.flow.model import FlowTransformer, TimeEmbedding, axial_table, build_model, time_features, with_unrotated
from seedbed.recipes.flow.presets import ModelConfig

SMALL = ModelConfig(depth=2, width=32, heads=2, patch=2)
SHAPE, CLASSES = (3, 8, 12), 5
VARIANTS = {
    "adaln": SMALL,
    "context": replace(SMALL, condition="context"),
    "1d": replace(SMALL, condition="context", positions="1d"),
    "gelu": replace(SMALL, mlp="gelu", positions="sines", qk_norm=False),
    "late tokens": replace(SMALL, context_tokens=3, context_start=1),
    "many tokens": replace(SMALL, condition="context", context_tokens=3, context_start=1),
}


def model_of(config: ModelConfig, *, perturbed: bool = True) -> FlowTransformer:
    """A model in float64; shaken, since zeros at the end hide everything behind them."""
    model = build_model(config, SHAPE, CLASSES, seed=1).double().eval()
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in model.parameters() if perturbed else ():
            param += 0.1 * torch.randn(param.shape, generator=rng)
    return model


def inputs(num: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num, *SHAPE, generator=rng, dtype=torch.float64)
    return x, torch.rand(num, generator=rng, dtype=torch.float64), torch.arange(num) % CLASSES


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> FlowTransformer:
    return model_of(VARIANTS[request.param])


# ---- patches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width", "patch"), [(8, 8, 2), (8, 12, 4), (6, 15, 3), (5, 7, 1), (16, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_patchify_round_trip_is_bitwise(height: int, width: int, patch: int, dtype: torch.dtype) -> None:
    x = (100 * torch.randn(2, 3, height, width)).to(dtype)
    rows = patchify(x, patch)
    assert rows.shape == (2, height * width // patch**2, 3 * patch**2)
    assert torch.equal(depatchify(rows, patch, height, width), x)


def test_patchify_maps_a_pixel_to_one_value() -> None:
    x = torch.zeros(1, 3, 8, 12)
    x[0, 1, 5, 7] = 1.0  # patch row 2 of 4, column 3 of 6; inside the patch row 1, column 1
    lit = patchify(x, 2).nonzero().tolist()
    assert lit == [[0, 2 * 6 + 3, 1 * 4 + 1 * 2 + 1]]


def test_patchify_refuses_sizes_that_do_not_divide() -> None:
    with pytest.raises(UserError, match="9x12 does not divide into patches of 2x2"):
        patchify(torch.zeros(1, 3, 9, 12), 2)


# ---- positions -------------------------------------------------------------------------------------------------------


def test_axial_rope_depends_on_distances_only() -> None:
    rng = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=rng, dtype=torch.float64)

    def score(a: list[int], b: list[int]) -> float:
        return float(
            (
                apply_rope(q, axial_table(torch.tensor([a]), 16, 1e4)) * apply_rope(k, axial_table(torch.tensor([b]), 16, 1e4))
            ).sum()
        )

    assert score([1, 2], [4, 3]) == pytest.approx(score([6, 7], [9, 8]), abs=1e-5)
    assert abs(score([1, 2], [4, 3]) - score([1, 2], [3, 4])) > 1e-3, "rows and columns are told apart"
    assert abs(score([1, 2], [4, 3]) - score([4, 3], [1, 2])) > 1e-3, "the sign of a distance matters"


def test_condition_tokens_are_not_rotated() -> None:
    cos, sin = with_unrotated(axial_table(raster(2, 3, torch.device("cpu")), 8, 1e4), 2)
    assert cos.shape == sin.shape == (8, 1, 4)
    assert torch.equal(cos[6:], torch.ones(2, 1, 4)) and torch.equal(sin[6:], torch.zeros(2, 1, 4))


def test_sincos_table_distinguishes_every_position() -> None:
    table = sincos_table(raster(16, 16, torch.device("cpu")), 64)
    apart = torch.cdist(table, table) + 100 * torch.eye(256)
    assert table.shape == (256, 64) and apart.min() > 0.3


def test_model_is_equivariant_to_permuted_patches_and_positions(model: FlowTransformer) -> None:
    """So the condition tokens are where they should be, and are cut off at the right end."""
    x, time, label = inputs()
    rows, order = patchify(x, 2), torch.randperm(model.num_patches, generator=torch.Generator().manual_seed(4))
    plain = model.tokens(rows, time, label)
    moved = model.tokens(rows[:, order], time, label, model.position_tables(raster(*model.grid, torch.device("cpu"))[order]))
    torch.testing.assert_close(moved, plain[:, order], rtol=1e-5, atol=1e-6)
    unmoved = model.tokens(rows[:, order], time, label)
    assert (unmoved - plain[:, order]).abs().max() > 1e-3, "places matter"


# ---- what depends on what ----------------------------------------------------------------------------------------------


def test_output_has_the_shape_of_the_input(model: FlowTransformer) -> None:
    x, time, label = inputs()
    assert model(x, time, label).shape == x.shape


def test_attention_has_no_mask(model: FlowTransformer) -> None:
    x, time, label = inputs()
    other = x.clone()
    other[:, :, -1, -1] += 1.0
    change = patchify(model(other, time, label) - model(x, time, label), 2).abs().amax(-1)
    assert change.min() > 1e-6, "every patch sees every other"


def test_attention_mask_would_be_detected() -> None:
    model = model_of(SMALL)
    for module in model.modules():
        if isinstance(module, Attention):
            module.causal = True
    x, time, label = inputs()
    other = x.clone()
    other[:, :, -1, -1] += 1.0
    assert patchify(model(other, time, label) - model(x, time, label), 2)[:, :-1].abs().max() == 0.0


def test_time_and_class_matter_and_rows_do_not_mix(model: FlowTransformer) -> None:
    x, time, label = inputs()
    base = model(x, time, label)
    assert (model(x, time.flip(0), label) - base).abs().amax((1, 2, 3))[0] > 1e-3
    assert (model(x, time, (label + 1) % CLASSES) - base).abs().amax((1, 2, 3)).min() > 1e-4
    assert (model(x, time, torch.full_like(label, model.null_class)) - base).abs().amax((1, 2, 3)).min() > 1e-4
    torch.testing.assert_close(model(x[1:2], time[1:2], label[1:2]), base[1:2])


def test_time_embedding_in_half_precision() -> None:
    """Just below 1 bfloat16 counts in steps of 1/256; the network must still tell these two times apart."""
    model = model_of(SMALL).float()
    x, _, label = (t.float() if t.is_floating_point() else t for t in inputs(1))
    assert model.time is not None
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        near = [model.time(torch.tensor([t])) for t in (0.9980, 0.9985)]
        out = model(x, torch.tensor([0.5]), label)
    assert near[0].dtype == torch.float32 and (near[0] - near[1]).abs().max() > 1e-2
    assert out.dtype == torch.float32


# ---- initial ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_initial_output_is_zero_and_only_the_head_has_a_gradient(name: str) -> None:
    model = model_of(VARIANTS[name], perturbed=False)
    x, time, label = inputs()
    out = model(x, time, label)
    assert out.abs().max() == 0.0
    (out - x).square().mean().backward()
    moving = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert moving == {"leave.weight", "leave.bias"}


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_reach_every_parameter_after_three_steps(name: str) -> None:
    model = model_of(VARIANTS[name], perturbed=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(4):
        x, time, label = inputs(16, seed=step)
        optimizer.zero_grad()
        (model(x, time, label) - x.roll(1, 3)).square().mean().backward()
        if step == 3:
            break
        optimizer.step()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    assert not dead


@pytest.mark.parametrize(("patch", "width"), [(2, 256), (4, 96), (16, 256)])
def test_patch_init_keeps_the_variance_at_any_patch_size(patch: int, width: int) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, 32, 32, generator=rng)
    sizes = {}
    for kind in ("unit", "conv", "xavier"):
        config = ModelConfig(depth=1, width=width, heads=width // 16, patch=patch, patch_init=kind)
        model = build_model(config, (3, 32, 32), 2, seed=1)
        sizes[kind] = model.enter(patchify(x, patch)).square().mean().sqrt().item()
    assert sizes["unit"] == pytest.approx(1.0, rel=0.05)
    assert sizes["conv"] == pytest.approx(0.577, rel=0.05)
    assert sizes["xavier"] == pytest.approx((2 * 3 * patch**2 / (3 * patch**2 + width)) ** 0.5, rel=0.05)


def test_seed_decides_the_model() -> None:
    one, two, other = (build_model(SMALL, SHAPE, CLASSES, seed=s) for s in (1, 1, 2))
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(one.enter.weight, other.enter.weight)


# ---- time ------------------------------------------------------------------------------------------------------------------


def effective_rank(x: Tensor) -> float:
    """exp of the entropy of the shares of variance."""
    share = torch.linalg.eigvalsh((x - x.mean(0)).T @ (x - x.mean(0))).clamp_min(0)
    share = share[share > 0] / share.sum()
    return float((-(share * share.log()).sum()).exp())


def test_time_scale_spans_many_dimensions() -> None:
    time = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    assert effective_rank(time_features(time, 256, 1000.0)) > 50
    assert effective_rank(time_features(time, 256, 1.0)) < 1.2


@pytest.mark.parametrize("name", find("flow")[0].presets)
def test_presets_scale_their_time(name: str) -> None:
    config = find("flow")[0].presets[name]()
    time = torch.rand(2048, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert effective_rank(time_features(time, 256, config.model.t_scale)) > 8


def test_modulated_norm_is_a_norm_at_zero_and_an_affine_map_of_it() -> None:
    x, shift, scale = torch.randn(2, 3, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    zero = torch.zeros(2, 1, 8)
    torch.testing.assert_close(modulated_norm(x, zero, zero), rms_norm(x))
    torch.testing.assert_close(modulated_norm(x, shift, scale), rms_norm(x) * (1 + scale) + shift)
    assert modulated_norm(x.bfloat16(), shift, scale).dtype == torch.bfloat16


def test_gate_and_norm_adds_the_gated_branch_first() -> None:
    x, branch, vectors = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    gate, shift, scale = vectors.split(1, dim=1)
    total, y = gate_and_norm(x, branch, vectors)
    torch.testing.assert_close(total, x + gate * branch)
    assert torch.equal(y, modulated_norm(total, shift, scale))
    same, y = gate_and_norm(x, None, vectors[:, 1:])
    assert same is x and torch.equal(y, modulated_norm(x, shift, scale))


def test_time_embedding_stays_wide_in_float64() -> None:
    embedding = TimeEmbedding(16, 8, 1000.0).double()
    assert embedding(torch.rand(3, dtype=torch.float64)).dtype == torch.float64


# ---- wrong shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 30, "heads": 4}, "does not divide into model.heads=4"),
        ({"width": 24, "heads": 4}, "along 2 axes need heads whose width is a multiple of 4"),
        ({"context_start": 2}, "has blocks 0 to 1 only"),
    ],
)
def test_model_config_out_of_range_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(SMALL, **changes).check()


def test_presets_are_valid() -> None:
    for make in find("flow")[0].presets.values():
        config = make()
        config.model.check()
        assert config.data.size % config.model.patch == 0
