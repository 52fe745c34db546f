"""profile: time goes to the innermost phase, a trace is read as it was written, and a timed step is the same step."""

import json

import pytest
import torch
from tune_toys import CPU, Model, Regression, Talker, Windows, config, needs_cuda, recipe, workload

from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.report.verdict import ATTENTION, MATMUL, MEMORY
from seedbed.train.engine import Engine
from seedbed.tune import profile
from seedbed.tune.profile import PHASES, Phases, TimedEngine, Work
from seedbed.tune.workload import Workload, rigged


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", MATMUL),
        ("aten::addmm", MATMUL),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", MATMUL),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", MATMUL),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64>", MATMUL),
        ("aten::mkldnn_convolution", MATMUL),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128>>", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", ATTENTION),
        ("triton_poi_fused_add_mul_3", MEMORY),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", MEMORY),
        ("Memcpy HtoD (Pinned -> Device)", MEMORY),
        ("aten::_fused_adamw_", MEMORY),
        ("aten::silu", MEMORY),
    ],
)
def test_kinds_of_work(name: str, kind: str) -> None:
    assert profile.kind_of_work(name) == kind


def test_time_goes_to_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(profile.time, "perf_counter", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    phases = Phases(CPU)
    phases.on = True
    with phases("data"):
        pass_time(1)
    pass_time(100)  # outside of any phase
    with phases("optimizer"):
        pass_time(2)
        with phases("forward"):
            pass_time(4)
            with phases("backward"):
                pass_time(8)
                with phases("optimizer"):
                    pass_time(16)
            pass_time(32)
        pass_time(64)
    host, stream = phases.take()
    assert host == {"data": 1, "transfer": 0, "forward": 36, "backward": 8, "optimizer": 82} and stream == {}
    assert phases.take()[0] == dict.fromkeys(PHASES, 0.0), "taking empties"


def test_phase_timer_ends_on_an_error() -> None:
    phases = Phases(CPU)
    phases.on = True
    with pytest.raises(KeyError), phases("forward"):
        raise KeyError
    assert phases.stack == []


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("on", [False, True])
def test_timed_step_is_the_same_step(accum: int, on: bool) -> None:
    toys = workload(accum=accum, ema=0.9, model=Model(dropout=0.3))
    plain, timed = toys.build(), toys.build(make=TimedEngine)
    assert type(plain) is Engine and isinstance(timed, TimedEngine)
    timed.phases.on = on
    for engine in (plain, timed):
        with rigged(engine, toys.data, print) as rig:
            rig.take_steps(3)
    for file, group in plain.tensors().items():
        for name, tensor in group.items():
            assert torch.equal(tensor, timed.tensors()[file][name]), f"{file}: {name}"


def kernel(name: str, correlation: int, start: float, length: float, cat: str = "kernel") -> dict:
    return {"cat": cat, "name": name, "ts": start, "dur": length, "args": {"correlation": correlation}}


def launch(correlation: int, when: float, cat: str = "cuda_runtime") -> dict:
    return {"cat": cat, "name": "cudaLaunchKernel", "ts": when, "dur": 1.0, "args": {"correlation": correlation}}


def phase(name: str, start: float, length: float) -> dict:
    return {"cat": "user_annotation", "name": f"phase:{name}", "ts": start, "dur": length, "args": {}}


def test_kernels_belong_to_the_phase_that_launched_them() -> None:
    """Kernels run late and backward is launched by another thread: only the moment of launch counts."""
    events = [
        phase("optimizer", 0, 100),
        phase("forward", 10, 80),
        phase("backward", 40, 40),
        phase("optimizer", 70, 10),
        {"cat": "gpu_user_annotation", "name": "phase:forward", "ts": 500, "dur": 400, "args": {}},
        launch(1, 20),
        launch(2, 50, "cuda_driver"),
        launch(3, 75),
        launch(4, 95),
        kernel("gemm", 1, 500, 1000),
        kernel("flash_bwd", 2, 1500, 2000),
        kernel("adamw", 3, 3500, 400),
        kernel("Memset", 4, 3900, 100, "gpu_memset"),
        {"ph": "i", "name": "no category"},
    ]
    work = profile.read_trace(events, [], 2, cuda=True)
    assert work.phases == pytest.approx({"data": 0, "transfer": 0, "forward": 5e-4, "backward": 1e-3, "optimizer": 2.5e-4})
    assert work.kinds == pytest.approx({MATMUL: 5e-4, ATTENTION: 1e-3, MEMORY: 2.5e-4})
    assert work.busy == pytest.approx(1.75e-3) and work.num_ops == 2


def op(name: str, start: float, length: float, thread: int = 1) -> dict:
    return {"cat": "cpu_op", "name": name, "ts": start, "dur": length, "tid": thread, "args": {}}


def test_operations_count_their_own_time_only() -> None:
    events = [
        phase("forward", 0, 100),
        op("aten::linear", 0, 50),
        op("aten::addmm", 10, 30),
        op("aten::resolve_conj", 12, 5),
        op("aten::relu", 50, 20),
        op("aten::mm", 10, 40, thread=2),
    ]
    work = profile.read_trace(events, [], 1, cuda=False)
    assert work.kinds == pytest.approx({MATMUL: (25 + 40) / 1e6, ATTENTION: 0.0, MEMORY: (20 + 5 + 20) / 1e6})
    assert work.num_ops == 3 and work.phases["forward"] == pytest.approx(work.busy)


WORK = Work({MATMUL: 2e-3, ATTENTION: 1e-3, MEMORY: 1e-3}, dict.fromkeys(PHASES, 1e-3), [], 100)


@pytest.mark.parametrize(
    ("seconds", "wait", "data", "gap"),
    [(10e-3, 0.0, 0.0, 0.6), (10e-3, 2e-3, 0.2, 0.4), (4e-3, 0.0, 0.0, 0.0), (3e-3, 0.0, 0.0, 0.0), (4e-3, 9e-3, 1.0, 0.0)],
)
def test_shares_of_a_device(seconds: float, wait: float, data: float, gap: float) -> None:
    shares = profile.device_shares(seconds, wait, WORK)
    assert (shares.data, shares.gap) == pytest.approx((data, gap))
    assert shares.data + shares.gap + shares.matmul + shares.attention + shares.memory == pytest.approx(1.0)
    assert shares.matmul == pytest.approx(2 * shares.attention)


@pytest.mark.parametrize("per_op", [0.0, 1e-5, 1.0])
def test_shares_of_a_host(per_op: float) -> None:
    host = {"data": 1e-3, "transfer": 1e-3, "forward": 3e-3, "backward": 3e-3, "optimizer": 1e-3}
    shares = profile.host_shares(10e-3, host, WORK, per_op)
    assert shares.data == pytest.approx(0.2) and shares.gap == pytest.approx(min(0.1 + 10e3 * per_op, 0.8))
    assert shares.data + shares.gap + shares.matmul + shares.attention + shares.memory == pytest.approx(1.0)


def test_device_rows_add_up() -> None:
    host = dict.fromkeys(PHASES, 2e-3)
    work = Work(WORK.kinds, {"data": 0.0, "transfer": 1e-3, "forward": 1e-3, "backward": 1e-3, "optimizer": 1e-3}, [], 9)
    rows = profile.device_rows(10e-3, 1e-3, host, host, work)
    assert [r["phase"] for r in rows] == [*PHASES, "host gap"]
    assert sum(r["share"] for r in rows) == pytest.approx(1.0) and rows[-1]["ms"] == pytest.approx(5.0)
    assert rows[2]["host_ms"] == rows[2]["stream_ms"] == pytest.approx(2.0)


def talker_bench(**changes) -> Workload:
    data = Data(Windows(64, 16, 48), Windows(4, 16, 48), {})
    return Workload("toy/talker", recipe(lambda c, d: Talker(), lambda c: data), config(**changes), data, CPU)


@pytest.mark.parametrize(
    "toys", [workload(), workload(accum=4, ema=0.9), talker_bench(precision="bf16")], ids=["plain", "parts", "talker"]
)
def test_profile_of_a_step(toys: Workload, tmp_path) -> None:
    found = profile.run(toys, tmp_path, num_steps=6)
    rows = {r["phase"]: r["ms"] for r in found.phases}
    assert set(rows) == {*PHASES, "host gap"}
    assert all(rows[name] > 0 for name in PHASES), "no phase may be missing"
    assert sum(rows.values()) == pytest.approx(1e3 * found.uncaptured, rel=0.05)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {f"phase:{name}" for name in PHASES} <= {e.get("name") for e in events}
    ops = found.work.ops
    assert 5 < len(ops) <= 12 and [o["ms"] for o in ops] == sorted((o["ms"] for o in ops), reverse=True)
    assert not any(o["op"].startswith("phase:") for o in ops)
    assert found.verdict.help and json.loads(json.dumps(found.to_json()))["verdict"]["bound"] == found.verdict.bound
    assert found.work.kinds[MATMUL] > 0 and (found.work.kinds[ATTENTION] > 0) == (toys.name == "toy/talker")


class Sleepy(Regression):
    """A slow forward pass."""

    def loss(self, batch, engine):
        import time

        time.sleep(0.01)
        return super().loss(batch, engine)


def test_slow_phase_is_found(tmp_path) -> None:
    found = profile.run(workload(lambda c: Sleepy()), tmp_path, num_steps=5)
    shares = {r["phase"]: r["share"] for r in found.phases}
    assert shares["forward"] > 0.6 and found.seconds >= 0.01


@needs_cuda
@pytest.mark.parametrize("capture", ["auto", "off"])
def test_profile_of_a_step_on_cuda(capture: str, tmp_path) -> None:
    found = profile.run(workload(where=torch.device("cuda", 0), capture=capture), tmp_path, num_steps=10)
    rows = {r["phase"]: r for r in found.phases}
    assert ("not captured" in found.execution) == (capture == "off")
    assert all(rows[name]["ms"] > 0 and rows[name]["stream_ms"] > 0 for name in ("forward", "backward", "optimizer"))
    assert sum(r["share"] for r in found.phases) == pytest.approx(1.0, abs=0.05)
    assert found.work.ops and found.work.kinds[MATMUL] > 0
    assert found.verdict.bound == "host launches", "a toy this small can only be bound by launches"


def test_profile_refuses_too_few_steps(tmp_path) -> None:
    with pytest.raises(UserError, match="at least 5"):
        profile.run(workload(), tmp_path, num_steps=2)
