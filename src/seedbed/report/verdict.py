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
    parts = {MEMORY: shares.memory, ATTENTION: shares.attention, MATMUL: shares.matmul, DATA: shares.data, LAUNCHES: shares.gap}
    bound = max(parts, key=parts.__getitem__)
    if shares.data >= DATA_MATTERS and shares.data >= shares.gap:
        bound = DATA
    elif shares.gap >= GAP_MATTERS:
        bound = LAUNCHES
    return Verdict(bound, parts[bound], tuple(help_for(bound, setup)))


def help_for(bound: str, setup: Setup) -> list[str]:
    """What would help against this bound, most useful first."""
    cpu, cuda, wide = setup.device == "cpu", setup.device == "cuda", setup.precision in ("fp32", "tf32")
    made, held = setup.tier == "generated", setup.tier == "device"
    fine = "this is where a step should spend its time"
    tips = {
        DATA: {
            "the source makes its items too slowly: make them in `batch`, on the device, in few large operations": made,
            "the data is in memory already: `locate` or `batch` of the source does too much work per step": held,
            "a store that fits into device memory is kept there: narrower dtypes or a smaller set would fit": not (made or held),
            "a faster or a local disk; `seedbed data bench` measures it": not (made or held),
        },
        LAUNCHES: {
            "capture=auto runs the whole step as one CUDA graph": cuda and not setup.captured,
            "compile=blocks makes fewer and larger operations": not setup.compiled,
            "a larger batch does more work per operation; `seedbed find-batch` says how large it can be": True,
        },
        MEMORY: {
            "compile=blocks fuses elementwise operations, so that tensors are read once": not setup.compiled,
            "precision=bf16 halves the bytes of every activation": not cpu and wide,
            "a larger batch spreads the optimizer's traffic over more items": True,
        },
        ATTENTION: {
            "precision=bf16 lets the fast attention kernels run at all": cuda and wide,
            "heads of width 64 or 128 suit the hardware; its cost grows with the square of the context": True,
        },
        MATMUL: {
            f"{fine}; more cores or a GPU would help, or a smaller model": cpu,
            "precision=bf16 uses the matrix units at several times the rate": not cpu and setup.precision == "fp32",
            f"{fine}; widths in multiples of 128 suit the hardware best": not cpu and setup.precision != "fp32",
        },
    }
    return [tip for tip, applies in tips[bound].items() if applies]
