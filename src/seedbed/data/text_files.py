"""Text in files: the standard library, a file, a folder, a Hugging Face dataset; streamed in chunks."""

import codecs
import contextlib
import difflib
import hashlib
import os
import shlex
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from seedbed.data import corpus
from seedbed.data.corpus import HELP, Chunk, Corpus
from seedbed.errors import UserError

# Up to this size a source is identified by its content, beyond it by path, size, time and both ends.
HASH_LIMIT = 256 << 20
SUFFIXES = (
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".srt", ".html", ".xml", ".json", ".jsonl", ".csv", ".tsv"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".swift", ".js", ".ts", ".jsx"),
    *(".tsx", ".css", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml", ".scala", ".sh", ".sql", ".yaml", ".yml", ".toml"),
)
# Parts of the standard library's folder that are tests or not the library.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def open_files(text: str) -> Corpus:
    if text == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return FileCorpus(text, root, _find_files(root, [".py"], NOT_LIBRARY, skip_links_out=True))
    if text.startswith("hf:"):
        name, _, column = text.removeprefix("hf:").partition(":")
        return HubCorpus(name, column or "text")
    return _from_path(Path(text).expanduser())


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

    def chunks(self, document: int = 0, offset: int = 0) -> Iterator[Chunk]:
        before = sum(s.st_size for s in self._stats[:document])
        for n in range(document, self.num_documents):
            for chunk in _file_chunks(self._paths[n], n, offset):
                yield chunk._replace(done=before + chunk.offset)
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

    def chunks(self, document: int = 0, offset: int = 0) -> Iterator[Chunk]:
        for n in range(document, self.total):
            text = self._rows[n][self._column]
            if not isinstance(text, str):
                raise UserError(f"row {n} of dataset {self.name}: column `{self._column}` is {type(text).__name__}, not text")
            yield from (chunk._replace(done=n + 1) for chunk in corpus.memory_chunks(text, n, offset, len(text)))
            offset = 0


def _from_path(path: Path) -> Corpus:
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            return FileCorpus(path.stem, path, [path])
        if not stat.S_ISDIR(mode):
            raise UserError(f"{path} is neither a file nor a folder; {HELP}")
        found = _find_files(path, SUFFIXES, set())
        if not found:
            looked = f"looked for {_list(SUFFIXES)} and so on, in all its folders"
            raise UserError(f"{path} holds no text files ({looked}); images need --size")
        return FileCorpus(path.resolve().name, path, found)
    except FileNotFoundError:
        raise UserError(f"there is no text at {path}{nearest(path, ['reference', 'stdlib'])}; {HELP}") from None
    except OSError as error:
        # The text itself may have been given.
        shown = str(path) if len(str(path)) < 200 else f"{' '.join(str(path)[:160].split())}..."
        raise UserError(f"cannot read {shown}: {error.strerror}; {HELP}") from None


def nearest(path: Path, known: Sequence[str]) -> str:
    """For an error: the nearest of the names that are no paths and of those in the path's folder."""
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*known, *siblings], 1)
    return f" (did you mean {near[0]}?)" if near else ""


def _find_files(root: Path, suffixes: Sequence[str], left_out: set[str], skip_links_out: bool = False) -> list[Path]:
    """Text files below a folder that are not hidden, sorted by their path in it.

    A link that points out of the folder is an error, or skipped: Debian's Python has such links in its standard library.
    """
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in left_out]
        found += [Path(folder, n) for n in names if not n.startswith(".") and os.path.splitext(n)[1].lower() in suffixes]
    outside = {p for p in found if p.is_symlink() and not p.resolve().is_relative_to(root.resolve())}
    if outside and not skip_links_out:
        raise UserError(f"{min(outside)} is a link that points out of {root}; put a copy there, or name its own folder")
    return sorted((p for p in found if p.is_file() and p not in outside), key=lambda p: p.relative_to(root).as_posix())


def _blocks(path: Path, size: int, whole: bool) -> Iterator[bytes]:
    with _readable(path) as file:
        if whole:
            while block := file.read(corpus.CHUNK):
                yield block
        else:
            yield file.read(corpus.CHUNK)
            file.seek(max(0, size - corpus.CHUNK))
            yield file.read(corpus.CHUNK)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _file_chunks(path: Path, document: int, offset: int) -> Iterator[Chunk]:
    with _readable(path) as file:
        size = os.fstat(file.fileno()).st_size
        while offset < size:
            file.seek(offset)
            block = file.read(corpus.CHUNK)
            if not block:
                raise UserError(f"{path} became shorter while it was read; run again when nothing writes to it")
            final = offset + len(block) >= size
            text = _decode(path, block, offset, final)
            text = text if final else text[: safe_split(text, len(text))]
            offset = size if final else offset + len(text.encode())
            yield Chunk(text, document, offset, final, 0)


def split_text(text: str, limit: int) -> Iterator[str]:
    """The text in parts of at most `limit` characters, split where no tokenizer merges across."""
    start = 0
    while len(text) - start > limit:
        size = safe_split(text[start : start + limit + 1], limit)
        yield text[start : start + size]
        start += size
    if start < len(text):
        yield text[start:]


def safe_split(text: str, limit: int) -> int:
    """After a line end between two non-space characters, in the second half; the limit itself if there is none."""
    place = limit
    for _ in range(1000):
        place = text.rfind("\n", limit // 2, place)
        if place < 1:
            break
        if not text[place - 1].isspace() and not text[place + 1 : place + 2].isspace() and place + 1 < len(text):
            return place + 1
    return limit


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


def load_hub(name: str, split: str | None) -> Any:
    """A split of a Hugging Face dataset, or all of them by name."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f'hf:{name} needs the extra `hub`: pip install "seedbed[hub]"') from None
    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:
        # The library passes on any error of the network, the cache or the dataset's own files.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"dataset {name} could not be loaded: {reason}") from None


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:8])
