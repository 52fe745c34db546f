"""Interface of what follows a run while it trains, such as mirrors."""

from typing import Any, Protocol


class Listener(Protocol):
    """Receives the rows and events of a run as they are written; must neither raise nor block."""

    def row(self, values: dict[str, Any]) -> None: ...
    def event(self, values: dict[str, Any]) -> None: ...
    def rewind(self, step: int) -> None: ...
