"""Names that data files give their columns, in lower case."""

from __future__ import annotations

import re

# Setting of a column -> its usual names, the most specific first.
USUAL_NAMES = {
    "prompt_column": (
        "prompt", "question", "question_stem", "stem", "problem", "instruction", "query", "goal", "ctx", "sentence",
        "messages", "input", "inputs", "text",
    ),
    "answer_column": (
        "answer", "solution", "ground_truth", "final_answer", "expected_answer", "target", "label", "reference",
        "reward_model", "output", "response",
    ),
}  # fmt: skip
CONTEXTS = (
    "context", "passage", "article", "paragraph", "story", "document", "premise", "body", "background", "scenario",
    "situation", "narrative", "dialogue", "excerpt", "table",
)  # fmt: skip
"""Columns with a text that the question is about."""
INSTRUCTION, INSTRUCTION_CONTEXT = "instruction", "input"
"""A question in the first column has its text in the second."""
CLASSES = ("label", "labels", "class", "category")
"""Columns that can have numbers of classes."""
NOT_ASKED = re.compile(
    r"sol|ration|expl|reason|cot|proof|messag|conversation|respon|completion|answer|generat|th(?:ought|ink)|test|hint|"
    r"step|decompos|meta|info|source|url|equation|program|code_|prompt|^exp$|^id$|_id$|wrong|distract"
)
"""In names of columns with the answer, how it was found, or where the row is from."""
