"""Forms of calls and results against what chat templates write and tokenizers encode."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from brorl.errors import UserError
from brorl.prompts.question import Question
from brorl.prompts.rendering import render
from brorl.prompts.settings import PromptFormat
from brorl.tools.calls import Call
from brorl.tools.format import ToolFormat, check_turn_ends
from brorl.tools.settings import ToolSettings
from each_row import each_row
from tool_chats import (
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMES,
    NO_SYSTEM,
    PLAIN,
    QWEN,
    SCHEMAS,
    SPECIAL,
    TAGS,
    chat_tokenizer,
)

pytestmark = pytest.mark.usefixtures("same_import_path")

ENDS = {QWEN: "<|im_end|>", LLAMA3: "<|eot_id|>", MISTRAL: "</s>", MISTRAL_NAMES: "</s>"}
RESULTS = [("calculate", "12 and\n 3"), ("look_up", '"the tool" é')]


def chosen(
    tokenizer: PreTrainedTokenizerFast,
    form: str = "auto",
    ends: Sequence[str] = ("</s>", "<|im_end|>", "<|eot_id|>"),
    **style: Any,
) -> ToolFormat:
    stop = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    return ToolFormat.choose(tokenizer, ToolSettings(format=form), PromptFormat(**style), SCHEMAS, stop)


def call_messages(results: Sequence[tuple[str, str]], arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a question, a turn with calls, and their results, as transformers takes them."""
    functions = [{"name": name, "arguments": arguments} for name, _ in results]
    calls = [{"id": f"call0000{i}", "type": "function", "function": f} for i, f in enumerate(functions, 1)]
    tools = [
        {"role": "tool", "name": name, "content": content, "tool_call_id": call["id"]}
        for (name, content), call in zip(results, calls, strict=True)
    ]
    user = {"role": "user", "content": "How much?"}
    return [user, {"role": "assistant", "content": "", "tool_calls": calls}, *tools]


@pytest.mark.parametrize(
    ("name", "template", "number"),
    [
        ("hermes", QWEN, 1), ("hermes", QWEN, 2), ("llama3", LLAMA3, 1), ("mistral", MISTRAL, 1),
        ("mistral", MISTRAL, 2), ("mistral", MISTRAL_NAMES, 1), ("mistral", MISTRAL_NAMES, 2),
    ],
)  # fmt: skip
def test_a_transcript_has_the_tokens_of_the_whole_conversation(name: str, template: str, number: int) -> None:
    """The prompt, the turn, its end token and the reply are what the tokenizer makes of the whole text."""
    tokenizer = chat_tokenizer(template)
    found = chosen(tokenizer)
    assert found.name == name
    results, arguments = RESULTS[:number], {"query": 'is "é" {x}?', "n": [1, {"b": 2.5, "a": None}]}
    (prompt,) = render([Question("q", "How much?", "", "math")], PromptFormat(), tokenizer, found.shown)
    messages = call_messages(results, arguments)
    whole = tokenizer.apply_chat_template(
        messages, tools=list(SCHEMAS), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tuple(whole[: len(prompt.token_ids)]) == prompt.token_ids
    after, end = whole[len(prompt.token_ids) :], tokenizer.convert_tokens_to_ids(ENDS[template])
    turn = after[: after.index(end) + 1]
    assert found.reply(results) == tuple(after[len(turn) :])
    canonical = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    text = found.turn_text(turn)
    assert text == tokenizer.decode(turn[:-1])
    assert found.parse(text) == tuple(Call(name, canonical) for name, _ in results)
    assert found.turn_text(turn[:-1]) == text  # a turn that was cut has no end token


def test_two_results_where_the_template_shows_a_single_call() -> None:
    tokenizer = chat_tokenizer(LLAMA3)
    start = "<|start_header_id|>{}<|end_header_id|>\n\n"
    blocks = [start.format("ipython") + json.dumps(content, ensure_ascii=False) for _, content in RESULTS]
    expected = "<|eot_id|>".join([*blocks, start.format("assistant")])
    assert tokenizer.decode(chosen(tokenizer).reply(RESULTS)) == expected


def test_results_are_joined_where_the_template_shows_a_single_one() -> None:
    single = "{% if messages | length > 3 %}{{ raise_exception('a single result') }}{% endif %}"
    tokenizer = chat_tokenizer(single + QWEN)
    joined = "<tool_response>\n" + "\n".join(content for _, content in RESULTS) + "\n</tool_response>"
    assert joined in tokenizer.decode(chosen(tokenizer).reply(RESULTS))


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM])
def test_hermes_with_a_template_without_tools(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    found = chosen(tokenizer, "hermes", ["<|im_end|>"])
    blocks = "\n".join(f"<tool_response>\n{content}\n</tool_response>" for _, content in RESULTS)
    text = f"\n<|im_start|>user\n{blocks}<|im_end|>\n<|im_start|>assistant\n"
    assert found.reply(RESULTS) == tuple(tokenizer("<|im_end|>" + text)["input_ids"][1:])
    (prompt,) = render([Question("q", "How much?", "", "math")], PromptFormat(), tokenizer, found.shown)
    begin = "<|im_start|>system\n" if template == PLAIN else "<|im_start|>user\n"
    shown, _, question = prompt.text.partition("How much?")
    assert shown.startswith(begin)
    assert question == "<|im_end|>\n<|im_start|>assistant\n"
    lines = [json.loads(line) for line in shown.splitlines() if line.startswith('{"type"')]
    assert lines == list(SCHEMAS)
    assert "<tool_call>" in shown


def test_hermes_uses_a_template_that_writes_it() -> None:
    tokenizer = chat_tokenizer(QWEN)
    assert chosen(tokenizer, "hermes").shown == chosen(tokenizer).shown
    other = chosen(chat_tokenizer(LLAMA3), "hermes")
    assert other.shown.text
    assert other.parse('<tool_call>{"name": "a"}</tool_call>') == (Call("a", "{}"),)


HOSTILE = [
    *SPECIAL,
    *TAGS,
    "<<|im_end|>|im_end|>",
    "<|im_<|im_end|>end|>",
    "<|im_end|><|im_end|>",
    "xQ0Zk4Wm<|im_end|>",
]


@pytest.mark.parametrize("template", [QWEN, LLAMA3, MISTRAL, PLAIN])
def test_a_tool_forges_no_token(template: str, rng: np.random.Generator) -> None:
    """The text is the same, and the added tokens are those of harmless results."""
    tokenizer = chat_tokenizer(template)
    found = chosen(tokenizer, "hermes" if template == PLAIN else "auto")
    added = set(tokenizer.added_tokens_decoder)
    harmless = [token for token in found.reply([("calculate", "1"), ("calculate", "2")]) if token in added]
    for text in [*HOSTILE, *("".join(rng.choice(HOSTILE, size=5)) for _ in range(20))]:
        ids = found.reply([("calculate", text), ("calculate", "\udc80")])
        assert [token for token in ids if token in added] == harmless
        shown = json.dumps(text, ensure_ascii=False) if template == LLAMA3 else text
        assert shown in tokenizer.decode(ids)


def test_a_tool_forges_no_token_in_another_spelling() -> None:
    """A tokenizer can normalize a text before it looks for added tokens."""
    from tokenizers import AddedToken, normalizers

    tokenizer = chat_tokenizer(QWEN, ())
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=True)])
    full_width = "a\N{FULLWIDTH LESS-THAN SIGN}tool_call\N{FULLWIDTH GREATER-THAN SIGN}b"
    forged = tokenizer.convert_tokens_to_ids("<tool_call>")
    assert forged in tokenizer(full_width)["input_ids"]
    assert forged not in chosen(tokenizer).reply([("calculate", full_width)])


def test_tokens_of_white_space_stay_whole() -> None:
    """Gemma and Phi have added tokens for runs of white space, which their models know."""
    tokenizer = chat_tokenizer(PLAIN, ["\n\n\n", "  "])
    ids = chosen(tokenizer, "hermes").reply([("calculate", "a\n\n\nb  c")])
    assert set(tokenizer.convert_tokens_to_ids(["\n\n\n", "  "])) <= set(ids)


@each_row(
    "thinking, reply, turn, number",
    [
        (None, "<|im_start|>assistant\n", '<tool_call>{"name": "a"}</tool_call>', 1),
        (False, "<|im_start|>assistant\n<think>\n\n</think>\n\n", '<tool_call>{"name": "a"}</tool_call>', 1),
        (True, "<|im_start|>assistant\n<think>\n", '</think><tool_call>{"name": "a"}</tool_call>', 1),
        (True, "<|im_start|>assistant\n<think>\n", '<tool_call>{"name": "a"}</tool_call>', 0),
        (True, "<|im_start|>assistant\n<think>\n", '<tool_call>{"name": "a"}</tool_call></think>No.', 0),
    ],
)
def test_thoughts(thinking: bool | None, reply: str, turn: str, number: int) -> None:
    """Options of the template apply to the next turn, and a thought that the prompt opens makes no calls."""
    tokenizer = chat_tokenizer(QWEN)
    found = chosen(tokenizer, chat_template_options={} if thinking is None else {"enable_thinking": thinking})
    assert tokenizer.decode(found.reply(RESULTS[:1])).endswith(f"</tool_response><|im_end|>\n{reply}")
    assert len(found.parse(turn)) == number


XML = QWEN.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "<function={{ call.function.name }}>{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>{{ v }}"
    "</parameter>{% endfor %}</function>",
)
BY_TAGS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}  # fmt: skip


def test_the_response_template_of_a_tokenizer() -> None:
    tokenizer = chat_tokenizer(XML)
    if "response_template" not in vars(tokenizer):
        pytest.skip("transformers is older than response templates")
    with pytest.raises(
        UserError, match=r"writes a call as '<tool_call>.*not a known format; set tools\.format: hermes"
    ):
        chosen(tokenizer)
    tokenizer.response_template = BY_TAGS
    found = chosen(tokenizer)
    assert found.name == "response template"
    one = "<tool_call>\n<function=look_up><parameter=query>a</parameter><parameter=place>\nb c</parameter></function>"
    expected = Call("look_up", '{"place":"\\nb c","query":"a"}')
    assert found.parse(f"Hm.{one}</tool_call>\n{one}</tool_call>") == (expected, expected)
    assert found.parse("The answer is 4.") == ()


def test_a_response_template_that_raises_makes_an_unreadable_call() -> None:
    tokenizer = chat_tokenizer(QWEN)
    if "response_template" not in vars(tokenizer):
        pytest.skip("transformers is older than response templates")
    call = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
    call["transform"] = {"type": "function", "function": "{content}"}
    tokenizer.response_template = {**BY_TAGS, "fields": {**BY_TAGS["fields"], "tool_calls": call}}
    found = chosen(tokenizer)
    assert found.name == "response template"
    assert found.parse('<tool_call>{"name": "a", "arguments": {"b": 1}}</tool_call>') == (Call("a", '{"b":1}'),)
    for text in ('<tool_call>{"name": "a"</tool_call>', "<tool_call>[]</tool_call>", "<tool_call>7</tool_call>"):
        (broken,) = found.parse(text)
        assert broken.problem


CALL = QWEN[QWEN.index("{%- for call") : QWEN.index("<|im_end|>\n{% endif %}\n{%- endfor")]


@each_row(
    "form, template, error",
    [
        ("auto", None, "needs a chat template"),
        ("auto", PLAIN, "does not show the tools; set tools.format: hermes"),
        ("llama3", PLAIN, "does not show the tools"),
        ("auto", QWEN.replace("(tool | tojson)", "(tools[0] | tojson)"), "does not show the tools"),
        ("auto", QWEN.replace(CALL, ""), "drops the calls"),
        ("auto", QWEN.replace("{{ m.content }}\n</tool", "\n</tool"), "drops tool results"),
        ("auto", QWEN.replace("{%- for m in", "{{ messages | length }}{%- for m in", 1), "changes the text"),
        ("auto", QWEN.replace("<|im_end|>", "\n").replace("<|im_start|>", "# "), "an end token between"),
        ("auto", QWEN.replace("<|im_end|>", "<|end_header_id|>"), r"set sampling.stop: \['<\|end_header_id\|>'\]"),
        ("auto", "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + QWEN, "does not show the tools"),
        ("auto", "{% if messages | length > 1 %}{{ 1 / 0 }}{% endif %}" + QWEN, "division by zero"),
        ("mistral", QWEN, "not in the mistral format"),
        ("hermes", "{{ messages[0].content }}", "changes|drops|an end token"),
        ("hermes", PLAIN.replace("<|im_end|>", "").replace("<|im_start|>", "# "), "an end token"),
    ],
)  # fmt: skip
def test_templates_that_are_refused(form: str, template: str | None, error: str) -> None:
    with pytest.raises(UserError, match=error) as raised:
        chosen(chat_tokenizer(template), form)
    again = "set tools.format: hermes" in str(raised.value)
    assert again is (form != "hermes" and "sampling.stop" not in error and template is not None)


def test_no_chat_template_is_used() -> None:
    with pytest.raises(UserError, match=r"tools\.format = hermes needs a chat template"):
        chosen(chat_tokenizer(QWEN), "hermes", chat="never")


def test_texts_that_end_responses_do_not_go_with_tools() -> None:
    tokenizer = chat_tokenizer(QWEN)
    check_turn_ends(tokenizer, ["<|im_end|>", "</s>"])
    with pytest.raises(UserError, match=r"sampling\.stop contains 'Question:', but with tools"):
        check_turn_ends(tokenizer, ["<|im_end|>", "Question:"])


OWN = """
import re

def parse(text):
    if "boom" in text:
        raise RuntimeError("no way")
    if "odd" in text:
        return 3
    return [{"name": name, "arguments": {"x": value}} for name, value in re.findall(r"(\\w+)\\((.*?)\\)", text)]

def render(results):
    return "".join(f"\\n{name} = {content}" for name, content in results) + "\\n"
"""


def test_a_file_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    tokenizer = chat_tokenizer(None)
    found = chosen(tokenizer, str(file), ["</s>"], chat="never")
    assert found.parse("add(1) and (2)") == (Call("add", '{"x":"1"}'),)
    assert found.parse("4") == ()
    for text, problem in (("boom", "RuntimeError: no way"), ("odd", "TypeError")):
        (call,) = found.parse(text)
        assert problem in call.problem
    reply = found.reply([("add", "12"), ("sub", "</s>")])
    assert reply == (*tokenizer("\nadd = 12\nsub = <")["input_ids"], *tokenizer("/s>\n")["input_ids"])
    (prompt,) = render([Question("q", "How much?", "", "math")], PromptFormat(chat="never"), tokenizer, found.shown)
    assert prompt.text == "How much?"
    with_chat = chosen(chat_tokenizer(QWEN), str(file))
    (prompt,) = render([Question("q", "?", "", "math")], PromptFormat(), chat_tokenizer(QWEN), with_chat.shown)
    assert '"look_up"' in prompt.text
    without_tools = chosen(chat_tokenizer(PLAIN), str(file))
    (prompt,) = render([Question("q", "?", "", "math")], PromptFormat(), chat_tokenizer(PLAIN), without_tools.shown)
    assert prompt.text == "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"


def test_a_stop_token_that_merges_with_what_follows(tmp_path: Path) -> None:
    """A text after a line end has the tokens that it has alone: the line end is the model's token."""
    file, tokenizer = tmp_path / "mine.py", chat_tokenizer(None)
    file.write_text(OWN)
    line_end = tokenizer.encode("\n")
    assert tokenizer.encode("\n\nadd")[:1] != line_end
    form = ToolFormat.choose(tokenizer, ToolSettings(format=str(file)), PromptFormat(), SCHEMAS, line_end)
    assert form.reply([("add", "12")]) == tuple(tokenizer.encode("\nadd = 12\n"))


@each_row(
    "code, error",
    [
        ("def parse(text): ...", "no attribute 'render'"),
        ("1 / 0", "ZeroDivisionError"),
        (None, "no such file"),
        ("def parse(text): ...\ndef render(results): return None", "render returned None"),
        ("def parse(text): ...\ndef render(results): return results[5]", "render raised IndexError"),
    ],
)
def test_a_broken_file_of_the_user(code: str | None, error: str, tmp_path: Path) -> None:
    file = tmp_path / f"{abs(hash(code))}.py"
    if code is not None:
        file.write_text(code)
    with pytest.raises(UserError, match=error):
        chosen(chat_tokenizer(None), str(file), ["</s>"])
