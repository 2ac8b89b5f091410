"""Every exception that hybridserve raises on purpose, as one tree.

Owns the classes and what each means to a caller: the HTTP status, the `type` of OpenAI's error object and the exit code of a
command. Knows nothing above it. A message names the value, the limit and the remedy; it never carries another user's text.

    HybridServeError
    |- UsageError                 wrong flags or settings                   exit 2
    |- ModelError                 another file of the model is broken       exit 4
    |  |- UnsupportedModelError   an architecture or a config key           exit 3
    |  |- WeightsError            corrupt, missing or mismatched weights    exit 4
    |  |- DoesNotFitError         memory too small for the model            exit 5
    |  |- UnsafeContentError      pickles, remote code, hostile templates   exit 7
    |- MissingDependencyError     an optional package is needed             exit 6
    |- RequestError               one request is wrong                      HTTP 400
    |  |- NotFoundError           no such model or route                    HTTP 404
    |  |- AuthenticationError     missing or wrong key                      HTTP 401
    |  |- PayloadTooLargeError    the body is over the limit                HTTP 413
    |- OverloadedError            full or draining: try again               HTTP 503
    |- EngineDeadError            the engine process has stopped            HTTP 503
    |- EngineError                the engine failed this request            HTTP 500
    |- DeadlineError              the request took longer than it may       HTTP 504
    |- SlowReaderError            the client does not take what it asked    event
"""


class HybridServeError(Exception):
    """Base of all. `status` is the HTTP status, `exit_code` a command's, `kind` OpenAI's `error.type`."""

    status = 500
    exit_code = 70
    kind = "server_error"
    code: str | None = None


class UsageError(HybridServeError):
    """A flag, environment variable or settings file is wrong."""

    exit_code = 2
    kind = "invalid_request_error"


class ModelError(HybridServeError):
    """The model cannot be served as it is; with no class of its own, because a file beside its weights is broken."""

    exit_code = 4


class UnsupportedModelError(ModelError):
    """The architecture, or a key of its config that changes the mathematics, is not implemented."""

    exit_code = 3


class WeightsError(ModelError):
    """A weights file is truncated or corrupt, or its tensors are not the model's."""

    exit_code = 4


class DoesNotFitError(ModelError):
    """The memory at hand does not hold the weights and one sequence's cache."""

    exit_code = 5


class UnsafeContentError(ModelError):
    """The model folder asks for something that could run foreign code."""

    exit_code = 7


class MissingDependencyError(HybridServeError):
    """An optional package is needed for what was asked."""

    exit_code = 6


class RequestError(HybridServeError):
    """One request is wrong; nothing else is affected. `param` names the field at fault."""

    status = 400
    exit_code = 2
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class NotFoundError(RequestError):
    """The named model or route does not exist."""

    status = 404
    kind = "not_found_error"


class AuthenticationError(RequestError):
    """No key, or a wrong one."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class PayloadTooLargeError(RequestError):
    """The request body is larger than the server takes."""

    status = 413


class OverloadedError(HybridServeError):
    """The engine is full or draining; the same request may be taken later."""

    status = 503
    kind = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(HybridServeError):
    """The engine process has stopped; open streams end with this error."""

    status = 503
    kind = "server_error"
    code = "engine_dead"


class EngineError(HybridServeError):
    """The engine failed this one request (a NaN in its logits, a failing step)."""

    code = "engine_error"


class DeadlineError(HybridServeError):
    """The request ran longer than its deadline; what it held is free again."""

    status = 504
    kind = "timeout_error"
    code = "timeout"


class SlowReaderError(HybridServeError):
    """The client of a stream took its events so slowly that too much waited for it; told in an event."""

    kind = "timeout_error"
    code = "slow_reader"
