"""Every error that Phalanx raises on purpose.

PhalanxError
├── ConfigError       a command line or configuration that cannot be honoured: one line, exit code 2
├── ModelError        a model folder, file or tensor that cannot be used; also one line, exit code 2
├── RequestError      one request is wrong: an HTTP 4xx for it alone, the engine and its neighbours go on
└── EngineError       the engine itself failed: the requests of that step end with an error
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What a library's error says, as a part of our one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class PhalanxError(Exception):
    """Base of all deliberate errors."""


class ConfigError(PhalanxError):
    """A setting that cannot be honoured. The message is one line, made for the command line."""


class ModelError(PhalanxError):
    """A model that cannot be loaded. The message is one line and names the file, tensor or architecture."""


class EngineError(PhalanxError):
    """The engine failed in a step."""

    @classmethod
    def of_step(cls, step_id: int, error: Exception) -> EngineError:
        """What `error` means to the requests of this step."""
        return cls(f"step {step_id} failed: {type(error).__name__}: {error or 'no message'}")


class RequestError(PhalanxError):
    """One request cannot be served as asked.

    Attributes:
        message: what is wrong, naming the numbers involved.
        status: HTTP status (400, 401, 403, 404, 408, 413, 500, 503, 504).
        param: the request field at fault, or None.
        code: a short machine-readable cause, or None.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    @property
    def type(self) -> str:
        """OpenAI's error type for this status."""
        return {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            408: "timeout_error",
            500: "server_error",
            503: "service_unavailable_error",
            504: "timeout_error",
        }.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error body: {"error": {message, type, param, code}}."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
