"""The short way of a token to its client: table, bytes, transport.

A stream without log-probabilities, stop strings and the like gets a lane once its first chunk is out. Then a
step's token costs one lookup of its text as JSON, one bytes template and one write; no object is made that
outlives it. Whatever is not that simple (half a character, the end, a client that does not keep up) is
declined, with nothing changed, and goes the general way (`Form.chunk`).

Measured (docs/measured.md): 1.4 to 2 us a token, before the kernel takes 6 us for the write.
"""

from __future__ import annotations

from phalanx.server.response import Connection
from phalanx.server.sessions import OutputStream
from phalanx.text.output import TextStream


class DeltaLane:
    """Events that say nothing but the new text.

    Args:
        stream: its first chunk is written.
        connection: where its response goes.
        head, tail: the event around the inside of the JSON string.
    """

    __slots__ = ("_connection", "_head", "_num_bytes", "_response", "_stream", "_tail", "_text")

    def __init__(self, stream: OutputStream, connection: Connection, head: bytes, tail: bytes) -> None:
        self._stream = stream
        self._text = stream.text
        self._response = stream.call.response
        self._connection = connection
        self._head = b"\r\n" + head
        self._tail = tail + b"\r\n"
        self._num_bytes = len(head) + len(tail)

    def write(self, token: int) -> int:
        """See Lane."""
        connection = self._connection
        if connection.flow.write_paused or connection.disconnected or self._response.blocked:
            return -1
        piece = self._text.push_whole(token)
        if piece is None:
            return -1
        if piece:  # a special token says nothing, and its event would be empty
            size = self._num_bytes + len(piece)
            connection.transport.write(b"%x%b%b%b" % (size, self._head, piece, self._tail))
        self._stream.num_sent += 1
        return 1 if piece else 0


class ItemLane:
    """/generate's events: text, ids and the count so far; all of them or the new ones.

    Args:
        stream: its first chunk is written.
        connection: where its response goes.
        head: up to the text's opening quote. middle: from its closing quote to the ids. tail: from behind the
            ids to the count.
        is_incremental: events carry what is new.
    """

    __slots__ = (
        "_connection",
        "_head",
        "_is_incremental",
        "_middle",
        "_response",
        "_stream",
        "_tail",
        "_text",
    )

    def __init__(
        self,
        stream: OutputStream,
        connection: Connection,
        *,
        head: bytes,
        middle: bytes,
        tail: bytes,
        is_incremental: bool,
    ) -> None:
        self._stream = stream
        self._text = stream.text
        self._response = stream.call.response
        self._connection = connection
        self._head, self._middle, self._tail = head, middle, tail
        self._is_incremental = is_incremental

    def write(self, token: int) -> int:
        """See Lane."""
        connection, stream = self._connection, self._stream
        if connection.flow.write_paused or connection.disconnected or self._response.blocked:
            return -1
        piece = self._text.push_whole(token)
        if piece is None:
            return -1
        ids: bytes | bytearray
        text: bytes | bytearray
        if self._is_incremental:
            text, ids = piece, b"%d" % token
        else:
            text, ids = stream.sent_json, stream.sent_ids_json
            text += piece
            ids += b",%d" % token if ids else b"%d" % token
        stream.num_sent += 1
        body = b"%b%b%b%b%b%d}}\n\n" % (self._head, text, self._middle, ids, self._tail, stream.num_sent)
        connection.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return 1


class SilentLane:
    """No events: the text is gathered for an answer that is not streamed."""

    __slots__ = ("_text",)

    def __init__(self, text: TextStream) -> None:
        self._text = text

    def write(self, token: int) -> int:
        """See Lane."""
        return -1 if self._text.push_whole(token) is None else 0
