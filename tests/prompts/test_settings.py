"""Settings of sources and of prompts that contradict each other are rejected with the fix."""
# ruff: noqa: E501

import re
from typing import Any

import pytest

from brorl.prompts.settings import FileSource, PromptFormat
from each_row import each_row


@each_row(
    ("settings", "message"),
    [
        ({"path": " "}, "`path` is empty; give it a value"),
        ({"answer_column": ""}, "`answer_column` is empty; give it a value, or remove it if it has a default"),
        ({"answer_after": ""}, "`answer_after` is empty; give it a value, or null"),
        ({"name": "a:b"}, "`name: 'a:b'` must not contain a colon, which separates the parts of an id; choose a different name"),
        ({"limit": 0}, "greater than or equal to 1"),
        ({"options_column": "A"}, "needs the multiple-choice verifier; set `domain: science`"),
        ({"first_option": 0}, "`first_option` has no effect without options_column"),
        ({"options_column": ["A", " "], "domain": "science"}, "`options_column` contains an empty name"),
        ({"options_column": "A", "domain": "science", "answer_after": "####"}, "`answer_after` has no effect with options"),
        ({"options_column": "A", "layout": "gsm8k"}, "the layout gsm8k already sets it"),
        ({"layout": "gsm8k", "answer_after": "####"}, "`answer_after`: the layout gsm8k already sets it; remove answer_after"),
        ({"layout": "gsm8k", "prompt_column": "question"}, "`prompt_column`: the layout gsm8k already sets it"),
        ({"layout": "gsm8k", "domain": "code"}, "`domain`: the layout gsm8k already sets it"),
    ],
)  # fmt: skip
def test_a_source_checks_its_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FileSource(**{"path": "p.jsonl", "name": "s", **settings})


@each_row(
    ("fields", "message"),
    [
        ({"template": "Q: prompt"}, "prompt.template must contain {prompt} once, where the question goes, got 0 times ('Q: prompt')"),
        ({"template": "{prompt}{prompt}"}, "prompt.template must contain {prompt} once, where the question goes, got 2 times ('{prompt}{prompt}')"),
        ({"domain_templates": {"code": "x"}}, "prompt.domain_templates.code must contain {prompt} once, where the question goes, got 0 times ('x')"),
        ({"system_prompt": " "}, "prompt.system_prompt is blank; set it to a text, or to null for none"),
        ({"chat": "yes"}, "'auto', 'always' or 'never'"),
        ({"chat": "never", "chat_template_options": {"a": 1}}, "prompt.chat_template_options has no effect with prompt.chat: never; remove one of them"),
        ({"chat_template_options": {"messages": []}}, "prompt.chat_template_options: messages is not a variable of a chat template; remove it"),
    ],
)  # fmt: skip
def test_a_format_checks_its_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PromptFormat(**fields)
