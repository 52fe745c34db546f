"""Queries about this machine, one method per question; tests replace them."""

import importlib.util
import locale
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

from seedbed.track import code, files

_COMPILE = """
import torch
f = torch.compile(lambda x: torch.relu(2 * x - 1).sum())
x = torch.ones(64, device={device!r}, requires_grad=True)
f(x).backward()
assert x.grad.eq(2).all()
"""
_CPP = 'extern "C" int twice(int x) { return 2 * x; }\n'


class Machine:
    """Answers questions about this machine without judging them. Leaves nothing behind."""

    def __init__(self) -> None:
        self.env = dict(os.environ)

    # ---- folders and disk ------------------------------------------------------------------------------------------

    def try_folder(self, folder: Path) -> None:
        """Creates, writes, syncs, renames over an older file and deletes, as a checkpoint does; raises OSError."""
        made = [p for p in (folder, *folder.parents) if not p.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as scratch:
                old, new = Path(scratch) / "old", Path(scratch) / "new"
                files.write_synced(old, b"old")
                files.write_synced(new, b"new")
                files.replace(new, old)
                files.sync_folder(Path(scratch))
                if old.read_bytes() != b"new" or new.exists():
                    raise OSError(0, "a rename over an older file is not atomic here")
        finally:
            for path in made:  # leave no folders behind
                if path.exists() and not any(path.iterdir()):
                    path.rmdir()

    def touch_ends(self, path: Path) -> None:
        """Reads the first and the last byte of a file; raises OSError."""
        with open(path, "rb") as file:
            if file.read(1):
                file.seek(-1, os.SEEK_END)
                file.read(1)

    def free(self, folder: Path) -> tuple[int, int]:
        """Free bytes and free inodes for this user where `folder` is or will be; inodes -1 when the disk has none."""
        stat = os.statvfs(_existing(folder))
        return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else -1

    def write_speed(self, folder: Path) -> float:
        """Bytes per second of a synced write of 32 MiB."""
        data = os.urandom(1 << 20) * 32
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=_existing(folder)) as scratch:
            start = time.perf_counter()
            files.write_synced(Path(scratch) / "speed", data)
            return len(data) / max(time.perf_counter() - start, 1e-9)

    def clock_lead(self, folder: Path) -> float:
        """Seconds by which the file server's clock is ahead of ours."""
        with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=_existing(folder)) as file:
            before = time.time()
            os.utime(file.name)
            return os.stat(file.name).st_mtime - before

    def now(self) -> float:
        return time.time()

    # ---- limits ----------------------------------------------------------------------------------------------------

    def num_cores(self) -> float:
        """Cores available to this process: affinity and container quota."""
        cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        quota = Path("/sys/fs/cgroup/cpu.max")
        limit, _, period = quota.read_text().partition(" ") if quota.is_file() else ("max", "", "")
        return min(cores, int(limit) / int(period)) if limit.isdigit() else cores

    def num_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def open_files(self) -> tuple[int, int]:
        """Soft and hard limit on open files."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def shared_memory(self) -> int | None:
        """Free bytes of shared memory; None where there is no /dev/shm."""
        path = Path("/dev/shm")
        return shutil.disk_usage(path).free if path.is_dir() else None

    def memory(self) -> tuple[int, int]:
        """Available and total bytes of memory."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        info = Path("/proc/meminfo")
        for line in info.read_text().splitlines() if info.is_file() else ():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024, total
        return total, total

    def encodings(self) -> dict[str, str]:
        terminal = getattr(sys.stdout, "encoding", None) or "utf-8"
        return {"files": sys.getfilesystemencoding(), "text": locale.getpreferredencoding(False), "terminal": terminal}

    def asserts_are_on(self) -> bool:
        return not sys.flags.optimize

    # ---- versions --------------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, str]:
        import numpy
        import torch

        known = {"torch": torch.__version__, "numpy": numpy.__version__, "cuda": torch.version.cuda or ""}
        return {"python": platform.python_version(), **known}

    def numpy_bridge(self) -> None:
        """Converts an array to a tensor and back; raises when numpy and torch are incompatible."""
        import numpy
        import torch

        assert torch.from_numpy(numpy.arange(3.0)).numpy().sum() == 3.0

    def compiler(self) -> str | None:
        """The C++ compiler that torch.compile would call on the CPU; None when there is none."""
        return next(filter(None, map(shutil.which, filter(None, (self.env.get("CXX"), "g++", "clang++", "c++")))), None)

    def compile_cpp(self, compiler: str) -> str:
        """Compiles a minimal C++ file; the compiler's output, empty on success."""
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "t.cpp"
            source.write_text(_CPP)
            command = [compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(Path(scratch) / "t.so")]
            status, output = self.call(command, 5.0)
        return "" if status == 0 else (output.strip().splitlines() or [f"status {status}"])[0]

    def has_triton(self) -> bool:
        return importlib.util.find_spec("triton") is not None

    def start_compile(self, device: str) -> subprocess.Popen[str]:
        """Starts torch.compile of a small function in another process, which the caller waits for or kills."""
        command = [sys.executable, "-P", "-c", _COMPILE.format(device=device)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    # ---- GPU -------------------------------------------------------------------------------------------------------

    def num_nvidia(self) -> int:
        """NVIDIA devices in the system, whether or not torch sees them."""
        gpus = Path("/proc/driver/nvidia/gpus")
        return len(list(gpus.iterdir())) if gpus.is_dir() else len(list(Path("/dev").glob("nvidia[0-9]*")))

    def gpus(self) -> list[dict[str, Any]]:
        """Per CUDA device: name, free and total bytes, and bytes this process holds itself."""
        import torch

        found = []
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            free, total = torch.cuda.mem_get_info(index)
            name, own = torch.cuda.get_device_name(index), torch.cuda.memory_reserved(index)
            found.append({"name": name, "free": free, "total": total, "own": own})
        return found

    def driver_cuda(self) -> tuple[int, int] | None:
        """The newest CUDA version that the driver supports."""
        import torch

        number = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
        return (number // 1000, number % 1000 // 10) if number > 0 else None

    def gpu_error(self, index: int) -> float:
        """Largest relative difference of a float32 product and its gradient between a GPU and the CPU."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            a, b = torch.randn(257, 129), torch.randn(129, 65)
        results = []
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            for device in ("cpu", f"cuda:{index}"):
                room = torch.empty(64 << 20, dtype=torch.uint8, device=device)
                x = a.detach().to(device).requires_grad_()
                y = x @ b.to(device)
                (y * y).sum().backward()
                assert x.grad is not None
                results.append((y.detach().cpu(), x.grad.cpu()))
                del room
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed
        return max(float((u - v).abs().max() / u.abs().max()) for u, v in zip(*results, strict=True))

    def attention_times(self, device: str) -> dict[str, float | None]:
        """Seconds per forward and backward pass of causal attention by kernel; None where it is not supported."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        kinds = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
        shape, dtype = (1, 2, 256, 32), torch.float32
        if device != "cpu":
            kinds += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
            shape, dtype = (8, 12, 1024, 64), torch.bfloat16
        with torch.random.fork_rng(devices=[]):
            qkv: list[Any] = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]

        def forward_and_backward() -> None:
            y = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
            torch.autograd.grad(y, qkv, y)

        times: dict[str, float | None] = {}
        for kind in kinds:
            name = kind.name.removesuffix("_ATTENTION").lower()
            try:
                with sdpa_kernel(kind):
                    times[name] = _best_time(forward_and_backward, device)
            except RuntimeError:
                times[name] = None
        return times

    def speeds(self, device: str) -> dict[str, float]:
        """Matrix products in FLOP/s, memory copy in B/s and, for a GPU, pinned copies in B/s."""
        import torch

        num, dtype = (512, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
        a, b = (torch.ones(num, num, dtype=dtype, device=device) for _ in range(2))
        found = {"gemm": 2 * num**3 / _best_time(lambda: a @ b, device)}
        size = (64 << 20) if device == "cpu" else (1 << 30)
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        found["copy"] = 2 * size / _best_time(lambda: target.copy_(source), device)
        if device != "cpu":
            host = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
            part = target[: len(host)]
            found["upload"] = len(host) / _best_time(lambda: part.copy_(host, non_blocking=True), device)
        return found

    # ---- launcher and source -----------------------------------------------------------------------------------------

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def call(self, command: list[str], seconds: float) -> tuple[int, str]:
        """Exit status and output of a program; status 124 on a timeout."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return 124, f"no answer within {seconds:g} s"
        except OSError as error:
            return 127, str(error)
        return done.returncode, done.stdout + done.stderr

    def code_state(self, folder: Path, root: Path) -> dict[str, Any]:
        return code.state(folder, root)


def _existing(folder: Path) -> Path:
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())


def _best_time(work: Any, device: str) -> float:
    """Seconds of the fastest of a few calls."""
    import torch

    sync = (lambda: None) if device == "cpu" else (lambda: torch.cuda.synchronize(device))
    work()
    sync()
    return max(min(timeit.repeat(lambda: (work(), sync()), number=1, repeat=5)), 1e-9)
