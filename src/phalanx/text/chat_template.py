"""Chat templates: a list of messages becomes the text of a prompt, as the model's own Jinja template says.

The environment is the one that the templates of the Hugging Face Hub are written for. A template is foreign
code, so it runs in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.core.errors import RequestError
from phalanx.text.chat_messages import plain_messages

_PROBE = "zqprobe"
_KNOWS_NULL_CONTENT = re.compile(r"content['\"]?\s*\]?\s+is\s+(not\s+)?none", re.IGNORECASE)
# What foreign template code can raise on data that it was not written for.
_RENDER_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text.
        special_tokens: what the template may name: {"bos_token": "<s>", ...}.

    Attributes:
        source: the Jinja text.
        uses_tools: whether the template reads `tools`.
        takes_parts: whether it can read content given as a list of parts; else text parts are joined for it.

    Raises:
        jinja2.TemplateSyntaxError: the source is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._template = environment.from_string(source)
        self.uses_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.takes_parts = self._probe_parts()
        self._absent_content = None if _KNOWS_NULL_CONTENT.search(source) else ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. kwargs: further variables of the template (`enable_thinking=False`).

        Raises:
            RequestError: messages that are empty, malformed or hold anything but text; tools that the
                template has no place for; or the template refuses them (`raise_exception`) or fails on them.
        """
        if tools and not self.uses_tools:
            raise RequestError(
                "tools are not supported: this model's chat template has no place for them", param="tools"
            )
        plain = plain_messages(messages, keep_parts=self.takes_parts)
        variables = {
            **self._special_tokens,
            **kwargs,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render_tolerantly(plain, variables)
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        except _RENDER_ERRORS as error:
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

    def _render_tolerantly(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Null content is left away first, as transformers does, and filled in if the template fails so."""
        try:
            return self._template.render(variables, messages=messages)
        except (jinja2.TemplateError, *_RENDER_ERRORS):
            if all("content" in message for message in messages):
                raise
        filled = [{"content": self._absent_content, **message} for message in messages]
        return self._template.render(variables, messages=filled)

    def _probe_parts(self) -> bool:
        """Show it a list of parts: a template made for strings fails, or prints the list."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._template.render(
                **self._special_tokens, messages=[message], tools=None, add_generation_prompt=True
            )
        except Exception:  # whatever it raises, the answer is no
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no template means.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)
