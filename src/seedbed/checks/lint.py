"""Rules on the syntax tree of a recipe: known mistakes, each with its reason and its fix."""

from __future__ import annotations

import ast
import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ALLOW = "# check: allow"
_DEVICES = {"cpu", "cuda", "mps", "xpu"}
_STEP, _LOOKUP = {"loss", "update", "forward"}, {"locate", "batch", "__getitem__"}
_EMPTY = ("[]", "{}", "list()", "dict()", "set()")

# What is wrong, why, the fix and the severity, by the name of a rule. A rule yields what is filled into the first of them.
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
Found = Iterator[tuple[object, ...]]


def lint(path: Path) -> Iterator[Hit]:
    """Every hit of every rule in a file, except lines marked as intended."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node, scope in _scoped_nodes(ast.parse(text), Scope()):
        line = getattr(node, "lineno", 0)
        if line and ALLOW not in lines[line - 1]:
            for rule in RULES:
                texts = TEXTS[rule.__name__]
                what = (texts["what"].format(*values) for values in rule(node, scope))
                yield from (Hit(path, line, **{**texts, "what": seen}) for seen in what)


@dataclass(frozen=True)
class Hit:
    """One faulty line."""

    path: Path
    line: int
    what: str
    why: str
    fix: str
    severity: str


@dataclass(frozen=True)
class Scope:
    """The enclosing function of a node, and the buffers that its class registers."""

    function: str = ""
    buffers: frozenset[str] = frozenset()
    in_class: bool = False


def _scoped_nodes(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    for child in ast.iter_child_nodes(node):
        yield child, scope
        inner = scope
        if isinstance(child, ast.ClassDef):
            inner = Scope("", frozenset(_buffers(child)), True)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = Scope(scope.function or child.name, scope.buffers, False)
        yield from _scoped_nodes(child, inner)


def _buffers(node: ast.ClassDef) -> Iterator[str]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("register_buffer") and call.args:
            name = call.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def tuple_assert(node: ast.AST, scope: Scope) -> Found:
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts:
        yield ()


def device_as_text(node: ast.AST, scope: Scope) -> Found:
    if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
        return
    sides = [node.left, *node.comparators]
    texts = [s for s in sides if isinstance(s, ast.Constant) and s.value in _DEVICES]
    devices = [s for s in sides if isinstance(s, ast.Attribute) and s.attr == "device"]
    # A config's device is a string; a tensor's or an engine's is not.
    if texts and devices and not ast.unparse(devices[0].value).endswith(("config", "cfg", "args", "given")):
        yield (ast.unparse(node),)


def legacy_tensor(node: ast.AST, scope: Scope) -> Found:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and len(node.args) == 2:
        kind = ast.unparse(node.args[1])
        if kind.startswith("torch.") and kind.endswith("Tensor") and kind != "torch.Tensor":
            yield (kind,)


def truncated_pixels(node: ast.AST, scope: Scope) -> Found:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    cast = node.func.attr == "byte" or (node.func.attr == "to" and any("uint8" in ast.unparse(a) for a in node.args))
    inner = ast.unparse(node.func.value)
    if cast and "255" in inner and "round" not in inner and "0.5" not in inner:
        yield ()


def waits_for_device(node: ast.AST, scope: Scope) -> Found:
    if scope.function not in _STEP or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    if node.func.attr in ("item", "cpu", "tolist", "numpy") and not node.args:
        yield node.func.attr, scope.function


def buffer_written(node: ast.AST, scope: Scope) -> Found:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for target in targets:
        if not isinstance(target, ast.Subscript) or scope.function not in _STEP:
            continue
        owner = target.value
        if isinstance(owner, ast.Attribute) and ast.unparse(owner.value) == "self" and owner.attr in scope.buffers:
            yield owner.attr, scope.function


def shared_state(node: ast.AST, scope: Scope) -> Found:
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if scope.in_class and value is not None and ast.unparse(value) in _EMPTY:
        yield (ast.unparse(node),)


def literal_modulo(node: ast.AST, scope: Scope) -> Found:
    if scope.function not in _LOOKUP or not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
        return
    if isinstance(node.right, ast.Constant) and isinstance(node.right.value, int) and not isinstance(node.left, ast.Constant):
        yield ast.unparse(node), scope.function, node.right.value


def unsafe_load(node: ast.AST, scope: Scope) -> Found:
    if not isinstance(node, ast.Call):
        return
    name, words = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
    unsafe = name in ("pickle.load", "pickle.loads", "joblib.load", "dill.load") or words.get("allow_pickle") == "True"
    if unsafe or (name == "torch.load" and words.get("weights_only") != "True"):
        yield (name,)


def misspelt_grad(node: ast.AST, scope: Scope) -> Found:
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if not isinstance(target, ast.Attribute) or target.attr in ("requires_grad", "requires_grad_"):
            continue
        if difflib.SequenceMatcher(None, target.attr, "requires_grad").ratio() > 0.85:
            yield (target.attr,)


RULES = (
    tuple_assert, device_as_text, legacy_tensor, truncated_pixels, waits_for_device,
    buffer_written, shared_state, literal_modulo, unsafe_load, misspelt_grad,
)  # fmt: skip
