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

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_PROBE = "zqprobe"
_HANDLES_NULL_CONTENT = re.compile(r"content['\"]?\s*\]?\s+is\s+(not\s+)?none", re.IGNORECASE)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text.
        special_tokens: what the template may name: {"bos_token": "<s>", ...}.

    Attributes:
        source: the Jinja text.
        uses_tools: whether the template reads `tools`.
        takes_parts: whether it can read content given as a list of parts; else text parts are joined for it.
        takes_null: whether it tells null content apart; else null becomes the empty string.

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
        self.takes_null = _HANDLES_NULL_CONTENT.search(source) is not None

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
        for name in kwargs.keys() & _RESERVED:
            raise RequestError(f"{name} cannot be a template variable", param="chat_template_kwargs")
        if tools and not self.uses_tools:
            raise RequestError(
                "tools are not supported: this model's chat template has no place for them", param="tools"
            )
        plain = plain_messages(messages, keep_parts=self.takes_parts, keep_null=self.takes_null)
        variables = {**self._special_tokens, **kwargs}
        try:
            return self._template.render(
                **variables,
                messages=plain,
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise RequestError(
                f"the chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error

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
