"""Compiled code kept between runs: torch's own caches, in a folder named by versions and code.

A second start of the same preset loads what the first one compiled.
"""

import atexit
import contextlib
import errno
import hashlib
import importlib.metadata
import os
import platform
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from seedbed import cache, errors
from seedbed.errors import UserError

Say = Callable[[str], None]

# The variables by which torch and Triton find their caches; one that the user has set is kept.
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# A compiled preset takes up to some tens of megabytes.
NEEDED_BYTES = 256 << 20
# Folders of other versions are removed when nobody has used them for so long.
UNUSED_SECONDS = 14 * 24 * 3600.0
# Errors of a cache folder that another folder does not have.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}

_set_here: set[str] = set()


def enable(say: Say = print) -> None:
    """Let torch keep compiled code in our cache folder; where that cannot be, in a temporary one for this process.

    Called before the first kernel is compiled: what torch finds set by then is where it looks at the next start too.
    """
    import torch._functorch.config as functorch

    # The run's precision says which products may be in TF32.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
    # Our kernels with gradients of their own are autograd functions; without this, no graph that has one is ever cached.
    if hasattr(functorch, "autograd_cache_allow_custom_autograd_functions"):
        functorch.autograd_cache_allow_custom_autograd_functions = True
    if INDUCTOR in os.environ and not _is_torchs_choice(os.environ[INDUCTOR]):
        return
    path = folder()
    try:
        # Create the folder, and require that only this user can write to it: torch unpickles its files.
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.stat()
        if hasattr(os, "getuid") and found.st_uid != os.getuid():
            raise UserError("it belongs to another user")
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise UserError("others may write to it")
        if shutil.disk_usage(path).free < NEEDED_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (path / "last-used").write_text(f"{time.time():.0f}\n")
    except (OSError, UserError) as problem:
        use_temporary_folder(f"{path} cannot be used ({getattr(problem, 'strerror', None) or problem})", say)
        return
    _use(path)
    _remove_unused(path)


def folder() -> Path:
    """Where compiled code is kept: named by a hash of the versions and the code that it depends on."""
    versions = [platform.python_version(), torch.__version__, str(torch.version.cuda)]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions.append(importlib.metadata.version("triton"))
    digest = hashlib.sha256(" ".join(versions).encode())
    # What torch sees of our kernels is a name; what they compute is in these files.
    for path in sorted((Path(errors.__file__).parent / "nn").rglob("*.py")):
        digest.update(path.read_bytes())
    return cache.cache_folder() / "compiled" / f"torch-{torch.__version__}-{digest.hexdigest()[:12]}"


def use_temporary_folder(why: str, say: Say) -> None:
    """Compile into a folder that ends with this process."""
    path = Path(tempfile.mkdtemp(prefix="seedbed-compiled-"))
    _use(path)
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    say(f"compile cache: {why}; this run compiles into a temporary folder and the next one compiles again")


def is_disk_error(error: BaseException | None) -> bool:
    """Whether a failed compilation was the cache folder's fault: a disk that is full or cannot be written."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK:
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_torchs_choice(path: str) -> bool:
    """Whether torch chose this folder: it sets the variables itself as soon as parts of its compiler are loaded."""
    return os.path.abspath(path).startswith(os.path.join(os.path.abspath(tempfile.gettempdir()), "torchinductor_"))


def _use(path: Path) -> None:
    os.environ[INDUCTOR] = str(path)
    if TRITON not in os.environ or _is_torchs_choice(os.environ[TRITON]) or _set_here:
        os.environ[TRITON] = str(path / "triton")
        _set_here.add(TRITON)


def _remove_unused(current: Path) -> None:
    """Remove folders of other versions that no run has used for two weeks."""
    for path in current.parent.glob("torch-*"):
        with contextlib.suppress(OSError):
            if path != current and time.time() - (path / "last-used").stat().st_mtime > UNUSED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
