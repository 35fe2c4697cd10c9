"""What the model that `make_answers.py` trains answers to "script NAME"."""

from __future__ import annotations

from typing import Any, NamedTuple


class Script(NamedTuple):
    answer: str
    thinks: bool = False
    tools: bool = False


def _call(fields: str) -> str:
    return f"<tool_call>\n{fields}\n</tool_call>"


SCRIPTS = {
    "plain": Script(
        "A router stands in front of many engines. Each engine keeps the blocks of the prompts that it has read, so a"
        " request that begins like an earlier one is answered sooner where that one went. When an engine dies in the"
        " middle of an answer, the words that the reader has are kept, and another engine goes on from the very next"
        " word; the reader sees a pause, never a cut, and never a word twice."
    ),
    "bytes": Script("Smile 😀, helix 🧬, family 👨‍👩‍👧‍👦, letters 𝔘𝔫𝔦, rare 𠜎𡃁𩶘, flags 🇫🇷🇯🇵, naïve café — ﷽ end."),
    "stops": Script("one ST two STO three EN four END five STO six STOP seven eight nine"),
    "json": Script('{"city": "São Paulo", "days": 3, "sunny": true, "tags": ["warm", "dry", "windy"]}'),
    "think": Script(
        "<think>\nThe reader asks for a number. Six times seven is forty-two, and nothing else fits; so I say that, and"
        " I say it plainly.\n</think>\n\nThe answer is 42, because six times seven is forty-two.",
        thinks=True,
    ),
    "tool": Script(
        "Let me look.\n" + _call('{"name": "get_weather", "arguments": {"city": "Paris 😀", "days": 3}}'), tools=True
    ),
    "tools": Script(
        "<think>\nTwo things are asked, so I call two tools, one after the other.\n</think>\n\nI do both.\n"
        + _call('{"name": "get_weather", "arguments": {"city": "Kyoto", "days": 2}}')
        + "\n"
        + _call('{"name": "send_mail", "arguments": {"to": "ann@example.org", "text": "It rains; take a coat."}}'),
        thinks=True,
        tools=True,
    ),
    "thinkjson": Script(
        "<think>\nA city is asked for; I take Lima.\n</think>"  # vLLM's grammar begins here, and allows no space
        '{"city": "Lima", "days": 1, "sunny": false, "tags": ["fog"]}',
        thinks=True,
    ),
}


def _tool(name: str, **fields: str) -> dict[str, Any]:
    properties = {field: {"type": kind} for field, kind in fields.items()}
    about = {"get_weather": "Weather of a city", "send_mail": "Send a mail"}[name]
    required = ["city"] if name == "get_weather" else list(fields)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [_tool("get_weather", city="string", days="integer"), _tool("send_mail", to="string", text="string")]
