"""The gpt presets: sizes, FLOPs, first losses, and that naming them costs no torch."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

from seedbed import config as configs
from seedbed.config import Config
from seedbed.config.saved import from_json
from seedbed.errors import UserError
from seedbed.nn.layers import attention_scope
from seedbed.recipes import find
from seedbed.recipes.gpt import gpu_presets, presets
from seedbed.recipes.gpt.model import Transformer, build_model

ALL = find("gpt")[0].presets
REQUIRED = {"demo", "shakespeare", "mini-v0", "baby", "gpt3-small", "gpt3-small-char", "gpt2-124m", "code"}


def vocab_of(config: Config) -> int:
    if config.data.text.startswith("random:"):
        return int(config.data.text.rpartition(":")[2])
    return {"char": 65, "char75": 75, "bpe": config.data.vocab}[config.data.tokenizer]


def on_meta(config: Config) -> Transformer:
    with torch.device("meta"):
        return Transformer(config.model, vocab_of(config), config.data.block)


def test_presets_exist_and_are_valid():
    assert set(ALL) >= REQUIRED
    for name, make in ALL.items():
        config = make()
        assert isinstance(config, Config) and make.__annotations__["return"] in (Config, "Config"), name
        assert from_json(config, configs.to_json(config)) == config


def test_presets_are_named_without_torch():
    code = "import sys; from seedbed.recipes.gpt import gpu_presets, presets; presets.demo(); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_presets_for_gpus_are_loaded_when_one_is_asked_for():
    code = (
        "import sys; from seedbed.recipes import find; known = lambda: 'seedbed.recipes.gpt.gpu_presets' in sys.modules\n"
        "find('gpt/demo')[0].preset('demo'); print(known()); find('gpt/baby')[0].preset('baby'); print(known())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]


@pytest.mark.parametrize(
    ("name", "millions"),
    [("mini-v0", 31.5), ("baby", 10.7), ("gpt3-small", 123.6), ("gpt3-small-char", 85.0), ("gpt2-124m", 124.4), ("demo", 0.9)],
)
def test_preset_sizes_are_those_of_the_table(name, millions):
    assert abs(on_meta(ALL[name]()).num_parameters() / 1e6 - millions) < 0.06


@pytest.mark.parametrize("name", ALL)
def test_flops_by_formula_are_within_one_percent_of_torchs_count(name):
    """The plain attention kernel is counted as it multiplies: every score, not halved for causality, nothing recomputed."""
    model = on_meta(ALL[name]())
    x_BT = torch.zeros(1, model.block, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, attention_scope([SDPBackend.MATH]):
        model(x_BT, x_BT).backward()
    assert abs(counter.get_total_flops() / model.block / model.flops_per_token() - 1) < 0.01


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_first_loss_of_presets_is_that_of_a_uniform_guess(name):
    config = ALL[name]()
    shape = dataclasses.replace(config.model, depth=min(config.model.depth, 2))
    vocab = min(vocab_of(config), 4096)
    model = build_model(shape, vocab, 32, seed=1).eval()
    x_BT = torch.randint(vocab, (4, 33), generator=torch.Generator().manual_seed(0))
    assert abs(model(x_BT[:, :-1], x_BT[:, 1:]).item() - math.log(vocab)) < 0.1


def test_presets_of_early_models_keep_their_numbers():
    mini, small, replica = gpu_presets.mini_v0(), gpu_presets.gpt3_small(), gpu_presets.nanogpt_shakespeare()
    shape = mini.model
    assert (shape.depth, shape.heads, shape.width, mini.data.block, shape.dropout) == (10, 8, 512, 256, 0.2)
    assert (mini.batch, mini.optim.lr, mini.data.valid, mini.schedule.kind) == (128, 0.001, 0.1, "constant")
    assert dataclasses.replace(gpu_presets.mini_v1(), batch=mini.batch) == mini
    assert (small.batch // small.accum, small.accum, small.data.block, small.optim.lr) == (4, 16, 2048, 6e-4)
    assert (replica.batch, replica.optim.lr, replica.optim.beta2, replica.steps) == (64, 1e-3, 0.99, 5000)
    assert replica.schedule.warmup * replica.steps == 100 and replica.schedule.floor == 0.1


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.heads=5", "multiple"),
        ("model.widht=3", "model.width"),
        ("data.block=0", "at least|between"),
        ("model.norm=batch", "rms"),
    ],
)
def test_preset_overrides_out_of_range_are_refused(assignment, message):
    with pytest.raises(UserError, match=message):
        configs.override(presets.demo(), [assignment])
