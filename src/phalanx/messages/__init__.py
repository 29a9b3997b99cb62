"""What crosses a process boundary, and its encoding: msgspec for the small part, arrays as raw bytes."""

from phalanx.messages.codec import MessageError, decode, encode
from phalanx.messages.split import select_outputs, split_outputs
from phalanx.messages.types import Abort, Control, ControlReply, EngineReady, Message, Submit

__all__ = [
    "Abort",
    "Control",
    "ControlReply",
    "EngineReady",
    "Message",
    "MessageError",
    "Submit",
    "decode",
    "encode",
    "select_outputs",
    "split_outputs",
]
