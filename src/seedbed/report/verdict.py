"""Verdicts of profiles: what bounds a step and what would help, as functions of measured shares. Does not import torch."""

from dataclasses import dataclass

from seedbed.report.run_report import ATTENTION, DATA, DATA_MATTERS, LAUNCHES, MATMUL, MEMORY, Setup

GAP_MATTERS = 0.30  # the share of an idle device from which host launches are named first


@dataclass(frozen=True)
class Shares:
    """Shares of a step's wall time, 0 to 1: data wait, idle device, and kinds of work."""

    data: float = 0.0
    gap: float = 0.0
    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What bounds the step, its share of the time, and what would help, most useful first."""

    bound: str
    share: float
    help: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"bound by {self.bound} ({self.share:.0%} of the step)"


def judge(shares: Shares, setup: Setup) -> Verdict:
    """Waiting first, where it matters; otherwise the largest part."""
    parts = {MEMORY: shares.memory, ATTENTION: shares.attention, MATMUL: shares.matmul}
    if shares.data >= DATA_MATTERS and shares.data >= shares.gap:
        bound, share = DATA, shares.data
    elif shares.gap >= GAP_MATTERS:
        bound, share = LAUNCHES, shares.gap
    else:
        waits = {DATA: shares.data, LAUNCHES: shares.gap}
        bound, share = max({**parts, **waits}.items(), key=lambda item: item[1])
    return Verdict(bound, share, tuple(HELP[bound](setup)))


def _for_data(setup: Setup) -> list[str]:
    if setup.tier == "generated":
        return ["the source makes its items too slowly: make them in `batch`, on the device, in few large operations"]
    if setup.tier == "device":
        return ["the data is in memory already: `locate` or `batch` of the source does too much work per step"]
    keep = "a store that fits into device memory is kept there: narrower dtypes or a smaller set would fit"
    return [keep, "a faster or a local disk; `seedbed data bench` measures it"]


def _for_launches(setup: Setup) -> list[str]:
    out = []
    if setup.device == "cuda" and not setup.captured:
        out.append("capture=auto runs the whole step as one CUDA graph")
    if not setup.compiled:
        out.append("compile=blocks makes fewer and larger operations")
    return [*out, "a larger batch does more work per operation; `seedbed find-batch` says how large it can be"]


def _for_memory(setup: Setup) -> list[str]:
    out = [] if setup.compiled else ["compile=blocks fuses elementwise operations, so that tensors are read once"]
    if setup.device != "cpu" and setup.precision in ("fp32", "tf32"):
        out.append("precision=bf16 halves the bytes of every activation")
    return [*out, "a larger batch spreads the optimizer's traffic over more items"]


def _for_attention(setup: Setup) -> list[str]:
    out = []
    if setup.device == "cuda" and setup.precision in ("fp32", "tf32"):
        out.append("precision=bf16 lets the fast attention kernels run at all")
    return [*out, "heads of width 64 or 128 suit the hardware; its cost grows with the square of the context"]


def _for_matmul(setup: Setup) -> list[str]:
    if setup.device == "cpu":
        return ["this is where a step should spend its time; more cores or a GPU would help, or a smaller model"]
    if setup.precision == "fp32":
        return ["precision=bf16 uses the matrix units at several times the rate"]
    return ["this is where a step should spend its time; widths in multiples of 128 suit the hardware best"]


HELP = {DATA: _for_data, LAUNCHES: _for_launches, MEMORY: _for_memory, ATTENTION: _for_attention, MATMUL: _for_matmul}
