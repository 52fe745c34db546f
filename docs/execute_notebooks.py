"""Executes docs/notebooks and writes the outputs in a tidy form: `python docs/execute_notebooks.py [NAME ...]`.

On one CPU thread, so that numbers change only where the code does. `problems` says what must not be committed; tests use it too.
"""

import base64
import io
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image

FOLDER = Path(__file__).parent / "notebooks"
SECONDS = 120
MAX_BYTES, MAX_TOTAL = 150_000, 600_000
COLOURS = 64
INLINE = "module://matplotlib_inline.backend_inline"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # for `!seedbed`
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": INLINE, "PATH": PATH}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
# Absolute paths, home folders, and addresses of objects.
OF_A_MACHINE = re.compile(r"(?<![\w.:/])/(?!/)[A-Za-z_][\w.-]*/[\w./-]+|[A-Z]:\\\\|~/|0x[0-9a-f]{8,}")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def execute(notebook: Any, folder: Path) -> None:
    """All cells in a fresh kernel; the first error is raised."""
    nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute(env={**os.environ, **ENVIRONMENT})


def tidy(notebook: Any) -> None:
    """What differs from one execution to the next without a reason is left out, and pictures get few colours."""
    notebook.metadata = nbformat.from_dict(METADATA)
    number = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type != "code":
            continue
        number += 1
        cell.execution_count = number
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
            if "image/png" in (data := output.get("data", {})):
                output.data = nbformat.from_dict({"image/png": small(data["image/png"])})
                output.metadata = nbformat.from_dict({})


def small(png: str) -> str:
    """The same picture with at most 64 colours and without metadata."""
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        reduced = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    out = io.BytesIO()
    reduced.save(out, format="png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def texts(cell: Any) -> list[str]:
    """What a cell printed, showed as text, or raised."""
    outputs = cell.get("outputs", [])
    shown = [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return [*shown, *("\n".join(output.get("traceback", [])) for output in outputs)]


def num_pictures(cell: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


def prose(source: str) -> str:
    """Text without code and without the targets of links."""
    return re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", source, flags=re.DOTALL)


def problems(notebook: Any) -> list[str]:
    """Why these outputs should not be committed."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    printed = "\n".join(text for cell in code for text in texts(cell))
    known = set(NUMBER.findall(printed)) | set(NUMBER.findall("\n".join(cell.source for cell in code)))
    said = {word for cell in notebook.cells if cell.cell_type == "markdown" for word in NUMBER.findall(prose(cell.source))}
    found = [f"the text says {word}, which no cell prints or sets" for word in sorted(said - known)]
    found += [f"an output names a place of a machine: {place}" for place in OF_A_MACHINE.findall(printed)]
    found += ["an output holds control codes"] * ("\x1b" in printed)
    found += [f"cell {cell.id} printed to stderr" for cell in code for out in cell.outputs if out.get("name") == "stderr"]
    found += [f"cell {cell.id} raised an error" for cell in code for out in cell.outputs if out.output_type == "error"]
    if code and [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("cells were not executed in their order; run docs/execute_notebooks.py")
    if (size := len(nbformat.writes(notebook).encode())) > MAX_BYTES:
        found.append(f"{size:,} bytes; at most {MAX_BYTES:,}")
    return found


def main(wanted: list[str]) -> int:
    wrong = 0
    for name in wanted or names():
        path, began = FOLDER / f"{name}.ipynb", time.monotonic()
        notebook = read(path)
        execute(notebook, FOLDER)
        tidy(notebook)
        nbformat.write(notebook, path)
        print(f"{name}: {time.monotonic() - began:.0f} s, {path.stat().st_size:,} bytes")
        found = problems(notebook)
        wrong += len(found)
        print(*(f"  {line}" for line in found), sep="\n", end="\n" if found else "")
    total = sum((FOLDER / f"{name}.ipynb").stat().st_size for name in names())
    print(f"{total:,} bytes in all; at most {MAX_TOTAL:,}")
    return 1 if wrong or total > MAX_TOTAL else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
