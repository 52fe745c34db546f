"""A thinker as a run sees it: leaks are found and withhold the numbers, examinations are whole, answers can be asked for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seedbed import config as configs
from seedbed import inference
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.recipes.thinker import evaluate, full_evaluation, show
from seedbed.recipes.thinker.evaluate import Inference, as_trained, leak_check, score
from seedbed.recipes.thinker.model import Thinker
from seedbed.recipes.thinker.system import ThinkerSystem
from seedbed.track.run import Run
from seedbed.train.engine import Engine
from seedbed.train.system import Request

CPU = torch.device("cpu")
SMALL = ["model.width=8", "model.heads=2", "data.length=4", "data.vocab=6", "batch=4", "device=cpu"]


def make(*settings: str, preset: str = "demo") -> ThinkerSystem:
    recipe, _ = find("thinker")
    config = configs.override(recipe.preset(preset), [*SMALL, *settings])
    system = recipe.build(config, recipe.open_data(config))
    assert isinstance(system, ThinkerSystem)
    return system.eval()


def engine_of(system: ThinkerSystem) -> Engine:
    return Engine(system, system.config, CPU)


def valid(system: ThinkerSystem) -> Any:
    return system.data.valid


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(evaluate.NUM_QUICK, "cpu", 256)


# ---- leaks --------------------------------------------------------------------------------------------------------------


def unshifted(self: Thinker, y_BM: Tensor) -> Tensor:
    return self._tokens(y_BM)


def knows(system: ThinkerSystem, monkeypatch: pytest.MonkeyPatch, right: float) -> None:
    """Let the answers be the targets of the sample itself, whatever its input, in a share of all samples."""

    def cheat(cheating: ThinkerSystem, batch: dict[str, Tensor], inference: Inference) -> Tensor:
        logits = predict(cheating, batch, inference)
        messages = torch.nn.functional.one_hot(batch["y"], logits.shape[-1]) * 100.0
        mask = torch.arange(len(messages)) < right * len(messages)
        return logits + messages * mask[:, None, None]

    predict = evaluate.predict
    monkeypatch.setattr(evaluate, "predict", cheat)


@pytest.mark.parametrize("stream", ["only", "both"])
def test_leak_check_finds_unshifted_targets(stream: str, monkeypatch: pytest.MonkeyPatch):
    system = make(f"model.target_stream={stream}")
    full = valid(system).at(4)
    assert not leak_check(system, full, 256).found
    monkeypatch.setattr(Thinker, "_targets", unshifted)
    assert leak_check(system, full, 256).found
    assert system.evaluate(valid(system), engine_of(system)) == {"error": 1.0, "leak": 1.0}


def test_leak_check_finds_latents_that_see_the_stream(monkeypatch: pytest.MonkeyPatch):
    system = make("model.target_stream=both", "model.n_step=1:2")
    start, unroll = system.model.start, system.model.unroll

    class Peeking(torch.nn.Module):
        y: Tensor

        def forward(self, index_B: Tensor, setting: Any, num_latents: int) -> Tensor:
            return start(index_B, setting, num_latents) + self.y.float().mean(-1)[:, None, None]

    peeking = Peeking()

    def messages(batch: dict[str, Tensor], *rest: Any) -> Any:
        peeking.y = batch["y"]
        return unroll(batch, *rest)

    system.model.start = peeking  # type: ignore[assignment]
    monkeypatch.setattr(system.model, "unroll", messages)
    assert leak_check(system, valid(system).at(4), 256).found


@pytest.mark.parametrize("right", [1.0, 0.3])
def test_leak_check_finds_answers_without_input_and_withholds_numbers(
    right: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    system = make()
    clean = system.evaluate(valid(system), engine_of(system))
    assert clean["leak"] == 0.0 and set(clean) == {"error", "exact", "token", "loss", "trivial_token", "leak"}
    knows(system, monkeypatch, right)
    assert system.evaluate(valid(system), engine_of(system)) == {"error": 1.0, "leak": 1.0}
    found = full_evaluation.full_evaluation(system, valid(system), tmp_path / "exam", 256)
    assert set(found) == {"task", "num", "leak", "leak_check"} and found["leak"]
    assert "LEAK" in show.table(found) and "withheld" in show.table(found)
    assert [p.name for p in (tmp_path / "exam").iterdir()] == ["full_evaluation.json"]


@pytest.mark.parametrize("task", ["copy", "cumsum", "bucket_sort", "missing_duplicate", "binary_addition", "add"])
def test_leak_check_passes_untrained_thinkers(task: str):
    system = make(f"data.task={task}", "data.curriculum.kind=uniform")
    assert not leak_check(system, valid(system).at(valid(system).task.length), 512).found


def test_leak_check_passes_a_perfect_thinker(monkeypatch: pytest.MonkeyPatch):
    system = make()

    def backwards(_: ThinkerSystem, batch: dict[str, Tensor], inference: Inference) -> Tensor:
        return torch.nn.functional.one_hot(batch["x"].flip(1), 8)[None].double()

    monkeypatch.setattr(evaluate, "predict", backwards)
    assert system.evaluate(valid(system), engine_of(system))["exact"] == 1.0


# ---- evaluation ---------------------------------------------------------------------------------------------------------


def test_scores_do_not_depend_on_batches(monkeypatch: pytest.MonkeyPatch):
    system = make("model.positions.kind=random_sorted", "model.positions.max=32", "model.output.self_attn=true")
    full, inference = valid(system).at(4), Inference(8, (1, 3))
    whole = score(system, full, inference, 100)
    monkeypatch.setitem(evaluate.MAX_VALUES, "cpu", 30_000)
    assert len(list(evaluate.batches(system, full, inference, 100))) > 2
    cut = score(system, full, inference, 100)
    assert torch.equal(whole.exact_S, cut.exact_S) and torch.equal(whole.token_S, cut.token_S)
    assert torch.equal(whole.position_M, cut.position_M) and whole.nats == pytest.approx(cut.nats, rel=1e-6)


def test_scores_of_perfect_answers_and_of_padding(monkeypatch: pytest.MonkeyPatch):
    system = make("data.curriculum.kind=uniform")

    def perfect(_: ThinkerSystem, batch: dict[str, Tensor], inference: Inference) -> Tensor:
        # Right where it counts, a wrong symbol wherever there is padding.
        logits = torch.nn.functional.one_hot(torch.where(batch["keep"], batch["y"], 0), 8).double()
        return logits.expand(len(inference.steps), *logits.shape)

    monkeypatch.setattr(evaluate, "predict", perfect)
    found = score(system, valid(system), as_trained(system), 200)
    assert found.exact == found.token == 1.0 and found.num_wrong == 0

    def padding(_: ThinkerSystem, batch: dict[str, Tensor], inference: Inference) -> Tensor:
        # Right only where nothing counts.
        logits = torch.nn.functional.one_hot(torch.where(batch["keep"], (batch["y"] + 1) % 6, batch["y"]), 8).double()
        return logits.expand(len(inference.steps), *logits.shape)

    monkeypatch.setattr(evaluate, "predict", padding)
    found = score(system, valid(system), as_trained(system), 200)
    assert found.exact == found.token == 0.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with everything that happens at its end."""
    root = tmp_path_factory.mktemp("runs")
    settings = [*SMALL, "steps=6", "every.log=2", "every.eval=3", "every.save=3", "data.test=128", "data.test_lengths=4,6"]
    settings += ["model.positions.kind=sin", "model.n_latent=2:4", "data.curriculum.kind=mixed", "data.curriculum.start=2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(evaluate.NUM_QUICK, "cpu", 64)
        assert local.train("thinker/demo", settings, root=root, run_name="short", dirty=True) == 0
    return root


def test_full_evaluation_is_in_the_report_of_a_run(trained: Path):
    run = Run.open(trained, "short")
    folder = run.path / "samples" / "step-000006"
    found = json.loads((folder / "full_evaluation.json").read_text())
    assert not found["leak"] and found["num"] == 128
    assert found["curve"]["steps"][-1] == 16 * 4 == len(found["curve"]["residual"]) + 1
    assert found["map"]["latents"] == [2, 3, 4, 5, 6] and found["map"]["steps"] == [1, 2, 3, 4, 5, 6]
    assert found["map"]["box"] == [2, 4, 1, 4]
    assert [row["length"] for row in found["by_length"]] == [1, 2, 3, 4]
    assert [(row["length"], row["latents"], row["steps"]) for row in found["longer"]] == [(4, 4, 4), (6, 6, 6)]
    assert len(found["num_wrong"]) == 4 and set(found["baselines"]) >= {"copy_token", "commonest_token", "per_position_token"}
    report = (run.path / "report.md").read_text()
    for name in ("map.png", "map-exact.png", "steps.png", "residual.png"):
        assert (folder / name).stat().st_size > 2000
        assert f"samples/step-000006/{name}" in report
    assert "capacity" in (run.path / "console.log").read_text()


def test_curriculum_stage_is_in_the_checkpoint(trained: Path):
    loaded = inference.load(trained, "short", "step-000006", device="cpu")
    stage = loaded.system.get_buffer("stage")
    assert stage[0] == 2 and stage[3] == 6, "six steps at the first stage"


def test_sample_answers_a_prompt(trained: Path, capsys: pytest.CaptureFixture[str]):
    assert inference.sample(trained, "short", {"prompt": "1 2 3", "steps": 9, "latents": 7}) == 0
    assert capsys.readouterr().out.startswith("1 2 3 -> ")
    assert inference.sample(trained, "short", {"num": 2}) == 0
    assert capsys.readouterr().out.count(" -> ") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [({"prompt": "1 9"}, "'9' is not a token"), ({"prompt": " "}, "tokens with blanks"), ({"top_k": 3}, "--top-k")],
)
def test_sample_options_out_of_range_are_refused(trained: Path, options: dict[str, Any], words: str):
    with pytest.raises(UserError) as caught:
        inference.sample(trained, "short", options)
    assert words in str(caught.value)


def test_full_evaluation_tests_every_pair_of_addition():
    system = make("data.max_value=20", "data.held=0.2", "data.base=10", preset="add16")
    found = full_evaluation.all_pairs(system, valid(system))
    assert found["num"] == 400 and 20 < found["num_held"] < 140
    assert show.answer(system, valid(system), "base-10 @ 7 1 + 5 = base-10", as_trained(system)).endswith(("right", "it is 2 2"))


def test_full_evaluation_of_random_programs_uses_the_named_ones():
    system = make("model.program=random", "model.n_step=1:3")
    found = full_evaluation.named_programs(system, valid(system), 64)
    assert set(found) == {"everything", "read-once"}


# ---- words --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "vectors"),
    [
        (["model.n_latent=8"], 8),
        (["model.n_latent=4", "model.program=rlwo*6", "model.n_step=6", "model.n_memory=6"], 28),
        (["model.n_latent=4", "model.program=rlwo*6", "model.n_step=6", "model.n_memory=2"], 12),
        (["model.n_latent=4", "model.program=rw,lw,lw,lo", "model.n_step=4"], 16),
        (["model.n_latent=2:5", "model.program=rw,ro", "model.n_step=2"], 5),
    ],
)
def test_capacity_counts_vectors_of_the_decoder(settings: list[str], vectors: int):
    system = make(*settings)
    assert show.num_vectors(system) == vectors
    assert f"{vectors} vectors of 8" in show.capacity(system)


def test_presets_build_and_describe():
    recipe, _ = find("thinker")
    wanted = {
        "demo",
        "ablation",
        "copy",
        "flip",
        "roll",
        "roll-num",
        "copy40",
        "add16",
        "cumsum",
        "chomsky",
        "prefix",
        "mirrored",
    }
    assert set(recipe.presets) == wanted
    for preset in recipe.presets.values():
        config = preset()
        system = recipe.build(config, recipe.open_data(config))
        assert system.flops_per_item() > 0
        assert {"capacity", "latents", "steps", "program"} <= set(system.describe())


def test_program_file_that_changed_is_refused(tmp_path: Path):
    path = tmp_path / "program.txt"
    path.write_text("ro\nro\n")
    system = make(f"model.program={path}", "model.n_step=2")
    state = system.state()
    system.load_state(state)
    path.write_text("rwo\nro\n")
    with pytest.raises(UserError, match="the program has changed"):
        make(f"model.program={path}", "model.n_step=2").load_state(state)


def test_full_evaluation_runs_at_the_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    system, asked = make("data.test=64"), []
    engine = engine_of(system)

    def noted(*arguments: Any) -> dict[str, Any]:
        asked.append(arguments[2:])
        return {"leak": True, "leak_check": "LEAK: as told"}

    monkeypatch.setattr("seedbed.recipes.thinker.system.full_evaluation", noted)
    engine.begin(0, 0.5)
    system.sample(Request(tmp_path / "half"), engine)
    assert not asked
    engine.begin(1, 1.0)
    assert "LEAK" in system.sample(Request(tmp_path / "end"), engine).text
    system.sample(Request(tmp_path / "asked", {"examine": 7}), engine_of(system))
    assert asked == [(tmp_path / "end", 64), (tmp_path / "asked", 7)]
