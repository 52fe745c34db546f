"""The objective of the world recipe: controls and targets of a rollout, no leak, noise by counters, the ladder of stages."""

import pytest
import torch
from torch import Tensor
from world_samples import made

from seedbed.recipes.world.curriculum import BLIND, EASY, HARD, OPEN, Curriculum, Stage
from seedbed.recipes.world.data import CONTEXT, CounterNoise
from seedbed.recipes.world.memory import Layout, quantise, to_float
from seedbed.recipes.world.metrics import dissimilarity, psnr, sharpness, shift
from seedbed.recipes.world.objective import HIDDEN_NOISE, Rollouts, TrainingNoise, open_window, rows_of
from seedbed.recipes.world.presets import ModelConfig

LAYOUT = Layout(((1, 3),))


def batch_of(num: int = 4, length: int = 8, axes: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    frames = torch.randint(0, 256, (num, length, 8, 8, 3), generator=generator, dtype=torch.uint8)
    action = torch.arange(num * length, dtype=torch.float32).view(num, length, 1).expand(num, length, axes)
    return {"frames": frames, "action": action, "index": torch.arange(num) + 100}


# ---- rollouts ----------------------------------------------------------------------------------------------------------

BEFORE = LAYOUT.num_frames


def batches(num: int) -> list[dict[str, Tensor]]:
    """Different windows for every step of training."""
    made = []
    for k in range(num):
        one = batch_of()
        made.append({"frames": one["frames"].roll(k, 0) ^ k, "action": one["action"] + 100.0 * k, "index": one["index"] + 10 * k})
    return made


def test_rollout_steps_have_their_own_control_and_target() -> None:
    """The log's rollout used one control for all steps and scored against a target that was as many steps old."""
    rollouts, length = Rollouts(4, BEFORE + 5, 8, 8, 2), 4
    begun, own = [0] * 4, [[] for _ in range(4)]
    ages = set()
    given = batches(14)
    for step, batch in enumerate(given):
        rows = rollouts.next_rows(rows_of(batch), length)
        window = open_window(rows, LAYOUT)
        for row in range(4):
            if (step + row) % length == 0 or step == 0:
                begun[row], own[row] = step, []
            age, source = len(own[row]), given[begun[row]]
            ages.add((step, age))
            true = to_float(source["frames"][row])
            wanted = torch.cat([*true[:BEFORE], *own[row]])[-3 * BEFORE :]
            assert torch.equal(window.memory.tensors()["m1"][row], wanted), f"the memory of row {row} at {age}"
            assert torch.equal(window.target_B3HW[row], true[BEFORE + age])
            assert torch.equal(window.action_BA[row], source["action"][row, BEFORE - 1 + age]), "of the newest remembered frame"
            assert window.age_B[row] == age and window.index_B[row] == source["index"][row]
        frame = (window.memory.last + 0.25).requires_grad_()
        rollouts.keep(rows, BEFORE, frame)
        for row in range(4):
            own[row].append(quantise(frame[row].detach()))
    assert {age for step, age in ages if step == 13} == {0, 1, 2, 3}, "rollouts of all ages at once"


def test_rollout_gradient_does_not_flow_through_time() -> None:
    rollouts, (first, second) = Rollouts(4, BEFORE + 5, 8, 8, 2), batches(2)
    rows = rollouts.next_rows(rows_of(first), 4)
    rollouts.keep(rows, BEFORE, open_window(rows, LAYOUT).memory.last.requires_grad_() * 2)
    assert not open_window(rollouts.next_rows(rows_of(second), 4), LAYOUT).memory.last.requires_grad


def test_rollouts_are_read_without_change_and_end_when_shortened() -> None:
    rollouts, given = Rollouts(4, BEFORE + 5, 8, 8, 2), batches(6)
    for batch in given[:3]:
        rows = rollouts.next_rows(rows_of(batch), 5)
        rollouts.keep(rows, BEFORE, open_window(rows, LAYOUT).memory.last)
    before = {name: b.clone() for name, b in rollouts.named_buffers()}
    rollouts.next_rows(rows_of(given[3]), 5)
    assert all(torch.equal(b, before[name]) for name, b in rollouts.named_buffers())
    assert rollouts.next_rows(rows_of(given[4]), 2).age_B.max() < 2


def test_rollouts_are_half_of_a_closed_loop_step() -> None:
    system, engine, feed = made("model.rollout=4")
    batch = feed.part(0)
    alone, none = system.training_windows(batch, Stage("open", 1))
    joined, going = system.training_windows(batch, Stage("closed", 4))
    assert none is None and going is not None and len(going.index_B) == 4
    for name in ("action_BA", "target_B3HW", "counter_B"):
        assert torch.equal(getattr(alone, name), getattr(joined, name)), "rollouts begin as the open loop does"
    assert torch.equal(system.training_noise.own(alone), system.training_noise.own(joined))
    engine.variant = Stage("closed", 4)
    engine.begin(0, 0.5)
    engine.step(feed.part)
    later, _ = system.training_windows(batch, Stage("closed", 4))
    assert later.age_B.tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert torch.equal(later.index_B, alone.index_B) and not torch.equal(
        system.training_noise.own(alone)[4], system.training_noise.own(later)[4]
    )


def test_targets_are_not_among_the_inputs() -> None:
    batch, noises = batch_of(), TrainingNoise(CounterNoise(1), 0.3, 0.0)
    changed = {**batch, "frames": batch["frames"].clone()}
    changed["frames"][:, BEFORE:] = 0
    seen = []
    for one in (batch, changed):
        window = open_window(rows_of(one), LAYOUT)
        messages, real = noises.levels(window)
        seen.append((noises.context(window, real)["m1"], window.action_BA, messages, noises.own(window)))
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)


# ---- noise -------------------------------------------------------------------------------------------------------------


def test_noise_follows_from_the_counter_alone() -> None:
    leftover, index = CounterNoise(7), torch.tensor([5, 900, 31])
    whole = leftover(index, CONTEXT, 0, (3, 8, 8))
    alone = leftover(index[1:2], CONTEXT, 0, (3, 8, 8))
    assert torch.equal(whole[1:2], alone)
    for other in (
        leftover(index, CONTEXT, 1, (3, 8, 8)),
        leftover(index, CONTEXT + 1, 0, (3, 8, 8)),
        CounterNoise(8)(index, CONTEXT, 0, (3, 8, 8)),
    ):
        assert not torch.equal(whole, other)


def test_noise_is_normal_and_levels_are_even() -> None:
    leftover, index = CounterNoise(1), torch.arange(512)
    drawn = leftover(index, CONTEXT, 0, (3, 16, 16))
    assert abs(drawn.mean()) < 0.01 and abs(drawn.std() - 1) < 0.01
    assert torch.corrcoef(drawn[:8].flatten(1)).fill_diagonal_(0).abs().max() < 0.2, "samples share their noise"
    level = leftover.level(index, 0.4)
    assert level.min() >= 0 and level.max() < 0.4 and abs(level.mean() - 0.2) < 0.02


def test_noise_covers_images_larger_than_its_table() -> None:
    assert CounterNoise(1)(torch.arange(1), CONTEXT, 0, (12, 512, 256)).std().item() == pytest.approx(1, abs=0.01)


def test_noise_level_is_slightly_above_the_input() -> None:
    window, noises = open_window(rows_of(batch_of(num=64)), LAYOUT), TrainingNoise(CounterNoise(1), 0.5, 0.0)
    messages, real = noises.levels(window)
    found = (noises.context(window, real)["m1"] - window.memory.tensors()["m1"]).flatten(1).std(1)
    torch.testing.assert_close(found, messages + HIDDEN_NOISE, rtol=0.15, atol=0.01)


def test_rollouts_see_what_play_sees() -> None:
    window, noises = open_window(rows_of(batch_of(num=8)), LAYOUT, 3), TrainingNoise(CounterNoise(1), 0.5, 0.0)
    messages, real = noises.levels(window)
    seen, clean = noises.context(window, real)["m1"], window.memory.tensors()["m1"]
    assert (messages[:5] > 0).all() and not messages[5:].any()
    assert torch.equal(seen[5:], clean[5:]) and not torch.isclose(seen[:5], clean[:5]).all((1, 2, 3)).any()


# ---- stages ------------------------------------------------------------------------------------------------------------


def ladder(**changes: float) -> Curriculum:
    return Curriculum(ModelConfig(**{"closed": 0.5, "rollout": 40, **changes}))


GOOD = {"gap": EASY - 0.1, "listens": 1.0, "error": 0.1, "near": 20.0}


def test_closed_loop_waits_for_its_share_and_for_a_measurement() -> None:
    up = ladder()
    assert up.stage(60, 100) == OPEN
    up.measured(**GOOD)
    assert up.stage(40, 100) == OPEN
    assert up.stage(50, 100) == Stage("closed", 4)
    assert up.stage(51, 100) == Stage("closed", 4), "one move per measurement"


@pytest.mark.parametrize(
    ("seen", "length"),
    [({}, 16), ({"gap": EASY + 0.1}, 4), ({"gap": HARD + 0.1}, 1), ({"listens": BLIND - 0.1}, 4)],
    ids=["sound", "hard enough", "too hard", "blind"],
)
def test_curriculum_rollout_length_moves_by_one_step(seen: dict, length: int) -> None:
    up = ladder()
    up.length = 4
    up.measured(**{**GOOD, **seen})
    assert up.stage(60, 100).length == length
    for _ in range(5):
        up.measured(**GOOD)
        up.stage(61, 100)
    assert up.length == 40, "never beyond model.rollout"


def test_evaluation_twice_changes_nothing() -> None:
    one, two = ladder(), ladder()
    one.measured(**GOOD)
    two.measured(**GOOD)
    two.measured(**GOOD)
    assert one.stage(60, 100) == two.stage(60, 100) and one.state() == two.state()


def test_ladder_comes_back_from_json() -> None:
    up, again = ladder(adversarial=0.6), ladder(adversarial=0.6)
    for step in (60, 61, 62):
        up.measured(**GOOD)
        up.stage(step, 100)
    again.load_state(up.state())
    assert again.state() == up.state() and again.stage(63, 100) == up.stage(63, 100)


def test_critic_starts_when_errors_are_flat_and_warms_up() -> None:
    up = ladder(adversarial=0.6, critic_warmup=10)
    up.measured(**{**GOOD, "error": 0.2})
    assert up.stage(60, 100).name == "closed"
    up.measured(**GOOD)
    assert up.stage(61, 100).name == "closed", "the error is still falling"
    up.measured(**GOOD)
    assert up.stage(62, 100).name == "critic"
    assert up.stage(71, 100).name == "critic" and up.stage(72, 100).name == "adversarial"


@pytest.mark.parametrize(("seen", "balance"), [({}, 1.0), ({"near": 19.1}, 1.0), ({"near": 18.9}, 0.5), ({"listens": 0.4}, 0.5)])
def test_critic_weight_is_halved_when_it_harms(seen: dict, balance: float) -> None:
    up = ladder(adversarial=0.5, critic_warmup=0)
    for _ in range(2):
        up.measured(**GOOD)
        up.stage(60, 100)
    up.measured(**{**GOOD, **seen})
    assert up.stage(61, 100) == Stage("adversarial", up.length, balance)


def test_critic_never_starts_when_controls_are_ignored() -> None:
    up = ladder(adversarial=0.5)
    for _ in range(4):
        up.measured(**{**GOOD, "listens": 0.0})
        assert up.stage(60, 100) == OPEN


# ---- metrics -----------------------------------------------------------------------------------------------------------


def test_psnr_of_a_known_error() -> None:
    true = to_float(torch.full((1, 8, 8, 3), 100, dtype=torch.uint8))
    other = to_float(torch.full((1, 8, 8, 3), 110, dtype=torch.uint8))
    assert psnr(other, true).item() == pytest.approx(20 * torch.log10(torch.tensor(25.5)).item(), abs=1e-3)
    assert psnr(true, true).item() == pytest.approx(100)


@pytest.mark.parametrize(("dx", "dy"), [(3, 0), (-2, 0), (0, 4), (0, -1), (2, -3)])
def test_shift_finds_how_far_a_picture_moved(dx: int, dy: int) -> None:
    picture = torch.nn.functional.avg_pool2d(torch.randn(4, 3, 80, 80, generator=torch.Generator().manual_seed(1)), 5, 1)
    before, after = picture[..., 20:52, 20:52], picture[..., 20 - dy : 52 - dy, 20 - dx : 52 - dx]
    torch.testing.assert_close(shift(before, after), torch.tensor([[dx, dy]] * 4).float(), rtol=0, atol=0.3)


def test_sharpness_and_ssim_fall_with_blur() -> None:
    picture = torch.rand(2, 3, 32, 32) * 2 - 1
    blurred = torch.nn.functional.avg_pool2d(picture, 3, 1, 1)
    assert (sharpness(blurred) < 0.6 * sharpness(picture)).all()
    assert dissimilarity(picture, picture).abs().max() < 1e-5
    assert (dissimilarity(blurred, picture) > dissimilarity(picture * 0.9, picture)).all()
