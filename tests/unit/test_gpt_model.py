"""The gpt model: causality, initialisation, parameter kinds, switches that must matter, precision, compile and FLOPs."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

from seedbed.config import Config, override
from seedbed.errors import UserError
from seedbed.nn.init import kind_of, materialize
from seedbed.nn.layers import ENCODINGS, attention_scope
from seedbed.recipes import find
from seedbed.recipes.gpt.model import Transformer, build_model
from seedbed.recipes.gpt.presets import ModelConfig

VOCAB, BLOCK = 70, 12
SMALL = ModelConfig(depth=4, heads=2, width=32, out_init=1.0)
CLASSIC = dataclasses.replace(SMALL, norm="layer", positions="learned", mlp="gelu", qk_norm=False)
EVERYTHING = dataclasses.replace(SMALL, skips=True, gate=True, values_x0=True, tied=False, kv_heads=1, softcap=5.0)
VARIANTS = {"small": SMALL, "classic": CLASSIC, "everything": EVERYTHING}


# Dynamo itself looks at `.grad` of a block's input while tracing.
tracing = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# And its code generator uses parts of torch that torch has deprecated.
inductor = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def make(config: ModelConfig = SMALL, seed: int = 0) -> Transformer:
    return build_model(config, VOCAB, BLOCK, seed).eval()


def tokens(rows: int = 2, length: int = BLOCK) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(3))


def assert_causal(read_logits) -> None:
    """Changing token t must leave every logit before t alone and move every one from t on."""
    x_BT = tokens()
    before = read_logits(x_BT)
    for t in range(x_BT.shape[1]):
        changed = x_BT.clone()
        changed[:, t] = (changed[:, t] + 1) % VOCAB
        moved_T = (read_logits(changed) - before).abs().amax((0, 2))
        assert (moved_T[:t] < 1e-6).all(), f"token {t} reaches back: {moved_T}"
        assert (moved_T[t:] > 1e-5).all(), f"token {t} does not reach forward: {moved_T}"


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_causality_by_perturbation(name):
    assert_causal(make(VARIANTS[name]).logits)


@torch.no_grad()
def test_causality_check_can_fail():
    """The positive control: a model that looks one token ahead must be caught."""
    model = make()
    with pytest.raises(AssertionError, match="reaches back"):
        assert_causal(lambda x: model.logits(x) + model.logits(x.roll(-1, 1)))


@torch.no_grad()
def test_causality_survives_tracing_as_one_graph():
    model = make(dataclasses.replace(EVERYTHING, depth=2))
    compiled = torch.compile(model.logits, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_causal(compiled)


@tracing
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=inductor)])
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_training_step_equals_eager(name, backend):
    model, x = make(dataclasses.replace(VARIANTS[name], depth=2)).train(), tokens()
    eager = model(x[:, :-1], x[:, 1:])
    expected = torch.autograd.grad(eager, list(model.parameters()))
    for unit in [*model.blocks, model.head]:
        unit.compile(backend=backend, fullgraph=True, dynamic=False)
    compiled = model(x[:, :-1], x[:, 1:])
    torch.testing.assert_close(compiled, eager)
    for got, want in zip(torch.autograd.grad(compiled, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@tracing
def test_tracing_many_blocks_compiles_few_graphs():
    """Blocks of one kind must share their compiled code, or a deep model would pass the recompile limit."""
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    counts.clear()
    model = make(dataclasses.replace(SMALL, depth=10, skips=True, drop_path=0.1)).train()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    x = tokens()
    model(x[:, :-1], x[:, 1:]).backward()
    assert counts["unique_graphs"] <= 2
    model(x[:, :-1], x[:, 1:]).backward()
    assert counts["unique_graphs"] <= 2


@torch.no_grad()
def test_rows_of_a_batch_are_independent():
    model, x = make(EVERYTHING), tokens(4)
    together = model.logits(x)
    for row in range(4):
        torch.testing.assert_close(together[row], model.logits(x[row : row + 1])[0], rtol=1e-4, atol=1e-5)


# ---- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_initialisation_leaves_nothing_out(name):
    with torch.device("meta"):
        model = Transformer(VARIANTS[name], VOCAB, BLOCK)
    materialize(model)
    assert all(p.isnan().all() for p in model.parameters())
    assert not list(model.buffers())
    model.init_weights(torch.Generator().manual_seed(0))
    assert all(p.isfinite().all() for p in model.parameters())


def test_initialisation_follows_the_seed_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a, b, other = make(seed=1), make(seed=1), make(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed.weight, other.embed.weight)


@pytest.mark.parametrize("vocab", [65, 103, 5000])
@pytest.mark.parametrize("width", [64, 384])
@pytest.mark.parametrize("change", [{}, {"tied": False}, {"out_init": 0.5, "skips": True, "values_x0": True}, "classic"])
@torch.no_grad()
def test_first_loss_is_that_of_a_uniform_guess(vocab, width, change):
    base = ModelConfig(depth=4, heads=2, width=width)
    if change == "classic":
        change = {"norm": "layer", "positions": "learned", "mlp": "gelu", "qk_norm": False, "out_init": 8**-0.5}
    model = build_model(dataclasses.replace(base, **change), vocab, 32, 0)
    x = torch.randint(vocab, (8, 33))
    assert abs(model(x[:, :-1], x[:, 1:]).item() - math.log(vocab)) < 0.1


def test_parameters_have_their_kinds():
    model = make(dataclasses.replace(EVERYTHING, norm="layer", positions="learned"))
    owners = {id(p): m for m in model.modules() for p in m.parameters(recurse=False)}
    kinds = {n: kind_of(n, owners[id(p)], p) for n, p in model.named_parameters()}
    assert kinds["embed.weight"] == kinds["positions.weight"] == "embed"
    assert kinds["unembed.weight"] == "head"
    for name, kind in kinds.items():
        if name.startswith("blocks."):
            is_matrix = name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight", "values_x0.weight"))
            assert kind == ("matrix" if is_matrix else "scalar"), name


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_all_change_within_three_steps(name):
    model = make(dataclasses.replace(VARIANTS[name], out_init=0.0)).train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), tokens()
    for _ in range(3):
        model(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []


# ---- switches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"norm": "layer"},
        {"positions": "learned"},
        {"positions": "none"},
        {"rope_base": 100.0},
        {"qk_norm": False},
        {"softcap": 0.1},
        {"skips": True},
        {"kv_heads": 1},
        {"mlp": "relu2"},
        {"mlp": "gelu"},
        {"tied": False},
        {"values_x0": True},
        {"out_init": 0.5},
    ],
    ids=str,
)
@torch.no_grad()
def test_config_switches_change_the_model(change):
    plain, changed = make(), make(dataclasses.replace(SMALL, **change))
    assert (plain.logits(tokens()) - changed.logits(tokens())).abs().max() > 1e-5


def test_positional_encoding_of_the_registry_can_be_chosen_at_once(monkeypatch: pytest.MonkeyPatch):
    preset = find("gpt/demo")[0].preset("demo")
    with pytest.raises(UserError, match=r"rope.*learned.*none"):
        override(preset, ["model.positions=sines"])
    monkeypatch.setitem(ENCODINGS, "sines", ENCODINGS["none"])
    assert override(preset, ["model.positions=sines"]).model.positions == "sines"


@pytest.mark.parametrize("kind", ENCODINGS)
@torch.no_grad()
def test_positional_encoding_has_the_effect_that_it_declares(kind: str):
    model = make(dataclasses.replace(SMALL, positions=kind, out_init=1.0))
    place_T = torch.arange(5)

    def moved(positions_T: torch.Tensor) -> float:
        tables = model.position_tables(tokens()[:, :5], positions_T)
        return (model.hidden(tokens()[:, :5], tables) - model.hidden(tokens()[:, :5])).abs().max().item()

    assert moved(place_T) == 0.0
    assert (moved(place_T.flip(0)) > 1e-3) == (model.positions.effect is not None)
    assert (moved(place_T + 2) > 1e-3) == (model.positions.effect == "absolute")


@torch.no_grad()
def test_gate_starts_open_and_then_matters():
    gated, plain = make(dataclasses.replace(SMALL, gate=True)), make()
    torch.testing.assert_close(gated.logits(tokens()), plain.logits(tokens()))
    for block in gated.blocks:
        block.attention.gate.weight.normal_()
    assert (gated.logits(tokens()) - plain.logits(tokens())).abs().max() > 1e-5


@torch.no_grad()
def test_skips_connect_the_first_block_with_the_last():
    model = make(dataclasses.replace(SMALL, skips=True))
    assert [b.skip_weight is not None for b in model.blocks] == [False, False, True, True]
    seen = {}
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _, args, out, i=i: seen.update({i: (args, out)}))
    model.hidden(tokens())
    assert seen[2][0][3] is seen[1][0][0] and seen[3][0][3] is seen[0][0][0]


@pytest.mark.parametrize("change", [{"dropout": 0.3}, {"drop_path": 0.5}])
def test_noise_acts_in_training_only(change):
    model, x = make(dataclasses.replace(SMALL, **change)), tokens()
    assert torch.equal(model.logits(x), model.logits(x))
    torch.testing.assert_close(model.logits(x), make().logits(x))
    model.train()
    assert not torch.equal(model.logits(x), model.logits(x))


def test_stochastic_depth_drops_whole_rows_and_keeps_the_mean():
    block = make(dataclasses.replace(SMALL, drop_path=0.25)).train().blocks[0]
    torch.manual_seed(0)
    thinned = block._drop(torch.ones(4000, 2, 3))
    assert ((thinned == 0).all((1, 2)) | (thinned == 1 / 0.75).all((1, 2))).all()
    assert abs(thinned.mean().item() - 1.0) < 0.05


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.heads=5", "does not divide"),
        ("model.kv_heads=4", "cannot share"),
        ("model.dropout=1.5", "out of range"),
        ("model.depth=0", "out of range"),
        ("model.mlp=relu", "did you mean relu2"),
        ("model.width=18", "odd"),
    ],
)
def test_model_config_out_of_range_is_refused(assignment, message):
    config = Config(model=ModelConfig(), data=None)
    with pytest.raises(UserError, match=message):
        override(config, [assignment])


# ---- vocabulary, precision -----------------------------------------------------------------------------------------------


def test_padding_of_the_vocabulary_gets_no_probability_and_no_gradient():
    model = make(dataclasses.replace(SMALL, tied=False))
    assert model.embed.weight.shape == (128, 32) and model.logits(tokens()).shape[-1] == VOCAB
    with torch.no_grad():
        model.unembed.weight[VOCAB:] = 100.0
    x = tokens()
    loss = model(x[:, :-1], x[:, 1:])
    expected = nn.functional.cross_entropy(model.logits(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert not model.unembed.weight.grad[VOCAB:].any() and model.unembed.weight.grad[:VOCAB].any()


def test_autocast_keeps_stream_and_logits_in_half_precision_and_the_loss_in_float32():
    model, x = make(EVERYTHING), tokens()
    exact = model(x[:, :-1], x[:, 1:])
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.logits(x).dtype == torch.bfloat16
        loss = model(x[:, :-1], x[:, 1:])
    assert set(seen) == {torch.bfloat16} and loss.dtype == torch.float32
    assert abs(loss - exact) < 0.05
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@torch.no_grad()
def test_model_cast_to_a_dtype_runs_in_it():
    for dtype in (torch.bfloat16, torch.float64):
        model = make(EVERYTHING).to(dtype)
        assert model.logits(tokens()).dtype == dtype
        assert model.new_cache(1).kv_LPBHTD.dtype == dtype


# ---- FLOPs ---------------------------------------------------------------------------------------------------------------


def counted_flops_per_token(model: Transformer) -> float:
    """torch's own count of a training step on the meta device. The plain attention kernel is counted as it multiplies:
    all T x T scores, not halved for causality, twice forward and four times backward, without flash's recomputation."""
    x = torch.zeros(2, model.block, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, attention_scope([SDPBackend.MATH]):
        model(x, x).backward()
    return counter.get_total_flops() / x.numel()


@pytest.mark.parametrize("name", VARIANTS)
def test_flops_by_formula_equal_torchs_count_for_every_variant(name):
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(VARIANTS[name], width=256, heads=4), 1000, 128)
    assert abs(counted_flops_per_token(model) / model.flops_per_token() - 1) < 0.01


def test_flops_of_gpt2_124m_are_854_8_megaflop_per_token():
    shape = ModelConfig(depth=12, heads=12, width=768, norm="layer", positions="learned", mlp="gelu", qk_norm=False)
    with torch.device("meta"):
        model = Transformer(shape, 50_304, 1024)
        untied = Transformer(dataclasses.replace(shape, tied=False), 50_304, 1024)
    assert round(model.flops_per_token() / 1e6, 1) == 854.8
    assert untied.flops_per_token() == model.flops_per_token()
    assert abs(counted_flops_per_token(model) / model.flops_per_token() - 1) < 0.01
    assert model.num_parameters() - model.positions.weight.numel() == 123_587_328
