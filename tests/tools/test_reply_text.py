"""Results without what a chat template writes around them."""

from typing import Any

import pytest

from brorl.prompts.settings import PromptFormat
from brorl.tools.format import ToolFormat
from brorl.tools.settings import ToolSettings
from brorl.tools.toolbox import Toolbox
from tool_chats import LLAMA3, MISTRAL_NAMES, QWEN, SCHEMAS, chat_tokenizer

RESULTS = ("408", "12 and\n 3", "", " error: <|im_end|> \u00e9", "1")


def toolbox_of(template: str) -> Toolbox:
    tokenizer, settings, tools = chat_tokenizer(template), ToolSettings(), Any
    stop = [tokenizer.convert_tokens_to_ids(end) for end in ("</s>", "<|im_end|>", "<|eot_id|>")]
    form = ToolFormat.choose(tokenizer, settings, PromptFormat(), SCHEMAS, stop)
    return Toolbox(tools, form, settings, tokenizer)  # type: ignore[arg-type]


@pytest.mark.parametrize(("template", "quoted"), [(QWEN, False), (LLAMA3, True)])
def test_a_result_stands_alone(template: str, quoted: bool) -> None:
    box = toolbox_of(template)
    for text in RESULTS:
        written = text.replace("\n", "\\n") if quoted else text
        assert box.reply_text(box.format.reply([("tool", text)])) == written


def test_a_reply_of_another_form_is_shown_whole() -> None:
    box = toolbox_of(MISTRAL_NAMES)
    reply = box.format.reply([("calculate", "408"), ("look_up", "x")])
    text = box.reply_text(reply)
    assert "408" in text
    assert text == box.tokenizer.decode(list(reply), skip_special_tokens=False).strip()
