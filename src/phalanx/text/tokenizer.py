"""The tokenizer of a model, from whatever the model comes with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from phalanx.core.errors import ConfigError, ModelError, RequestError
from phalanx.text.chat_template import ChatTemplate
from phalanx.text.dummy_tokenizer import dummy_tokenizer
from phalanx.text.gguf_tokenizer import gguf_tokenizer
from phalanx.text.hf_tokenizer import hf_tokenizer
from phalanx.text.parts import TokenizerParts
from phalanx.text.token_bound import token_bound
from phalanx.text.token_table import TokenTable, build_token_table

logger = logging.getLogger(__name__)

_NO_TEMPLATE = "this model has no chat template: give one with --chat-template, or use a completion route"


def load_tokenizer(
    path: str, *, vocab_size: int | None = None, chat_template: str | None = None
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        path: a .gguf file, a folder with tokenizer.json, or "dummy".
        vocab_size: the model's vocabulary, which may be padded beyond the tokenizer's; required for "dummy".
        chat_template: a template to use instead of the model's own: a file, or the Jinja text itself.

    Raises:
        ModelError: there is no tokenizer at `path`, or it is of a kind that is not supported.
        ConfigError: `chat_template` is neither a file nor a template.
    """
    override = None if chat_template is None else _template_text(chat_template)
    if path == "dummy":
        if vocab_size is None:
            raise ModelError("a dummy tokenizer needs the vocabulary size of its model")
        parts = dummy_tokenizer(vocab_size)
    elif path.endswith(".gguf"):
        parts = gguf_tokenizer(Path(path))
    else:
        parts = hf_tokenizer(Path(path))
    return Tokenizer(parts, vocab_size=vocab_size, chat_template=override)


class Tokenizer:
    """Text to ids and back.

    Attributes:
        vocab_size: ids are in [0, vocab_size); the model's number where one was given.
        bos_token_id: None if there is none.
        eos_token_ids: ids that end a text, by the tokenizer's own account.
        special_ids: ids that `skip_special_tokens` leaves out.
        chat_template: the Jinja source, or None.
        table: the bytes of each id, or None where the decoder allows no table.
    """

    def __init__(
        self, parts: TokenizerParts, *, vocab_size: int | None = None, chat_template: str | None = None
    ) -> None:
        self._backend = parts.backend
        self._size = parts.backend.get_vocab_size(with_added_tokens=True)
        self.vocab_size = self._size if vocab_size is None else vocab_size
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = parts.eos_token_ids
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Ids can have gaps, so the largest one may lie beyond the number of tokens.
        num_ids = max(self.vocab_size, self._size, max(added, default=-1) + 1)
        self.table: TokenTable | None = build_token_table(parts.backend, num_ids)
        self._num_ids = num_ids
        self._bound = token_bound(parts.backend, self.table)
        self.chat_template = parts.chat_template if chat_template is None else chat_template
        self._template: ChatTemplate | None = None
        self._template_error = _NO_TEMPLATE
        if self.chat_template is not None:
            self._compile(self.chat_template, parts.special_tokens, is_override=chat_template is not None)

    def _compile(self, source: str, special_tokens: Mapping[str, str], *, is_override: bool) -> None:
        try:
            self._template = ChatTemplate(source, special_tokens)
        except jinja2.TemplateError as error:
            message = f"the chat template does not compile: {error}"
            if is_override:
                raise ConfigError(message) from error
            # The model still completes text; only its chats are refused.
            logger.warning("%s", message)
            self._template_error = message

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`; special tokens written in it are recognised.

        add_special_tokens: add what the model expects around a text (usually BOS, for many nothing).

        Raises:
            RequestError: text that is no valid Unicode (a lone surrogate).
        """
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        check_length: Callable[[int], None] | None = None,
    ) -> list[list[int]]:
        """`encode` of several texts, on all cores; releases the GIL meanwhile.

        check_length: is shown the number of ids of each text, and may raise, before they become a list, which
            holds the GIL for some 10 ms a million.
        """
        if any(type(text) is not str for text in texts):  # the library would read a pair as two texts
            raise RequestError("a prompt to tokenize must be a string")
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError:  # all that a str can have wrong
            raise RequestError("the text holds a lone surrogate, which is not valid Unicode") from None
        if check_length is not None:
            for encoding in encodings:
                check_length(len(encoding))
        return [encoding.ids for encoding in encodings]

    def min_ids(self, text: str) -> int:
        """A number of ids that `text` has at least, told without tokenizing; 0 where nothing is known."""
        return 0 if self._bound is None else self._bound.min_ids(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`: exactly what they say, no clean-up of spaces. Ids without a token add nothing.

        Raises:
            RequestError: an id outside [0, vocab_size).
        """
        checked = [int(i) for i in ids]
        if checked and not 0 <= min(checked) <= max(checked) < self._num_ids:
            bad = min(checked) if min(checked) < 0 else max(checked)
            raise RequestError(f"token id {bad} is outside the vocabulary of {self.vocab_size} ids")
        return str(self._backend.decode(checked, skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token_id: int) -> str:
        """The text of one id by itself, specials included; half a character reads U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes of one id, specials included: also right where it is half a character."""
        if self.table is not None and 0 <= token_id < self._num_ids:
            return self.table.raw[token_id]
        return self.id_to_token(token_id).encode("utf-8")

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt ids of a chat. The template writes BOS itself where it wants one; none is added.

        Raises:
            RequestError: see `render_chat`.
        """
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a chat. kwargs: further variables of the template.

        Raises:
            RequestError: the model has no chat template, or `ChatTemplate.render` refuses.
        """
        if self._template is None:
            raise RequestError(self._template_error, code="no_chat_template")
        return self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
        )


def _template_text(given: str) -> str:
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {given}: neither a readable file nor a template ({error})"
        ) from error
