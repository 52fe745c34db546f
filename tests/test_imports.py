"""The import directions of the design, read from the source, and what the quick commands are allowed to load."""

import ast
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

SRC = ROOT / "src"
STANDARD = set(sys.stdlib_module_names)

# What a folder (or file) of the package may import from the rest of it. Its own modules are always allowed.
# "recipes" alone means the finder in recipes/__init__.py and recipes/saved.py, never a named recipe.
ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "cache": set(),
    "trust": {"errors", "track.files"},
    "isolated": set(),
    "nn": {"errors"},
    "data": {"errors", "cache", "config", "track.files", "nn.rng"},
    "dist": {"errors", "config"},
    "train": {"errors", "cache", "config", "nn", "data", "dist", "track"},
    "track": {"errors", "config"},
    "report": {"errors", "config", "data", "track"},
    "tune": {"errors", "config", "trust", "nn", "data", "dist", "train", "track", "report", "recipes"},
    "checks": {"errors", "cache", "config", "nn", "data", "train", "track", "report", "recipes"},
    "serve": {"errors", "config", "isolated", "data", "train", "track", "report", "recipes", "launch", "tune.sweep", "inference"},
    "launch": {"errors", "config", "trust", "isolated", "data", "dist", "train", "track", "report", "recipes", "tune", "checks"}
    | {"inference"},
    "inference": {"errors", "config", "data", "train", "track", "recipes", "report.model_card"},
    "publish": {"errors", "config", "track", "train", "report", "inference"},
    "recipes": {"errors", "cache", "config", "trust", "nn", "data", "train", "track.events", "report.heatmap"},
    "api": {"errors", "config", "track", "report", "recipes", "launch", "tune", "inference"},
    "__init__": {"errors", "config", "data", "train", "checks", "api"},
    "pytest_plugin": {"checks"},
    "__main__": {"cli"},
    "drills": {"errors", "config", "isolated", "data", "train", "track", "report", "recipes", "launch", "serve"},
    "cli": {"errors", "config", "data", "train", "track", "report", "tune", "checks", "serve", "launch", "recipes", "drills"}
    | {"inference", "publish"},
}
# The registry of recipes; all else in the folder is a named one.
REGISTRY = {"recipes", "recipes.catalogue", "recipes.saved", "recipes.user_files"}
HEAVY = {"torch", "matplotlib", "safetensors", "tokenizers", "seedbed.train", "seedbed.nn"}


def modules() -> dict[str, Path]:
    """Dotted name to file, for every module of the package."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, top_only: bool = False) -> Iterator[str]:
    """Dotted names that a module imports; with `top_only`, only what importing it executes."""
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _walk(_tree(path), top_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _walk(tree: ast.AST, top_only: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if top_only and (inside or typing_only):
            continue
        yield node
        yield from _walk(node, top_only)


def layer(name: str) -> str:
    """The folder or file right under the package that a module belongs to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def violation(importer: str, imported: str) -> str | None:
    """Why `importer` may not import `imported`, or None when it may."""
    if not imported.startswith("seedbed"):
        return None
    source, target = layer(importer), layer(imported)
    if target == "__init__":
        return "import the module that holds the name, not the package's front door"
    if source == target:
        return _between_recipes(importer, imported) if source == "recipes" else None
    if source not in ALLOWED:
        return f"`{source}` has no rule; add it to ALLOWED with the design in mind"
    tail = imported.removeprefix("seedbed.")
    if target == "recipes" and tail not in REGISTRY and "recipes" in ALLOWED[source]:
        return "a named recipe; find it through seedbed.recipes"
    if any(tail == rule or tail.startswith(f"{rule}.") for rule in ALLOWED[source]):
        return None
    return f"`{source}` may import {sorted(ALLOWED[source]) or 'nothing of the package'}"


def _between_recipes(importer: str, imported: str) -> str | None:
    own, other = importer.split(".")[2:3], imported.split(".")[2:3]
    if own == ["saved"] or other == ["saved"]:  # recipes of saved runs, for whoever opens them
        return None if own == ["saved"] else "recipes do not open runs"
    if "user_files" in (*own, *other):  # the finder's other half
        return None if not own or not other else "only the finder loads files"
    if not own:
        return "the finder names no recipe" if other not in ([], ["catalogue"]) else None  # the catalogue words its errors
    return None if other in ([], own) else "one recipe does not lean on another"


def test_every_import_follows_the_design():
    wrong = [
        f"{name} imports {target}: {reason}"
        for name in MODULES
        for target in imports(name)
        if (reason := violation(name, target)) is not None
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("seedbed.nn.attention", "seedbed.train.engine"),
        ("seedbed.nn.attention", "seedbed.config"),
        ("seedbed.train.loop", "seedbed.recipes.gpt.model"),
        ("seedbed.train.loop", "seedbed.recipes"),
        ("seedbed.track.run", "seedbed.recipes.gpt.presets"),
        ("seedbed.tune.plan", "seedbed.recipes.gpt.system"),
        ("seedbed.data.feed", "seedbed.train.system"),
        ("seedbed.data.store", "seedbed.track.run"),
        ("seedbed.recipes.gpt.system", "seedbed.recipes.flow.model"),
        ("seedbed.recipes", "seedbed.recipes.gpt.presets"),
        ("seedbed.train.loop", "seedbed.cli"),
        ("seedbed.launch.local", "seedbed.cli"),
        ("seedbed.config", "seedbed.train.optim"),
        ("seedbed.nn.layers", "seedbed"),
        ("seedbed.novelty.thing", "seedbed.config"),
    ],
)
def test_import_in_the_wrong_direction_is_caught(importer: str, imported: str):
    assert violation(importer, imported) is not None


SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_names_that_scripts_import_exist(path: Path):
    """A script is not run by a test, so that a name that moved would be noticed by its next user only."""
    from_package = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    missing = [
        f"{node.module}.{name.name}"
        for node in from_package
        if (node.module or "").split(".")[0] in ("seedbed", *(script.stem for script in SCRIPTS))
        for name in node.names
        if not _exists(str(node.module), name.name)
    ]
    assert not missing


def _exists(module: str, name: str) -> bool:
    try:
        if module.startswith("seedbed"):
            return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError:
        return False
    tree = ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())
    return name in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {getattr(n, "name", "") for n in ast.walk(tree)}


def test_command_line_is_imported_by_the_entry_point_only():
    users = {name for name in MODULES if "seedbed.cli" in set(imports(name)) and layer(name) not in ("cli", "__main__")}
    assert not users


def test_nn_needs_only_torch():
    # Triton comes with torch's CUDA builds and is imported where there is a device for it.
    wrong = {
        f"{name} imports {target}"
        for name in MODULES
        if layer(name) == "nn"
        for target in imports(name)
        if target.split(".")[0] not in STANDARD | {"torch", "triton", "seedbed"}
    }
    assert not wrong


def at_import(start: str) -> dict[str, str]:
    """Every module that importing `start` loads, by reading, with the module that asked for it."""
    reached, waiting = {start: ""}, [start]
    while waiting:
        name = waiting.pop()
        for target in imports(name, top_only=True):
            parents = [".".join(target.split(".")[:n]) for n in range(1, target.count(".") + 2)]
            for found in parents:
                if found not in reached:
                    reached[found] = name
                    if found in MODULES:
                        waiting.append(found)
    return reached


LIGHT = ["seedbed", "seedbed.cli", "seedbed.config", "seedbed.recipes", "seedbed.track.run"]
LIGHT += [name for name in MODULES if name.startswith("seedbed.recipes.") and name.endswith(".presets")]


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_load_nothing_heavy(name: str):
    chain = {heavy: asked for heavy, asked in at_import(name).items() if heavy in HEAVY}
    assert not chain, f"importing {name} loads {chain}"


QUICK = [(), ("--help",), ("--version",), ("runs", "list"), ("runs", "list", "--json"), ("runs", "--help"), ("journal",)]


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_quick_commands_never_load_torch(seedbed, arguments: tuple[str, ...]):
    done = seedbed(*arguments, python=("-X", "importtime"))
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "seedbed.cli" in loaded, "the listing of imports was not read"
    assert not loaded & HEAVY


def test_package_import_is_light():
    code = "import sys, seedbed; print(sorted(set(sys.modules) & {'torch', 'numpy', 'matplotlib', 'rich'}))"
    shown = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
