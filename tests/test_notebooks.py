"""The notebooks of the docs run as they are, and what is committed with them is what they print and draw."""

import copy
import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import ROOT
from retired_words import retired_prose

FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def load_script() -> ModuleType:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    spec = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs" / "execute_notebooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script()


def test_notebooks_are_one_per_recipe_and_first_steps(script: ModuleType):
    from seedbed.recipes import names

    assert {*names(), "first-steps"} == set(NAMES) == set(script.names())


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook_is_short_and_tidy(name: str, script: ModuleType):
    notebook = script.read(FOLDER / f"{name}.ipynb")
    assert 8 <= len(notebook.cells) <= 15
    assert script.problems(notebook) == []
    text = "\n".join(script.prose(cell.source) for cell in notebook.cells if cell.cell_type == "markdown")
    assert not list(retired_prose(iter([(1, text)])))
    again = copy.deepcopy(notebook)
    script.tidy(again)
    assert {**again, "cells": []} == {**notebook, "cells": []}, "metadata differs; run docs/execute_notebooks.py"


def test_notebooks_are_small_together(script: ModuleType):
    assert sum((FOLDER / f"{name}.ipynb").stat().st_size for name in NAMES) <= script.MAX_TOTAL


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_and_draws_what_is_committed(
    name: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copy2(FOLDER / f"{name}.ipynb", tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    committed, notebook = script.read(FOLDER / f"{name}.ipynb"), script.read(tmp_path / f"{name}.ipynb")
    for cell in notebook.cells:
        cell.pop("outputs", None) is None or cell.update(outputs=[])
    script.execute(notebook, tmp_path)
    script.tidy(notebook)
    for old, new in zip(committed.cells, notebook.cells, strict=True):
        assert script.num_pictures(new) == script.num_pictures(old), new.source
        assert any(map(str.strip, script.texts(new))) == any(map(str.strip, script.texts(old))), new.source
    assert not [line for line in script.problems(notebook) if not line.startswith("the text says")]
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.ipynb", "temporary"}, "runs belong in the temporary folder"


def notebook_of(script: ModuleType, source: str = "", text: str = "", **output: Any) -> Any:
    """One text cell, and one code cell with an output."""
    from nbformat import v4

    shown = v4.new_output("stream", **{"name": "stdout", "text": text, **output})
    code = v4.new_code_cell("print(12)", outputs=[shown], execution_count=1)
    return v4.new_notebook(cells=[v4.new_markdown_cell(source), code])


PLACE = "/".join(("", "srv", "someone", "runs"))  # split so that no test finds this file
WRONG = [
    ({"text": f"in {PLACE}"}, "a place of a machine"),
    ({"text": f"'{PLACE}/one'"}, "a place of a machine"),
    ({"text": "<object at 0x7f12345678ab>"}, "a place of a machine"),
    ({"text": "\x1b[2Kresumed"}, "control codes"),
    ({"source": "It costs 3.5 nats.", "text": "3.4 nats"}, "the text says 3.5"),
    ({"source": "It takes 97 % of them."}, "the text says 97"),
    ({"name": "stderr", "text": "warning"}, "printed to stderr"),
    ({"text": "x" * 150_001}, "bytes; at most"),
]


@pytest.mark.parametrize(("given", "says"), WRONG, ids=[says for _, says in WRONG])
def test_problem_of_a_notebook_is_found(given: dict[str, str], says: str, script: ModuleType):
    (problem,) = script.problems(notebook_of(script, **given))
    assert says in problem


@pytest.mark.parametrize("text", ["runs/one/report.md", "a / b", "1/24", "and/or", "3.5 nats"])
def test_ordinary_output_of_a_notebook_is_no_problem(text: str, script: ModuleType):
    assert script.problems(notebook_of(script, "It prints 12, and `99` is code ([page](page-7.md)).", text)) == []


def test_cells_out_of_order_are_a_problem(script: ModuleType):
    notebook = notebook_of(script)
    notebook.cells[-1].execution_count = 4
    assert any("in their order" in line for line in script.problems(notebook))


def test_tidy_notebook_has_no_trace_of_its_execution(script: ModuleType):
    notebook = notebook_of(script)
    notebook.metadata["kernelspec"] = {"name": os.uname().nodename}
    notebook.cells[-1].metadata["execution"] = {"iopub.execute_input": "2026-01-01T00:00:00Z"}
    notebook.cells[-1].execution_count = 9
    script.tidy(notebook)
    assert notebook.cells[-1].execution_count == 1 and notebook.cells[-1].metadata == {}
    assert json.loads(json.dumps(notebook.metadata)) == script.METADATA
