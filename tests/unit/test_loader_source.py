"""LoaderSource: items in the loader's order for any batch size, exact resume by `seek`, and what is said without it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch.utils.data import DataLoader, TensorDataset

from seedbed.cli import main
from seedbed.data.feed import Feed
from seedbed.data.loader import LoaderSource
from seedbed.errors import UserError
from seedbed.track.run import Run

NUM = 10


def numbered(at: int = 0) -> Iterator[tuple[torch.Tensor]]:
    """Batches of three numbers, from any item on."""
    while True:
        yield (torch.arange(at, at + 3),)
        at += 3


def seen(source: LoaderSource, counters: range, batch: int, parts: int = 1) -> list[int]:
    feed = Feed(source, batch=batch, parts=parts, seed=0, device=torch.device("cpu"))
    out: list[int] = []
    for counter in counters:
        feed.load(counter)
        out += [int(one) for k in range(parts) for one in feed.part(k)["x"]]
    return out


@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (2, 1), (4, 2), (7, 1), (12, 3)])
def test_items_are_those_of_the_loader_for_any_batch_size(batch: int, parts: int) -> None:
    assert seen(LoaderSource(numbered(), ("x",)), range(0, 3 * batch, batch), batch, parts) == list(range(3 * batch))


@pytest.mark.parametrize("start", [0, 1, 8, 1000])
def test_seek_goes_on_at_any_item(start: int) -> None:
    source = LoaderSource(numbered(), ("x",), seek=numbered)
    assert seen(source, range(start, start + 12, 4), 4) == list(range(start, start + 12))
    assert seen(source, range(2, 6, 4), 4) == [2, 3, 4, 5], "and back"


def test_loader_without_seek_says_that_it_begins_again(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(TensorDataset(torch.arange(NUM)), 3)
    assert seen(LoaderSource(loader, ("x",)), range(0, 12, 4), 4) == [*range(NUM), 0, 1] and not capsys.readouterr().out
    assert seen(LoaderSource(loader, ("x",)), range(8, 12, 4), 4) == [0, 1, 2, 3]
    assert "the loader cannot seek to item 8: it begins from its start" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("loader", "names", "said"),
    [([], ("x",), "gives no batches"), ([(1, 2)], ("x",), "has 2 parts, and 1 names"), (iter([]), ("x",), "gives no batches")],
)
def test_loaders_that_cannot_be_used_are_explained(loader: Any, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        seen(LoaderSource(loader, names), range(0, 1), 1)


def test_recipe_of_the_guide_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "from-pytorch.md").read_text()
    Path("digits.py").write_text(re.findall(r"```python\n(.*?)```", text, re.S)[0])
    command = ["train", "digits.py", "batch=48", "--no-check", "--dirty", "--run"]
    assert main([*command, "straight"]) == 0
    assert main([*command, "stopped", "--until", "7"]) == 0 and main(["resume", "stopped"]) == 0
    straight, stopped = ([(row["step"], row["loss"]) for row in Run(Path("runs") / n).rows()] for n in ("straight", "stopped"))
    assert straight == stopped and len(straight) == 4
    assert Run(Path("runs/straight")).status()["metric"] == "accuracy"
