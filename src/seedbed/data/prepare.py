"""Token stores, cached by content: the one that exists, or a new one that tokenise.py builds."""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from seedbed.cache import cache_folder
from seedbed.data import tokenizers
from seedbed.data.corpus import TextConfig, open_corpus
from seedbed.data.store import DamagedStore, Progress, Store, Writer, building, damaged, digest, is_store
from seedbed.data.tokenizers import Tokenizer
from seedbed.errors import UserError

# Bump when the same text and tokenizer give other tokens than before.
FORMAT = 1
# Names that are never files.
NAMES = {"reference", "stdlib", "char", "char75", "bpe"}

Say = Callable[[str], None]


def prepare_text(config: TextConfig, *, out: Path | None = None, rebuild: bool = False, say: Say = lambda line: None) -> Store:
    """The store for this text and tokenizer: the one that exists, or a new one. `rebuild` replaces a damaged one.

    An interrupted preparation continues where it stopped, and gives the same store as an uninterrupted one.
    """
    if is_store(Path(config.text).expanduser()):
        store = Store.open(Path(config.text).expanduser())
        made = store.manifest["text"]["valid"]
        if made != config.valid:
            raise UserError(
                f"store {store.path} was split with valid={made}, not data.valid={config.valid}; name its text instead"
            )
        return store
    if config.text.startswith("random:"):
        from seedbed.data.random_tokens import RandomPlan as Plan
    else:
        Plan = TextPlan
    plan = Plan(config)
    path = out.absolute() if out else cache_folder(config.cache) / f"{plan.label}-{plan.key[:12]}"
    return find_or_build(path, plan.key, plan.build, rebuild=rebuild, say=say)


def find_or_build(path: Path, key: str, build: Callable[[Writer], Store], *, rebuild: bool, say: Say) -> Store:
    """The store at `path`; built by `build` if missing. A second process waits for the first."""
    if path.exists() and not is_store(path) and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not a store; choose another --out")
    with building(path, say), _disk_errors(path):
        store = _existing(path, key, rebuild, say) if is_store(path) else None
        return store or build(Writer(path, key))


def load_tokenizer(store: Store) -> Tokenizer | None:
    """The tokenizer stored with the tokens; None for random ones. It must be the one that made them."""
    facts = store.manifest["tokenizer"]
    if facts["kind"] == "random":
        return None
    found = tokenizers.load(store.path)
    if found.fingerprint != facts["fingerprint"]:
        what = f"its tokenizer.json has fingerprint {found.fingerprint}, the tokens were made with {facts['fingerprint']}"
        raise damaged(store.path, what, store.manifest)
    return found


def _existing(path: Path, key: str, rebuild: bool, say: Say) -> Store | None:
    """The store at `path` if it is valid and has this key; None when it is damaged and may be replaced."""
    try:
        store = Store.open(path, check=not rebuild)
        if rebuild and (problems := store.verify(Progress("verifying"))):
            raise damaged(path, problems[0], store.manifest)
    except DamagedStore as error:
        if not rebuild:
            raise
        say(f"{str(error).splitlines()[0]}; building it again")
        return None
    made = next((store.manifest[kind] for kind in ("text", "images", "recording") if kind in store.manifest), {})
    if made.get("key") != key:
        what = "recording" if "recording" in store.manifest else "text or tokenizer"
        raise UserError(f"{path} holds a store of another {what}; remove it first, or choose another --out")
    return store


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """A full disk or a forbidden folder is a user error; what was prepared so far is kept."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else error.strerror or str(error)
        raise UserError(f"cannot write {path}: {what}; what was prepared is kept; fix this and run again") from error


class TextPlan:
    """A corpus in the tokens that a config asks for; the key names the content."""

    def __init__(self, config: TextConfig):
        self.config, self.corpus = config, open_corpus(config.text)
        self.given = None if config.tokenizer in NAMES else tokenizers.load(Path(config.tokenizer).expanduser())
        self.identity = self.corpus.identity()
        spec = [config.tokenizer, config.vocab if config.tokenizer == "bpe" else config.unknown]
        self.key = digest([FORMAT, self.identity, self.given.fingerprint if self.given else spec, config.valid])
        kind = self.given.kind if self.given else config.tokenizer
        self.label = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', self.corpus.name)[:40]}-{kind}"

    def build(self, writer: Writer) -> Store:
        from seedbed.data import tokenise

        return tokenise.build_text(self, writer)
