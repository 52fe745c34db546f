"""`seedbed publish`: a run's export, model card, sample and plot as one commit in a repository on the Hugging Face Hub.

What --dry lists is sent and nothing else. Settings and facts of the data lose the folders of this machine.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from seedbed import inference
from seedbed.config import digest_values, flat
from seedbed.errors import EXIT_OK, UserError
from seedbed.report import model_card, run_report
from seedbed.track.run import full_name
from seedbed.track.text import clip, one_line, size
from seedbed.train.export_onnx import needs

_TOKEN = "run `hf auth login`, or set HF_TOKEN to a token with write access (huggingface.co/settings/tokens)"
_READ = "settings, samples and a few held-out items of the data are among them: read it once before you publish it"


def publish(root: Path, run_name: str, target: str, form: str, checkpoint: str, *, private: bool, dry: bool) -> int:
    """List what is published, and upload it; `dry` prints the model card instead and contacts nothing."""
    repo = target.removeprefix("hub:")
    if not re.fullmatch(r"hub:[a-zA-Z0-9][\w.-]*/[a-zA-Z0-9][\w.-]*", target, re.ASCII):
        raise UserError(f"--to {target} is not of the form hub:USER/NAME, such as hub:me/tiny-gpt")
    api = None if dry else _api()
    trained = inference.load(root, run_name, checkpoint, "cpu", dtype="" if form == "files" else "float32")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "export")
        _write(trained, folder, repo, form, checkpoint)
        found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        for name, path in found.items():
            print(f"{path.stat().st_size:>14,}  {name}")
        what = f"{len(found)} files, {size(sum(path.stat().st_size for path in found.values()))}"
        if form == "files" and (recipe := trained.run.config_json()["recipe"]).endswith(".py"):
            print(f"{Path(recipe).name} is not published: whoever loads these weights needs that file from you")
        if api:
            _upload(api, repo, found, private)
            print(f"published {what}: {api.endpoint}/{repo}")
        else:
            print(f"{what}, nothing was sent; {_READ}\n\n{found['README.md'].read_text(encoding='utf-8')}", end="")
    return EXIT_OK


def _write(trained: inference.TrainedModel, folder: Path, repo: str, form: str, checkpoint: str) -> None:
    """Write all that is published into a new folder."""
    run, shown = trained.run, []
    config, events = run.config_json(), run.events()
    if not events:
        raise UserError(f"{run.path} has no record of its training, which the model card is made of; publish the run itself")
    trained.export(folder, to=form)
    for path in filter(Path.is_file, (folder / "config.json", folder / inference.INFERENCE / "data.json")):
        known = _shortened(json.loads(path.read_text(encoding="utf-8")))
        if "hash" in known:
            known["hash"] = digest_values(flat(known["config"]))
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    title = model_card.without_folders(f"{run.name} · {full_name(config['recipe'], config['preset'])}")
    if picture := run_report.draw(title, run.rows(), events):  # drawn again: the title of the run's own may hold a path
        shown.append(Path(run_report.PICTURE))
        (folder / "plots").mkdir()
        (folder / shown[0]).write_bytes(picture["png"])
    sample = next((event for event in reversed(events) if event.get("kind") == "sample"), {})
    for path in (Path(run.path, str(name)).resolve() for name in sample.get("files") or []):
        if path.suffix in (".png", ".jpg", ".gif") and path.is_relative_to(run.path.resolve() / "samples") and path.is_file():
            shown.append(Path("samples", path.name))
            (folder / "samples").mkdir(exist_ok=True)
            shutil.copyfile(path, folder / shown[-1])
    card = model_card.model_card(run, repo, form, [path.as_posix() for path in shown], checkpoint=checkpoint)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _shortened(value: Any) -> Any:
    """JSON with only the last part of every absolute path."""
    if isinstance(value, dict):
        return {key: _shortened(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(_shortened, value))
    return model_card.without_folders(f"'{value}'")[1:-1] if isinstance(value, str) else value


def _api() -> Any:
    needs("hub", "huggingface_hub")
    import huggingface_hub

    if not (token := huggingface_hub.get_token()):
        raise UserError(f"publishing needs a token of the Hugging Face Hub: {_TOKEN}")
    return huggingface_hub.HfApi(token=token)


def _upload(api: Any, repo: str, found: dict[str, Path], private: bool) -> None:
    from huggingface_hub import CommitOperationAdd

    try:
        known = api.model_info(repo) if api.repo_exists(repo) else None
        if known and private and not known.private:
            raise UserError(f"{repo} exists and is public, which --private does not change; do it on its page, or name another")
        if known:
            print(f"{repo} exists: this is a new commit on it; files of the same names are replaced, others stay")
        else:
            api.create_repo(repo, private=private or None, exist_ok=True)
        api.create_commit(repo, [CommitOperationAdd(*one) for one in found.items()], commit_message="Publish a run of seedbed")
    except UserError:
        raise
    except Exception as error:  # the library passes on any error of the network, of the server and of its own
        status, cause = getattr(getattr(error, "response", None), "status_code", 0), error.__cause__ or error
        if status in (401, 403, 404):
            raise UserError(f"the Hub does not let this token write to {repo} ({status}); if it is yours, {_TOKEN}") from None
        reason = clip(one_line(str(cause)), 200) or type(cause).__name__
        why = f"{repo} is not published at {api.endpoint}: {reason}"
        raise UserError(f"{why}; run the command again, what has arrived is not sent twice") from None
