"""What a request can be refused for: one sentence, an HTTP status, and the OpenAI error body."""

from __future__ import annotations

from typing import Any

BAD_REQUEST, NOT_FOUND, SERVER_FAULT, STOPPING = 400, 404, 500, 503
_KINDS = {BAD_REQUEST: "BadRequestError", NOT_FOUND: "NotFoundError", SERVER_FAULT: "InternalServerError", STOPPING: "ServiceUnavailable"}


class RequestError(Exception):
    """Refuses one request. `message` says what was got, what is needed and what to do; `param` names the field."""

    def __init__(self, message: str, *, status: int = BAD_REQUEST, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param = message, status, param

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        kind = _KINDS.get(self.status, "APIError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}
