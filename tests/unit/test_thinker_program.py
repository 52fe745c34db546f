"""Plans and ranges: what is written is what is done, and what makes no sense is refused with the row that does not."""

from pathlib import Path

import pytest

from seedbed import config as configs
from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.recipes.thinker.program import COLUMNS, Program, parse_program, parse_range


def program(text: str, num_steps: int, memory: int = 4, static: int = 2) -> Program:
    found = parse_program(text, num_steps, memory, static)
    assert found is not None
    return found


def table(text: str, num_steps: int) -> list[str]:
    return ["".join(map(str, row)) for row in program(text, num_steps).rows(num_steps)]


@pytest.mark.parametrize(
    ("text", "num_steps", "expected"),
    [
        ("ro*", 3, ["10001"] * 3),
        ("rlwo*3", 3, ["11101"] * 3),
        ("everything", 3, ["11101"] * 3),
        ("rw,lw,lw,lo", 4, ["10100", "01100", "01100", "01001"]),
        ("read-once", 4, ["10100", "01100", "01100", "01001"]),
        ("read-once", 2, ["10100", "01001"]),
        ("rs, so*2, o", 4, ["10010", "00011", "00011", "00001"]),
        ("or*,ro", 2, ["10001", "10001"]),
    ],
)
def test_program_text_gives_these_rows(text: str, num_steps: int, expected: list[str]):
    assert table(text, num_steps) == expected


def test_program_continues_beyond_the_trained_steps():
    assert program("read-once", 4).rows(6) == program("rw,lw*,lo", 6).rows(6)
    closed = program("rw,lw,lw,lo", 4)
    assert closed.rows(6) == (*closed.rows(4), closed.rows(4)[-1], closed.rows(4)[-1])
    assert closed.rows(2) == closed.rows(4)[:2]


def test_program_text_round_trip():
    for text in ("ro*", "rw,lw*,lo", "rw,lw,lo"):
        assert str(program(text, 3)) == text


REFUSED = [
    ("lo,ro", 2, "row 1 of model.program, `lo`, outputs before any row has read"),
    ("s,so,ro", 3, "row 2"),
    ("rx,ro", 2, "row 1 of model.program, `rx`: unknown column `x`"),
    ("ro,,ro", 3, "row 2 of model.program is empty"),
    ("", 1, "row 1 of model.program is empty"),
    ("ro,ro*0", 1, "row 2 of model.program, `ro*0`: zero steps"),
    ("ro*x", 1, "row 1 of model.program, `ro*x`"),
    ("ro*,lw*,ro", 3, "row 2 of model.program: only one row can be open"),
    ("ro,rw", 2, "row 2 of model.program, `rw`, is the last and does not output"),
    ("ro*3", 4, "3 rows and model.n_step has up to 4 steps"),
    ("rw,lw*,lo", 1, "2 rows and model.n_step has up to 1 steps"),
    ("nowhere/program.txt", 3, "cannot be read"),
]


@pytest.mark.parametrize(("text", "num_steps", "words"), REFUSED)
def test_program_errors_name_the_row(text: str, num_steps: int, words: str):
    with pytest.raises(UserError) as caught:
        parse_program(text, num_steps, 4, 2)
    assert words in str(caught.value)


def test_program_errors_name_the_row_of_missing_memory():
    with pytest.raises(UserError, match=r"row 2 of model\.program, `lo`, uses the memory"):
        parse_program("ro,lo", 2, 0, 0)
    with pytest.raises(UserError, match=r"row 2 of model\.program, `so`, looks up static memory"):
        parse_program("ro,so", 2, 4, 0)


def test_program_file_of_letters_or_of_columns(tmp_path: Path):
    letters, columns = tmp_path / "a.txt", tmp_path / "b.csv"
    letters.write_text("# read once\nrw\nlw\n\nlo\n")
    columns.write_text("output, read_input,mem_write,mem_lookup\n0,1,1,0\n0,0,1,1\n1,0,0,1\n")
    assert program(str(letters), 3) == program(str(columns), 3) == program("rw,lw,lo", 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("read_input,halt\n1,0\n", "unknown column 'halt'"),
        ("read_input,output\n1,0\n1\n", "row 2 of"),
        ("read_input,output\n1,2\n", "row 1 of"),
        ("read_input,output\n0,1\n", "row 1 of model.program, `o`, outputs before any row has read"),
        ("\n", "has no rows"),
        ("read_input,output\n", "0 rows"),
    ],
)
def test_program_file_errors_name_the_row(tmp_path: Path, text: str, words: str):
    path = tmp_path / "program.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        parse_program(str(path), 2 if "1\n1" in text or "1,0\n1" in text else 1, 4, 0)
    assert words in str(caught.value)


def test_random_programs_have_no_table():
    assert parse_program("random", 5, 4, 0) is None


def test_program_columns_match_the_letters():
    assert COLUMNS == ("read_input", "mem_lookup", "mem_write", "static_mem_lookup", "output")


@pytest.mark.parametrize(
    ("text", "values"), [("8", (8,)), ("4:7", (4, 5, 6, 7)), ("4:16:4", (4, 8, 12, 16)), ("4:9:2", (4, 6, 8)), ("3:3", (3,))]
)
def test_ranges(text: str, values: tuple[int, ...]):
    found = parse_range(text, "key")
    assert found.values() == values
    assert (found.low, found.high) == (values[0], values[-1])
    assert parse_range(str(found), "key") == found


@pytest.mark.parametrize("text", ["0", "0:4", "5:4", "4:8:0", "four", "4:", ":4", "-1", "4:8:1:1", "4.5", ""])
def test_range_errors_name_the_key(text: str):
    with pytest.raises(UserError, match=r"model\.n_step"):
        parse_range(text, "model.n_step")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.heads=5"], "model.heads=5"),
        (["model.n_step=0"], "model.n_step=0"),
        (["model.n_latent=9:4"], "model.n_latent=9:4"),
        (["model.positions.kind=random_sorted"], "model.positions.max"),
        (["model.positions.kind=ends"], "model.positions.max"),
        (["model.positions.kind=ends", "model.positions.max=64", "model.width=18", "model.heads=2"], "multiple of 4"),
        (["model.width=33", "model.heads=3", "model.positions.kind=sin"], "odd"),
        (["model.program=lo,ro", "model.n_step=2"], "row 1"),
        (["model.program=rw,lo", "model.n_step=1:2", "model.loss.steps=random"], "row 1 of model.program does not output"),
        (["model.program=rw,lo", "model.n_step=2", "model.loss.steps=progressive"], "row 1 of model.program does not output"),
        (["data.test_lengths=50,0"], "data.test_lengths"),
    ],
)
def test_config_errors_are_refused(settings: list[str], words: str):
    recipe, preset = find("thinker/demo")
    with pytest.raises(UserError) as caught:
        configs.override(recipe.preset(preset), settings)
    assert words in str(caught.value)
