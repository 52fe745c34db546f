"""The generator of the world recipe and its memory: births, transport, sizes, operations counted, and rounding."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.recipes.world.memory import LEVELS, Layout, Memory, quantise, reduce, to_bytes, to_float
from seedbed.recipes.world.model import (
    STILL,
    TAPS,
    WorldNet,
    build_model,
    layout_of,
    num_scales,
    strides_of,
    transport,
    widths_of,
)
from seedbed.recipes.world.presets import ModelConfig, num_parameters

PRESETS = find("world")[0].presets
PYRAMID = Layout(((1, 2), (4, 4), (16, 8)))


def inputs(net: WorldNet, batch: int = 2, device: str = "cpu") -> tuple:
    shapes = net.layout.shapes(net.height, net.width)
    memory = {name: torch.rand(batch, *shape, device=device) * 2 - 1 for name, shape in shapes.items()}
    numbers = torch.randn(batch, net.num_axes, device=device), torch.zeros(batch, device=device)
    return memory, *numbers, torch.randn(batch, 1, net.height, net.width, device=device)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_frame_bytes_round_trip() -> None:
    bytes_HWC = torch.arange(256, dtype=torch.uint8).view(16, 16, 1).expand(16, 16, 3)
    x = to_float(bytes_HWC)
    assert torch.equal(to_bytes(x), bytes_HWC)
    assert torch.equal(quantise(x), x), "quantising a stored picture changes it"
    assert x.min() == -1.0 and x.max() == 1.0


def test_quantisation_rounds_without_darkening() -> None:
    """A perfect network with a little noise, a hundred frames on its own: the log's pictures went black."""
    generator = torch.Generator().manual_seed(1)
    rounded = cut = to_float(torch.randint(0, 256, (64, 64, 3), generator=generator, dtype=torch.uint8))
    first = rounded.mean()
    for _ in range(100):
        noise = 0.005 * torch.randn(rounded.shape, generator=generator)
        rounded = quantise(rounded + noise)
        cut = ((cut + noise).clamp(-1, 1).add(1).mul(LEVELS)).floor() / LEVELS - 1
    assert abs(rounded.mean() - first) < 0.02
    assert cut.mean() - first < -0.1


@pytest.mark.parametrize("layout", [Layout(((1, 3),)), PYRAMID], ids=["plain", "pyramid"])
def test_memory_push_equals_a_later_start(layout: Layout) -> None:
    frames = to_float(torch.randint(0, 256, (2, layout.num_frames + 3, 32, 48, 3), dtype=torch.uint8))
    memory = Memory.start(frames[:, :-3], layout)
    for k in range(3, 0, -1):
        memory = memory.push(frames[:, -k])
    whole = Memory.start(frames, layout)
    for name, kept in whole.tensors().items():
        assert torch.equal(memory.tensors()[name], kept), name
    assert torch.equal(memory.last, frames[:, -1])
    assert {n: tuple(t.shape[1:]) for n, t in memory.tensors().items()} == layout.shapes(32, 48)


def test_memory_push_clamps_and_rounds_once() -> None:
    memory = Memory.start(torch.zeros(1, 2, 3, 8, 8), Layout(((1, 2),)))
    pushed = memory.push(torch.linspace(-3, 3, 192).view(1, 3, 8, 8)).last
    assert pushed.abs().max() <= 1
    torch.testing.assert_close((pushed + 1) * LEVELS, ((pushed + 1) * LEVELS).round(), rtol=0, atol=1e-4)


def test_reduced_frames_are_means_rounded_to_bytes() -> None:
    frame = to_float(torch.randint(0, 256, (1, 8, 8, 3), dtype=torch.uint8))
    small = reduce(frame, 4)
    assert torch.equal(quantise(small), small)
    torch.testing.assert_close(small[0, 0, 0, 0], frame[0, 0, :4, :4].mean(), rtol=0, atol=0.51 / LEVELS)


# ---- the network -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["demo", "box64", "log5m"])
def test_initial_prediction_is_the_last_frame(preset: str) -> None:
    config = PRESETS[preset]()
    net = build_model(config.model, min(64, config.data.height), min(64, config.data.width), 7, 1)
    given = inputs(net)
    assert torch.equal(net(*given), given[0]["m1"][:, -3:])


@torch.no_grad()
def test_static_place_stays_where_no_control_moves_it() -> None:
    """Whatever was learned; and a control that is as large as usual is not held back."""
    nets = [build_model(ModelConfig(static=static), 32, 32, 7, 1) for static in (True, False)]
    (memory, action, level, noise), generator = inputs(nets[0]), torch.Generator().manual_seed(5)
    for net in nets:
        generator.manual_seed(5)
        for parameter in net.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    last = memory["m1"][:, -3:]
    none, slight, usual = torch.zeros_like(action), torch.zeros_like(action), torch.zeros_like(action)
    slight[:, 2], usual[:, 2] = -0.5 * STILL, -STILL
    assert torch.equal(nets[0](memory, none, level, noise), last)
    assert not torch.equal(nets[1](memory, none, level, noise), last)
    torch.testing.assert_close(nets[0](memory, usual, level, noise), nets[1](memory, usual, level, noise))
    half = nets[1](memory, slight, level, noise) - last
    torch.testing.assert_close(nets[0](memory, slight, level, noise), last + 0.5 * half)


@pytest.mark.parametrize("move", [-3, -1, 2])
@pytest.mark.parametrize(("stride", "dim"), [(1, 3), (1, 2), (4, 3)])
def test_transport_moves_pixels_exactly(move: int, stride: int, dim: int) -> None:
    x = torch.rand(1, 3, 32, 32)
    rows = torch.zeros(1, TAPS, 32, 32)
    assert torch.equal(transport(x, rows, stride, dim), x)
    rows[:, TAPS // 2] -= 1.5
    rows[:, TAPS // 2 + move] += 1
    wanted = x.roll(-move * stride, dim)
    inner = (..., slice(13, 19), slice(13, 19))
    torch.testing.assert_close(transport(x, rows, stride, dim)[inner], wanted[inner])


def test_transport_range_covers_recorded_rotations() -> None:
    for height, width in ((32, 32), (64, 64), (192, 256)):
        reach = sum(stride * (TAPS // 2) for stride in strides_of(height, width))
        assert reach >= max(height, width) / 20, "0.08 radian a frame of a view of 75 degrees is a sixteenth; 95 % are below"


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "edm"])
def test_flops_by_formula_equal_the_count(preset: str) -> None:
    config = PRESETS[preset]()
    with torch.device("meta"):
        net = WorldNet(config.model, config.data.height, config.data.width, 7)
    given = inputs(net, 1, "meta")
    with FlopCounterMode(display=False) as counter:
        out = net(*given)
        forward = counter.get_total_flops()
        out.abs().mean().backward()
    assert net.flops() == pytest.approx(forward, rel=0.01)
    assert net.flops_per_frame() == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize(("size", "height", "width"), [("nano", 32, 32), ("1m", 64, 64), ("5m", 64, 64), ("5m", 192, 256)])
def test_dial_gives_about_what_it_says(size: str, height: int, width: int) -> None:
    with torch.device("meta"):
        net = WorldNet(ModelConfig(size=size, pyramid=height > 64), height, width, 7)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(num_parameters(size), rel=0.15)


def test_journals_generator_at_its_own_size() -> None:
    """5.27 M parameters and 1.08 GFLOP there."""
    config = PRESETS["log5m"]()
    with torch.device("meta"):
        net = WorldNet(config.model, 192, 256, 7)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(5.27e6, rel=0.05)
    assert net.flops() == pytest.approx(1.08e9, rel=0.05)
    assert net.layout.num_frames == 32 and len(net.layout.scales) == 4


def test_network_size_grows_with_settings_and_image() -> None:
    assert all(a <= b for a, b in zip(widths_of("1m", 64, 64), widths_of("5m", 64, 64), strict=True))
    assert num_scales(32, 32) == 3 and num_scales(64, 64) == 4 and num_scales(192, 256) == 6
    assert [r for r, _ in layout_of(ModelConfig(pyramid=True), 64, 64).scales] == [1, 4, 16]


def test_condition_reaches_every_scale() -> None:
    net = build_model(ModelConfig(), 32, 32, 5, 1)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(0.05 * torch.randn_like(param))
    memory, action, level, noise = inputs(net)
    seen = {}
    hooks = [
        module.register_forward_hook(lambda m, a, out, name=name: seen.setdefault(name, []).append(out.detach()))
        for name, module in net.trunk.named_modules()
        if name.endswith("film")
    ]
    for change in (action, action + 1.0):
        net(memory, change, level, noise)
    for change in (level, level + 0.5):
        net(memory, action, change, noise)
    for hook in hooks:
        hook.remove()
    assert len(seen) >= 2 * len(net.trunk.widths)
    for name, (one, two, three, four) in seen.items():
        assert (one - two).abs().max() > 1e-4 and (three - four).abs().max() > 1e-4, name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"size": "huge"}, "nano"),
        ({"size": "0.001m"}, "millions"),
        ({"memory_dropout": 0.1}, "pyramid"),
        ({"kind": "edm", "adversarial": 0.9}, "no adversarial stage"),
        ({"closed": 0.9, "adversarial": 0.5}, "last stage"),
    ],
)
def test_wrong_shapes_are_refused(changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ModelConfig(**changes).check()


def test_image_sizes_that_cannot_be_halved_are_refused() -> None:
    with pytest.raises(UserError, match="halved"):
        num_scales(30, 31)


class Names(TorchDispatchMode):
    """Which operations were called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_network_uses_only_exportable_operations() -> None:
    """No norm, no attention, nothing that a browser's runtime lacks."""
    net = build_model(ModelConfig(pyramid=True, static=True), 64, 64, 5, 1)
    given = inputs(net)
    with Names() as names:
        net(*given)
    allowed = {
        "convolution",
        "addmm",
        "t",
        "leaky_relu",
        "cat",
        "pixel_shuffle",
        "add",
        "mul",
        "div",
        "clamp_min",
        "upsample_nearest2d",
        # How large a control is, for places that are static: Abs, ReduceMax, Clip, Sub.
        "abs",
        "amax",
        "clamp",
        "sub",
    }
    views = {"zeros_like", "slice", "unsqueeze", "split", "view", "_unsafe_view", "expand", "permute", "clone", "detach"}
    assert names.seen - allowed - views == set()


def test_renamed_config_keys_load_and_are_named_when_typed() -> None:
    from seedbed import config as configs
    from seedbed.config.saved import from_json
    from seedbed.recipes import find

    new = find("world")[0].preset("demo")
    old = configs.to_json(new)
    for now, then in (("pose_tracking", "odometer"), ("plane_resolution", "map_cells"), ("memory_dropout", "blank")):
        old["model"][then] = old["model"].pop(now)
    assert from_json(new, old) == new
    with pytest.raises(UserError, match=r"model\.pose_tracking"):
        configs.override(new, ["model.odometer=false"])
