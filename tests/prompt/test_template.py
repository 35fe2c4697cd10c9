"""From a chat request's body to the text that the engine will encode."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ConfigError, MalformedRequest
from router.prompt.conversation import Unrenderable
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def variable(deepseek: Tokenizer) -> Any:
    """The value of a template variable: `variable(name, body, default_kwargs)`."""

    def read(name: str, body: dict[str, Any] | None = None, defaults: dict[str, Any] | None = None) -> str:
        text = f"{{{{ {name} | tojson if {name} is defined else 'undefined' }}}}"
        return ChatTemplate(deepseek, text, default_kwargs=defaults).render({"messages": [USER], **(body or {})})

    return read


def test_messages_tools_and_special_tokens_reach_the_template(template: ChatTemplate) -> None:
    """In vLLM's form, with the generation prompt that is the default."""
    text = template.render(
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        }
    )
    tool = '{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}'
    call = '{"id": "1", "function": {"arguments": {}, "name": "f"}, "type": "function"}'
    assert text == (
        f"<｜begin▁of▁sentence｜>TOOLS [{tool}]\nBe brief.<｜User｜>a\nb"
        f"<｜Assistant｜>CALL {call}<｜end▁of▁sentence｜><｜Assistant｜>"
    )


def test_the_requests_fields_override_its_kwargs_and_those_the_engines_defaults(variable: Any) -> None:
    """Null and "auto" never override."""
    defaults = {"style": "engine", "add_generation_prompt": False}
    assert variable("style", {}, defaults) == '"engine"'
    assert variable("style", {"chat_template_kwargs": {"style": "mine"}}, defaults) == '"mine"'
    assert variable("style", {"chat_template_kwargs": {"style": None}}, defaults) == '"engine"'
    assert variable("style", {"chat_template_kwargs": {"style": "auto"}}, defaults) == '"engine"'
    assert variable("style", {"chat_template_kwargs": {"style": "auto"}}) == "undefined"
    asked = {"chat_template_kwargs": {"add_generation_prompt": False, "reasoning_effort": "low"}}
    assert variable("add_generation_prompt", asked, defaults) == "true"
    assert variable("add_generation_prompt", {"add_generation_prompt": False}) == "false"
    assert variable("reasoning_effort", asked) == '"low"'
    assert variable("reasoning_effort", asked | {"reasoning_effort": "high"}) == '"high"'


def test_tools_come_from_the_body_unless_kwargs_name_others(variable: Any) -> None:
    """`tool_choice` does not change the prompt."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert '"name": "f"' in variable("tools", {"tools": tools, "tool_choice": "none"}, {"tools": [{}]})
    assert variable("tools", {"tools": tools, "chat_template_kwargs": {"tools": [{"x": 1}]}}) == '[{"x": 1}]'
    assert variable("tools") == "null"


def test_reasoning_effort_sets_thinking(variable: Any) -> None:
    """Unless the kwargs set it."""
    assert variable("enable_thinking") == "undefined"
    assert variable("enable_thinking", {"reasoning_effort": "low"}) == "true"
    assert variable("enable_thinking", {"reasoning_effort": "none"}, {"enable_thinking": True}) == "false"
    asked = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}
    assert variable("enable_thinking", asked) == "false"


def test_documents_and_special_tokens_can_be_named(variable: Any) -> None:
    """A special token can be overridden."""
    assert variable("documents", {"documents": [{"title": "t"}]}) == '[{"title": "t"}]'
    assert variable("documents") == "null"
    assert variable("eos_token") == '"<｜end▁of▁sentence｜>"'
    assert variable("eos_token", {"chat_template_kwargs": {"eos_token": "E"}}) == '"E"'


def test_kwargs_cannot_steer_the_renderer(variable: Any) -> None:
    """Names of its own parameters are not variables."""
    kwargs = {"conversations": [], "messages": [], "tokenize": True, "return_assistant_tokens_mask": True}
    assert variable("messages", {"chat_template_kwargs": kwargs}) == '[{"role": "user", "content": "hi"}]'


def test_a_final_message_can_be_continued(template: ChatTemplate) -> None:
    """The prompt ends with the message."""
    messages = [USER, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "add_generation_prompt": False}
    assert template.render(body).endswith("Well, <｜end▁of▁sentence｜>")
    assert template.render(body | {"continue_final_message": True}).endswith("<｜Assistant｜>Well, ")


@pytest.mark.parametrize("explicit", [{}, {"add_generation_prompt": True}])
def test_continuing_and_starting_a_message_exclude_each_other(
    template: ChatTemplate, explicit: dict[str, bool]
) -> None:
    """Also when one of them is only the default."""
    with pytest.raises(MalformedRequest, match="cannot both be true") as caught:
        template.render({"messages": [USER], "continue_final_message": True, **explicit})
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("body", [{"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}])
def test_a_template_in_the_request_is_refused(template: ChatTemplate, body: dict[str, Any]) -> None:
    """In the body and in the kwargs."""
    with pytest.raises(MalformedRequest, match="not accepted"):
        template.render({"messages": [USER], **body})


def test_the_templates_own_refusal_is_passed_on(template: ChatTemplate) -> None:
    """With the template's own message."""
    with pytest.raises(MalformedRequest, match="unknown role wizard"):
        template.render({"messages": [{"role": "wizard", "content": "hi"}]})


def test_a_template_that_fails_on_a_request_refuses_it(deepseek: Tokenizer) -> None:
    """Also for an access that the sandbox forbids."""
    for text in ("{{ messages[0].content + 1 }}", "{{ messages.append(1) }}", "{{ ''.__class__.mro() }}"):
        with pytest.raises(MalformedRequest, match="the chat template refused"):
            ChatTemplate(deepseek, text).render({"messages": [USER]})


def test_media_is_left_to_the_engine(template: ChatTemplate) -> None:
    """It raises `Unrenderable`, which is not an error of the client."""
    with pytest.raises(Unrenderable):
        template.render({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]})


def test_content_has_the_form_that_the_template_loops_over_or_that_was_configured(
    deepseek: Tokenizer,
) -> None:
    """Detection is the default."""
    text = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    shown = "{{ messages[0].content | tojson }}"
    assert ChatTemplate(deepseek, text).render({"messages": [USER]}) == "<hi>"
    assert ChatTemplate(deepseek, text, "string").render({"messages": [USER]}) == "<><>"
    assert ChatTemplate(deepseek, shown).render({"messages": [USER]}) == '"hi"'
    assert ChatTemplate(deepseek, shown, "openai").render({"messages": [USER]}) == '[{"type": "text", "text": "hi"}]'


def test_developer_messages_stay_only_in_templates_with_that_role(deepseek: Tokenizer) -> None:
    """A template that names the role handles it."""
    body = {"messages": [USER, {"role": "developer", "content": "d"}]}
    roles = "{% for m in messages %}{{ m.role }} {% endfor %}"
    assert ChatTemplate(deepseek, roles).render(body) == "system user "
    assert ChatTemplate(deepseek, roles + "{# 'developer' #}").render(body) == "user developer "


def test_one_of_several_named_templates_is_for_tools(deepseek: Tokenizer) -> None:
    """As in `transformers`."""
    several = _with_templates(deepseek, {"default": "plain", "tool_use": "with tools"})
    template = ChatTemplate(several)
    assert template.render({"messages": [USER]}) == "plain"
    assert template.render({"messages": [USER], "tools": [{"function": {"name": "f"}}]}) == "with tools"


def _with_templates(tokenizer: Tokenizer, templates: Any) -> Tokenizer:
    other = object.__new__(Tokenizer)
    other.__dict__.update(tokenizer.__dict__, chat_template=templates)
    return other


@pytest.mark.parametrize("templates", [None, "", {"rag": "x"}])
def test_a_tokenizer_without_a_template_is_an_error(deepseek: Tokenizer, templates: Any) -> None:
    """At startup."""
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate(_with_templates(deepseek, templates))


@pytest.mark.parametrize("content_format", ["auto", "string"])
def test_a_template_that_does_not_compile_is_a_configuration_error(deepseek: Tokenizer, content_format: Any) -> None:
    """Also when no format needs to be detected."""
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(deepseek, "{% for %}", content_format)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELD = st.sampled_from(
    ["role", "content", "tool_calls", "function", "arguments", "name", "type", "text", "image_url", "tools", "id"]
)
NEARLY = st.recursive(
    JSON | st.sampled_from(["user", "assistant", "tool", "system", "developer", "text", "function", "{}", "["]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELD, inner, max_size=5),
    max_leaves=20,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "wizard"])},
    optional={"content": NEARLY, "tool_calls": st.lists(NEARLY, max_size=2), "name": JSON, "reasoning": JSON},
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=4) | NEARLY},
    optional={
        "tools": st.lists(NEARLY, max_size=2) | JSON,
        "chat_template_kwargs": st.dictionaries(st.text(max_size=6), JSON, max_size=2) | JSON,
        "documents": JSON,
        "reasoning_effort": JSON,
        "add_generation_prompt": st.booleans() | JSON,
        "continue_final_message": st.booleans() | JSON,
    },
)


@given(body=BODY)
def test_any_json_is_rendered_or_refused_as_malformed(template: ChatTemplate, body: dict[str, Any]) -> None:
    """No other error is raised."""
    try:
        assert isinstance(template.render(body), str)
    except (MalformedRequest, Unrenderable) as refused:
        assert str(refused)
