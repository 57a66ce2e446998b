"""Prompts against the tokenizer's own calls, on small byte tokenizers with and without a chat template."""
# ruff: noqa: E501

import logging
from dataclasses import replace
from datetime import datetime
from string import ascii_letters
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerFast

from brorl.errors import UserError
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import Message, Question
from brorl.prompts.rendering import ShownTools, drop_long, prompt_problems, render
from brorl.prompts.settings import PromptFormat
from each_row import each_row
from error_names import check_names

CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT
)
USER_ONLY = "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
DATED = "{% if not date is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}Today: {{ date }}. " + CHAT

CHAT_OF_ENDS = "{% for m in messages %}</s>{{ m['content'] }}</s>{% endfor %}"

BOS, EOS, END, ASSISTANT = range(256, 260)


def byte_tokenizer(chat: str | None = None, prefix: str = "<s>", suffix: str = "") -> PreTrainedTokenizerFast:
    """One token a byte, special tokens, and what the tokenizer puts around every text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<s>", "</s>", "<|end|>", "<|assistant|>"]
    vocab = {token: i for i, token in enumerate([*letters, *specials])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{prefix} $A {suffix}".strip(), special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat,
        extra_special_tokens=["<|end|>", "<|assistant|>"],
    )  # fmt: skip


def ask(text: str, name: str = "q") -> Question:
    return Question(name, text, "2", "math", "mine")


def talk(*turns: tuple[str, str]) -> Question:
    return Question("q", "", "2", "math", "mine", tuple(Message(*turn) for turn in turns))


def text_of(question: Question, tokenizer: Any, **settings: Any) -> str:
    (prompt,) = render([question], PromptFormat(**settings), tokenizer)
    return prompt.text


def refusal(question: Question, tokenizer: Any, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        render([question], PromptFormat(**settings), tokenizer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_prompt_above_the_length_of_the_tokenizer_prints_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run checks the positions of the model; `model_max_length` is no limit of it."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for chat in (None, CHAT):
        tokenizer = byte_tokenizer(chat)
        tokenizer.model_max_length = 4
        (prompt,) = render([ask("longer than four bytes")], PromptFormat(), tokenizer)
        assert len(prompt.token_ids) > 4
    assert caplog.records == []


class TestPlainText:
    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=5))
    def test_tokens_are_the_tokenizers_own(self, texts: list[str]) -> None:
        tokenizer = byte_tokenizer()
        prompts = render([ask(text, f"q{i}") for i, text in enumerate(texts)], PromptFormat(), tokenizer)
        assert prompts == [
            Prompt(f"q{i}", text, tuple(tokenizer(text)["input_ids"]), "2", "math", "mine", text)
            for i, text in enumerate(texts)
        ]
        assert all(prompt.token_ids[0] == BOS for prompt in prompts)

    @pytest.mark.parametrize(
        ("prefix", "suffix", "begin", "end"),
        [("<s>", "", (BOS,), ()), ("", "", (), ()), ("<s>", "</s>", (BOS,), ()), ("", "</s>", (), ()), ("</s>", "", (EOS,), ())],
    )  # fmt: skip
    def test_no_end_token_stays_behind_the_prompt(
        self, prefix: str, suffix: str, begin: tuple[int, ...], end: tuple[int, ...]
    ) -> None:
        tokenizer = byte_tokenizer(prefix=prefix, suffix=suffix)
        (prompt,) = render([ask("a b")], PromptFormat(), tokenizer)
        assert prompt.token_ids == (*begin, *tokenizer("a b", add_special_tokens=False)["input_ids"], *end)

    def test_an_end_token_that_the_user_wrote_stays(self) -> None:
        (prompt,) = render([ask("a</s>")], PromptFormat(), byte_tokenizer())
        assert prompt.token_ids[-1] == EOS

    def test_more_questions_than_fit_a_batch_keep_their_order(self) -> None:
        questions = [ask(str(i), f"q{i}") for i in range(2500)]
        prompts = render(questions, PromptFormat(template="{prompt}="), byte_tokenizer())
        assert [p.text for p in prompts] == [f"{i}=" for i in range(2500)]

    @given(*[st.text(st.characters(exclude_categories=["Cs"])).filter(lambda t: "{prompt}" not in t)] * 2)
    def test_every_other_brace_is_a_brace(self, before: str, after: str) -> None:
        question = r"Simplify \frac{1}{2}{x} in {prompt} and {0} and {{}}, %s $x"
        found = PromptFormat(template=f"{before}{{prompt}}{after}").fill(question, "math")
        assert found == before + question + after

    def test_a_domain_can_have_its_own_template(self) -> None:
        questions = [replace(ask(text), domain=domain) for text, domain in (("a", "math"), ("b", "code"), ("c", "gym"))]
        style = PromptFormat(template="{prompt}?", domain_templates={"code": "{prompt} {code}", "gym": "{prompt}"})
        assert [p.text for p in render(questions, style, byte_tokenizer())] == ["a?", "b {code}", "c"]
        (chat,) = render(questions[1:2], style, byte_tokenizer(CHAT))
        assert "b {code}" in chat.text

    def test_the_system_prompt_comes_first(self) -> None:
        tokenizer = byte_tokenizer()
        assert (
            text_of(ask("a"), tokenizer, system_prompt="Be brief.", template="Q: {prompt}\nA:")
            == "Be brief.\n\nQ: a\nA:"
        )
        assert text_of(talk(("system", "Be brief."), ("user", "a")), tokenizer) == "Be brief.\n\na"
        assert text_of(ask("a"), byte_tokenizer(CHAT), chat="never") == "a"

    def test_a_conversation_needs_a_chat_template(self) -> None:
        question = talk(("user", "a"), ("assistant", "b"), ("user", "c"))
        said = refusal(question, byte_tokenizer())
        check_names(said, "question q", "user, assistant, user", "needs a chat template", "prompt.chat at auto")

    def test_a_question_without_tokens(self) -> None:
        words = Tokenizer(models.WordLevel({"1": 0}))
        words.normalizer = normalizers.Replace("?", "")
        said = refusal(ask("??"), PreTrainedTokenizerFast(tokenizer_object=words))
        check_names(said, "question q has zero tokens ('??')", "delete the row")


class TestChat:
    @pytest.mark.parametrize("chat", ["auto", "always"])
    @pytest.mark.parametrize("system", [None, "Be {brief}."])
    @pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
    def test_text_is_what_transformers_makes(self, chat: str, system: str | None, options: dict[str, Any]) -> None:
        """And its tokens are those of transformers: no second begin token, no end token."""
        tokenizer = byte_tokenizer(CHAT, suffix="</s>")
        said = [{"role": "user", "content": "What is {x}? Box it."}]
        if system:
            said.insert(0, {"role": "system", "content": system})
        style = PromptFormat(
            template="{prompt} Box it.", system_prompt=system, chat=chat, chat_template_options=options
        )  # type: ignore[arg-type]
        (prompt,) = render([ask("What is {x}?")], style, tokenizer)
        expected = tokenizer.apply_chat_template(said, add_generation_prompt=True, **options)
        assert prompt.text == tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **options)
        assert list(prompt.token_ids) == expected["input_ids"]
        assert prompt.token_ids.count(BOS) == 1
        assert prompt.text.endswith("<|assistant|><think></think>" if options else "<|assistant|>")
        assert EOS not in prompt.token_ids

    def test_the_last_message_is_put_into_the_template(self) -> None:
        question = talk(("user", "a"), ("assistant", "b"), ("user", "c"))
        assert text_of(question, byte_tokenizer(CHAT), template="{prompt}!", system_prompt="s") == (
            "<s><|system|>s<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c!<|end|><|assistant|>"
        )

    def test_a_date_is_always_the_same_and_the_users_own_wins(self) -> None:
        tokenizer = byte_tokenizer(DATED)
        real = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        assert datetime.now().strftime("%b %Y") in real
        dated = text_of(ask("a"), tokenizer)
        assert dated == f"Today: 01 Jan 2026. {text_of(ask('a'), byte_tokenizer(CHAT))}"
        assert text_of(ask("a"), tokenizer, chat_template_options={"date": "May"}).startswith("Today: May. ")

    def test_a_date_is_written_as_strftime_writes_it(self) -> None:
        """In every form, inside a macro too, and without touching the blank line that the template begins with."""
        forms = [f"%{flag}{letter}" for flag in ("", *"-#EO") for letter in ascii_letters]
        forms += ["%F", "%x", "%-d. %-m. %Y", "%10Y|%_5d|%^010B", "%%d", "%%%d", "100%", "%", "", "%-d%e%%", "%é"]
        forms += ["%d %b %Y", "%Y-%m-%d", "%A, %B %d, %Y", "%a %e %y %j", "%I:%M:%S %p, %H h", "%:z", "% d", "%+"]
        chat = "\n\n{% macro now(f) %}{{ strftime_now(f) }}{% endmacro %}\n"
        chat += "|".join(f"{{{{ now({form!r}) }}}}" for form in forms)
        written = text_of(ask("a"), byte_tokenizer(chat))
        assert written == "\n\n" + "|".join(datetime(2026, 1, 1).strftime(form) for form in forms)

    def test_a_date_that_the_template_puts_together(self) -> None:
        """The form is not in the template's text; one that is not known is an error, never today's date."""
        chat = (
            "{{ strftime_now('%' ~ 'd/%' ~ 'm' ~ '/%Y') }} {{ strftime_now('%B') | upper }} "
            "{{ strftime_now('%y') | int + 1 }}"
        )
        assert text_of(ask("a"), byte_tokenizer(chat)) == "01/01/2026 JANUARY 27"
        assert "(it writes a date in the form %7d, which is not read)" in refusal(
            ask("a"), byte_tokenizer("{{ strftime_now('%' ~ '7d') }}")
        )

    def test_a_tokenizer_without_a_chat_template(self) -> None:
        said = refusal(ask("a"), byte_tokenizer(), chat="always")
        check_names(said, "has no chat template", "prompt.chat: never", "prompt.template")
        said = refusal(ask("a"), byte_tokenizer(), chat_template_options={"enable_thinking": False})
        check_names(said, "has no chat template", "prompt.chat_template_options")

    def test_an_option_that_the_template_does_not_know(self) -> None:
        said = refusal(ask("a"), byte_tokenizer(CHAT), chat_template_options={"enable_thinkin": False})
        check_names(said, "'enable_thinkin'", "prompt.chat_template_options")

    def test_templates_without_a_system_role(self) -> None:
        advice = "from prompt.system_prompt to prompt.template"
        said = refusal(ask("a"), byte_tokenizer(NO_SYSTEM), system_prompt="s")
        check_names(said, "rejects system prompts (System role not supported)", advice)
        said = refusal(ask("a"), byte_tokenizer(USER_ONLY), system_prompt="Be brief.")
        check_names(said, "drops the system prompt", advice)
        said = refusal(talk(("system", "s"), ("user", "a")), byte_tokenizer(NO_SYSTEM))
        check_names(said, "rejects system prompts", "from question q to prompt.template")
        assert text_of(ask("a"), byte_tokenizer(NO_SYSTEM)).endswith("<|user|>a<|end|><|assistant|>")

    def test_templates_that_fail(self) -> None:
        broken = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(jinja2.TemplateError):
            byte_tokenizer(broken).apply_chat_template([{"role": "user", "content": "a"}])
        for system in None, "s":
            said = refusal(ask("a"), byte_tokenizer(broken), system_prompt=system)
            check_names(said, "question q (roles must alternate)", "prompt.chat: never")

    def test_two_system_prompts(self) -> None:
        said = refusal(talk(("system", "a"), ("user", "b")), byte_tokenizer(CHAT), system_prompt="s")
        check_names(said, "question q already has a system message", "prompt.system_prompt: null")


def test_a_prompt_keeps_the_question_alone() -> None:
    around = PromptFormat(template="Think. {prompt} Answer:", system_prompt="You are a poet.")
    (prompt,) = render([ask("What is 1 + 1?")], around, byte_tokenizer())
    assert (prompt.question, prompt.text) == ("What is 1 + 1?", "You are a poet.\n\nThink. What is 1 + 1? Answer:")
    chat = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turns = talk(("user", "Hello"), ("assistant", "Hi"), ("user", "And 2 + 2?"))
    (prompt,) = render([turns], around, byte_tokenizer(chat))
    assert prompt.question == "And 2 + 2?"


TOOL_CHAT = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


class TestTools:
    """Tools in prompts: the chat template shows them, or a text does."""

    schemas = tuple({"type": "function", "function": {"name": name}} for name in ("add", "look_up"))

    def test_the_template_shows_the_schemas(self) -> None:
        tokenizer = byte_tokenizer(TOOL_CHAT)
        (prompt,) = render([ask("2?")], PromptFormat(system_prompt="s"), tokenizer, ShownTools(self.schemas))
        chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "2?"}]
        expected = tokenizer.apply_chat_template(chat, tools=list(self.schemas), tokenize=False)
        assert "look_up" in expected
        assert prompt.text == expected
        assert render([ask("2?")], PromptFormat(), tokenizer)[0].text == "<|user|>2?"

    def test_a_template_that_shows_some(self) -> None:
        tokenizer = byte_tokenizer(TOOL_CHAT.replace("tools or []", "(tools or [])[:1]"))
        with pytest.raises(UserError, match=r"not show the tool look_up for question q; set tools\.format: hermes"):
            render([ask("2?")], PromptFormat(), tokenizer, ShownTools(self.schemas))

    @each_row(
        ("role", "system_prompt", "text"),
        [
            ("system", None, "<|system|>T<|user|>2?"),
            ("system", "s", "<|system|>T\n\ns<|user|>2?"),
            ("user", None, "<|user|>T\n\n2?"),
            ("user", "s", "<|system|>s<|user|>T\n\n2?"),
        ],
    )
    def test_a_text_goes_before_the_first_message(self, role: Any, system_prompt: str | None, text: str) -> None:
        style = PromptFormat(system_prompt=system_prompt)
        (prompt,) = render([ask("2?")], style, byte_tokenizer(TOOL_CHAT), ShownTools(text="T", role=role))
        assert prompt.text == text

    def test_a_text_in_a_conversation(self) -> None:
        asked = talk(("user", "Hello"), ("assistant", "Hi"), ("user", "And 2?"))
        (prompt,) = render([asked], PromptFormat(), byte_tokenizer(TOOL_CHAT), ShownTools(text="T", role="user"))
        assert prompt.text == "<|user|>T\n\nHello<|assistant|>Hi<|user|>And 2?"


def test_long_prompts_are_dropped() -> None:
    prompts = [Prompt(str(n), "", (1,) * n, "", "d") for n in (3, 1, 4, 2, 4)]
    assert [len(p.token_ids) for p in drop_long(prompts, 3)] == [3, 1, 2]
    assert drop_long(prompts, 4) == drop_long(prompts, 0) == prompts


def one_token(**roles: str) -> PreTrainedTokenizerFast:
    """A tokenizer of letters and digits that has one token for several roles, at the beginning of every text."""
    vocab = {token: i for i, token in enumerate(["</s>", *"abc12 ", "<unk>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=roles["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


OPT = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>"}


@each_row(
    ("roles", "chat", "text", "missing"),
    [
        (OPT, None, "a1 b2", None),
        (OPT, None, "a1</s>b2", None),  # the user's own
        (OPT, CHAT_OF_ENDS, "a1 b2", None),
        (OPT, None, "a1 bd2 c", "bd2"),
        (OPT, None, "a1</s>d", "d"),
        (OPT, CHAT_OF_ENDS, "a1 ö", "ö"),
        ({**OPT, "unk_token": "<unk>"}, None, "a1 b2", None),
        ({**OPT, "unk_token": "<unk>"}, None, "a1 x", "x"),
    ],
)
def test_a_text_without_a_token_is_told_from_a_token_with_several_roles(
    roles: dict[str, str], chat: str | None, text: str, missing: str | None
) -> None:
    tokenizer = one_token(**roles)
    tokenizer.chat_template = chat
    (prompt,) = render([ask(text)], PromptFormat(), tokenizer)
    assert (tokenizer.unk_token_id in prompt.token_ids) == (roles is OPT or missing is not None)
    problems = [*prompt_problems("opt", [prompt], {"max": 9}, tokenizer, LlamaConfig())]
    assert [problem.partition("it has no token for ")[2].partition(";")[0] for problem in problems] == (
        [] if missing is None else [repr(missing)]
    )
