"""Sample texts to compare two tokenizer backends before one replaces the other.

They contain what tokenizers treat differently: many scripts, code, whitespace, digits, composed and decomposed letters,
special tokens inside user text, and long text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

SAMPLED_TOKENS = 32
"""Maximum number of added tokens that are tried; more would only take load time."""

TEXTS = (
    "",
    " ",
    "\n",
    "a",
    " a",
    "a ",
    "Hello, world!",
    "hello world",
    "  two  spaces   three    four",
    "tabs\tand\t\ttabs \t mixed",
    "line\nline\n\nline\n\n\n  indented\r\nwindows\r\n",
    "trailing newline\n",
    "\n\nleading newlines",
    "non\u00a0breaking\u2003em\u3000ideographic\u200bzero width\ufeffbom",
    "don't can't I'll we've they're it's DON'T",
    "CamelCaseWord snake_case_word kebab-case SCREAMING_CASE x2y3z4",
    "1234567890 3.14159 1,000,000 0x1F 1e-9 2026-11-21T05:22:00Z",
    "٠١٢٣٤٥٦٧٨٩ १२३४ ①②③ ½ x² 10⁻⁶",
    "def f(x: int) -> list[int]:\n    return [i ** 2 for i in range(x) if i % 2 == 0]  # squares\n",
    "for (let i = 0; i < n; ++i) { a[i] += `${b}`; } // ok?\n",
    "SELECT * FROM t WHERE a <> 'b' AND c >= 10;",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2, 3], "metric": true}}',
    "<html><body class='x'>&lt;p&gt; <br/> <!-- c --></body></html>",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\temp\\x.txt",
    "!?.,;:\"'()[]{}<>|/\\@#$%^&*-_=+~`",
    "!!!??? ... ---- ==== ____ ****",
    "Grüße aus Köln, façade, naïve, Ångström, œuvre, İstanbul, ıstanbul, ß ẞ",
    "cafe\u0301 A\u030a n\u0303 e\u0302\u0323 \u1e69 s\u0323\u0307",
    "Ω \u2126 K \u212a Å \u212b ﬁ ﬂ ﬀ Ⅷ ㎏ ｆｕｌｌｗｉｄｔｈ ～",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "敏捷的棕色狐狸跳过懒狗。今天天气怎么样？",
    "いろはにほへと ちりぬるを。カタカナ ｶﾀｶﾅ",
    "다람쥐 헌 쳇바퀴에 타고파",
    "\u1112\u1161\u11ab\u1100\u1173\u11af decomposed jamo",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ",
    "דג סקרן שט בים מאוכזב",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇨🇭 ❤️ ☺︎ ⌘",
    "∑ ∫ √ ≤ ≥ ≠ → ⇒ ∀x∈ℝ ∃y: x² + y² = r² $\\frac{a}{b}$",
    "\u0000 \u0001 \u001b[31m \u007f \u0085 \ufffd \U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "                                                                x",
    "\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n\n \n \n \n",
    "▁ ▁▁ Ġ Ċ ## ##ing </w> <0x0A> ␣",
    "user\nassistant\nsystem\n[INST] [/INST] <s> </s> <|im_start|> <|eot_id|>",
)


def samples(added_tokens: Sequence[str]) -> list[str]:
    """The fixed texts, the tokenizer's own added tokens in unusual places, and long text of both."""
    step = max(1, len(added_tokens) // SAMPLED_TOKENS)
    chosen = [token for token in added_tokens[::step] if token]
    surrounded = [form for token in chosen for form in _unusual(token)]
    pairs = [left + right for left, right in pairwise(chosen)]
    markers = chosen or ["\n"]
    dialogue = "".join(markers[i % len(markers)] + text for i, text in enumerate(TEXTS))
    return [*TEXTS, *surrounded, *pairs, dialogue, " ".join(TEXTS), dialogue[::-1], dialogue * 4]


def _unusual(token: str) -> list[str]:
    return [f"x{token}y", f"x {token} y", f"\n{token}\n\n", token + token, token[:-1], token + token[1:]]
