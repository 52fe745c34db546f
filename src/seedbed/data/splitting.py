"""Long texts in parts, split where no tokenizer merges across."""

from collections.abc import Iterator


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
