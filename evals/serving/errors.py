"""What a request to a server can end in, besides a reply. Each error's text says what was got and is fit for a record."""

from __future__ import annotations

EXCERPT_CHARACTERS = 240


class ServingError(Exception):
    """A request that gave no usable answer. `attempts` counts how often it was sent; `kind` is a stable word for tables."""

    kind = "failed"

    def __init__(self, reason: str, attempts: int = 1) -> None:
        self.reason = reason
        self.attempts = attempts
        super().__init__(reason)


class Unreachable(ServingError):
    """No connection was made: not a byte was sent."""

    kind = "unreachable"


class Dropped(ServingError):
    """The connection ended before the whole answer was there."""

    kind = "dropped"


class TimedOut(ServingError):
    kind = "timed out"


class HttpStatus(ServingError):
    """An answer with another status than 2xx."""

    kind = "http status"

    def __init__(self, status: int, reason: str, attempts: int = 1) -> None:
        self.status = status
        super().__init__(reason, attempts)


class Unauthorised(HttpStatus):
    """401 or 403."""

    kind = "unauthorised"


class NotThere(HttpStatus):
    """404: no such route or model."""

    kind = "not there"


class Malformed(ServingError):
    """2xx, but not what the route answers: HTML, broken JSON, absent fields."""

    kind = "malformed"


class TooLarge(ServingError):
    """More bytes than an answer may have."""

    kind = "too large"


def excerpt(body: bytes) -> str:
    """The beginning of a body, in one line."""
    text = " ".join(body[: 4 * EXCERPT_CHARACTERS].decode("utf-8", errors="replace").split())
    return text if len(text) <= EXCERPT_CHARACTERS else text[:EXCERPT_CHARACTERS] + "…"
