"""How a user's function is called: by the names of its parameters, or not at all."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from brorl.verification.sandbox.inside.calling import called, takes
from each_row import each_row

GIVEN = {
    "response": "RESPONSE", "reference": "REFERENCE", "prompt": "PROMPT", "text": "<PROMPT>", "source": "SOURCE",
    "as_messages": False,
}  # fmt: skip
A, R, P = "RESPONSE", "REFERENCE", "PROMPT"


def recorder(parameters: str, returned: str = "dict(locals())") -> Callable[..., Any]:
    """Return a function with these parameters that returns what it got."""
    names: dict[str, Any] = {}
    exec(f"def f({parameters}): return {returned}", names)
    return names["f"]  # type: ignore[no-any-return]


@each_row(
    ("parameters", "got"),
    [
        # without names that say more, in the order of the documentation
        ("a, b", {"a": A, "b": R}),
        ("a, b, c", {"a": A, "b": R, "c": P}),
        ("answer, solution", {"answer": A, "solution": R}),
        ("a, b, /, c", {"a": A, "b": R, "c": P}),
        ("response, reference, prompt", {"response": A, "reference": R, "prompt": P}),
        # an option is not the question, unless it is named so
        ("response, reference, tolerance=1e-6", {"response": A, "reference": R, "tolerance": 1e-6}),
        ("a, b, c=1", {"a": A, "b": R, "c": 1}),
        ("response, reference, strict=True, question=''", {"response": A, "reference": R, "strict": True,
                                                          "question": P}),
        ("solution_str, ground_truth, method='strict', weight=1.0", {"solution_str": A, "ground_truth": R,
                                                                    "method": "strict", "weight": 1.0}),
        ("a, b=1", {"a": A, "b": R}),
        ("response, reference, *rest", {"response": A, "reference": R, "rest": ()}),
        ("response, reference, **more", {"response": A, "reference": R, "more": {}}),
        # in another order
        ("reference, response", {"reference": R, "response": A}),
        ("prompt, response, reference", {"prompt": P, "response": A, "reference": R}),
        ("question, answer, gold", {"question": P, "answer": A, "gold": R}),
        ("prompt, completion, answer", {"prompt": P, "completion": A, "answer": R}),
        ("y_true, y_pred", {"y_true": R, "y_pred": A}),
        ("expectedOutput, modelOutput", {"expectedOutput": R, "modelOutput": A}),
        ("text, *, target", {"text": A, "target": R}),
        ("predict_str, ground_truth", {"predict_str": A, "ground_truth": R}),
        ("prompt, response", {"prompt": P, "response": A}),
        # verl
        ("data_source, solution_str, ground_truth, extra_info=None",
         {"data_source": "SOURCE", "solution_str": A, "ground_truth": R, "extra_info": {}}),
        ("data_source, solution_str, ground_truth, extra_info, **kwargs",
         {"data_source": "SOURCE", "solution_str": A, "ground_truth": R, "extra_info": {}, "kwargs": {}}),
        ("solution_str, ground_truth, data_source",
         {"solution_str": A, "ground_truth": R, "data_source": "SOURCE"}),
    ],
)  # fmt: skip
def test_each_parameter_gets_what_its_name_says(parameters: str, got: dict[str, object]) -> None:
    function = recorder(parameters)
    assert called(function, {"as_messages": False, **{role: GIVEN[role] for role in takes(function)}}) == got


@each_row(
    ("parameters", "problem"),
    [
        ("a", "do not name a response and a reference"),
        ("", "do not name a response and a reference"),
        ("a, b, c, d", "what to pass as its parameter 'd'"),
        ("a, b, *, c", "what to pass as its parameter 'c'"),
        ("completion, answer, state", "what to pass as its parameter 'state'"),
        ("response, output, reference", "what to pass as its parameter 'output'"),
        ("reference, target", "what to pass as its parameter 'target'"),
        ("*args", "any number of arguments"),
        ("*args, **kwargs", "any number of arguments"),
        ("data_sources, solution_strs, ground_truths, extra_infos=None", "'solution_strs' is a list"),
        ("samples, prompts, outputs, **kwargs", "'outputs' is a list"),
        ("responses, references", "'responses' is a list"),
        ("queries, prompts, labels, step", "what to pass as its parameter 'step'"),
    ],
)
def test_a_function_that_leaves_a_doubt_is_refused(parameters: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        takes(recorder(parameters))


def test_rows_of_verl_and_its_results_are_read() -> None:
    row = '{"data_source": "gsm8k", "ground_truth": "4", "extra_info": {"index": 7}}'
    returned = "(data_source, ground_truth, extra_info)"
    verl = recorder("data_source, solution_str, ground_truth, extra_info=None", returned)
    assert called(verl, {**GIVEN, "reference": row}) == ("gsm8k", "4", {"index": 7})
    assert called(verl, {**GIVEN, "reference": '{"x": 1}'}) == ("SOURCE", '{"x": 1}', {})
    scores = recorder("solution_str, ground_truth", "{'score': 1.0, 'acc': True, 'pred': '4', 'format': 0}")
    assert called(scores, GIVEN) == {"score": 1.0, "correct": True}


def test_reward_functions_of_openrlhf_get_lists() -> None:
    for parameters in ("queries, prompts, labels", "queries, prompts, labels, **kwargs"):
        assert called(recorder(parameters, "[queries + prompts + labels]"), GIVEN) == [
            "<PROMPT>RESPONSE", "<PROMPT>", "REFERENCE",
        ]  # fmt: skip
    named = recorder("queries, prompts", "{'rewards': [len(queries[0])], 'extra_logs': {}}")
    assert called(named, GIVEN) == len("<PROMPT>RESPONSE")


def decorated(wrapper: str, inner: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"f": recorder(inner), "functools": functools}
    exec(f"@functools.wraps(f)\n{wrapper}", names)
    return names["g"]  # type: ignore[no-any-return]


@each_row(
    ("wrapper", "inner", "got"),
    [
        ("def g(*args): return f(*args)", "response, reference", {"response": A, "reference": R}),
        ("def g(*args, **kwargs): return f(*args, **kwargs)", "prompt, response, reference",
         {"prompt": P, "response": A, "reference": R}),
        ("def g(response, *args): return f(response, *args)", "response, target", {"response": A, "target": R}),
        ("def g(response, reference): return f(response, reference, 7)", "response, reference, tolerance",
         {"response": A, "reference": R, "tolerance": 7}),
        ("def g(*args, **kwargs): return [f(*args, **kwargs)]", "completions, gold",
         {"completions": [A], "gold": [R]}),
    ],
)  # fmt: skip
def test_a_decorated_function_is_called_as_the_function_in_it(wrapper: str, inner: str, got: dict[str, Any]) -> None:
    function = decorated(wrapper, inner)
    assert called(function, {"as_messages": False, **{role: GIVEN[role] for role in takes(function)}}) == got


def test_a_decorator_that_takes_other_arguments_is_refused() -> None:
    with pytest.raises(ValueError, match="its decorator does not take these arguments"):
        takes(decorated("def g(**kwargs): return f(**kwargs)", "response, reference"))
