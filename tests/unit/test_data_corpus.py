"""Corpora: every character arrives once and in order, from any position, and bad input gets one clear line."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from seedbed.config import Config, override
from seedbed.data import corpus
from seedbed.data.corpus import TextConfig, open_corpus
from seedbed.data.prepare import prepare_text
from seedbed.data.random_tokens import random_size
from seedbed.errors import UserError

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 64)


def text_of(source: corpus.Corpus, *start: int) -> list[str]:
    """The documents from a position on."""
    documents, now = [], ""
    for piece in source.chunks(*start):
        now += piece.text
        if piece.ends:
            documents.append(now)
            now = ""
    assert now == ""
    return documents


def test_reference_is_the_sorted_topics():
    from pydoc_data.topics import topics

    source = open_corpus("reference")
    assert text_of(source) == ["".join(topics[k] for k in sorted(topics))]
    assert source.total > 300_000 and source.num_documents == 1


def test_standard_library_is_source_without_tests():
    source = open_corpus("stdlib")
    first = next(source.chunks())
    assert source.num_documents > 400 and first.text.isprintable() is False
    names = [p.relative_to(source._root).as_posix() for p in source._paths]  # type: ignore[attr-defined]
    assert names == sorted(names) and "os.py" in names and "json/decoder.py" in names
    assert not [n for n in names if {"site-packages", "test", "tests", "idle_test"} & set(n.split("/"))]


def test_links_out_of_the_standard_library_are_skipped(tmp_path, monkeypatch):
    # Debian's Python has sitecustomize.py as a link to /etc.
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "sitecustomize.py").write_text("x = 1\n")
    library = tmp_path / "lib"
    library.mkdir()
    (library / "os.py").write_text("y = 2\n")
    (library / "sitecustomize.py").symlink_to(tmp_path / "etc" / "sitecustomize.py")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    assert text_of(open_corpus("stdlib")) == ["y = 2\n"]
    with pytest.raises(UserError, match="points out"):
        open_corpus(str(library))


TEXTS = {
    "empty lines": "\n\n\n\n" * 50,
    "words": "some words in a line\nand another line of them\n" * 40,
    "one long line": "word " * 200,
    "wide": "日本語 text 😀😀\r\n" * 30,
    "no end": "x" * 64,
    "end": "x" * 63 + "\n",
    "short": "a",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_file_is_read_from_any_chunk_on(tmp_path, small_pieces, text):
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    source = open_corpus(str(path))
    pieces = list(source.chunks())
    assert "".join(p.text for p in pieces) == text
    assert [p.ends for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].done == source.total == len(text.encode())
    for n, piece in enumerate(pieces[:-1]):
        assert list(source.chunks(piece.document, piece.offset)) == pieces[n + 1 :]


def test_folder_is_its_text_files_in_order(tmp_path, small_pieces):
    for name, text in {"b.txt": "bee\n" * 30, "a/z.md": "zed", "a/é.py": "é = 1", "A.TXT": "A", "empty.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden.txt").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("secret")
    source = open_corpus(str(tmp_path))
    assert text_of(source) == ["A", "zed", "é = 1", "bee\n" * 30]
    pieces = list(source.chunks())
    assert pieces[-1].done == source.total
    for n, piece in enumerate(pieces[:-1]):
        start = (piece.document + 1, 0) if piece.ends else (piece.document, piece.offset)
        assert list(source.chunks(*start)) == pieces[n + 1 :]


def test_identity_follows_the_content(tmp_path, monkeypatch):
    path, copy = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text("hello")
    copy.write_text("hello")
    first = open_corpus(str(path)).identity()
    assert open_corpus(str(copy)).identity() == first
    path.write_text("jello")
    assert open_corpus(str(path)).identity() != first
    # A large source is known by its place, size, time and ends instead.
    monkeypatch.setattr("seedbed.data.text_files.HASH_LIMIT", 3)
    large = open_corpus(str(copy)).identity()
    assert large.startswith("stat:") and open_corpus(str(copy)).identity() == large
    os.utime(copy, (1, 1))
    assert open_corpus(str(copy)).identity() != large


def test_identity_sees_names_and_borders(tmp_path):
    for n, files in enumerate([{"a.txt": "xy", "b.txt": "z"}, {"a.txt": "x", "b.txt": "yz"}, {"a.txt": "xy", "c.txt": "z"}]):
        (tmp_path / str(n)).mkdir()
        for name, text in files.items():
            (tmp_path / str(n) / name).write_text(text)
    assert len({open_corpus(str(tmp_path / str(n))).identity() for n in range(3)}) == 3


def make_fifo(path: Path) -> None:
    os.mkfifo(path / "fifo")


BAD = [
    (lambda p: None, "missing.txt", r"there is no text at .*missing\.txt; name a file"),
    (lambda p: (p / "shakespeare.txt").write_text("x"), "shakespear.txt", r"did you mean shakespeare\.txt\?"),
    (lambda p: None, "referense", r"did you mean reference\?"),
    (lambda p: (p / "e.txt").write_text(""), "e.txt", r"e\.txt holds no text: it is empty"),
    (lambda p: (p / "d").mkdir(), "d", r"d holds no text files \(looked for \.txt"),
    (
        lambda p: (p / "l.txt").write_bytes(b"caf\xe9 au lait"),
        "l.txt",
        r"l\.txt is not UTF-8: byte 0xe9 at offset 3; .*iconv -f latin1",
    ),
    (lambda p: (p / "c.txt").write_bytes("né".encode()[:-1]), "c.txt", r"byte 0xc3 at offset 1"),
    (lambda p: (p / "u.txt").write_text("hi", encoding="utf-16"), "u.txt", r"u\.txt is UTF-16.*iconv -f utf-16"),
    (lambda p: (p / "b.bin").write_bytes(b"\x7fELF\0\0"), "b.bin", r"b\.bin is a binary file \(a zero byte at offset 4\)"),
    (make_fifo, "fifo", r"neither a file nor a folder"),
]


@pytest.mark.parametrize(("make", "name", "words"), BAD, ids=[name for _, name, _ in BAD])
def test_bad_input_is_a_one_line_error(tmp_path, make, name, words):
    make(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        text_of(open_corpus(str(tmp_path / name)))
    assert "\n" not in str(caught.value) and str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 300, "words and words\n" * 100])
def test_text_given_instead_of_a_path_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"cannot read .*\.\.\.: File name too long; name a file"):
        prepare_text(TextConfig(text=str(tmp_path / name)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("secret")
    (tmp_path / "x.txt").chmod(0)
    with pytest.raises(UserError, match=r"cannot read .*x\.txt: Permission denied"):
        open_corpus(str(tmp_path / "x.txt")).identity()


def test_offset_of_a_bad_byte_counts_from_the_start_of_the_file(tmp_path, small_pieces):
    (tmp_path / "x.txt").write_bytes("wörter\n".encode() * 100 + b"\xff")
    with pytest.raises(UserError, match="byte 0xff at offset 800"):
        text_of(open_corpus(str(tmp_path / "x.txt")))


def test_bad_file_in_a_folder_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"\xff\xffx")
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8"):
        text_of(open_corpus(str(tmp_path)))


def test_file_that_shrinks_while_read_is_refused(tmp_path, small_pieces):
    path = tmp_path / "x.txt"
    path.write_text("word " * 10_000)
    pieces = open_corpus(str(path)).chunks()
    next(pieces)
    os.truncate(path, 10)
    with pytest.raises(UserError, match="became shorter"):
        list(pieces)


class Rows:
    """What `datasets.load_dataset` returns, as far as it is used."""

    _fingerprint = "f1"

    def __init__(self, rows):
        self.rows = rows
        self.column_names = ["text", "title"]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, n):
        return {"text": self.rows[n], "title": f"title {n}"}


@pytest.fixture
def hub(monkeypatch):
    found = {"name/of": Rows(["first", "", "a long row of many words\n" * 10, "last"]), "none": Rows([]), "num": Rows([1])}

    def load_dataset(name, split):
        assert split == "train"
        if name not in found:
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist on the Hub\nmore")
        return found[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_hub_dataset_is_read(hub, small_pieces):
    source = open_corpus("hf:name/of")
    assert text_of(source) == ["first", "", "a long row of many words\n" * 10, "last"]
    assert text_of(open_corpus("hf:name/of:title")) == [f"title {n}" for n in range(4)]
    assert open_corpus("hf:name/of:title").identity() != source.identity()
    pieces = list(source.chunks())
    assert pieces[-1].done == source.total == 4
    assert text_of(source, 3, 0) == ["last"]
    assert list(source.chunks(2, pieces[2].offset)) == pieces[3:]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:name/of:body", "no column `body`; use hf:name/of:COLUMN with text, title"),
        ("hf:nowhere", "dataset nowhere could not be loaded: Dataset 'nowhere' doesn't exist on the Hub$"),
        ("hf:none", "dataset none is empty"),
        ("hf:num", "row 0 of dataset num: column `text` is int, not text"),
    ],
)
def test_hub_dataset_errors_are_one_line(hub, name, words):
    with pytest.raises(UserError, match=words):
        text_of(open_corpus(name))


def test_hub_extra_missing_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r'pip install "seedbed\[hub\]"'):
        open_corpus("hf:anything")


def test_random_sizes():
    assert random_size("random:1_000:50304") == (1000, 50304)


@pytest.mark.parametrize(
    "text", ["random:", "random:5", "random:a:5", "random:5:1", "random:1:5", "random:-5:7", "random:1:2:3", "random:²:5"]
)
def test_wrong_random_sizes(text):
    with pytest.raises(UserError, match="is not random:NUM_TOKENS:VOCAB"):
        Config(model=None, data=TextConfig(text=text))


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("data.block=0", "data.block=0 is out of range"),
        ("data.valid=0", "data.valid=0.0 is out of range"),
        ("data.valid=1", "data.valid=1.0 is out of range"),
        ("data.vocab=256", "data.vocab=256 is out of range"),
        ("data.mode=phases", "did you mean phase"),
        ("data.text=", "data.text is empty"),
        ("data.tokenizer=", "data.tokenizer is empty"),
    ],
)
def test_wrong_settings(assignment, words):
    with pytest.raises(UserError, match=words):
        override(Config(model=None, data=TextConfig()), [assignment])


def test_corpus_import_is_light():
    code = "import sys, seedbed.data.corpus; print(sorted({'numpy', 'torch', 'tokenizers', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
