"""What the README and the pages say is true: their commands run, their links lead somewhere, their keys and verbs exist.

Every `bash` block of the README is executed, in order, in one folder. Lines that call make install the package anew,
so they run on a copy of the tracked files. Every `console` block is executed too, and its quoted lines must be printed. All of
them are in the slow suite; the fast one runs the example.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from seedbed.config import flatten

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text()
GPT_PAGE = (ROOT / "docs" / "gpt.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]


def quick() -> list[str]:
    return [line for line in commands() if not line.startswith("make ")]


def shell(line: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def command_on_path(folder: Path) -> str:
    """A PATH on which `seedbed` is this source tree, whether or not it is installed."""
    folder.mkdir()
    script = folder / "seedbed"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from seedbed.cli import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_readme_has_commands_to_try():
    assert len(quick()) >= 5
    assert all(line.split()[0] in ("make", "seedbed") for line in commands())


def run_all(lines: list[str], tmp_path: Path) -> Path:
    path = command_on_path(tmp_path / "bin")
    folder = tmp_path / "work"
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for line in lines:
        done = shell(line, folder, PATH=path, COLUMNS="120")
        assert done.returncode == 0, f"$ {line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.stdout.strip(), f"`{line}` printed nothing"
        assert "Traceback" not in done.stderr
    return folder


def test_example_of_the_readme_runs(tmp_path: Path):
    first = next(line for line in quick() if "examples/" in line)
    folder = run_all([first], tmp_path)
    (picture,) = (folder / "runs" / "seedling" / "samples").rglob("*.png")
    assert picture.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readme_commands_run(tmp_path: Path):
    folder = run_all(quick(), tmp_path)
    done = shell("seedbed runs diff first second", folder, PATH=command_on_path(tmp_path / "again"))
    assert re.search(r"^optim\.lr +0\.003 +0\.01$", done.stdout, re.MULTILINE), done.stdout
    best = re.search(r"^best evaluation +loss ([\d.]+) +loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert best and abs(float(best[1]) - float(best[2])) > 0.03, "the other setting matters"


def test_second_run_of_the_readme_has_another_setting():
    from seedbed.config import flatten, override
    from seedbed.recipes import find

    runs = [line.split() for line in quick() if line.startswith("seedbed train gpt/demo") and "--name" in line]
    recipe, name = find("gpt/demo")
    configs = [flatten(override(recipe.preset(name), [word for word in words if "=" in word])) for words in runs]
    first, second = configs
    assert [key for key in first if first[key] != second[key]] == ["optim.lr"]
    diff = next(line for line in quick() if line.startswith("seedbed runs diff"))
    assert f"optim.lr {first['optim.lr']:g} and {second['optim.lr']:g}" in diff


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make ")])
def test_make_targets_of_the_readme_exist(line: str):
    done = shell(line.replace("make ", "make -n ", 1), ROOT)
    assert done.returncode == 0, done.stderr


def copy_of_tracked_files(folder: Path) -> Path:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git work tree: there is no telling which files belong")
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_demo_from_a_bare_copy(tmp_path: Path):
    folder = copy_of_tracked_files(tmp_path / "copy")
    done = subprocess.run(["make", "demo"], cwd=folder, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    runs = list((folder / "runs").iterdir())
    assert runs, "the demo left no run"
    assert done.stdout.count("seedbed ") >= 3, "the demo names the next commands to try"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_of_pages_resolve(page: Path):
    text = page.read_text()
    targets = re.findall(r"\]\(([^)#\s]+)[^)\s]*\)", text) + re.findall(r"<img src=\"([^\"]+)\"", text)
    lost = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not lost


def test_tree_of_the_architecture_page_exists():
    page = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"^## The tree\n+```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert block
    parent, seen = "", []
    for line in block[1].splitlines():
        name = line.split()[0]
        inside = line.startswith("  ")
        if not inside:
            parent = name
        seen.append(parent + name if inside else name)
    assert len(seen) > 8
    assert [s for s in seen if not (ROOT / s).exists()] == []
    folders = {f"src/seedbed/{p.name}/" for p in (ROOT / "src/seedbed").iterdir() if p.is_dir() and p.name[0] not in "_."}
    assert folders <= set(seen), "a folder of the package is missing from the tree"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_verbs_on_the_pages_exist(page: Path):
    from seedbed.cli import GROUPS, VERBS

    spoken = re.findall(r"(?:`|^|\$ )(?:\.venv/bin/)?seedbed ((?:runs |data )?[a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    assert set(spoken) <= {*VERBS, *GROUPS}


def known_keys() -> set[str]:
    """Keys of every config, those of the recipes and of the example, and what a Slurm job may ask for."""
    from seedbed.launch.slurm_script import Resources
    from seedbed.recipes import find, names

    example, name = find(str(ROOT / "examples" / "my_recipe.py"))
    configs = [make() for recipe in names() for make in find(recipe)[0].presets.values()]
    keys = {key for config in [*configs, example.preset(name)] for key in flatten(config)}
    return keys | {f"slurm.{key}" for key in flatten(Resources())}


def our_words(page: Path) -> str:
    """The page's text; of the tables that translate from other programs, only our side."""
    lines = page.read_text().splitlines()
    if page.name == "coming-from.md":
        lines = [line.strip("|").rpartition("|")[2] for line in lines]
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_config_keys_on_the_pages_exist(page: Path):
    text, known = our_words(page), known_keys()
    groups = "|".join(sorted({key.partition(".")[0] for key in known if "." in key}))
    set_in_code = re.findall(r"(?:`|seedbed (?:train|resume) [^`\n]*?)([a-z_]+(?:\.[a-z_0-9]+)*)=", text)
    named = re.findall(rf"`((?:{groups})(?:\.[a-z_0-9]+)+)", text)
    files = {word for word in named if word.endswith((".py", ".safetensors", ".md", ".onnx"))}
    python = {"shell", "allow_pickle", "weights_only"}
    assert {*set_in_code, *named} - files - python - {"key"} <= known


def test_readme_table_of_gpt_presets_is_true():
    from seedbed.recipes import find

    reported = re.findall(r"^\| `([\w-]+)` \| ([\d/ ]+) \| (\d+) \| ([^|]+) \| (\d+) x (\d+) \|", GPT_PAGE, re.MULTILINE)
    presets = {name: make() for name, make in find("gpt")[0].presets.items()}
    assert [row[0] for row in reported] == list(presets)
    for name, shape, block, text, batch, accum in reported:
        config = presets[name]
        model = config.model
        assert [int(n) for n in shape.split("/")] == [model.depth, model.heads, model.width], name
        assert (int(block), int(batch), int(accum)) == (config.data.block, config.batch, config.accum), name
        if "random" not in text:
            assert f"`{config.data.tokenizer}`" in text, name


def test_readme_table_of_thinker_presets_is_true():
    from seedbed.recipes import find

    page = (ROOT / "docs" / "thinker.md").read_text()
    reported = re.findall(
        r"^\| `([\w-]+)` \| `(\w+)` \| (\d+) \| `([\d:]+)` \| `([\d:]+)` \| (\d+) x (\d+) \|", page, re.MULTILINE
    )
    presets = {name: make() for name, make in find("thinker")[0].presets.items()}
    assert [row[0] for row in reported] == list(presets)
    for name, task, length, latents, steps, batch, num_steps in reported:
        config = presets[name]
        assert (task, int(length)) == (config.data.task, config.data.length), name
        assert (latents, steps) == (config.model.n_latent, config.model.n_step), name
        assert (int(batch), int(num_steps)) == (config.batch, config.steps), name


# ---- the README as a product page ------------------------------------------------------------------------------------


STORIES = re.findall(r"^```console\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
MEASURED = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]*\(benchmarks/results/(\S+)\)) \|$", README, re.MULTILINE)
TRAINED = re.findall(r"^\| <img src=\"(\S+)\".*?\| `(seedbed train (\w+)/(\w+))`.*?\| (.+?) \| (.+?) \|$", README, re.MULTILINE)


def test_readme_is_one_page_and_its_sentence_describes_the_package():
    assert len(README.splitlines()) < 150
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert README.split("\n\n")[1] == project["description"]
    pictures = re.findall(r"docs/img/[\w-]+\.png", README)
    assert len(pictures) == 6 and all((ROOT / name).stat().st_size < 150_000 for name in pictures)


def numbers(text: str) -> list[tuple[float, int]]:
    """Numbers of a text with the decimals they are given to."""
    found = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text)
    return [(float(one.replace(",", "")), len(one.partition(".")[2])) for one in found]


def figures(value: Any) -> Iterator[float]:
    """Every number of a result, by itself and in per cent, without its sign."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from figures(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (abs(value), 100 * abs(value))


def is_rounding(shown: float, decimals: int, known: list[float]) -> bool:
    return any(abs(shown - one) <= 0.5001 * 10.0**-decimals for one in known)


def test_readme_table_has_at_most_eight_rows():
    assert 5 <= len(MEASURED) <= 8
    assert README.count("benchmarks/results/") == len(MEASURED), "a row of the table could not be read"


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row[4])
def test_every_number_of_the_readme_table_stands_in_a_result(row: tuple[str, ...]):
    """Ours in the result that the row links to, the peer's there or as a constant of the script that made it."""
    _, ours, peers, hardware, name = row
    result = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    known = list(figures(result["figures"]))
    assert numbers(ours) and all(is_rounding(*one, known) for one in numbers(ours)), ours
    script = {"gpt-h200.json": "gpt_gpu.py", "ebt-step-h200.json": "ebt.py"}.get(name)
    constants = (ROOT / "benchmarks" / script).read_text().replace("_", "") if script else ""
    assert all(is_rounding(*one, known) or f"{one[0]:g}" in constants for one in numbers(peers)), peers
    assert ("H200" in hardware) == ("gpu" in result["hardware"])


@pytest.mark.parametrize("row", TRAINED, ids=lambda row: row[2])
def test_numbers_on_what_can_be_trained_stand_on_the_page_of_the_recipe(row: tuple[str, ...]):
    _, _, recipe, _, minutes, result = row
    page = (ROOT / "docs" / f"{recipe}.md").read_text()
    known = [one for one, _ in numbers(page.replace(" two minutes", " 2 min"))]
    assert numbers(result) and {one for one, _ in numbers(minutes + result)} <= set(known)


def test_readme_lists_every_recipe():
    from seedbed.recipes import names

    assert sorted(row[2] for row in TRAINED) == names()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", TRAINED, ids=lambda row: row[2])
def test_every_listed_training_starts(row: tuple[str, ...], tmp_path: Path):
    """The command as it is written, but for its length: two steps with evaluation, sample, save and resume."""
    shorter = " data.frames=3000" if row[2] == "world" else ""  # rendering all frames of the box world takes minutes
    run_all([f"{row[1]} --dry{shorter}"], tmp_path)


def masked(text: str) -> str:
    """A line of output without its numbers, which depend on the machine, and with single spaces."""
    return " ".join(re.sub(r"\d[\d,.]*(e[-+]\d+)?", "#", text).split())


@functools.cache
def lines_of_story(number: int) -> tuple[str, list[str]]:
    """The commands of a story as one script, and the lines that it quotes."""
    lines = STORIES[number].splitlines()
    return "\n".join(line[2:] for line in lines if line.startswith("$ ")), [x for x in lines if not x.startswith(("$ ", "..."))]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(3))
def test_story_of_the_readme_happens(number: int, tmp_path: Path):
    """A story's commands run in one shell and print its quoted lines in their order."""
    script, quoted = lines_of_story(number)
    path = command_on_path(tmp_path / "bin")
    shutil.copytree(ROOT / "examples", tmp_path / "work" / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        ["bash", "-u", "-c", script],
        cwd=tmp_path / "work",
        env={**os.environ, "PATH": path, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    printed = [masked(line) for line in done.stdout.splitlines()]
    assert quoted
    for line in quoted:
        assert masked(line) in printed, f"not printed, or not in this order: {line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        printed = printed[printed.index(masked(line)) + 1 :]
    assert "Traceback" not in done.stderr
    if "7777" in script:
        assert "item 7777 of the data set" in done.stdout


def test_readme_tells_three_stories():
    from seedbed.checks.registry import all_checks

    assert len(STORIES) == 3
    assert all("seedbed" in lines_of_story(number)[0] and lines_of_story(number)[1] for number in range(3))
    assert f"There are {len(all_checks())} such [checks]" in README
    drilled = re.search(r"drills run, (\d+) faults", (ROOT / "docs" / "drills.md").read_text())
    assert drilled and f"{int(drilled[1]):,} faults" in README
