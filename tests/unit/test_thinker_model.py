"""The thinker's forward against a plain loop, its masks against smaller shapes, and what may depend on what."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import NOISED_TERMS, NoHost, assert_close_in_float, float_limit
from torch import Tensor

from seedbed import config as configs
from seedbed.launch import local
from seedbed.nn.layers import rms_norm
from seedbed.recipes import find
from seedbed.recipes.thinker.batch_settings import BatchSettings, draw_settings, draw_shape
from seedbed.recipes.thinker.model import Thinker, sinusoids
from seedbed.recipes.thinker.system import ThinkerSystem
from seedbed.track.run import Run

SMALL = ["model.width=8", "model.heads=2", "data.length=5", "data.vocab=6", "data.curriculum.kind=uniform", "batch=4"]
EXACT = 1e-12


def make(*settings: str) -> ThinkerSystem:
    """A small thinker in float64 with every parameter shaken, so that nothing is zero by birth."""
    recipe, preset = find("thinker/demo")
    config = configs.override(recipe.preset(preset), [*SMALL, *settings])
    system = recipe.build(config, recipe.open_data(config)).double()
    assert isinstance(system, ThinkerSystem)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in system.parameters():
            param += 0.3 * torch.randn(param.shape, generator=rng).double()
    return system


def batch_of(system: ThinkerSystem, num: int = 4, start: int = 0) -> dict[str, Tensor]:
    return system.source.make(torch.arange(start, start + num), 1)


def logits_of(system: ThinkerSystem, batch: dict[str, Tensor], num_latents: int, num_steps: int, **changes: Any) -> Tensor:
    setting = system.batch_settings(batch["index"], num_latents, num_steps)._replace(**changes)
    return system.model.logits(batch, setting, num_latents, num_steps, tuple(range(num_steps)))[-1]


# ---- against a plain loop -----------------------------------------------------------------------------------------------


def by_hand(
    model: Thinker, x: list[int], index: int, setting: BatchSettings, latents: int, rows: Any, num_out: int
) -> list[Tensor]:
    """One sample without padding, masks or batches: every step sees exactly the vectors that its row names."""
    config, (block,) = model.config, model.cell
    batch_index = torch.tensor([index])
    place, ask = (p[0] if p.ndim == 3 else p for p in model.places(len(x), num_out, batch_index, setting))
    tokens = model.embed.weight[torch.tensor(x)] + place
    z, memory, answers = model.start(batch_index, setting, latents)[0], [], []
    if config.latent_init == "positional":
        tape = model.places(max(model.sizes[:2]), 0, batch_index, setting)[0]
        z = z + torch.cat([tape[0] if tape.ndim == 3 else tape] * latents)[:latents]
    for read, lookup, write, static, output in rows:
        seen = [model.null] + [tokens] * read + memory * lookup + ([model.static] * static if model.static is not None else [])
        z = z + block.cross(block.cross_norm(z), block.context(torch.cat(seen)))
        normed = block.self_norm(z)
        z = z + block.others(normed, block.others.keys_values(normed))
        z = rms_norm(z + block.mlp(block.mlp_norm(z)))
        memory = [*memory, z][-config.n_memory :] if write else memory
        if output:
            (layer,) = model.decoder.layers
            h = model.ask + ask
            h = h + layer.cross(layer.cross_norm(h), layer.context(torch.cat([z, *memory * lookup])))
            h = h + layer.mlp(layer.mlp_norm(h))
            answers.append(model.decoder.logits(h, model.embed.weight))
    return answers


PLANS = [
    ("ro*", 3, []),
    ("rw,lw,lw,lo", 4, ["model.n_memory=2"]),
    ("rlwo*5", 5, ["model.n_memory=1"]),
    ("rw,so,lwo,o,lso", 5, ["model.n_memory=3", "model.static_memory=2"]),
    ("ro,wo,lo", 3, ["model.positions.kind=sin", "model.latent_init=shared"]),
    ("rwo,lo*", 3, ["model.positions.kind=random_sorted", "model.positions.max=32", "model.output.tied=true"]),
    ("ro*", 2, ["model.positions.kind=random_sorted", "model.positions.max=32", "model.latent_init=positional"]),
    ("ro*", 2, ["model.latent_init=positional"]),
]


@pytest.mark.usefixtures("exact_noise")
@pytest.mark.parametrize(("text", "steps", "more"), PLANS)
def test_model_with_padding_equals_a_plain_loop_per_sample(text: str, steps: int, more: list[str]):
    system = make(f"model.program={text}", f"model.n_step={steps}", "model.n_latent=3", *more)
    batch, rows = batch_of(system, 5), system.program.rows(steps)  # type: ignore[union-attr]
    setting = system.batch_settings(batch["index"], 3, steps)
    every = logits_of(system, batch, 3, steps)
    outputs = [t for t, row in enumerate(rows) if row[4]]
    lengths = batch["length"].tolist()
    assert len(set(lengths)) > 1
    # The sines of drawn places are float32, and of other shapes here and there; a logit is a sum of about 100 terms of them.
    limit = float_limit(100) if system.config.model.positions.kind == "random_sorted" else EXACT
    for b, length in enumerate(lengths):
        x = batch["x"][b, :length].tolist()
        for t, expected in zip(outputs, by_hand(system.model, x, b, setting, 3, rows, 5), strict=True):
            if system.config.model.positions.kind == "random_sorted" and length < 5:
                expected, found = expected[:length], every[t, b, :length]
            else:
                found = every[t, b]
            assert torch.allclose(found, expected, rtol=0, atol=limit), f"sample {b}, step {t}"


def test_latents_positional_repeat_beyond_the_positions():
    """Seven latents, five places: the sixth begins where the first does, and so do the same without noise."""
    system = make("model.latent_init=positional", "model.noise=0", "model.n_latent=7")
    batch = batch_of(system)
    state = system.model.unroll(batch, system.batch_settings(batch["index"], 7, 2), 7, 2, (0, 1)).state_SBKD
    assert torch.allclose(state[..., :2, :], state[..., 5:, :], rtol=0, atol=EXACT)
    assert (state[..., :5, None, :] - state[..., None, :5, :]).abs().amax(-1).add(torch.eye(5)).min() > 1e-6


# ---- masks are exact ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact_noise")
@pytest.mark.parametrize(
    "more", [[], ["model.program=everything", "model.n_memory=2"], ["model.target_stream=both"], ["model.perturb=0.5"]]
)
def test_latents_not_alive_change_nothing(more: list[str]):
    system = make("model.n_latent=2:6", "model.n_step=1:3", *more)
    batch = batch_of(system)
    for live in (2, 5):
        small = logits_of(system, batch, live, 3)
        large = logits_of(system, batch, 6, 3, latents=torch.tensor(live))
        assert torch.allclose(small, large, rtol=0, atol=EXACT)


def test_memory_beyond_the_kept_writes_changes_nothing():
    small, large = make("model.program=everything", "model.n_memory=1"), make("model.program=everything", "model.n_memory=3")
    large.model.load_state_dict(small.model.state_dict())
    batch = batch_of(small)
    kept = logits_of(large, batch, 8, 4, memory=torch.tensor(1))
    assert torch.allclose(logits_of(small, batch, 8, 4), kept, rtol=0, atol=EXACT)
    assert not torch.allclose(kept, logits_of(large, batch, 8, 4), atol=1e-3), "a larger memory must be able to matter"


def test_steps_are_a_prefix_of_more_steps():
    system = make("model.n_step=1:6")
    batch = batch_of(system)
    assert torch.allclose(logits_of(system, batch, 8, 2), logits_of(system, batch, 8, 6)[:2], rtol=0, atol=EXACT)


def test_latents_keep_their_noise_when_more_are_added():
    start, setting = make().model.start, make().batch_settings(torch.arange(3), 8, 4)
    few, many = (start(torch.arange(3), setting, num) for num in (8, 20))
    assert_close_in_float(few.float(), many[:, :8].float(), NOISED_TERMS)
    assert not torch.allclose(many[:, :8], many[:, 8:16], atol=0.1), "latents beyond the table need noise of their own"


def test_program_row_without_any_source_is_finite():
    system = make("model.program=ro,o,ro", "model.n_step=3")
    assert torch.isfinite(logits_of(system, batch_of(system), 8, 3)).all()


# ---- what depends on what -----------------------------------------------------------------------------------------------


ENDS = ["model.positions.kind=ends_shifted", "model.positions.max=64"]


@pytest.mark.parametrize(
    "more", [[], ["model.positions.kind=random_sorted", "model.positions.max=64"], ENDS, ["model.program=random"]]
)
def test_batch_rows_are_independent(more: list[str]):
    system = make("model.n_step=1:3", "model.n_memory=2", *more)
    batch = batch_of(system, 6)
    other = {k: torch.cat((v[:1], batch_of(system, 5, start=70)[k])) for k, v in batch.items()}
    one, two = (logits_of(system, b, 8, 3)[:, 0] for b in (batch, other))
    assert torch.allclose(one, two, rtol=0, atol=EXACT)
    assert not torch.allclose(logits_of(system, batch, 8, 3)[:, 0], logits_of(system, batch, 8, 3)[:, 1], atol=1e-3)


def test_target_stream_is_causal_and_invisible_to_latents():
    system = make("model.target_stream=only", "data.curriculum.kind=fixed", "model.n_step=1:3")
    batch = batch_of(system)
    setting = system.batch_settings(batch["index"], 8, 3)
    base = system.model.unroll(batch, setting, 8, 3, (0, 1, 2))
    for place in range(5):
        changed = {**batch, "y": batch["y"].clone()}
        changed["y"][:, place] = (changed["y"][:, place] + 1) % 6
        moved = system.model.unroll(changed, setting, 8, 3, (0, 1, 2))
        assert torch.equal(base.state_SBKD, moved.state_SBKD)
        assert base.stream_SBMD is not None and moved.stream_SBMD is not None
        distance_M = (base.stream_SBMD - moved.stream_SBMD).abs().amax((0, 1, 3))
        assert (distance_M[: place + 1] == 0).all(), f"place {place} reaches its own answer"
        assert (distance_M[place + 1 :] > 1e-6).all(), f"what follows place {place} does not see it"


def test_queries_do_not_see_the_targets():
    system = make("model.target_stream=both")
    batch = batch_of(system)
    changed = {**batch, "y": batch["y"].roll(1, 0)}
    assert torch.equal(logits_of(system, batch, 8, 4), logits_of(system, changed, 8, 4))


def test_backprop_cut_stops_gradients_and_changes_no_output():
    system = make("model.n_step=4", "model.loss.steps=last", "model.program=everything", "model.n_memory=2")
    batch = batch_of(system)
    found = {}
    for cut in (None, 0, 2):
        system.zero_grad()
        logits = logits_of(system, batch, 8, 4, cut=None if cut is None else torch.tensor(cut))
        logits[-1].square().sum().backward()
        grad = system.model.start.latent.grad
        assert grad is not None
        found[cut] = logits.detach(), grad.clone()
    assert all(torch.equal(found[None][0], found[cut][0]) for cut in (0, 2))
    assert torch.equal(found[None][1], found[0][1]) and found[0][1].abs().max() > 0
    assert found[2][1].abs().max() == 0


def test_perturbation_replaces_only_in_training():
    system = make("model.perturb=0.5", "model.n_step=1:2")
    batch = batch_of(system)
    stable = logits_of(system.eval(), batch, 8, 2)
    assert torch.equal(stable, logits_of(system, batch, 8, 2, perturb=None))
    assert not torch.allclose(stable, logits_of(system.train(), batch, 8, 2), atol=1e-3)
    setting = system.batch_settings(batch["index"], 8, 2)._replace(perturb=torch.tensor(1.0))
    z = torch.randn(4, 2000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 5
    drawn = system.model._perturb(z, batch["index"], setting, 0)
    assert not (drawn == z).any()
    assert torch.allclose(drawn.mean(1), z.mean(1), atol=0.4) and torch.allclose(drawn.std(1), z.std(1), atol=0.4)


# ---- positions ----------------------------------------------------------------------------------------------------------


def test_sinusoids_distinguish_positions():
    table = sinusoids(torch.arange(10), 16).double()
    # Tables of short sequences are nearly flat in their slow half; arguments swapped leave rank 2.
    assert torch.linalg.matrix_rank(table, rtol=1e-3) >= 6
    assert torch.cdist(table, table).add(torch.eye(10)).min() > 0.3


def test_positions_random_sorted_are_distinct_and_shared():
    system = make("model.positions.kind=random_sorted", "model.positions.max=40")
    places, setting = system.model.places, system.batch_settings(torch.arange(200), 8, 4)
    drawn = places.drawn(12, torch.arange(200), setting)
    assert (drawn.diff() > 0).all() and drawn.min() >= 0 and drawn.max() < 40
    # A batch of four shares its places.
    assert len({tuple(row) for row in drawn.tolist()}) == 50 and torch.equal(drawn[::4], drawn[3::4])
    # Without replacement from 40, every place is as likely as any other.
    counts = torch.bincount(drawn.flatten(), minlength=40).double()
    assert (counts - 60).abs().max() < 6 * (4 * 60 * 0.7) ** 0.5
    short, long = places(7, 12, torch.arange(5), setting)
    assert torch.equal(short, long[:, :7])


def test_positions_random_affine_keep_their_order():
    system = make("model.positions.kind=random_affine", "model.positions.max=100")
    drawn = system.model.places.drawn(9, torch.arange(300), system.batch_settings(torch.arange(300), 8, 4))
    steps = drawn.diff()
    assert torch.allclose(steps, steps[:, :1].expand_as(steps), rtol=1e-3)
    assert 0.5 <= steps.min() < 0.6 and 1.8 < steps.max() <= 2.0
    assert drawn[:, 0].min() < 5 and drawn[:, 0].max() > 95


@pytest.mark.parametrize("kind", ["ends", "ends_shifted"])
def test_positions_from_both_ends_mirror_and_reach_longer_samples(kind: str):
    system = make(f"model.positions.kind={kind}", "model.positions.max=100")
    places, index_B = system.model.places, torch.arange(400)
    setting, length_B1 = system.batch_settings(index_B, 8, 4), torch.arange(400)[:, None] % 20 + 1
    is_in, is_out = (torch.arange(num) < length_B1 for num in (20, 24))
    both_in, both_out = places.counted(is_in, is_out, index_B, setting)
    assert torch.equal(both_in, both_out[:, :20]), "of equal length, both tapes stand at the same places"
    farthest = []
    for b, length in enumerate(length_B1[:, 0].tolist()):
        ahead, back = both_in[b, :length].unbind(-1)
        assert torch.allclose(ahead, back.flip(0)) and (length == 1 or (ahead.diff() >= 1.0 - 1e-4).all())
        farthest.append(ahead.max().item())
    assert max(farthest) <= 100 + 1e-3 and max(farthest) > 80, "short samples show the places of long ones"
    starts = both_in[:, 0, 0] - both_in[:, 1, 0] + both_in[:, 0, 0]  # one stride before the first
    assert (starts.abs().max() < 1e-3) == (kind == "ends")
    # Neither padding nor what else is in the batch moves a place.
    again, _ = places.counted(is_in[7:9, :12], is_out[7:9, :12], index_B[7:9], system.batch_settings(index_B[7:9], 8, 4))
    assert torch.allclose(again[0, :8], both_in[7, :8]) and torch.allclose(again[1, :9], both_in[8, :9])


def test_positions_from_both_ends_match_reversed_copies():
    """The half that counts from the last is, at one tape, what the half that counts from the first is at the other."""
    system = make(*ENDS)
    used = torch.arange(9) < torch.tensor([[9], [5]])
    given, asked = system.model.places.from_ends(used, used, torch.arange(2), system.batch_settings(torch.arange(2), 8, 4))
    half = given.shape[-1] // 2
    for b, length in enumerate((9, 5)):
        assert torch.allclose(given[b, :length, :half], asked[b, :length, half:].flip(0), atol=1e-5)


# ---- draws --------------------------------------------------------------------------------------------------------------


def test_shapes_drawn_on_host_and_device_are_equal():
    system = make("model.n_latent=4:8:2", "model.n_step=2:4", "model.loss.steps=random")
    seen = [system.variant(step, 100) for step in range(200)]
    assert {k for k, _ in seen} == {4, 6, 8} and {t for _, t in seen} == {2, 3, 4}
    assert all(sum(k == one for k, _ in seen) > 40 for one in (4, 6, 8))
    settings = system.settings_tensors()
    again = torch.vmap(lambda step: torch.stack(draw_shape(settings, step)))(torch.arange(200))
    assert [tuple(pair) for pair in again.tolist()] == seen


def test_progressive_loss_draws_have_the_published_odds():
    system = make("model.n_step=4", "model.loss.steps=progressive")
    settings, num = system.settings_tensors(), 8000
    pairs = torch.vmap(lambda turn: _progressive(settings, turn))(torch.arange(num))
    for n in range(4):
        for k in range(1, 5 - n):
            share = ((pairs[:, 0] == n) & (pairs[:, 1] == n + k)).double().mean().item()
            assert share == pytest.approx(0.25 / (4 - n), abs=0.02), (n, k)


def _progressive(settings: dict[str, Tensor], turn: Tensor) -> Tensor:
    _, steps = draw_shape(settings, turn)
    cut = draw_settings(settings, turn, 4, None, steps).cut
    assert cut is not None
    return torch.stack((cut, steps))


def test_random_programs_are_valid():
    system = make("model.program=random", "model.n_step=5", "model.n_memory=2")
    settings = system.settings_tensors()
    programs = torch.vmap(lambda turn: draw_settings(settings, turn, 5, None, torch.tensor(5)).program_T5)(torch.arange(500))
    read, lookup, write, static, output = programs.unbind(-1)
    assert (read[:, 0] == 1).all() and (output[:, -1] == 1).all() and (static == 0).all()
    assert (lookup * ((write.cumsum(1) - write) == 0)).sum() == 0
    for column in (read[:, 1:], write, output[:, :-1]):
        assert column.mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["model.n_step=2:4"], [0, 1 / 3, 1 / 3, 1 / 3]),
        (["model.n_step=4"], [0, 0, 0, 1]),
        (["model.n_step=1:4", "model.loss.steps=last"], [0, 0, 0, 1]),
        (["model.n_step=1:4", "model.loss.base=2"], [1 / 15, 2 / 15, 4 / 15, 8 / 15]),
        (["model.n_step=1:4", "model.program=ro,r,r,ro"], [1 / 2, 0, 0, 1 / 2]),
        (["model.n_step=1:4", "model.loss.backprop_steps=2"], [0, 0, 1 / 2, 1 / 2]),
    ],
)
def test_loss_weights(settings: list[str], expected: list[float]):
    system = make(*settings)
    weights = system.batch_settings(torch.arange(4), 8, 4).weight_T
    assert weights.tolist() == pytest.approx(expected, abs=1e-6)
    assert system.output_steps(4) == tuple(t for t, weight in enumerate(expected) if weight)


# ---- compiled and captured ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["model.program=random", "model.n_memory=2", "model.perturb=0.1", "data.curriculum.kind=gated"],
        ["model.loss.steps=progressive", "model.positions.kind=random_sorted", "model.positions.max=32"],
        ["model.target_stream=both", "model.loss.backprop_steps=2", "data.curriculum.kind=mixed"],
    ],
)
def test_training_step_has_no_host_sync(more: list[str]):
    system = make("model.n_step=1:4" if "model.loss.steps=progressive" not in more else "model.n_step=4", *more)
    index = torch.arange(4)

    class Engine:
        variant = (8, 4)
        all_reduce_sum = staticmethod(lambda value: value)

    def step() -> None:
        batch = system.source.batch({"index": index})
        system.loss(batch, Engine)[0].backward()  # type: ignore[arg-type]

    step()  # what is made once may come from the host
    with NoHost():
        step()


@pytest.mark.slow
def test_forward_compiles_as_one_graph():
    system = make(
        "model.n_step=1:2", "model.target_stream=both", "model.program=everything", "model.n_memory=2", "model.perturb=0.2"
    )
    batch = batch_of(system)
    setting = system.batch_settings(batch["index"], 8, 2)._replace(latents=torch.tensor(5))
    plain = system.model(batch, setting, 8, 2, (0, 1))
    torch.compiler.reset()
    compiled = torch.compile(system.model, backend="eager", fullgraph=True, dynamic=False)
    for one, two in zip(plain, compiled(batch, setting, 8, 2, (0, 1)), strict=True):
        assert torch.allclose(one, two, rtol=0, atol=EXACT)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("mode", ["whole", "blocks"])
def test_compiled_training_equals_eager_training(mode: str, tmp_path: Path):
    losses = {}
    for name in ("off", mode):
        settings = [*SMALL, f"compile={name}", "steps=3", "every.log=1", "every.eval=0", "data.test=0", "model.n_step=1:2"]
        assert local.train("thinker/demo", settings, root=tmp_path, run_name=name, dirty=True) == 0
        run = Run.open(tmp_path, name)
        assert "goes on eager" not in (run.path / "console.log").read_text()
        losses[name] = [row["loss"] for row in run.rows()]
    assert losses[mode] == pytest.approx(losses["off"], rel=1e-4)
