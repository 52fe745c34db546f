"""Mistakes read off the source: every rule catches its mistake and lets its lawful neighbour pass."""

from pathlib import Path

import pytest

from seedbed.checks.lint import RULES, TEXTS, lint

WRONG = {
    "tuple_assert": "assert (x == 1, 'x')",
    "device_as_text": "def f(x):\n    return x.device == 'cuda'",
    "legacy_tensor": "y = isinstance(x, torch.LongTensor)",
    "truncated_pixels": "y = (x * 255).to(torch.uint8)",
    "waits_for_device": "class S:\n    def loss(self, batch, engine):\n        return batch.mean().item()",
    "buffer_written": (
        "class S:\n    def __init__(self):\n        self.register_buffer('seen', x)\n"
        "    def forward(self, x):\n        self.seen[0] = x"
    ),
    "shared_state": "class S:\n    items = []",
    "literal_modulo": "class S:\n    def locate(self, epoch, index):\n        return index % 3",
    "unsafe_load": "w = torch.load(path)",
    "misspelt_grad": "p.require_grad = False",
}

RIGHT = [
    "assert x == 1, 'x'",
    "def f(x):\n    return x.device.type == 'cuda'",
    "def f(config):\n    return config.device == 'cuda'",
    "y = isinstance(x, torch.Tensor)",
    "y = (x * 255).round().to(torch.uint8)",
    "class S:\n    def evaluate(self, source, engine):\n        return x.mean().item()",
    "class S:\n    def forward(self, x):\n        y[0] = x",
    "class S:\n    items = (1, 2)\n    names = {'a': 1}",
    "class S:\n    def locate(self, epoch, index):\n        return index % self.num_items",
    "class S:\n    def describe(self):\n        return 7 % 3",
    "w = torch.load(path, weights_only=True)",
    "p.requires_grad = False",
    "w = torch.load(path)  # check: allow",
    "class S:\n    def locate(self, e, index):\n        return index % 4  # check: allow, four seasons",
]


def test_lint_rules_each_have_an_example():
    assert {rule.__name__ for rule in RULES} == set(WRONG) == TEXTS.keys()


@pytest.mark.parametrize("name", WRONG)
def test_lint_finds_the_faulty_line(name: str, tmp_path: Path):
    path = tmp_path / "recipe.py"
    path.write_text("import torch\n" + WRONG[name] + "\n")
    hits = list(lint(path))
    assert len(hits) == 1, hits
    assert 2 <= hits[0].line <= 1 + WRONG[name].count("\n") + 1
    assert hits[0].what and "{" not in hits[0].what and hits[0].why and hits[0].fix and hits[0].severity in ("err", "warn")


@pytest.mark.parametrize("code", RIGHT)
def test_lint_passes_correct_code(code: str, tmp_path: Path):
    path = tmp_path / "recipe.py"
    path.write_text(code + "\n")
    assert not list(lint(path))
