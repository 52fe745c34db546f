"""The docs site: the generated reference lists all that the code registers, and the build refuses links that lead nowhere."""

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

DOCS = ROOT / "docs"
CAPTIONS = ["Start", "Recipes", "Train", "Diagnose", "Tune", "Data", "Scale", "Share", "Reference"]


def load_reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference", DOCS / "reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    return load_reference()


@pytest.fixture(scope="module")
def pages(reference: ModuleType) -> dict[str, str]:
    return reference.pages()


def first_cells(page: str) -> set[str]:
    """What the rows of a page's tables are about: the code in their first cells."""
    return {name for line in re.findall(r"^\| (.+?) \|", page, re.MULTILINE) for name in re.findall(r"`([^`]+)`", line)}


def test_every_verb_and_flag_is_listed(pages: dict[str, str]):
    from seedbed.cli import VERBS, parser_of

    for name in VERBS:
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", pages["verbs.md"], re.DOTALL | re.MULTILINE)
        assert section, name
        flags = set(parser_of(name).known_options) - {"-h", "--help", "--runs", "--json", "--dirty"}
        assert flags <= first_cells(section[1]), name
    assert {"-h", "--help", "--runs", "--json", "--dirty"} <= first_cells(pages["verbs.md"])


def test_every_option_of_samples_is_listed(pages: dict[str, str]):
    from seedbed.recipes import names

    assert {name for name in names() if f"### sample of {name}\n" in pages["verbs.md"]} == set(names())
    assert {"--prompt", "--guidance", "--latents", "--optimize-steps"} <= first_cells(pages["verbs.md"])


def test_every_check_is_listed(reference: ModuleType, pages: dict[str, str]):
    from seedbed.checks.registry import all_checks

    listed = re.findall(r"^\| \[(\w+)\]\(\S+\) \| ([^|]+) \| ([^|]+) \|", pages["checks.md"], re.MULTILINE)
    assert [(id, title) for id, title, _ in listed] == [(check.id, check.title) for check in all_checks()]
    assert all(about.strip() for *_, about in listed)
    assert set(reference.CHECK_SENTENCES) == {check.id for check in all_checks() if not check.run.__doc__}


def test_every_event_is_listed(pages: dict[str, str]):
    from seedbed.track.events import KINDS

    listed = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", pages["events.md"], re.MULTILINE))
    assert {kind: KINDS[kind].severity for kind in KINDS if kind in listed} == listed
    tables = [ROOT / "src/seedbed/track/events.toml", *(ROOT / "src/seedbed/recipes").rglob("alarms.toml")]
    known = {kind for path in tables for kind in tomllib.loads(path.read_text())}
    assert {"spike", "mcmc_alpha_drift", "below_copy"} <= known and known <= set(KINDS) & set(listed)


def test_every_exit_code_is_listed(pages: dict[str, str]):
    from seedbed import errors

    codes = {str(value) for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert set(re.findall(r"^\| (\d+) \|", pages["exit-codes.md"], re.MULTILINE)) == codes


def test_every_key_of_every_preset_is_listed(pages: dict[str, str]):
    from seedbed.config import flatten
    from seedbed.launch.slurm_script import Resources
    from seedbed.recipes import find, names

    shared = first_cells(pages["config.md"])
    assert {f"slurm.{key}" for key in flatten(Resources())} <= shared
    for recipe in names():
        page = pages[f"config-{recipe}.md"]
        for preset, make in find(recipe)[0].presets.items():
            assert set(flatten(make())) <= shared | first_cells(page), f"{recipe}/{preset}"
            assert f"### {recipe}/{preset}\n" in page


def test_every_public_name_is_listed(pages: dict[str, str]):
    import seedbed

    assert {name for name in seedbed.__all__ if f"\n## {name}\n" in pages["python.md"]} == set(seedbed.__all__)
    assert " object at 0x" not in pages["python.md"]


def config_classes() -> dict[str, type]:
    """Every dataclass that holds keys, by the name under which its sentences are filed."""
    from seedbed.config import Config
    from seedbed.launch.slurm_script import Resources
    from seedbed.recipes import find, names

    shared = {type(getattr(Config(model=None, data=None), f.name)) for f in dataclasses.fields(Config)}
    found = {kind.__name__: kind for kind in {Config, Resources, *filter(dataclasses.is_dataclass, shared)}}
    waiting = [part for name in names() for make in find(name)[0].presets.values() for part in (make().model, make().data)]
    while waiting:
        one = waiting.pop()
        found[f"{type(one).__module__.removeprefix('seedbed.')}.{type(one).__name__}"] = type(one)
        waiting += [value for f in dataclasses.fields(one) if dataclasses.is_dataclass(value := getattr(one, f.name))]
    return found


def test_every_key_has_one_sentence_and_every_sentence_a_key(reference: ModuleType):
    classes = config_classes()
    keys = {}
    for name, kind in classes.items():
        groups = {f.name for f in dataclasses.fields(kind) if dataclasses.is_dataclass(f.default)} | {"model", "data"}
        keys[name] = {f.name for f in dataclasses.fields(kind)} - groups
    assert {name: set(sentences) for name, sentences in reference.SENTENCES.items()} == keys
    assert all(text.strip() for sentences in reference.SENTENCES.values() for text in sentences.values())


def test_type_default_and_range_are_those_of_the_code(pages: dict[str, str]):
    line = next(line for line in pages["config.md"].splitlines() if line.startswith("| `optim.beta2`"))
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["number", "`0.95`", "0 to 0.99999"]
    line = next(line for line in pages["config.md"].splitlines() if line.startswith("| `budget`"))
    assert "duration" in line and "`none`" in line
    line = next(line for line in pages["config-gpt.md"].splitlines() if line.startswith("| `model.positions`"))
    assert "`rope`" in line and "`learned`" in line, "the choices of a registry are listed"


def test_nav_has_the_nine_parts_and_every_page_once():
    text = (DOCS / "index.md").read_text()
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [re.findall(r"^:caption: (.+)$", tree, re.MULTILINE) for tree in trees] == [[caption] for caption in CAPTIONS]
    entries = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert len(entries) == len(set(entries))
    own = {entry for entry in entries if not entry.startswith("reference/")}
    written = [p.relative_to(DOCS) for p in DOCS.rglob("*") if p.suffix in (".md", ".ipynb") and p.parent.name != "reference"]
    assert own == {str(p.with_suffix("")) for p in written} - {"index"}
    mapped = set(re.findall(r"\]\(([^)]+)\)", text)) | {"index.md"}
    assert {str(p) for p in written} <= mapped, "the map of the start page has them too"


def test_nav_has_every_generated_page(pages: dict[str, str]):
    text = (DOCS / "index.md").read_text()
    assert {f"{name}.md" for name in re.findall(r"^reference/(\S+)$", text, re.MULTILINE)} == set(pages)


def build(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-E", str(folder), str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
def test_build_refuses_dead_links_and_anchors(tmp_path: Path):
    """The site's own settings on two pages: as they are, and with each kind of link that leads nowhere."""
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copytree(DOCS / "_static", docs / "_static")
    shutil.copy2(DOCS / "conf.py", docs)
    (tmp_path / "OUTSIDE.md").write_text("# Outside\n")
    (tmp_path / "outside.py").write_text("pass\n")
    (docs / "page.md").write_text("# Page\n\n## A part\n\ntext\n")
    good = "# Start\n\n[a](page.md) [b](page.md#a-part) [c](../OUTSIDE.md) [d](../outside.py)\n\n```{toctree}\npage\n```\n"
    (docs / "index.md").write_text(good)
    assert (done := build(docs, tmp_path / "out")).returncode == 0, done.stderr
    for bad in ("nowhere.md", "page.md#nowhere", "../NOWHERE.md", "../nowhere.py"):
        (docs / "index.md").write_text(good.replace("[a](page.md)", f"[a]({bad})"))
        done = build(docs, tmp_path / "out")
        assert done.returncode != 0 and "nowhere" in done.stderr.lower(), bad
    (docs / "index.md").write_text(good)
    (docs / "lost.md").write_text("# In no part\n")
    assert "lost.md" in build(docs, tmp_path / "out").stderr
