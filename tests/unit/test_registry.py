"""Recipes by name and by path: what is found, what is said when it is not, and what is loaded when."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seedbed import recipes
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.recipes import catalogue, user_files

FILE = '''
"""A recipe of one file."""
from dataclasses import dataclass
from seedbed.config import Config, number

@dataclass(frozen=True)
class Model:
    width: int = number(8, low=1)

def small() -> Config:
    """The first line.

    More lines."""
    return Config(model=Model(), data=None)

def open_data(config):
    return f"data of {config.model.width}"

def build(config, data):
    return f"system on {data}"
'''


def write(folder: Path, text: str = FILE, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# ---- a file of the user's --------------------------------------------------------------------------------------------


def test_recipe_in_a_single_file(tmp_path: Path):
    path = write(tmp_path)
    recipe, preset = recipes.find(str(path))
    assert preset == "small", "the only preset needs no name"
    assert recipe.name == str(path) and recipe.files() == [path]
    config = recipe.preset(preset)
    assert config.model.width == 8
    assert recipe.build(config, recipe.open_data(config)) == "system on data of 8"


def test_recipe_file_name_is_absolute(tmp_path: Path, monkeypatch):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe, _ = recipes.find("./mine.py")
    monkeypatch.chdir("/")
    assert recipes.find(recipe.name)[0].preset("small") == recipe.preset("small")


TWO = (
    FILE
    + """
def gpt3_small() -> Config:
    return small()

def _hidden() -> Config:
    return small()

def helper() -> int:
    return 1

def untyped():
    return small()
"""
)


def test_presets_are_public_functions_that_return_a_config(tmp_path: Path):
    path = write(tmp_path, TWO)
    recipe, preset = recipes.find(str(path))
    assert list(recipe.presets) == ["small", "gpt3-small"] and preset is None
    for typed in ("gpt3-small", "gpt3_small"):
        assert recipes.find(f"{path}:{typed}")[1] == "gpt3-small"
    with pytest.raises(UserError, match="has several presets, name one of: small, gpt3-small"):
        recipe.preset(None)
    with pytest.raises(UserError, match=r"no preset 'smal'; did you mean small.*\?\nthere are: small, gpt3-small"):
        recipes.find(f"{path}:smal")


def test_imported_preset_is_not_listed(tmp_path: Path, monkeypatch):
    write(tmp_path, FILE, "base_recipe_for_test.py")
    path = write(tmp_path, "from base_recipe_for_test import small, open_data, build\n" + FILE.replace("small", "large"))
    recipe, preset = recipes.find(str(path))
    assert list(recipe.presets) == ["large"] == [preset]


ANNOTATIONS = ["Config", "'Config'", "config.Config", "'config.Config'", "Mine", "'Mine'"]


@pytest.mark.parametrize("future", [True, False])
@pytest.mark.parametrize("annotation", ANNOTATIONS)
def test_annotations_may_be_text_and_subclasses(tmp_path: Path, annotation: str, future: bool):
    head = "from __future__ import annotations\n" if future else ""
    text = f"{head}from seedbed import config\nfrom seedbed.config import Config\nclass Mine(Config): pass\n"
    text += f"def one() -> {annotation}:\n    return Config(model=None, data=None)\n"
    assert recipes.find(str(write(tmp_path, text)))[1] == "one"


def test_dataclass_under_future_annotations_takes_overrides(tmp_path: Path):
    from seedbed.config import override

    recipe, preset = recipes.find(str(write(tmp_path, "from __future__ import annotations\n" + FILE.lstrip())))
    assert override(recipe.preset(preset), ["model.width=16"]).model.width == 16


def test_recipe_file_is_reloaded_only_after_an_edit(tmp_path: Path):
    path = write(tmp_path)
    first, second = recipes.find(str(path))[0].preset("small"), recipes.find(str(path))[0].preset("small")
    assert first == second and type(first.model) is type(second.model)
    stamp = path.stat()
    path.write_text(FILE.replace("number(8", "number(9"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert recipes.find(str(path))[0].preset("small").model.width == 9, "an edit within the same second counts"
    assert not (tmp_path / "__pycache__").exists()


def test_recipe_files_of_one_name_are_distinct(tmp_path: Path):
    paths = []
    for name, width in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        paths.append(write(tmp_path / name, FILE.replace("number(8", f"number({width}")))
    assert [recipes.find(str(path))[0].preset("small").model.width for path in paths] == [1, 2]


def test_module_beside_a_recipe_file_can_be_imported(tmp_path: Path):
    write(tmp_path, "WIDTH = 11\n", "helper_for_test.py")
    write(tmp_path, "raise RuntimeError('this is not the json of Python')\n", "json.py")
    path = write(tmp_path, "import json\nfrom helper_for_test import WIDTH\n" + FILE.replace("number(8", "number(WIDTH"))
    assert recipes.find(str(path))[0].preset("small").model.width == 11


BROKEN = [
    ("def f(:\n    pass\n", r"mine\.py:1: "),
    ("x = 1\n\n  y = 2\n", r"mine\.py:3: unexpected indent"),
    ("import no_such_module_here\n", r"mine\.py:1: ModuleNotFoundError: No module named 'no_such_module_here'"),
    ("from seedbed.config import Nothing\n", r"mine\.py:1: ImportError: cannot import name 'Nothing'"),
    ("x = 1\n1 / 0\n", r"mine\.py:2: ZeroDivisionError"),
    (
        "from seedbed import System\nclass S(System):\n    def players(self): ...\n",
        r"py:2: S\.players is now called named_opt",
    ),
    ("from seedbed import System\nclass S(System):\n    lesson = 'a'\n", r"mine\.py:2: S\.lesson is now called stage_metric"),
    ("import json\n\njson.loads('{')\n", r"mine\.py:3: JSONDecodeError"),
    ("raise SystemExit(3)\n", r"mine\.py:1: SystemExit"),
    ("raise ValueError('two\\nlines')\n", r"mine\.py:1: ValueError: two$"),
    ("", "has no preset: write a function annotated"),
    ("x = '\xe9'\n", "mine.py"),
]


@pytest.mark.parametrize(("text", "printed"), BROKEN)
def test_broken_recipe_file_is_reported_with_line_and_reason(tmp_path: Path, text: str, printed: str):
    path = tmp_path / "mine.py"
    path.write_bytes(text.encode("latin-1"))
    before = set(sys.modules)
    with pytest.raises(UserError, match=printed) as caught:
        recipes.find(str(path))
    assert len(str(caught.value).splitlines()) <= 2
    if text:
        assert not [name for name in set(sys.modules) - before if name.startswith("seedbed_recipe")], (
            "no half-loaded module stays"
        )


@pytest.mark.parametrize("name", ["gone.py", "gone.py:small", "sub/gone.py", "folder.py"])
def test_unreadable_recipe_file_is_named(tmp_path: Path, monkeypatch, name: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UserError, match=r"recipe file .*\.py cannot be read"):
        recipes.find(name)


@pytest.mark.parametrize("missing", ["open_data", "build"])
def test_missing_recipe_function_is_reported_on_use(tmp_path: Path, missing: str):
    recipe, preset = recipes.find(str(write(tmp_path, FILE.replace(f"def {missing}(", "def other("))))
    config = recipe.preset(preset)
    with pytest.raises(UserError, match=f"defines no `{missing}`"):
        recipe.open_data(config) if missing == "open_data" else recipe.build(config, None)


def test_error_in_a_recipe_file_is_located(tmp_path: Path):
    path = write(tmp_path, FILE.replace('return f"data of', '1 / 0; return f"data of'))
    recipe, preset = recipes.find(str(path))
    config = recipe.preset(preset)
    with pytest.raises(ZeroDivisionError) as caught:
        recipe.open_data(config)
    place = user_files.place_of(caught.value)
    assert re.fullmatch(rf"by your recipe, {re.escape(str(path))}:\d+, in open_data\n  +1 / 0; return .*", place)
    try:
        {}["x"]
    except KeyError as error:
        assert user_files.place_of(error) == ""


# ---- the packages ----------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe_packages(tmp_path: Path, monkeypatch) -> Path:
    """Another folder of recipe packages in place of our own."""
    for name, body in {
        "alpha": "def tiny() -> Config:\n    'Smallest.'\n    return Config(model=None, data=None)\n",
        "beta": "def one() -> Config:\n    return Config(model=None, data=None)\ndef two_b() -> Config:\n    return one()\n",
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "presets.py").write_text("from seedbed.config import Config\n" + body)
        (folder / "data.py").write_text("def open_data(config):\n    return 'data'\n")
        (folder / "system.py").write_text("def build(config, data):\n    return ('system', data)\n")
    (tmp_path / "not_a_recipe").mkdir()
    (tmp_path / "stray.py").touch()
    (tmp_path / "_private").mkdir()
    (tmp_path / "_private" / "__init__.py").touch()
    (tmp_path / "_private" / "presets.py").touch()
    monkeypatch.setattr(recipes, "__path__", [str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("seedbed.recipes.alpha", "seedbed.recipes.beta"))]:
        del sys.modules[name]


def test_recipe_packages_are_found_by_listing(recipe_packages: Path):
    assert recipes.names() == ["alpha", "beta"]
    assert recipes.find("alpha/tiny")[1] == "tiny" == recipes.find("alpha")[1]
    assert recipes.find("beta")[1] is None
    assert recipes.find("beta/two_b")[1] == "two-b"
    assert catalogue.describe("alpha") == {"tiny": "Smallest."}
    assert [p.name for p in recipes.find("alpha")[0].files()] == ["__init__.py", "data.py", "presets.py", "system.py"]


def test_recipe_modules_are_loaded_lazily(recipe_packages: Path):
    recipe, preset = recipes.find("alpha/tiny")
    assert "seedbed.recipes.alpha.data" not in sys.modules and "seedbed.recipes.alpha.system" not in sys.modules
    config = recipe.preset(preset)
    assert isinstance(config, Config)
    assert recipe.build(config, recipe.open_data(config)) == ("system", "data")


UNKNOWN = [
    ("alhpa", r"no recipe 'alhpa'; did you mean alpha\?\nthere are: alpha, beta"),
    ("zzz/tiny", r"no recipe 'zzz'\nthere are: alpha, beta"),
    ("", r"no recipe ''\nthere are: alpha, beta"),
    ("alpha/tony", r"alpha has no preset 'tony'; did you mean tiny\?\nthere are: tiny"),
    ("alpha/tiny/x", r"alpha has no preset 'tiny/x'"),
    ("beta/", None),
    ("../alpha/tiny", r"no recipe '\.\.'"),
    ("not_a_recipe/x", "no recipe 'not_a_recipe'"),
    ("os", "no recipe 'os'"),
    ("stray", "no recipe 'stray'"),
    ("_private", "no recipe '_private'"),
]


@pytest.mark.parametrize(("name", "printed"), UNKNOWN)
def test_unknown_recipe_name_suggests_the_nearest(recipe_packages: Path, name: str, printed: str | None):
    if printed is None:
        assert recipes.find(name)[1] is None
        return
    with pytest.raises(UserError, match=printed) as caught:
        recipes.find(name)
    assert len(str(caught.value).splitlines()) <= 2


def test_broken_recipe_package_does_not_hide_the_others(recipe_packages: Path):
    (recipe_packages / "beta" / "presets.py").write_text("1 / 0\n")
    assert catalogue.describe("alpha") == {"tiny": "Smallest."}
    assert catalogue.describe("beta") == {"?": "does not load: ZeroDivisionError: division by zero"}


def test_listing_recipes_loads_no_torch():
    code = (
        "import sys; from seedbed import recipes\n"
        "for name in recipes.names():\n"
        "    recipe, _ = recipes.find(name)\n"
        "    [make() for make in recipe.presets.values()]\n"
        "print(sorted({'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert shown.stdout.strip() == "[]", shown.stderr


def test_presets_have_docstrings():
    for name in recipes.names():
        for preset, text in catalogue.describe(name).items():
            assert preset != "?" and text, f"{name}/{preset}: {text}"


@pytest.mark.parametrize("name", ["gpt", "flow", "world", "thinker", "ebt"])
def test_demo_presets_use_the_available_device(name: str):
    config = recipes.find(f"{name}/demo")[0].preset("demo")
    assert (config.device, config.precision, config.capture, config.compile) == ("auto", "fp32", "auto", "off")


@pytest.mark.parametrize("name", recipes.names())
def test_playable_declaration_equals_the_capability(name: str):
    """Pages offer a player without loading torch, by a declaration; the system decides whether it is right."""
    from seedbed.train.capabilities import Playable
    from seedbed.train.system import System

    recipe, _ = recipes.find(name)
    module = sys.modules[recipe.function("system", "build").__module__]
    systems = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, System) and one is not System]
    assert systems and recipe.is_playable == any(issubclass(one, Playable) for one in systems)
