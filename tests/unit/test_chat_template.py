"""Chat templates: what they accept and refuse, and ids equal to transformers'."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from phalanx.core.errors import ConfigError, RequestError
from phalanx.text.parts import TokenizerParts, surround
from phalanx.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit import tiny_tokenizers

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
WRITES_BOS = "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
TOOLS = """{%- if tools %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- '<tool>' + call.function.name + ' ' }}{{ call.function.arguments | tojson }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
    {%- else %}{{ m.content }}{% endif %}
{%- endfor %}"""
PARTS = """{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}
{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"""
NULL_AWARE = (
    "{% for m in messages %}{% if m['content'] is none %}(none)"
    "{% else %}{{ '<' + m['content'] + '>' }}{% endif %}{% endfor %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "<é>"}}}


def with_template(template: str | None, **options: Any) -> Tokenizer:
    base = tiny_tokenizers.byte_level()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    parts = TokenizerParts(backend=base._backend, special_tokens=special, chat_template=template, **options)
    return Tokenizer(parts)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool_call(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (CHATML, [user("hi 世界")], {}),
        (CHATML, [{"role": "system", "content": "s"}, user("a</s>b")], {"add_generation_prompt": False}),
        (WRITES_BOS, [user("  padded  ")], {}),
        (
            TOOLS,
            [user("weather?"), tool_call({"city": "é"}), {"role": "assistant", "content": "rain"}],
            {"tools": [WEATHER]},
        ),
        (PARTS, [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]), user("x")], {}),
        (PARTS, [tool_call({}), user("x")], {}),
        (TOOLS, [{"role": "assistant", "content": "x", "tool_calls": None, "name": None}, user(None)], {}),
        (
            "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.content }}{% endfor %}",
            [{"role": "assistant", "content": "x", "reasoning": "because"}],
            {},
        ),
        (
            "{{ enable_thinking }}{% for m in messages %}{{ m.content }}{% endfor %}",
            [user("x")],
            {"enable_thinking": False},
        ),
    ],
)
def test_ids_equal_transformers(
    template: str, messages: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    tokenizer = with_template(template)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    options = {"add_generation_prompt": True, **options}
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert tokenizer.apply_chat_template(messages, **options) == expected
    assert tokenizer.render_chat(messages, **options) == theirs.apply_chat_template(
        messages, tokenize=False, **options
    )


def test_bos_is_never_doubled() -> None:
    base = tiny_tokenizers.byte_level()
    copied = type(base._backend).from_str(base._backend.to_str())
    bos = ("<s>", copied.token_to_id("<s>"))
    surround(copied, bos, None)
    parts = TokenizerParts(
        backend=copied, bos_token_id=bos[1], special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )
    tokenizer = Tokenizer(parts, chat_template=WRITES_BOS)
    assert tokenizer.encode("x")[0] == bos[1]
    assert tokenizer.apply_chat_template([user("x")]).count(bos[1]) == 1


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (user(None), ""),
        ({"role": "user"}, ""),
        (user(""), ""),
        (user([]), ""),
        (user([{"type": "text", "text": "one"}]), "one"),
        (user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]), "one\ntwo"),
        (tool_call("{}"), ""),
        ({"role": "assistant", "content": "a", "tool_calls": None}, "a"),
        ({"role": "user", "content": "a", "tool_calls": []}, "a"),
    ],
)
def test_content_that_is_accepted(message: dict[str, Any], shown: str) -> None:
    before = repr(message)
    text = with_template(CHATML).render_chat([message], add_generation_prompt=False)
    assert text == f"<s>{message['role']}\n{shown}</s>\n"
    assert repr(message) == before


def test_arguments_given_as_json_text_are_printed_as_json() -> None:
    tokenizer = with_template(TOOLS)
    as_text, as_object = tool_call('{"city": "é", "n": 2}'), tool_call({"city": "é", "n": 2})
    assert (
        tokenizer.render_chat([as_text])
        == tokenizer.render_chat([as_object])
        == '<tool>weather {"city": "é", "n": 2}'
    )


def test_null_content_is_what_the_template_can_read() -> None:
    assert with_template(NULL_AWARE).render_chat([tool_call({}), user("x")]) == "(none)<x>"
    assert with_template("{{ messages[0].content }}|").render_chat([tool_call({})]) == "|"
    assert with_template("{{ messages[0].content + '|' }}").render_chat([tool_call({})]) == "|"


IMAGE = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        ("hi", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([user("x"), user(5)], r"messages\[1\]\.content"),
        ([user({"text": "x"})], r"messages\[0\]\.content"),
        ([user(IMAGE)], r"messages\[0\]\.content\[1\] is of type 'image_url'"),
        ([user([{"type": "text", "text": None}])], r"content\[0\]\.text"),
        ([user(["x"])], r"content\[0\] must be an object"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"tool_calls\[0\]\.function"),
        ([tool_call("{not json")], r"tool_calls\[0\]\.function\.arguments is not JSON"),
    ],
)
def test_content_that_is_refused(messages: Any, says: str) -> None:
    for template in (CHATML, PARTS):
        with pytest.raises(RequestError, match=says) as error:
            with_template(template).apply_chat_template(messages)
        assert error.value.status == 400
        assert error.value.param == "messages"


def test_no_template_is_a_400_that_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template") as error:
        with_template(None).apply_chat_template([user("x")])
    assert error.value.status == 400 and error.value.code == "no_chat_template"


def test_what_the_template_itself_refuses() -> None:
    refusing = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as error:
        refusing.apply_chat_template([user("x")])
    assert error.value.status == 400
    for failing in (
        "{{ messages[0].content.nothing.at_all }}",
        "{{ 1 + messages[0].content }}",
        "{{ 1 / 0 }}",
    ):
        with pytest.raises(RequestError, match="chat template"):
            with_template(failing).apply_chat_template([user("x")])


def test_the_sandbox_holds() -> None:
    for escape in (
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ):
        with pytest.raises(RequestError, match="chat template"):
            with_template(escape).render_chat([user("x")])


def test_tools_without_a_place_for_them() -> None:
    with pytest.raises(RequestError, match="tools") as error:
        with_template(CHATML).apply_chat_template([user("x")], tools=[WEATHER])
    assert error.value.param == "tools"
    assert with_template(CHATML).apply_chat_template([user("x")], tools=[])


def test_broken_templates() -> None:
    with pytest.raises(RequestError, match="does not compile"):
        with_template("{% for %}").apply_chat_template([user("x")])
    with pytest.raises(ConfigError, match="does not compile"):
        load_tokenizer("dummy", vocab_size=9, chat_template="{% for %}")
    with pytest.raises(ConfigError, match=r"no-such\.jinja"):
        load_tokenizer("dummy", vocab_size=9, chat_template="no-such.jinja")


def test_override_from_a_file_and_from_text(tmp_path: Any) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}é", encoding="utf-8")
    for given in (str(file), "{{ messages[0].content }}é"):
        tokenizer = load_tokenizer("dummy", vocab_size=9, chat_template=given)
        assert tokenizer.chat_template == "{{ messages[0].content }}é"
        assert tokenizer.render_chat([user("x")]) == "xé"


def test_helpers_and_whitespace() -> None:
    template = (
        "  {% if true %}\n{{ strftime_now('%Y') | length }}\n  {% endif %}\n{{ {'a': '<é>'} | tojson }}"
    )
    assert with_template(template).render_chat([user("x")]) == '4\n{"a": "<é>"}'


@pytest.mark.smollm2
def test_smollm2_equals_transformers() -> None:
    tokenizer = tiny_tokenizers.smollm2()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=tokenizer.chat_template,
    )
    for messages in (
        [user("Count: 1, 2, 3 – 世界 👩‍👩‍👧")],
        [
            {"role": "system", "content": "Be brief."},
            user("hi"),
            {"role": "assistant", "content": "hello"},
            user("?"),
        ],
    ):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.apply_chat_template(messages) == expected
    assert tokenizer.apply_chat_template([user("x")])[0] == 1
    assert not tokenizer.decode(tokenizer.apply_chat_template([user("x")])).count("<|im_start|>")
