"""Decoding the body of POST /generate, big ones piece by piece."""

from __future__ import annotations

import msgspec

from phalanx.server.errors import decode_json
from phalanx.server.schema_generate import GenerateBody, SamplingFields

_BIG_BYTES = 2**20


class _Shell(GenerateBody, kw_only=True):
    """The body with its `sampling_params` still as JSON: most of a big body, if there is one per prompt."""

    sampling_params: msgspec.Raw = msgspec.Raw(b"null")  # type: ignore[assignment]


_decoder = msgspec.json.Decoder(GenerateBody)
_shell_decoder = msgspec.json.Decoder(_Shell)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_fields_decoder = msgspec.json.Decoder(SamplingFields)


def decode_generate(raw_body: bytes) -> GenerateBody:
    """The body. Decoding holds the interpreter's lock, so a big one is taken apart before.

    Raises:
        RequestError: 400 that names the field at fault.
    """
    if len(raw_body) > _BIG_BYTES:
        try:
            return _in_pieces(raw_body)
        except (msgspec.MsgspecError, RecursionError):
            pass  # decoded as a whole, the error names its place
    return decode_json(_decoder, raw_body)


def _in_pieces(raw_body: bytes) -> GenerateBody:
    shell = _shell_decoder.decode(raw_body)
    pieces = _list_decoder.decode(shell.sampling_params)  # not a list: it is small, and not worth the trouble
    body: GenerateBody = shell
    body.sampling_params = [_fields_decoder.decode(piece) for piece in pieces]
    return body
