"""The exported page: our own files, and ONNX Runtime Web from the user's npm. Nothing comes from a stranger's server at play."""

import contextlib
import html
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from seedbed.errors import UserError

PAGE = Path(__file__).parent / "static" / "play"
PAGE_FILES = ("index.html", "play.css", "page.js", "controls.js", "web.js", "packing.js")
# Tested with this version; another of the same files works too when it is given with --ort.
PACKAGE = "onnxruntime-web@1.30.0"
# The loader for browsers with WebGPU and the smaller one for those without, each with its compiled half.
RUNTIME = (
    "ort.webgpu.min.mjs",
    "ort-wasm-simd-threaded.asyncify.mjs",
    "ort-wasm-simd-threaded.asyncify.wasm",
    "ort.wasm.min.mjs",
    "ort-wasm-simd-threaded.mjs",
    "ort-wasm-simd-threaded.wasm",
)
FETCH_SECONDS = 300
MAX_UNPACKED = 400 << 20


@contextlib.contextmanager
def runtime_files(given: Path | None, fetch: bool) -> Iterator[Path]:
    """The folder that holds ONNX Runtime Web: named, found in ./node_modules, or fetched by npm when asked."""
    if given is not None and fetch:
        raise UserError("--ort names ONNX Runtime Web and --fetch-ort fetches it; use one of them")
    if fetch:
        with tempfile.TemporaryDirectory() as folder:
            yield _fetched(Path(folder))
        return
    found = _inside(given if given is not None else Path("node_modules"))
    if found is None:
        where = f"{given} does not hold ONNX Runtime Web" if given is not None else "the page needs ONNX Runtime Web"
        raise UserError(f"{where}: add --fetch-ort to let npm fetch it (33 MB), or name the npm package's folder with --ort DIR")
    yield found


def write_page(folder: Path, runtime: Path, title: str) -> None:
    """Put page and runtime beside an exported network, and say how to look at it."""
    for name in PAGE_FILES:
        shutil.copyfile(PAGE / name, folder / name)
    page = (PAGE / "index.html").read_text()
    live = '<meta name="backend" content="live">'
    assert live in page and "<title>play " in page
    page = page.replace(live, live.replace("live", "web")).replace("/static/play/", "./").replace('href="/"', 'href="./"')
    (folder / "index.html").write_text(page.replace("<title>play ", f"<title>{html.escape(title)} "))
    (folder / "ort").mkdir(exist_ok=True)
    for name in RUNTIME:
        shutil.copyfile(runtime / name, folder / "ort" / name)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:.0f} MB that any web server can serve; to look at it here:")
    print(f"  python -m http.server --bind 127.0.0.1 --directory {folder} 8000    then open http://127.0.0.1:8000")


def _inside(folder: Path) -> Path | None:
    """The files may be in the folder itself, in the package's dist, or in a node_modules that holds the package."""
    inner = ("", "dist", "onnxruntime-web/dist", "node_modules/onnxruntime-web/dist")
    return next((p for p in map(folder.joinpath, inner) if all((p / name).is_file() for name in RUNTIME)), None)


def _fetched(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        instead = "unpack onnxruntime-web elsewhere and name it with --ort DIR"
        raise UserError(f"--fetch-ort needs npm, which is not installed; {instead}")
    command = [npm, "pack", PACKAGE, "--silent", "--pack-destination", str(folder)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"npm did not fetch {PACKAGE} within {FETCH_SECONDS} s; try again, or use --ort DIR") from None
    packed = list(folder.glob("*.tgz"))
    if done.returncode or not packed:
        messages = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"npm could not fetch {PACKAGE}: {messages[0] if messages else 'it did not say why'}")
    with tarfile.open(packed[0]) as archive:
        wanted = [member for member in archive if Path(member.name).name in RUNTIME and member.isfile()]
        if sum(member.size for member in wanted) > MAX_UNPACKED:
            raise UserError(f"{PACKAGE} is larger than it should be; it was not unpacked")
        archive.extractall(folder, wanted, filter="data")
    found = _inside(folder / "package")
    if found is None:
        raise UserError(f"{PACKAGE} does not hold the files it should; use --ort DIR with version 1.30")
    return found
