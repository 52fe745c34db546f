"""Where text comes from: Python's own reference or source, a file, a folder, a Hugging Face dataset; streamed in pieces.

Nothing here needs numpy or torch, so a preset can name its text at no cost.
"""

import codecs
import contextlib
import difflib
import hashlib
import os
import shlex
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from seedbed.config import number
from seedbed.errors import UserError

PIECE = 1 << 20
# Up to this size a source is known by its content, beyond it by path, size, time and both ends.
HASH_LIMIT = 256 << 20
SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".srt", ".html", ".xml", ".json", ".jsonl", ".csv", ".tsv"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".swift", ".js", ".ts", ".jsx"),
    *(".tsx", ".css", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".scala", ".sh", ".sql", ".yaml", ".yml", ".toml"),
)
# Parts of the standard library's folder that are tests or not the library.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELP = "name a file, a folder, `reference`, `stdlib`, hf:NAME or a prepared store"


@dataclass(frozen=True)
class TextConfig:
    """Which text, in which tokens, in blocks of which length."""

    text: str = "reference"
    tokenizer: str = "char"
    vocab: int = number(4096, low=257, high=1 << 20)
    block: int = number(256, low=1, high=1 << 20)
    valid: float = number(0.1, low=0.0001, high=0.9)
    mode: Literal["phase", "blocks", "random"] = "phase"
    unknown: Literal["error", "unk"] = "error"
    cache: str = ""

    def check(self) -> None:
        """What the fields must satisfy beyond their ranges."""
        if not self.text.strip():
            raise UserError(f"data.text is empty; {HELP}")
        if not self.tokenizer.strip():
            raise UserError("data.tokenizer is empty; use char, char75, bpe or the path of a tokenizer.json")
        if self.text.startswith("random:"):
            random_size(self.text)


def random_size(text: str) -> tuple[int, int]:
    """The number of tokens and the vocabulary of `random:NUM_TOKENS:VOCAB`."""
    parts = text.split(":")
    sizes = [int(p.replace("_", "")) for p in parts[1:] if p.replace("_", "").isascii() and p.replace("_", "").isdigit()]
    if len(parts) != 3 or len(sizes) != 2 or sizes[0] < 2 or not 2 <= sizes[1] <= 1 << 31:
        raise UserError(f"data.text={text} is not random:NUM_TOKENS:VOCAB; for example random:10_000_000:50304")
    return sizes[0], sizes[1]


class Piece(NamedTuple):
    """Some text, and where to go on after it. `done` counts towards the corpus's `total`."""

    text: str
    document: int
    offset: int
    ends: bool
    done: int


class Corpus:
    """Documents, streamed in pieces that depend on the content alone."""

    name: str
    total: int
    unit: str
    num_documents: int

    def identity(self) -> str:
        """Changes when the text does."""
        raise NotImplementedError

    def changed(self) -> bool:
        """Whether somebody wrote to it since it was opened, at a glance."""
        return False

    def describe(self) -> dict[str, Any]:
        """Plain facts for the manifest."""
        raise NotImplementedError

    def pieces(self, document: int = 0, offset: int = 0) -> Iterator[Piece]:
        """The text from a position on that an earlier piece named."""
        raise NotImplementedError


class TextCorpus(Corpus):
    """One text in memory."""

    unit, num_documents = "bytes", 1

    def __init__(self, name: str, text: str, facts: dict[str, Any]):
        self.name, self._text, self._facts = name, text, facts
        self.total = len(text.encode())

    def identity(self) -> str:
        return f"sha256:{hashlib.sha256(self._text.encode()).hexdigest()}"

    def describe(self) -> dict[str, Any]:
        return self._facts

    def pieces(self, document: int = 0, offset: int = 0) -> Iterator[Piece]:
        yield from _memory_pieces(self._text, 0, offset, self.total) if document == 0 else ()


class FileCorpus(Corpus):
    """Files, one document each, in the order given."""

    unit = "bytes"

    def __init__(self, name: str, root: Path, paths: Sequence[Path]):
        self.name, self._root = name, root
        self._paths = [path for path in paths if path.stat().st_size]
        self._stats = [path.stat() for path in self._paths]
        self.num_documents = len(self._paths)
        self.total = sum(s.st_size for s in self._stats)
        if not self.total:
            raise UserError(f"{root} holds no text: it is empty")

    def identity(self) -> str:
        whole = hashlib.sha256()
        stats = [path.stat() for path in self._paths]
        small = sum(s.st_size for s in stats) <= HASH_LIMIT
        for path, info in zip(self._paths, stats, strict=True):
            name = str(path.relative_to(self._root)) if self.num_documents > 1 else ""
            facts = f"{name}\0{info.st_size}\0" if small else f"{path.resolve()}\0{info.st_size}\0{info.st_mtime_ns}\0"
            whole.update(facts.encode("utf-8", "surrogateescape"))
            for block in _blocks(path, info.st_size, small):
                whole.update(block)
        return f"{'sha256' if small else 'stat'}:{whole.hexdigest()}"

    def changed(self) -> bool:
        now = (path.stat() for path in self._paths)
        return any((a.st_size, a.st_mtime_ns) != (b.st_size, b.st_mtime_ns) for a, b in zip(self._stats, now, strict=True))

    def describe(self) -> dict[str, Any]:
        path = str(self._root.resolve()).encode("utf-8", "replace").decode()
        return {"path": path, "num_documents": self.num_documents, "num_bytes": self.total}

    def pieces(self, document: int = 0, offset: int = 0) -> Iterator[Piece]:
        before = sum(s.st_size for s in self._stats[:document])
        for n in range(document, self.num_documents):
            for piece in _file_pieces(self._paths[n], n, offset):
                yield piece._replace(done=before + piece.offset)
            before += self._stats[n].st_size
            offset = 0


class HubCorpus(Corpus):
    """A Hugging Face dataset; each row of a column is a document."""

    unit = "documents"

    def __init__(self, name: str, column: str):
        self.name, self._column = name, column
        self._rows = load_hub(name, "train")
        self.total = self.num_documents = len(self._rows)
        if column not in self._rows.column_names:
            raise UserError(
                f"dataset {name} has no column `{column}`; use hf:{name}:COLUMN with {_list(self._rows.column_names)}"
            )
        if not self.total:
            raise UserError(f"dataset {name} is empty")

    def identity(self) -> str:
        return f"hub:{self.name}:{self._column}:{self._rows._fingerprint}"

    def describe(self) -> dict[str, Any]:
        return {"dataset": self.name, "column": self._column, "num_documents": self.total}

    def pieces(self, document: int = 0, offset: int = 0) -> Iterator[Piece]:
        for n in range(document, self.total):
            text = self._rows[n][self._column]
            if not isinstance(text, str):
                raise UserError(f"row {n} of dataset {self.name}: column `{self._column}` is {type(text).__name__}, not text")
            yield from (piece._replace(done=n + 1) for piece in _memory_pieces(text, n, offset, len(text)))
            offset = 0


def open_corpus(text: str) -> Corpus:
    """The corpus that `data.text` names."""
    if text == "reference":
        from pydoc_data.topics import topics

        return TextCorpus(text, "".join(topics[key] for key in sorted(topics)), {"num_documents": 1, "topics": len(topics)})
    if text == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return FileCorpus(text, root, _walk(root, [".py"], NOT_LIBRARY))
    if text.startswith("hf:"):
        name, _, column = text.removeprefix("hf:").partition(":")
        return HubCorpus(name, column or "text")
    return _from_path(Path(text).expanduser())


def _from_path(path: Path) -> Corpus:
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return FileCorpus(path.stem, path, [path])
        if not stat.S_ISDIR(mode):
            raise UserError(f"{path} is neither a file nor a folder; {HELP}")
        found = _walk(path, SUFFIXES, set())
        if not found:
            looked = f"looked for {_list(SUFFIXES)} and so on, in all its folders"
            raise UserError(f"{path} holds no text files ({looked}); images need --size")
        return FileCorpus(path.resolve().name, path, found)
    except FileNotFoundError:
        raise UserError(f"there is no text at {path}{_nearest(path)}; {HELP}") from None
    except OSError as error:
        # Somebody may have given the text itself.
        shown = str(path) if len(str(path)) < 200 else f"{' '.join(str(path)[:160].split())}..."
        raise UserError(f"cannot read {shown}: {error.strerror}; {HELP}") from None


def _nearest(path: Path) -> str:
    siblings = ["reference", "stdlib"]
    if path.parent.is_dir():
        siblings += [p.name for p in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, siblings, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _walk(root: Path, suffixes: Sequence[str], left_out: set[str]) -> list[Path]:
    """Text files below a folder that are not hidden, sorted by their path in it."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in left_out]
        found += [Path(folder, n) for n in names if not n.startswith(".") and os.path.splitext(n)[1].lower() in suffixes]
    for path in found:
        if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
            raise UserError(f"{path} is a link that leads out of {root}; put a copy there, or name its own folder")
    return sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(root).as_posix())


def _blocks(path: Path, size: int, whole: bool) -> Iterator[bytes]:
    with _readable(path) as file:
        if whole:
            while block := file.read(PIECE):
                yield block
        else:
            yield file.read(PIECE)
            file.seek(max(0, size - PIECE))
            yield file.read(PIECE)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _file_pieces(path: Path, document: int, offset: int) -> Iterator[Piece]:
    with _readable(path) as file:
        size = os.fstat(file.fileno()).st_size
        while offset < size:
            file.seek(offset)
            block = file.read(PIECE)
            if not block:
                raise UserError(f"{path} became shorter while it was read; run again when nothing writes to it")
            final = offset + len(block) >= size
            text = _decode(path, block, offset, final)
            text = text if final else text[: _safe_cut(text, len(text))]
            offset = size if final else offset + len(text.encode())
            yield Piece(text, document, offset, final, 0)


def _decode(path: Path, block: bytes, offset: int, final: bool) -> str:
    shown = shlex.quote(str(path))
    if offset == 0 and block[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path} is UTF-16, not UTF-8; convert it: iconv -f utf-16 -t utf-8 {shown} > converted.txt")
    if offset == 0 and b"\0" in block[:8192]:
        raise UserError(f"{path} is a binary file (a zero byte at offset {block.index(0):,}), not text; name a text file")
    try:
        return codecs.utf_8_decode(block, "strict", final)[0]
    except UnicodeDecodeError as error:
        place = f"byte 0x{block[error.start]:02x} at offset {offset + error.start:,}"
        raise UserError(f"{path} is not UTF-8: {place}; convert it: iconv -f latin1 -t utf-8 {shown} > converted.txt") from None


def _memory_pieces(text: str, document: int, offset: int, total: int) -> Iterator[Piece]:
    if not text:
        yield Piece("", document, 0, True, 0)
    for part in cuts(text[offset:], PIECE):
        offset += len(part)
        yield Piece(part, document, offset, offset == len(text), total * offset // len(text))


def cuts(text: str, limit: int) -> Iterator[str]:
    """The text in parts of at most `limit` characters, cut where no tokenizer joins across."""
    start = 0
    while len(text) - start > limit:
        size = _safe_cut(text[start : start + limit + 1], limit)
        yield text[start : start + size]
        start += size
    if start < len(text):
        yield text[start:]


def _safe_cut(text: str, limit: int) -> int:
    """After a line end between two characters that are no space, in the second half; the limit itself if there is none."""
    place = limit
    for _ in range(1000):
        place = text.rfind("\n", limit // 2, place)
        if place < 1:
            break
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace() and place + 1 < len(text):
            return place + 1
    return limit


def load_hub(name: str, split: str | None) -> Any:
    """A split of a Hugging Face dataset, or all of them by name."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f'hf:{name} needs the extra `hub`: pip install "seedbed[hub]"') from None
    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:
        # The library raises whatever the network, the cache or the dataset's own files cause.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"dataset {name} could not be loaded: {reason}") from None


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:8])
