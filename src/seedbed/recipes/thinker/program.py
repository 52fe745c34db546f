"""Step programs: what every step of a thinker reads, writes and outputs, as a table.

A program is a list of rows, one per step, over the columns of `COLUMNS`. Nothing here needs torch.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from seedbed.errors import UserError

COLUMNS = ("read_input", "mem_lookup", "mem_write", "static_mem_lookup", "output")
LETTERS = "rlwso"
READ, LOOKUP, WRITE, STATIC, OUTPUT = range(5)
NAMED = {"everything": "rlwo*", "read-once": "rw,lw*,lo"}
RANDOM = "random"
_SUFFIXES = (".txt", ".csv", ".plan")

Row = tuple[int, ...]  # one number, 0 or 1, per column


@dataclass(frozen=True)
class Program:
    """Rows and how often each is repeated. At most one is open (None): repeated until there are as many rows as steps."""

    parts: tuple[tuple[Row, int | None], ...]

    @property
    def num_fixed(self) -> int:
        return sum(count or 0 for _, count in self.parts)

    def rows(self, num_steps: int) -> tuple[Row, ...]:
        """The table for this many steps: a closed program is truncated, or repeats its last row."""
        missing = max(0, num_steps - self.num_fixed)
        found = [row for row, count in self.parts for _ in range(missing if count is None else count)]
        return tuple(found + found[-1:] * (num_steps - len(found)))[:num_steps]

    def uses(self, column: int) -> bool:
        """Whether any row has this column on."""
        return any(row[column] for row, _ in self.parts)

    def __str__(self) -> str:
        return ",".join(word for row, count in self.parts for word in [_letters(row) + "*" * (count is None)] * (count or 1))


@dataclass(frozen=True)
class Range:
    """Whole numbers from `low` to `high` in steps of `stride`."""

    low: int
    high: int
    stride: int = 1

    def values(self) -> tuple[int, ...]:
        return tuple(range(self.low, self.high + 1, self.stride))

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}" + f":{self.stride}" * (self.stride != 1)


def parse_range(text: str, key: str) -> Range:
    """`8`, `4:16` or `4:16:2`."""
    if not re.fullmatch(r"\d+(:\d+){0,2}", text):
        raise UserError(f"{key}={text} is not a whole number or a range such as 4:16 or 4:16:2")
    low, *rest = map(int, text.split(":"))
    high, stride = rest[0] if rest else low, rest[1] if len(rest) > 1 else 1
    if low < 1 or high < low or stride < 1:
        raise UserError(f"{key}={text} is out of range: it starts at 1 or above and does not fall")
    # `high` is a value that the stride reaches.
    return Range(low, low + (high - low) // stride * stride, stride)


def parse_program(text: str, num_steps: int, num_memory: int, num_static: int) -> Program | None:
    """The program that a text, a name or a file describes, checked for this many steps; None for random programs."""
    if text == RANDOM:
        return None
    rows = _from_file(Path(text)) if text.endswith(_SUFFIXES) or "/" in text else _from_text(NAMED.get(text, text))
    stars = [i for i, (_, count) in enumerate(rows) if count is None]
    if len(stars) > 1:
        raise UserError(f"row {stars[1] + 1} of model.program: only one row can be open; give the others a number, as in lw*3")
    program = Program(tuple(rows))
    if program.num_fixed > num_steps or (not stars and program.num_fixed != num_steps):
        raise UserError(
            f"model.program={text} has {program.num_fixed} rows and model.n_step has up to {num_steps} steps; make them agree, "
            "or let a row repeat with a star, as in ro*"
        )
    _check(program.rows(num_steps), num_memory, num_static)
    return program


def _from_text(text: str) -> list[tuple[Row, int | None]]:
    """Rows and how often each is repeated; None is the open star."""
    found = []
    for number, part in enumerate(text.split(","), 1):
        letters, star, count = part.strip().partition("*")
        if star and count and not count.isdigit():
            raise UserError(f"row {number} of model.program, `{part}`: a star is followed by a whole number or by nothing")
        if star and count and int(count) == 0:
            raise UserError(f"row {number} of model.program, `{part}`: zero steps; repeat a row at least once")
        if not letters:
            raise UserError(f"row {number} of model.program is empty; a row is made of the letters {' '.join(LETTERS)}")
        for letter in letters:
            if letter not in LETTERS:
                meaning = ", ".join(f"{one} {name}" for one, name in zip(LETTERS, COLUMNS, strict=True))
                raise UserError(f"row {number} of model.program, `{letters}`: unknown column `{letter}`; there are: {meaning}")
        row = tuple(int(letter in letters) for letter in LETTERS)
        found.append((row, None if star and not count else int(count or 1)))
    return found


def _from_file(path: Path) -> list[tuple[Row, int | None]]:
    """A row of letters per line; or a first line that names columns, and lines of 0 and 1 below it."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"model.program={path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    if not lines:
        raise UserError(f"model.program={path} has no rows; a program needs at least one step")
    if "," not in lines[0] and "_" not in lines[0] and lines[0] != "output":
        return _from_text(",".join(lines))
    header = [name.strip() for name in lines[0].split(",")]
    unknown = [name for name in header if name not in COLUMNS]
    if unknown:
        raise UserError(f"row 0 of {path} names the unknown column {unknown[0]!r}; there are: {', '.join(COLUMNS)}")
    return [(_cells(line, header, number, path), 1) for number, line in enumerate(lines[1:], 1)]


def _cells(line: str, header: list[str], number: int, path: Path) -> Row:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(header) or not set(cells) <= {"0", "1"}:
        raise UserError(f"row {number} of {path} is not {len(header)} values of 0 or 1: {line}")
    given = {name: int(cell) for name, cell in zip(header, cells, strict=True)}
    return tuple(given.get(name, 0) for name in COLUMNS)


def _check(rows: tuple[Row, ...], num_memory: int, num_static: int) -> None:
    if not rows:
        raise UserError("model.program has no rows: zero steps; a program needs at least one")
    has_read = False
    for number, row in enumerate(rows, 1):
        has_read = has_read or bool(row[READ])
        if row[OUTPUT] and not has_read:
            raise UserError(f"row {number} of model.program, `{_letters(row)}`, outputs before any row has read the input")
        if (row[LOOKUP] or row[WRITE]) and not num_memory:
            raise UserError(f"row {number} of model.program, `{_letters(row)}`, uses the memory, but model.n_memory=0")
        if row[STATIC] and not num_static:
            raise UserError(
                f"row {number} of model.program, `{_letters(row)}`, looks up static memory, but model.static_memory=0"
            )
    if not rows[-1][OUTPUT]:
        raise UserError(f"row {len(rows)} of model.program, `{_letters(rows[-1])}`, is the last and does not output; add an o")


def _letters(row: Row) -> str:
    return "".join(letter for letter, on in zip(LETTERS, row, strict=True) if on)
