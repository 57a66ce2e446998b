"""Prompt settings: the sources (built-in puzzles, files, datasets) and the text around a question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from brorl.errors import UserError, source_setting
from brorl.prompts.question import MATH_DOMAIN, SCIENCE_DOMAIN, Message, Question
from brorl.section import Names, Section, as_list
from brorl.storage import exists, split_revision

_PLACEHOLDER = "{prompt}"
GYM_SETS = ALL, PRORL = ("all", "prorl")
"""Sets of Reasoning Gym datasets that a source can name instead of single datasets."""
_OWN_OPTIONS = {"messages", "add_generation_prompt", "chat_template", "strftime_now"}
"""Chat template variables that are not options."""
_LAYOUT_SETTINGS = (
    "prompt_column", "context_column", "answer_column", "answer_after", "options_column", "first_option", "domain",
    "domain_column",
)  # fmt: skip
"""Source settings that a layout determines."""


class CountdownSource(Section):
    """Built-in puzzles: combine numbers with + - * / to reach a target. Whole sets of numbers are held out."""

    task: Literal["countdown"] = Field("countdown", description="the built-in puzzle")
    name: str | None = Field(None, description="name of the source in tables")
    num_numbers: int = Field(3, ge=2, le=5, description="numbers per puzzle")
    max_number: int = Field(9, ge=2, description="largest number of a puzzle")
    min_target: int = Field(1, ge=0, description="smallest target")
    max_target: int = Field(99, ge=0, description="largest target")
    weight: float = Field(1.0, gt=0, description="weight among the training prompts, relative to other sources")

    @model_validator(mode="after")
    def _targets_ascend(self) -> Self:
        if self.min_target > self.max_target:
            raise ValueError(
                f"data.sources: min_target = {self.min_target} is above max_target = {self.max_target}; swap the two"
            )
        return self

    @property
    def label(self) -> str:
        """Name of the source in tables."""
        return self.name or "countdown"

    @property
    def kind(self) -> str:
        """The kind of source, as a word."""
        return self.task


class FileSource(Section):
    """Questions with reference answers, one per row: JSONL, JSON, CSV, Parquet, or a Hugging Face dataset."""

    path: str = Field(
        description="file, folder or pattern (*.jsonl), hub id of a dataset (or id@revision), or the shipped `products`"
    )
    name: str | None = Field(None, description="name of the source in tables; null uses the last part of the path")
    layout: str | None = Field(
        None, description="layout of a public dataset; replaces columns and domain (docs/how-to/data.md)"
    )
    prompt_column: str = Field("prompt", description="column with the question: text, or a list of messages")
    context_column: str | None = Field(
        None, description="column with text that precedes the question, such as a passage; null for none"
    )
    answer_column: str = Field("answer", description="column with the reference answer")
    answer_after: str | None = Field(
        None, description="text whose last occurrence precedes the answer, such as #### in GSM8K"
    )
    options_column: Names = Field(
        (),
        description="column with the options of a multiple-choice question, or a list of one column per option; they "
        "are written below the question, and the answer is an option's letter, index or text",
    )
    first_option: int | None = Field(
        None, ge=0, le=1, description="index of the first option, 0 or 1, if answers are indices; null otherwise"
    )
    id_column: str | None = Field(None, description="column with unique ids; null numbers the rows")
    domain: str = Field(
        "math", min_length=1, description="domain of the questions, which selects the verifier; environment passes "
        "whole rows to tools.environment and does not need an answer",
    )  # fmt: skip
    domain_column: str | None = Field(None, description="column with the domain, if it differs between rows")
    subset: str | None = Field(None, description="configuration of a Hugging Face dataset")
    split: str = Field("train", description="split of a Hugging Face dataset")
    limit: int | None = Field(None, ge=1, description="maximum number of rows to read")
    weight: float = Field(1.0, gt=0, description="weight among the training prompts, relative to other sources")

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        """Make a local path absolute, so a run can resume from any directory."""
        local = Path(path).expanduser()
        is_pattern = not {*"*?["}.isdisjoint(path)
        return str(local.absolute()) if path.strip() and (exists(local) or is_pattern) else path

    @property
    def label(self) -> str:
        """Name of the source in tables."""
        return self.name or Path(split_revision(self.path)[0]).stem

    @property
    def kind(self) -> str:
        """The kind of source, as a word: its layout, or `columns`."""
        return self.layout or "columns"

    @model_validator(mode="after")
    def _texts_and_layout(self) -> Self:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, str) and not (value if field.default is None else value.strip()):
                otherwise = "null" if field.default is None else "remove it if it has a default"
                raise ValueError(f"{source_setting(name)} is empty; give it a value, or {otherwise}")
        _check_label(self.label)
        if self.layout is not None:
            fields = type(self).model_fields
            twice = next((name for name in _LAYOUT_SETTINGS if getattr(self, name) != fields[name].default), None)
            if twice:
                raise ValueError(
                    f"{source_setting(twice)}: the layout {self.layout} already sets it; remove {twice}, or remove "
                    "layout and name the columns"
                )
        self._check_options()
        return self

    def _check_options(self) -> None:
        if not self.options_column:
            if self.first_option is not None:
                raise ValueError(
                    f"{source_setting('first_option')} has no effect without options_column; set or remove it"
                )
            return
        if not all(name.strip() for name in self.options_column):
            raise ValueError(
                f"{source_setting('options_column')} contains an empty name; fix it, or remove the setting"
            )
        if self.answer_after is not None:
            raise ValueError(f"{source_setting('answer_after')} has no effect with options_column; remove one of them")
        if self.domain == MATH_DOMAIN and self.domain_column is None:
            raise ValueError(
                f"{source_setting('options_column')} needs the multiple-choice verifier; set "
                f"{source_setting('domain', SCIENCE_DOMAIN)}"
            )


class GymSource(Section):
    """Questions generated by Reasoning Gym, at consecutive indices of its datasets; needs the extra `gym`."""

    gym: Names = Field(
        min_length=1,
        description="a Reasoning Gym dataset, a list of them, prorl (the 96 that ProRL trained on), or all "
        "(docs/reference/gym.md)",
    )
    name: str | None = Field(None, description="name of the source in tables; null uses the dataset's name, or gym")
    num_questions: int = Field(1000, ge=1, le=10**7, description="questions to generate, cycling over the datasets")
    first_index: int = Field(
        0, ge=0, le=10**9, description="index of the first entry to use from each dataset; later ones follow"
    )
    seed: int = Field(0, ge=0, le=2**31, description="random seed of the datasets")
    config: dict[str, Any] = Field(
        {},
        description="settings of the dataset (docs/reference/gym.md); for several datasets, by name: "
        "{leg_counting: {min_animals: 3}}",
    )
    weight: float = Field(1.0, gt=0, description="weight among the training prompts, relative to other sources")

    @model_validator(mode="after")
    def _has_label(self) -> Self:
        _check_label(self.label)
        return self

    @property
    def is_single(self) -> bool:
        """Whether the source is a single dataset, rather than several or a set."""
        return len(self.gym) == 1 and self.gym[0] not in GYM_SETS

    @property
    def label(self) -> str:
        """Name of the source in tables."""
        return self.name or (self.gym[0] if self.is_single else "gym")

    @property
    def kind(self) -> str:
        """The kind of source, as a word."""
        return "gym"


def _check_label(label: str) -> None:
    if ":" in label:
        raise ValueError(
            f"{source_setting('name', repr(label))} must not contain a colon, which separates the parts of an id; "
            "choose a different name"
        )


def _kind(value: Any) -> str:
    for kind, section, key in (("countdown", CountdownSource, "task"), ("gym", GymSource, "gym")):
        if isinstance(value, section) or (isinstance(value, dict) and key in value):
            return kind
    return "file"


Source = Annotated[
    Annotated[CountdownSource, Tag("countdown")]
    | Annotated[GymSource, Tag("gym")]
    | Annotated[FileSource, Tag("file")],
    Discriminator(_kind),
]
EvaluationSource = Annotated[
    Annotated[GymSource, Tag("gym")] | Annotated[FileSource, Tag("file")],
    Discriminator(lambda value: "gym" if _kind(value) == "gym" else "file"),
]


def as_sources(value: Any) -> Any:
    """Wrap a single source in a list. A string is the name of a built-in puzzle, or a path."""
    sources = []
    for item in as_list(value):
        key = "task" if item == "countdown" else "path"
        sources.append({key: item} if isinstance(item, str) else item)
    return sources


class DataSettings(Section):
    """The prompts."""

    sources: Annotated[tuple[Source, ...], BeforeValidator(as_sources), Field(strict=False)] = Field(
        (CountdownSource(),), min_length=1, description="training data: files, Hugging Face datasets, "
        "Reasoning Gym or built-in puzzles; one source, or a list with weights (docs/how-to/data.md)",
    )  # fmt: skip
    held_out_fraction: float = Field(0.1, ge=0, lt=1, description="fraction of the prompts held out for evaluation")
    split_seed: int = Field(0, ge=0, lt=2**63, description="random seed of the held-out split")
    max_prompt_tokens: int = Field(0, ge=0, description="drop prompts longer than this; 0 keeps all")


class PromptFormat(Section):
    """The text around a question."""

    template: str = Field(_PLACEHOLDER, description="text around the question, which replaces {prompt}")
    domain_templates: dict[str, str] = Field(
        {}, description="templates for single domains, instead of `template`: {math: ..., code: ...}"
    )
    system_prompt: str | None = Field(None, description="system prompt before every question; null for none")
    chat: Literal["auto", "always", "never"] = Field(
        "auto",
        description="use the tokenizer's chat template: auto, if it has one | always, or fail if it has none | never",
    )
    chat_template_options: dict[str, Any] = Field(
        {}, description="variables for the chat template, such as {enable_thinking: false}"
    )

    @model_validator(mode="after")
    def _can_be_shown(self) -> Self:
        domain_templates = {f"prompt.domain_templates.{domain}": text for domain, text in self.domain_templates.items()}
        for name, text in {"prompt.template": self.template, **domain_templates}.items():
            count = text.count(_PLACEHOLDER)
            if count != 1:
                raise ValueError(
                    f"{name} must contain {_PLACEHOLDER} once, where the question goes, got {count} times ({text!r})"
                )
        if self.system_prompt is not None and not self.system_prompt.strip():
            raise ValueError("prompt.system_prompt is blank; set it to a text, or to null for none")
        if self.chat == "never" and self.chat_template_options:
            raise ValueError("prompt.chat_template_options has no effect with prompt.chat: never; remove one of them")
        own = sorted(_OWN_OPTIONS.intersection(self.chat_template_options))
        if own:
            raise ValueError(f"prompt.chat_template_options: {own[0]} is not a variable of a chat template; remove it")
        return self

    def fill(self, text: str, domain: str) -> str:
        """Return a question's text with its domain's template filled in."""
        before, _, after = self.domain_templates.get(domain, self.template).partition(_PLACEHOLDER)
        return before + text + after

    def messages_of(self, question: Question) -> tuple[Message, ...]:
        """Return the system prompt and the question's messages, the last one with its template filled in."""
        *before, last = question.messages or (Message("user", question.text),)
        if self.system_prompt is not None:
            if any(message.role == "system" for message in before):
                raise UserError(
                    f"question {question.id} already has a system message; set prompt.system_prompt: null, or remove "
                    "the system messages from the data"
                )
            before = [Message("system", self.system_prompt), *before]
        return (*before, replace(last, content=self.fill(last.content, question.domain)))
