"""The feed: every tier hands out the same items, in the same order, and says so when it cannot."""

import mmap
import threading
import time

import numpy as np
import pytest
import torch
from _sources import WindowSource

from seedbed.data import feed as feed_module
from seedbed.data import prefetch
from seedbed.data.feed import Feed, Source
from seedbed.errors import UserError

CPU = torch.device("cpu")
DEVICES = [CPU] + ([torch.device("cuda", 0)] if torch.cuda.is_available() else [])
TIERS = {"device": None, "memory-map": 0}


class Numbers(Source):
    """Item i is rows 3i .. 3i+3 of an array that counts up, and row 3i of another."""

    def __init__(self, num_items: int = 50, dtype: type = np.uint16):
        self.num_items = num_items
        count = np.arange(3 * num_items + 1)
        self.arrays = {"count": count.astype(dtype), "square": (count[:, None] * [1, 2]).astype(np.float32)}
        self.spans = {"count": 4, "square": 0}

    def locate(self, epoch_B, index_B):
        return 3 * index_B


class Frames(Source):
    """Rows long enough to be gathered one by one."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.arrays = {"frame": rng.integers(0, 256, (60, 20, 30, 3), dtype=np.uint8), "action": rng.random((60, 5)).astype("f4")}
        self.spans = {"frame": 8, "action": 8}
        self.num_items = 53


def collect(source: Source, counters, *, batch=8, parts=1, seed=1, device=CPU, **options) -> list[dict[str, torch.Tensor]]:
    feed = Feed(source, batch=batch, parts=parts, seed=seed, device=device, **options)
    result = []
    for counter in counters:
        feed.load(counter)
        shares = [feed.part(k) for k in range(parts)]
        result.append({name: torch.cat([s[name] for s in shares]).cpu().clone() for name in shares[0]})
    feed.close()
    return result


def same(first, second) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64, np.float32])
def test_feed_items_follow_the_order(device, tier, dtype):
    source = Numbers(dtype=dtype)
    order = feed_module.Order(50, 1)
    for step, batch in enumerate(collect(source, range(0, 120, 8), device=device, limit_bytes=TIERS[tier])):
        first = 3 * torch.from_numpy(order.at(8 * step, 8)[1].copy())
        assert torch.equal(batch["index"], torch.arange(8 * step, 8 * step + 8))
        assert batch["count"].shape == (8, 4) and batch["square"].shape == (8, 2)
        wanted = (first[:, None] + torch.arange(4)).to(torch.uint8 if dtype is np.uint8 else torch.int64)
        assert torch.equal(batch["count"].to(wanted.dtype), wanted)
        assert torch.equal(batch["square"], torch.stack([first, 2 * first], 1).float())


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("make", [Numbers, Frames])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_tiers_agree_to_the_bit(make, parts, device):
    plain = collect(make(), range(0, 160, 8))
    for limit in TIERS.values():
        assert same(plain, collect(make(), range(0, 160, 8), parts=parts, device=device, limit_bytes=limit))


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("limit", TIERS.values(), ids=TIERS)
def test_feed_counter_may_jump(limit, device):
    straight = {c: b for c, b in zip(range(0, 400, 8), collect(Numbers(), range(0, 400, 8)), strict=True)}
    counters = [0, 8, 16, 8, 16, 200, 208, 0, 0, 8, 392, 16, 24]
    for counter, batch in zip(counters, collect(Numbers(), counters, device=device, limit_bytes=limit), strict=True):
        assert same([batch], [straight[counter]]), counter


def test_feed_tier_follows_the_size():
    small = Feed(Numbers(), batch=4, parts=1, seed=1, device=CPU)
    size = sum(a.nbytes for a in Numbers().arrays.values())
    exact = Feed(Numbers(), batch=4, parts=1, seed=1, device=CPU, limit_bytes=size)
    large = Feed(Numbers(), batch=4, parts=1, seed=1, device=CPU, limit_bytes=size - 1)
    assert [f.tier for f in (small, exact, large)] == ["device", "device", "memory-map"]
    assert "cpu" in small.describe() and "thread" in large.describe()
    large.close()
    assert feed_module.room(CPU) > 1 << 20


@pytest.mark.parametrize("limit", TIERS.values(), ids=TIERS)
def test_feed_part_is_valid_until_the_next_load_but_one(limit):
    feed = Feed(Frames(), batch=8, parts=2, seed=1, device=CPU, limit_bytes=limit)
    expected = collect(Frames(), range(0, 400, 8))
    kept = []
    for step in range(50):
        feed.load(8 * step)
        kept.append([feed.part(0), feed.part(1)])
        for back in (0, 1)[: step + 1]:
            time.sleep(0.0005)
            for name, value in expected[step - back].items():
                assert torch.equal(torch.cat([part[name] for part in kept[step - back]]), value)
    feed.close()


def test_wait_counts_and_close_ends_the_thread():
    before = threading.active_count()
    feed = Feed(Numbers(), batch=8, parts=1, seed=1, device=CPU, limit_bytes=0)
    feed.load(0)
    assert feed.wait > 0 and threading.active_count() == before + 1
    feed.close()
    feed.close()
    assert threading.active_count() == before


def test_feed_batch_may_be_longer_than_an_epoch():
    (batch,) = collect(Numbers(num_items=3), [0], batch=9)
    assert sorted((batch["count"][:, 0].long() // 3).tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


class Endless(Source):
    def batch(self, raw):
        return {"value": raw["index"] * 2}


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_generator_sees_the_counters(device):
    batches = collect(Endless(), [0, 8, 80], parts=2, device=device)
    assert [b["value"].tolist() for b in batches] == [list(range(2 * c, 2 * c + 16, 2)) for c in (0, 8, 80)]
    assert Feed(Endless(), batch=4, parts=1, seed=1, device=device).tier == "generated"


class Broken(Numbers):
    """Cannot say where item 7 is."""

    def locate(self, epoch_B, index_B):
        if 7 in index_B:
            raise KeyError("no such item")
        return 3 * index_B


class Outside(Numbers):
    def __init__(self, row: int):
        super().__init__()
        self.row = row

    def locate(self, epoch_B, index_B):
        return np.where(index_B == 7, self.row, 3 * index_B)


LAST = 3 * 50 - 3
FAULTS = [(Broken(), "KeyError"), (Outside(LAST + 1), f"row {LAST + 1}, outside 0 to {LAST}"), (Outside(-1), "row -1, outside")]


@pytest.mark.parametrize("limit", TIERS.values(), ids=TIERS)
@pytest.mark.parametrize(("source", "words"), FAULTS)
def test_source_error_names_the_sample_when_it_is_due(tmp_path, source, words, limit):
    sample = feed_module.Order(50, 1).at(0, 50)[1].tolist().index(7)
    for name, array in source.arrays.items():
        array.tofile(tmp_path / name)
        source.arrays[name] = np.memmap(tmp_path / name, array.dtype, mode="r").reshape(array.shape)
    feed = Feed(source, batch=4, parts=1, seed=1, device=CPU, limit_bytes=limit)
    for counter in range(0, sample // 4 * 4, 4):
        feed.load(counter)
    with pytest.raises((RuntimeError, IndexError), match=words) as caught:
        feed.load(sample // 4 * 4)
    assert f"sample {sample}" in str(caught.value)
    feed.load(sample // 4 * 4 + 4)
    assert feed.part(0)["index"][0] == sample // 4 * 4 + 4
    feed.close()


def test_row_bounds_include_the_last_valid_row():
    for limit in TIERS.values():
        (batch,) = collect(Outside(LAST), [0], batch=50, limit_bytes=limit)
        assert batch["count"].long().max() == 3 * 50


def test_user_error_in_a_source_stays_a_user_error():
    class Refusing(Numbers):
        def locate(self, epoch_B, index_B):
            raise UserError("the mount is gone")

    feed = Feed(Refusing(), batch=4, parts=1, seed=1, device=CPU, limit_bytes=0)
    with pytest.raises(UserError, match=r"sample 0: .*the mount is gone"):
        feed.load(0)
    feed.close()


def test_prefetch_hanging_read_is_reported(monkeypatch):
    release = threading.Event()

    class Hanging(Numbers):
        def locate(self, epoch_B, index_B):
            release.wait(30)
            return 3 * index_B

    monkeypatch.setattr(prefetch, "TIMEOUT", 0.1)
    feed = Feed(Hanging(), batch=4, parts=1, seed=1, device=CPU, limit_bytes=0)
    with pytest.raises(UserError, match=r"samples 8 to 11 for 0\.1 s"):
        feed.load(8)
    release.set()
    monkeypatch.setattr(prefetch, "TIMEOUT", 30)
    feed.load(8)
    assert feed.part(0)["index"].tolist() == [8, 9, 10, 11]
    feed.close()


def test_prefetch_dead_thread_is_reported(monkeypatch):
    feed = Feed(Numbers(), batch=4, parts=1, seed=1, device=CPU, limit_bytes=0)
    feed.close()
    with pytest.raises(RuntimeError, match="thread died before sample 4"):
        feed.load(4)


def test_prefetch_slots_are_never_read_and_lent_at_once():
    """A slow reader and a fast one: what was handed out is never written to while it may be in use."""
    source, rng = Frames(), np.random.default_rng(3)
    original = source.locate
    source.locate = lambda e, i: (time.sleep(float(rng.random()) * 0.002), original(e, i))[1]  # type: ignore[method-assign]
    assert same(collect(source, range(0, 480, 8), limit_bytes=0), collect(Frames(), range(0, 480, 8)))


def test_memory_maps_are_advised(tmp_path, monkeypatch):
    path = tmp_path / "rows.bin"
    np.arange(100_000, dtype=np.uint16).tofile(path)
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    whole = np.frombuffer(mapping, np.uint16)
    pages = []
    monkeypatch.setattr(prefetch._Advice, "will_need", lambda self, offset, size: pages.append((self.offset + offset, size)))

    class Tail(Source):
        num_items, arrays, spans = 1000, {"row": whole[5000:]}, {"row": 16}

    (batch,) = collect(Tail(), [0], batch=4, limit_bytes=0)
    starts = feed_module.Order(1000, 1).at(0, 4)[1]
    assert [(10_000 + 2 * s, 32) for s in starts.tolist()] == pages[:4]
    assert torch.equal(batch["row"][:, 0].to(torch.int64), torch.from_numpy(starts + 5000))
    assert prefetch._Advice.on(np.zeros(4)) is None


def test_memory_map_advice_is_accepted_anywhere_in_the_file(tmp_path):
    (tmp_path / "rows.bin").write_bytes(bytes(3 * mmap.PAGESIZE + 100))
    with open(tmp_path / "rows.bin", "rb") as file:
        advice = prefetch._Advice.on(np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[7:])
    assert advice is not None and advice.offset == 7
    for start in (0, mmap.PAGESIZE - 8, 3 * mmap.PAGESIZE):
        advice.will_need(start, 93)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_window_never_crosses_an_episode(window):
    lengths = [3, 1, 7, 5, 4]
    firsts = np.cumsum([0, *lengths[:-1]])
    episode = np.repeat(np.arange(5), lengths)
    source = WindowSource({"episode": episode, "row": np.arange(20)}, {"episode": window, "row": window}, firsts)
    assert source.num_items == sum(max(0, n - window + 1) for n in lengths)
    (batch,) = collect(source, [0], batch=source.num_items)
    assert (batch["episode"] == batch["episode"][:, :1]).all()
    legal = [r for r in range(20 - window + 1) if episode[r] == episode[r + window - 1]]
    assert sorted(batch["row"][:, 0].tolist()) == legal


def test_windows_longer_than_every_episode_are_refused():
    with pytest.raises(UserError, match="no episode holds 8 rows in a row; the longest has 7"):
        WindowSource({"a": np.zeros(10)}, {"a": 8}, np.array([0, 3]))


def test_feed_unequal_parts_are_refused():
    with pytest.raises(UserError, match="batch of 6 does not divide into 4"):
        Feed(Numbers(), batch=6, parts=4, seed=1, device=CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("limit", TIERS.values(), ids=TIERS)
def test_feed_parts_can_be_captured(limit):
    device = torch.device("cuda", 0)
    feed = Feed(Numbers(), batch=8, parts=2, seed=1, device=device, limit_bytes=limit)
    feed.load(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        feed.part(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [feed.part(k)["count"].long() for k in range(2)]
    expected = collect(Numbers(), range(0, 800, 8))
    for step in range(100):
        feed.load(8 * step)
        graph.replay()
        assert torch.equal(torch.cat(out).cpu(), expected[step]["count"].long())
    feed.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("limit", TIERS.values(), ids=TIERS)
def test_feed_buffers_are_not_overwritten_while_the_device_lags(limit):
    """The host runs many steps ahead of a busy device; sums are taken on the device and compared at the end."""
    device = torch.device("cuda", 0)
    feed = Feed(Frames(), batch=8, parts=1, seed=1, device=device, limit_bytes=limit)
    work = torch.randn(2048, 2048, device=device)
    sums = []
    for step in range(100):
        feed.load(8 * step)
        for _ in range(5):
            work = torch.nn.functional.normalize(work @ work)
        sums.append(feed.part(0)["frame"].long().sum())
    feed.close()
    expected = [b["frame"].long().sum().item() for b in collect(Frames(), range(0, 800, 8))]
    assert torch.stack(sums).tolist() == expected
