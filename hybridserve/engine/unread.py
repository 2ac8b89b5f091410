"""What the engine has said and a client has not read yet: bounded, since the engine does not wait for readers.

Owns the count of one stream, whose sequences share it. Must not know sockets. Filled and emptied by the engine's client.
"""

from hybridserve.request import RequestOutput

_OUTPUT_NBYTES = 256
_TOKEN_NBYTES = 32
_LOGPROB_NBYTES = 200
_ALTERNATIVE_NBYTES = 120


class Unread:
    """Bytes of outputs that wait for the reader of one stream."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.nbytes = 0
        self.was_full = False
        self._message: int | None = None  # number of the engine's message that came last
        self._had_waited = False  # whether an output waited when it came

    @property
    def is_full(self) -> bool:
        """Whether too much waits for a reader who had a chance to read: what one message brings at once is never too much."""
        return self.nbytes > self.limit_nbytes and self._had_waited

    def note_put(self, output: RequestOutput, message: int) -> None:
        """An output waits that has come in the engine's message of this number."""
        if message != self._message:
            self._message, self._had_waited = message, self.nbytes > 0
        self.nbytes += output_nbytes(output)
        self.was_full |= self.is_full

    def note_read(self, output: RequestOutput) -> None:
        """An output that waited has been taken."""
        self.nbytes -= output_nbytes(output)


def output_nbytes(output: RequestOutput) -> int:
    """About the bytes that an output takes as objects of Python."""
    entries = [*(output.logprobs or ()), *(entry for entry in output.prompt_logprobs or () if entry is not None)]
    num_alternatives = sum(len(entry.top) for entry in entries)
    return (
        _OUTPUT_NBYTES
        + _TOKEN_NBYTES * len(output.new_token_ids)
        + _LOGPROB_NBYTES * len(entries)
        + _ALTERNATIVE_NBYTES * num_alternatives
    )
