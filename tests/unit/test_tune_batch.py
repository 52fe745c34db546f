"""find-batch: the search against every possible limit, memory told apart from crashes, and nothing left behind."""

import dataclasses
import gc
import mmap
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tune_toys import CPU, Hungry, Regression, needs_cuda, workload

from seedbed.errors import UserError
from seedbed.train.oom import is_out_of_memory
from seedbed.tune import batch
from seedbed.tune.batch import Attempts, Crashed, Trial, find, resolution, search


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step per round is enough to know that it can be timed."""
    monkeypatch.setattr(batch, "TIMED_SECONDS", 0.0)


@pytest.mark.parametrize("start", [1, 3, 8, 100, 5000])
def test_batch_search_finds_the_largest_that_fits(start: int) -> None:
    for most in (1, 7, 64, 1000):
        for limit in [*range(0, 70), 100, 255, 256, 257, 999, 1000, 5000]:
            tried = []

            def attempt(size: int, tried: list = tried, limit: int = limit) -> Trial:
                tried.append(size)
                return Trial(size, size <= limit)

            trials = search(attempt, start, most)
            best = max((t.batch for t in trials if t.fits), default=0)
            truth = min(limit, most)
            assert best <= truth < best + resolution(max(best, 1)) or best == truth, (limit, most, best)
            assert all(1 <= size <= most for size in tried) and len(tried) == len(set(tried)) <= 25
            assert [t.batch for t in trials] == sorted(tried)


PEAKS = {
    "line": lambda size, limit: 1000 + 7 * size,
    "held by a cache": lambda size, limit: 1000 + 7 * limit,
    "too high": lambda size, limit: 1000 + 12 * size,
    "too low": lambda size, limit: 1000 + 3 * size,
    "bent": lambda size, limit: 1000 + size * size // 50,
    "noise": lambda size, limit: 1000 + size * 7919 % 4000,
}


@pytest.mark.parametrize("shape", PEAKS)
@pytest.mark.parametrize("start", [1, 16, 300])
def test_batch_search_uses_peaks_safely(shape: str, start: int) -> None:
    for limit in [*range(1, 40), 100, 177, 255, 256, 700, 3001]:
        tried = []

        def attempt(size: int, tried: list = tried, limit: int = limit) -> Trial:
            tried.append(size)
            return Trial(size, size <= limit, PEAKS[shape](size, limit) if size <= limit else 0)

        trials = search(attempt, start, 4096, room=1000 + 7 * limit)
        best = max(t.batch for t in trials if t.fits)
        assert best <= limit < best + resolution(best), (limit, tried)
        assert len(tried) == len(set(tried)) <= 25
        if shape == "line" and limit >= 64 and start == 16:
            assert len(tried) <= 8, (limit, tried)


def test_batch_search_out_of_time_keeps_its_trials() -> None:
    left = iter([True, False])
    trials = search(lambda size: Trial(size, size <= 200), 16, 4096, in_time=lambda: next(left))
    assert [(t.batch, t.fits) for t in trials] == [
        (16, True), (32, True), (64, True), (128, True), (192, True), (256, False)
    ]  # fmt: skip


def test_small_batches_are_exact() -> None:
    assert all(resolution(size) == 1 for size in range(1, 32)) and resolution(32) == 2 and resolution(1023) == 32


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("cudaErrorMemoryAllocation"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory of the good old days"), False),
        (AssertionError(), False),
        (KeyError("x"), False),
    ],
)
def test_out_of_memory_errors_are_recognised(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) == memory


@pytest.mark.parametrize("most", [1, 5, 17])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA error: out of memory")], ids=repr)
def test_out_of_memory_ends_the_search_only(most: int, error: Exception) -> None:
    finding = find(workload(lambda c: Hungry(most, error)), most=64)
    assert finding.largest == most and not finding.extrapolated
    assert {t.why for t in finding.trials if not t.fits} == {"out of memory"}
    assert all(t.seconds > 0 and t.items_per_s > 0 for t in finding.trials if t.fits)


def test_batch_search_where_one_item_does_not_fit() -> None:
    finding = find(workload(lambda c: Hungry(0, MemoryError())), most=64)
    assert finding.largest == 0 and "not even one item" in finding.advice and finding.accum == 0


def test_crash_other_than_memory_is_raised() -> None:
    with pytest.raises(Crashed, match=r"batch 16 crashed.*ValueError: odd shapes") as caught:
        find(workload(lambda c: Hungry(8, ValueError("odd shapes\nand more"))), most=64)
    assert [t.batch for t in caught.value.trials] == [2, 4, 8] and isinstance(caught.value.__cause__, ValueError)


def test_user_errors_pass_through_the_search() -> None:
    with pytest.raises(UserError, match=r"^no such file$"):
        find(workload(lambda c: Hungry(0, UserError("no such file"))), most=8)


def test_batch_search_ends_at_the_data_or_the_maximum() -> None:
    assert find(workload(num_items=24)).capped == "the data"
    finding = find(workload(), most=16)
    assert finding.capped == "--max" and finding.largest == 16 and "accum=1" in finding.advice


def test_memory_is_freed_between_trials() -> None:
    alive: list[weakref.ref] = []

    def make(config):
        gc.collect()
        assert not any(ref() for ref in alive), "an earlier system is still in memory"
        system = Hungry(9, MemoryError())
        alive.append(weakref.ref(system))
        return system

    assert find(workload(make), most=64).largest == 9 and len(alive) > 5
    gc.collect()
    assert not any(ref() for ref in alive)


# ---- on a CPU, by growth -----------------------------------------------------------------------------------------------


def growing(limit: int, base: int, per_item: int, per_second: float, monkeypatch) -> Attempts:
    """Attempts whose memory and time follow a line; what is really run is kept in `ran`."""
    attempts = Attempts(workload(), limit, lambda trial: None)
    attempts.ran = []

    def run(size: int) -> Trial:
        attempts.ran.append(size)
        peak = base + per_item * size
        return Trial(size, peak <= limit, peak, size / per_second, "" if peak <= limit else "over the limit")

    monkeypatch.setattr(attempts, "_try", run)
    return attempts


@pytest.mark.parametrize("per_second", [10.0, 1e9])
@pytest.mark.parametrize("per_item", [1, 37, 1000])
def test_batch_search_never_exhausts_the_machine(per_item: int, per_second: float, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, base = 100_000, 20_000
    attempts = growing(limit, base, per_item, per_second, monkeypatch)
    trials = search(attempts, 1, 2**20)
    best = max(t.batch for t in trials if t.fits)
    truth = (limit - base) // per_item
    assert best <= truth < best + resolution(best)
    assert all(base + per_item * size <= limit for size in attempts.ran[2:]), "only the first two may go over"
    assert all(size / per_second <= batch.STEP_PATIENCE for size in attempts.ran[2:])
    assert max(t.peak for t in trials if t.fits) <= limit


def test_memory_limit_is_kept_and_shown() -> None:
    finding = find(workload(), limit=1e-6, most=64)
    assert finding.largest == 0 and "over the limit" in finding.trials[0].why
    finding = find(workload(), limit=1000.0, most=64)
    assert finding.largest == 64 and finding.limit == 1000 * 2**30


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets the highest memory use")
def test_peak_memory_includes_freed_allocations() -> None:
    batch.reset_peak(CPU)
    held = mmap.mmap(-1, 128 * 2**20)  # the allocator may keep what is freed; this goes back to the system
    held[:: mmap.PAGESIZE] = b"1" * (len(held) // mmap.PAGESIZE)
    (row,) = (row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmRSS:"))
    highest = int(row.split()[1]) * 1024
    held.close()
    assert batch.peak_memory(CPU) >= highest - 2**20
    batch.reset_peak(CPU)
    assert batch.peak_memory(CPU) < highest - 100 * 2**20


class Wide(Regression):
    """4 MiB of activations per item."""

    def loss(self, batch, engine):
        wide = self.net[1](self.net[0](batch["x"])).repeat(1, 2**16).sin()
        return self.net(batch["x"]).square().mean() + 0.0 * wide.square().mean(), {}


@needs_cuda
@pytest.mark.parametrize("capture", ["auto", "off"])
def test_memory_limit_on_cuda_is_enforced(capture: str) -> None:
    finding = find(workload(lambda c: Wide(), where=torch.device("cuda", 0), capture=capture), limit=1.0, most=4096)
    assert 4 < finding.largest < 250
    assert all(t.why == "out of memory" for t in finding.trials if not t.fits)
    assert all(0 < t.peak <= 2**30 for t in finding.trials if t.fits)
    assert torch.zeros(2**29, device="cuda").numel(), "the limit is lifted afterwards"


# ---- compiled steps -----------------------------------------------------------------------------------------------------


class Compiled:
    """Stands for the machine: a compiled step holds `share` of the memory of an uncompiled one, which holds 1 per item."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, largest: int, share: float) -> None:
        self.tried: list[tuple[int, str]] = []

        def run(attempts: Attempts, size: int) -> float:
            config = attempts.workload.config if attempts.compiled else batch.uncompiled(attempts.workload.config)
            self.tried.append((size, config.compile))
            self.held = size * (share if attempts.compiled else 1.0)
            if self.held > largest:
                raise MemoryError
            return 0.1

        monkeypatch.setattr(Attempts, "_run", run)
        monkeypatch.setattr(batch, "peak_memory", lambda device: int(self.held * 2**20))
        self.limit = (largest + 0.5) / 1024


@pytest.mark.parametrize(
    ("largest", "share", "sizes", "accum"),
    [
        (100, 0.7, [64], 1),
        (64, 0.7, [64], 1),  # uncompiled without headroom, compiled with
        (48, 0.6, [64], 1),  # fits in one part only when compiled
        (48, 1.0, [64, 32], 2),  # compiling saves nothing here
        (20, 0.9, [32, 16], 4),
    ],
)
def test_advised_batch_alone_is_compiled_and_fits(largest, share, sizes, accum, monkeypatch) -> None:
    machine = Compiled(monkeypatch, largest, share)
    finding = find(workload(batch=64, compile="whole"), limit=machine.limit)
    assert [size for size, how in machine.tried if how == "whole"] == sizes == [t.batch for t in finding.confirmed]
    assert finding.largest <= largest < finding.largest + resolution(finding.largest)
    assert finding.accum == accum and not finding.compiled and finding.confirmed[-1].compiled
    assert 64 // finding.accum * share <= batch.HEADROOM * (largest + 0.5)
    shown = finding.to_json()["confirmed"]
    assert [row["batch"] for row in shown] == sizes and shown[-1]["items_per_s"] == pytest.approx(10 * sizes[-1])


def test_every_size_is_compiled_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Compiled(monkeypatch, 40, 0.5)
    finding = find(workload(batch=64, compile="blocks"), limit=machine.limit, compiled=True)
    assert {how for _, how in machine.tried} == {"blocks"} and finding.compiled and not finding.confirmed
    assert finding.largest == 80 and finding.accum == 1


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_config_that_does_not_begin_compiled_confirms_nothing(compile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Compiled(monkeypatch, 40, 0.5)
    finding = find(workload(batch=64, compile=compile), limit=machine.limit, compiled=True)
    assert {how for _, how in machine.tried} == {"off"} and not finding.confirmed and not finding.compiled


def test_second_compilation_is_skipped_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Compiled(monkeypatch, 33, 1.0)
    monkeypatch.setattr(batch, "SEARCH_SECONDS", 0.0)
    finding = find(workload(batch=64, compile="whole"), limit=machine.limit)
    assert finding.largest == 32 and not finding.exact
    assert [t.batch for t in finding.confirmed] == [32] and not batch.has_headroom(finding.confirmed[0], int(33.5 * 2**20))
    assert finding.accum == 4, "the advice falls back to what was measured uncompiled"


# ---- what follows ------------------------------------------------------------------------------------------------------


def test_batch_split_adds_up_and_fits() -> None:
    for size in range(1, 130):
        for largest in range(1, 140):
            part, accum = batch.split(size, largest)
            assert part * accum == size and part <= largest
            assert accum == 1 or part <= max(1, batch.HEADROOM * largest)
            if size <= batch.HEADROOM * largest:
                assert accum == 1


def trial(size: int, rate: float, fits: bool = True) -> Trial:
    return Trial(size, fits, 1, size / rate if rate else 0.0)


@pytest.mark.parametrize(
    ("trials", "at"),
    [
        ([], None),
        ([trial(1, 10)], None),
        ([trial(1, 10), trial(2, 20)], None),
        ([trial(1, 10), trial(2, 19.5), trial(4, 20)], 2),
        ([trial(1, 100), trial(2, 50), trial(4, 20)], 1),
        ([trial(1, 10), trial(2, 20), trial(4, 0), trial(8, 99, fits=False)], None),
    ],
)
def test_saturation_batch(trials: list[Trial], at: int | None) -> None:
    assert batch.saturation_batch(trials) == at


@pytest.mark.parametrize(("options", "words"), [({"limit": 0.0}, "limit=0"), ({"limit": -1.0}, "limit"), ({"most": 0}, "max=0")])
def test_bad_requests_are_one_line(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        find(workload(), **options)
    assert "\n" not in str(caught.value)


def test_batch_result_is_plain_json(tmp_path) -> None:
    shown = find(workload(), most=16).to_json()
    assert shown["trials"][0]["items_per_s"] > 0
    assert dataclasses.is_dataclass(find(workload(), most=4)) and isinstance(shown["trials"], list)
