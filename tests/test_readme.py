"""What the README and the pages say is true: their commands run, their links lead somewhere, their keys and verbs exist.

Every `bash` block of the README is executed, in order, in one folder. Lines that call make install the package anew,
so they run on a copy of the tracked files. Both are in the slow suite; the fast one runs the example.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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
    run_all(quick(), tmp_path)


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
    targets = re.findall(r"\]\(([^)#\s]+)\)", page.read_text())
    lost = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not lost


def test_readme_tree_exists():
    block = re.search(r"^## The tree\n+```text\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
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
