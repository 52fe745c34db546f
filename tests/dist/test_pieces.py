"""Ranks without processes: one data order, pieces of checkpoints written and read by threads, refusals in a line."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seedbed.config import Config, Dist
from seedbed.data.feed import Feed, Source
from seedbed.dist import ranks as joining
from seedbed.dist.limits import require_possible, require_settings
from seedbed.dist.ranks import ALONE, Ranks
from seedbed.dist.shards import Rows
from seedbed.errors import UserError
from seedbed.launch import spawn
from seedbed.train import checkpoint
from seedbed.train.system import System

CPU = torch.device("cpu")


class Table:
    """Where threads that play ranks put what they say."""

    def __init__(self, world: int) -> None:
        self.barrier, self.said = threading.Barrier(world, timeout=20), [None] * world


class Threaded(Ranks):
    """A rank in a thread of its own."""

    def __init__(self, degrees: Dist, rank: int, table: Table) -> None:
        super().__init__(degrees, rank)
        self.table = table

    def collect(self, value: Any) -> list[Any]:
        self.table.said[self.rank] = value
        self.table.barrier.wait()
        found = list(self.table.said)
        self.table.barrier.wait()
        return found


def on_ranks(degrees: Dist, act: Any) -> list[Any]:
    """`act(ranks)` in one thread per rank; results, or the errors they ended with."""
    table, found = Table(degrees.world), [None] * degrees.world

    def run(rank: int) -> None:
        try:
            found[rank] = act(Threaded(degrees, rank, table))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(degrees.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# ---- data ----------------------------------------------------------------------------------------------------------------


class Numbers(Source):
    def __init__(self, num: int) -> None:
        self.num_items, self.arrays, self.spans = num, {"x": np.arange(num, dtype=np.int64)}, {"x": 0}


@pytest.mark.parametrize("limit", [None, 0], ids=["in memory", "read ahead"])
@pytest.mark.parametrize(("world", "parts"), [(2, 1), (4, 1), (3, 2)])
def test_ranks_share_one_order(world: int, parts: int, limit: int | None):
    shape = {"batch": 12, "seed": 3, "device": CPU, "limit_bytes": limit}
    whole = Feed(Numbers(50), parts=1, **shape)
    own = [Feed(Numbers(50), parts=parts, share=(rank, world), **shape) for rank in range(world)]
    for counter in (0, 12, 24, 36, 48, 300):  # past the end of an epoch too
        for feed in (whole, *own):
            feed.load(counter)
        together = np.full(12, -1)
        for rank, feed in enumerate(own):
            shares = [feed.part(k) for k in range(parts)]
            index = torch.cat([share["index"] for share in shares])
            assert index.tolist() == list(range(counter + rank, counter + 12, world))
            together[rank::world] = torch.cat([share["x"] for share in shares]).numpy()
        assert together.tolist() == whole.part(0)["x"].tolist()
    for feed in (whole, *own):
        feed.close()


def test_a_batch_must_divide_among_ranks():
    with pytest.raises(UserError, match="does not divide into 4 equal parts"):
        Feed(Numbers(50), batch=10, parts=2, seed=1, device=CPU, share=(0, 2))
    with pytest.raises(UserError, match="batch=10 is that of all ranks and does not divide into 4 ranks"):
        Config(model=None, data=None, batch=10, dist=Dist(replicate=2, shard=2))
    config = Config(model=None, data=None, batch=48, accum=3, dist=Dist(replicate=2, shard=4))
    assert config.micro_batch == 2


# ---- checkpoints -----------------------------------------------------------------------------------------------------------

WEIGHT, COUNT = torch.arange(30.0).view(10, 3), torch.tensor(7.0)
STATE = {"items": 5}


def rows_of(ranks: Ranks) -> Rows:
    size = -(-len(WEIGHT) // ranks.degrees.shard)
    first = min(size * ranks.shard_rank, len(WEIGHT))
    return Rows(first, min(first + size, len(WEIGHT)), len(WEIGHT))


def part_of(ranks: Ranks) -> checkpoint.Part:
    return checkpoint.Part(ranks, lambda file, name: rows_of(ranks) if name == "weight" and ranks.degrees.shard > 1 else None)


def tensors_of(ranks: Ranks) -> dict[str, dict[str, torch.Tensor]]:
    rows = rows_of(ranks)
    return {"model": {"weight": WEIGHT[rows.first : rows.last].clone(), "count": COUNT}}


def saved_by(folder: Path, degrees: Dist) -> list[Any]:
    return on_ranks(degrees, lambda ranks: checkpoint.save(folder, 4, tensors_of(ranks), STATE, part_of(ranks)))


DEGREES = [Dist(), Dist(replicate=3), Dist(shard=2), Dist(shard=4), Dist(shard=12), Dist(replicate=2, shard=3)]


@pytest.mark.parametrize("reading", DEGREES, ids=str)
@pytest.mark.parametrize("writing", DEGREES, ids=str)
def test_what_any_ranks_wrote_any_ranks_read(tmp_path: Path, writing: Dist, reading: Dist):
    (path,) = set(saved_by(tmp_path, writing))
    assert checkpoint.steps_in(tmp_path) == [path]
    for ranks, saved in enumerate(on_ranks(reading, lambda ranks: (ranks, checkpoint.load(path, part_of(ranks))))):
        who, found = saved
        assert who.rank == ranks and found.step == 4 and found.state["items"] == 5
        assert torch.equal(found.tensors["model"]["weight"], tensors_of(who)["model"]["weight"])
        assert torch.equal(found.tensors["model"]["count"], COUNT)


def test_one_rank_writes_as_a_single_process_does(tmp_path: Path):
    saved_by(tmp_path / "copies", Dist(replicate=2))
    checkpoint.save(tmp_path / "alone", 4, tensors_of(ALONE), STATE)
    for one in (tmp_path / "alone" / "step-000004").iterdir():
        assert one.read_bytes() == (tmp_path / "copies" / "step-000004" / one.name).read_bytes()


def test_a_disk_that_fails_one_rank_fails_all_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = checkpoint._write

    def write(path: Path, data: bytes) -> str:
        if "00002-of" in path.name:
            raise OSError(28, "No space left on device")
        return real(path, data)

    monkeypatch.setattr(checkpoint, "_write", write)
    found = saved_by(tmp_path, Dist(shard=3))
    assert [type(error) for error in found] == [OSError] * 3
    assert all("rank 1" in str(error) and "No space left" in str(error) for error in found)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["flip", "delete"])
def test_one_damaged_piece_is_known_to_all_ranks(tmp_path: Path, harm: str):
    (path,) = set(saved_by(tmp_path, Dist(shard=3)))
    piece = path / "model-00002-of-00003.safetensors"
    data = bytearray(piece.read_bytes())
    data[-1] ^= 1
    piece.unlink() if harm == "delete" else piece.write_bytes(data)
    found = on_ranks(Dist(shard=2), lambda ranks: checkpoint.load(path, part_of(ranks)))
    assert [type(error) for error in found] == [checkpoint.Damaged] * 2
    assert all("model-00002-of-00003" in str(error) for error in found)


def test_a_lost_piece_is_missed_even_if_nobody_lists_it(tmp_path: Path):
    import json

    (path,) = set(saved_by(tmp_path, Dist(shard=2)))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]["model-00002-of-00002.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(checkpoint.Damaged, match="lacks 5 rows of model tensor weight"):
        checkpoint.load(path)


def test_pieces_of_another_model_are_refused(tmp_path: Path):
    (path,) = set(saved_by(tmp_path, Dist(shard=2)))
    part = checkpoint.Part(ALONE, lambda file, name: Rows(0, 4, 8) if name == "weight" else None)
    saved = checkpoint.load(path, part)
    with pytest.raises(UserError, match="does not fit this model"):
        checkpoint.restore({"model": {"weight": torch.zeros(4, 3), "count": COUNT.clone()}}, saved.tensors, "it")


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "degrees", "says"),
    [
        (2, Dist(), "torchrun started 2 processes, but dist.replicate=1 x dist.shard=1 is 1"),
        (2, Dist(replicate=2, shard=2), "torchrun --nproc-per-node=4 -m seedbed"),
        (0, Dist(shard=4), "needs 4 processes"),
        (1, Dist(replicate=2), "needs 2 processes"),
    ],
)
def test_a_wrong_number_of_processes_is_refused(num: int, degrees: Dist, says: str):
    with pytest.raises(UserError, match=says):
        joining.require(degrees, num)


def test_a_right_number_of_processes_is_not():
    for num, degrees in ((0, Dist()), (1, Dist()), (4, Dist(replicate=2, shard=2)), (3, Dist(shard=3))):
        joining.require(degrees, num)


class Single(System):
    def why_one_rank(self) -> str:
        return "its walks lie in one place"


class Rivals(System):
    def players(self) -> dict[str, torch.nn.Module]:
        return {"main": self, "critic": torch.nn.Linear(1, 1)}


PLAIN = Config(model=None, data=None, precision="bf16")


@pytest.mark.parametrize(
    ("system", "degrees", "says"),
    [
        (System(), Dist(), "done by one process"),
        (Single(), Dist(replicate=2), "cannot be spread over 2 ranks: its walks"),
        (Rivals(), Dist(shard=2), r"players of this system \(main, critic\).*use dist.replicate=2"),
    ],
)
def test_what_cannot_be_spread_says_why(system: System, degrees: Dist, says: str):
    asked = degrees if degrees.world > 1 else Dist(replicate=2)
    with pytest.raises(UserError, match=says):
        require_possible(system, replace(PLAIN, dist=asked), degrees)


@pytest.mark.parametrize(
    ("changes", "degrees", "says"),
    [
        ({"compile_autograd": True}, Dist(shard=2), "compile_autograd=true does not go with dist.shard=2"),
        ({"compile_optimizer": True}, Dist(shard=2), "compile_optimizer=true does not go"),
        ({"float8": True}, Dist(shard=4), "float8=true does not go with dist.shard=4"),
        ({"device": "mps"}, Dist(replicate=2), "device=mps is one device"),
    ],
)
def test_settings_that_do_not_go_with_ranks_say_why(changes: dict[str, Any], degrees: Dist, says: str):
    require_settings(replace(PLAIN, **changes))
    with pytest.raises(UserError, match=says):
        require_settings(replace(PLAIN, dist=degrees, **changes))


def test_what_can_be_spread_is_not_refused():
    require_settings(replace(PLAIN, dist=Dist(replicate=2), compile_autograd=True))
    require_possible(Rivals(), replace(PLAIN, dist=Dist(replicate=2), compile_autograd=True), Dist(replicate=2))
    require_possible(Single(), PLAIN, Dist())


def test_a_command_starts_its_ranks_once(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert spawn.to_train("gpt/demo", ["dist.replicate=2"]) == 2
    assert spawn.to_train("gpt/demo", []) == 0
    with pytest.raises(UserError, match="--dry is done by one process"):
        spawn.refuse(spawn.to_train("gpt/demo", ["dist.shard=4"]), "--dry")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert spawn.to_train("gpt/demo", ["dist.replicate=2"]) == 0
    assert joining.started() == 2
