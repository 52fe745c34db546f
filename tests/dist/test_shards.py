"""Ranks as threads: one data order, sharded checkpoints, and settings that are refused."""

import json
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seedbed import launch
from seedbed.config import Config, Dist
from seedbed.data.feed import Feed, Source
from seedbed.dist import SINGLE, Ranks, started
from seedbed.dist import join as joining
from seedbed.dist.join import require_settings
from seedbed.dist.shards import Rows
from seedbed.errors import UserError
from seedbed.launch.dry import dry_run
from seedbed.train import checkpoint, checkpoint_loading
from seedbed.train.capabilities import require_possible
from seedbed.train.system import System

CPU = torch.device("cpu")


class Table:
    """Where the threads of a gather leave their values."""

    def __init__(self, world: int) -> None:
        self.barrier, self.values = threading.Barrier(world, timeout=20), [None] * world


class Threaded(joining.GroupRanks):
    """A rank in a thread of its own."""

    def __init__(self, degrees: Dist, rank: int, table: Table) -> None:
        super().__init__(degrees, rank)
        self.table = table

    def all_gather_object(self, value: Any) -> list[Any]:
        self.table.values[self.rank] = value
        self.table.barrier.wait()
        found = list(self.table.values)
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
def test_data_order_is_shared_by_ranks(world: int, parts: int, limit: int | None):
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


def test_batch_that_does_not_divide_among_ranks_is_refused():
    with pytest.raises(UserError, match="does not divide into 4 equal parts"):
        Feed(Numbers(50), batch=10, parts=2, seed=1, device=CPU, share=(0, 2))
    with pytest.raises(UserError, match="batch=10 is the total over all ranks and does not divide into 4 ranks"):
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
def test_checkpoint_of_any_degrees_loads_with_any_degrees(tmp_path: Path, writing: Dist, reading: Dist):
    (path,) = set(saved_by(tmp_path, writing))
    assert checkpoint.steps_in(tmp_path) == [path]
    for ranks, saved in enumerate(on_ranks(reading, lambda ranks: (ranks, checkpoint_loading.load(path, part_of(ranks))))):
        who, found = saved
        assert who.rank == ranks and found.step == 4 and found.state["items"] == 5
        assert torch.equal(found.tensors["model"]["weight"], tensors_of(who)["model"]["weight"])
        assert torch.equal(found.tensors["model"]["count"], COUNT)


def test_checkpoint_of_replicas_equals_that_of_a_single_process(tmp_path: Path):
    saved_by(tmp_path / "replicas", Dist(replicate=2))
    checkpoint.save(tmp_path / "alone", 4, tensors_of(SINGLE), STATE)
    for one in (tmp_path / "alone" / "step-000004").iterdir():
        assert one.read_bytes() == (tmp_path / "replicas" / "step-000004" / one.name).read_bytes()


def test_disk_error_on_one_rank_fails_all_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
def test_damaged_shard_is_reported_on_all_ranks(tmp_path: Path, harm: str):
    (path,) = set(saved_by(tmp_path, Dist(shard=3)))
    piece = path / "model-00002-of-00003.safetensors"
    data = bytearray(piece.read_bytes())
    data[-1] ^= 1
    piece.unlink() if harm == "delete" else piece.write_bytes(data)
    found = on_ranks(Dist(shard=2), lambda ranks: checkpoint_loading.load(path, part_of(ranks)))
    assert [type(error) for error in found] == [checkpoint_loading.Damaged] * 2
    assert all("model-00002-of-00003" in str(error) for error in found)


def test_missing_shard_is_damage_even_if_the_manifest_omits_it(tmp_path: Path):
    (path,) = set(saved_by(tmp_path, Dist(shard=2)))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]["model-00002-of-00002.safetensors"], manifest["pieces"]["model-00002-of-00002.safetensors"]
    del manifest["hash"]
    manifest["format"] = 1
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(checkpoint_loading.Damaged, match="lacks 5 rows of model tensor weight"):
        checkpoint_loading.load(path)


def as_first_format(path: Path) -> None:
    """A manifest as the first version wrote it, without a checksum of its own."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["hash"]
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 1}, indent=1))


def equal(a: dict[str, dict[str, torch.Tensor]], b: dict[str, dict[str, torch.Tensor]]) -> bool:
    same_names = a.keys() == b.keys() and all(a[f].keys() == b[f].keys() for f in a)
    return same_names and all(torch.equal(a[f][n], b[f][n]) for f in a for n in a[f])


@pytest.mark.parametrize("first_format", [False, True], ids=["checksum", "first format"])
@pytest.mark.parametrize("reading", [Dist(), Dist(shard=2)], ids=["alone", "2 ranks"])
def test_flipped_bits_of_a_sharded_checkpoint_are_never_loaded(tmp_path: Path, reading: Dist, first_format: bool):
    """1,200 single bits of manifest and shards: each is damage that is raised on all ranks, or changes nothing that is read."""
    (path,) = set(saved_by(tmp_path, Dist(shard=3)))
    if first_format:
        as_first_format(path)
    wanted = [found.tensors for found in on_ranks(reading, lambda ranks: checkpoint_loading.load(path, part_of(ranks)))]
    targets, rng, noticed = sorted(path.iterdir()), random.Random(5), 0
    for number in range(1200 if reading.world == 1 else 150):
        target = path / "manifest.json" if number % 2 else rng.choice(targets)
        good = bytearray(target.read_bytes())
        place = rng.randrange(len(good) * 8)
        target.write_bytes(good[: place // 8] + bytes([good[place // 8] ^ 1 << place % 8]) + good[place // 8 + 1 :])
        found = on_ranks(reading, lambda ranks: checkpoint_loading.load(path, part_of(ranks)))
        damaged = [isinstance(one, checkpoint_loading.Damaged) for one in found]
        assert all(damaged) or all(equal(one.tensors, was) for one, was in zip(found, wanted, strict=True)), (
            target,
            place,
            found,
        )
        noticed += all(damaged)
        target.write_bytes(good)
    assert noticed > (0.85 if first_format else 0.99) * (1200 if reading.world == 1 else 150)


# Two shards have rows 0-4 and 5-9. Claims of a manifest that do not cover ten rows.
CLAIMS: dict[str, list[list[Any]]] = {
    "overlap": [[0, 10], [4, 10]],
    "the same twice": [[0, 10], [0, 10]],
    "gap": [[0, 11], [6, 11]],
    "beyond the end": [[0, 9], [5, 9]],
    "too few": [[0, 12], [5, 12]],
    "two totals": [[0, 10], [5, 11]],
    "huge": [[0, 10**15], [5, 10**15]],
    "beyond 64 bits": [[0, 2**70], [5, 2**70]],
    "negative": [[-5, 10], [5, 10]],
    "text": [["0", 10], [5, 10]],
    "fraction": [[0.0, 10], [5, 10]],
    "truth": [[False, 10], [5, 10]],
    "short": [[0], [5, 10]],
    "nothing": [[], [5, 10]],
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize("first_format", [False, True], ids=["checksum", "first format"])
def test_shards_that_do_not_cover_a_tensor_are_damage(tmp_path: Path, claim: list[list[Any]], first_format: bool):
    checkpoint.save(tmp_path, 3, tensors_of(SINGLE), STATE)
    (path,) = set(saved_by(tmp_path, Dist(shard=2)))
    manifest = json.loads((path / "manifest.json").read_text())
    for number, rows in enumerate(claim, 1):
        manifest["pieces"][f"model-0000{number}-of-00002.safetensors"]["weight"] = rows
    del manifest["hash"]
    (path / "manifest.json").write_text(json.dumps({**manifest, "hash": checkpoint.digest(manifest)}))
    if first_format:
        as_first_format(path)
    warnings: list[str] = []
    saved = checkpoint_loading.load_newest(tmp_path, warnings.append)
    assert saved is not None and saved.step == 3 and len(warnings) == 1 and "step-000004" in warnings[0]


def test_read_error_on_one_rank_makes_all_fall_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint.save(tmp_path, 3, tensors_of(SINGLE), STATE)
    saved_by(tmp_path, Dist(shard=2))
    real = checkpoint_loading._read_rows

    def read(path: Path, manifest: dict[str, Any], part: checkpoint.Part):
        if part.ranks.rank == 1 and path.name == "step-000004":
            raise OSError(5, "Input/output error")
        return real(path, manifest, part)

    monkeypatch.setattr(checkpoint_loading, "_read_rows", read)
    for found in on_ranks(
        Dist(shard=2), lambda ranks: checkpoint_loading.load_newest(tmp_path, lambda text: None, part_of(ranks))
    ):
        assert found.step == 3


def test_checkpoint_of_the_first_format_loads(tmp_path: Path):
    for name, degrees in (("single", Dist()), ("sharded", Dist(shard=3))):
        (path,) = set(saved_by(tmp_path / name, degrees))
        as_first_format(path)
        for ranks, found in on_ranks(
            Dist(shard=2), lambda ranks, path=path: (ranks, checkpoint_loading.load(path, part_of(ranks)))
        ):
            assert equal(found.tensors, tensors_of(ranks)) and found.origin == {}


def test_checkpoint_folder_named_for_another_step_is_damage(tmp_path: Path):
    (path,) = set(saved_by(tmp_path, Dist()))
    shutil.copytree(path, tmp_path / "step-000009")
    with pytest.raises(checkpoint_loading.Damaged, match="step-000009 holds the state of step 4"):
        checkpoint_loading.load(tmp_path / "step-000009")
    assert checkpoint_loading.load(path.rename(tmp_path / "step-000004-copy")).step == 4, (
        "a copy of the user's may be asked for by name"
    )


def test_shards_of_another_model_are_refused(tmp_path: Path):
    (path,) = set(saved_by(tmp_path, Dist(shard=2)))
    part = checkpoint.Part(SINGLE, lambda file, name: Rows(0, 4, 8) if name == "weight" else None)
    saved = checkpoint_loading.load(path, part)
    with pytest.raises(UserError, match="does not fit this model"):
        checkpoint_loading.restore({"model": {"weight": torch.zeros(4, 3), "count": COUNT.clone()}}, saved.tensors, "it")


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
def test_number_of_processes_that_is_wrong_is_refused(num: int, degrees: Dist, says: str):
    with pytest.raises(UserError, match=says):
        joining.require(degrees, num)


def test_number_of_processes_that_is_right_is_accepted():
    for num, degrees in ((0, Dist()), (1, Dist()), (4, Dist(replicate=2, shard=2)), (3, Dist(shard=3))):
        joining.require(degrees, num)


class Single(System):
    def single_rank_reason(self) -> str:
        return "its walks lie in one place"


class Rivals(System):
    def named_optimizers(self) -> dict[str, torch.nn.Module]:
        return {"main": self, "critic": torch.nn.Linear(1, 1)}


PLAIN = Config(model=None, data=None, precision="bf16")


@pytest.mark.parametrize(
    ("system", "degrees", "says"),
    [
        (System(), Dist(), "runs in one process"),
        (Single(), Dist(replicate=2), "cannot use 2 ranks: its walks"),
        (Rivals(), Dist(shard=2), r"optimizers of this system \(main, critic\).*use dist.replicate=2"),
    ],
)
def test_systems_for_a_single_rank_are_refused_on_several(system: System, degrees: Dist, says: str):
    asked = degrees if degrees.world > 1 else Dist(replicate=2)
    with pytest.raises(UserError, match=says):
        require_possible(system, replace(PLAIN, dist=asked), degrees)


@pytest.mark.parametrize(
    ("changes", "degrees", "says"),
    [
        ({"compile_autograd": True}, Dist(shard=2), "compile_autograd=true does not go with dist.shard=2"),
        ({"compile_optimizer": True}, Dist(shard=2), "compile_optimizer=true does not go"),
        ({"float8": True}, Dist(shard=4), "float8=true does not go with dist.shard=4"),
        ({"device": "mps"}, Dist(replicate=2), "device=mps is a single device"),
    ],
)
def test_settings_that_do_not_work_on_several_ranks_are_refused(changes: dict[str, Any], degrees: Dist, says: str):
    require_settings(replace(PLAIN, **changes))
    with pytest.raises(UserError, match=says):
        require_settings(replace(PLAIN, dist=degrees, **changes))


def test_settings_that_work_on_several_ranks_are_accepted():
    require_settings(replace(PLAIN, dist=Dist(replicate=2), compile_autograd=True))
    require_possible(Rivals(), replace(PLAIN, dist=Dist(replicate=2), compile_autograd=True), Dist(replicate=2))
    require_possible(Single(), PLAIN, Dist())


def test_ranks_are_started_once_per_command(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launch.to_train("gpt/demo", ["dist.replicate=2"]) == 2
    assert launch.to_train("gpt/demo", []) == 0
    with pytest.raises(UserError, match="--dry is done by one process"):
        dry_run("gpt/demo", [], num_ranks=launch.to_train("gpt/demo", ["dist.shard=4"]))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.to_train("gpt/demo", ["dist.replicate=2"]) == 0
    assert started() == 2
