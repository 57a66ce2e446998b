"""The names of arguments and of settings of sources in the words of a shell and of Python."""

import shlex
from pathlib import Path

import pytest

from brorl.errors import in_recipe, of_source, option, shell_words, source_words


@pytest.mark.parametrize(
    ("name", "value", "in_a_shell", "in_python"),
    [
        ("budget", None, "--budget", "budget"),
        ("output-dir", None, "--output-dir", "output_dir"),
        ("jobs", 3, "--jobs 3", "jobs=3"),
        ("budget", "1200", "--budget 1200", "budget=1200"),
        ("budget", "90s", "--budget 90s", "budget='90s'"),
        ("match", "steps", "--match steps", "match='steps'"),
        ("seeds", "N", "--seeds N", "seeds=N"),
        ("from", None, "--from", "checkpoint"),
        ("from", Path("/a/b c"), "--from '/a/b c'", "checkpoint='/a/b c'"),
        ("cluster.nodes", 0, "--cluster.nodes 0", "cluster={'nodes': 0}"),
        ("evaluation.num_prompts", None, "--evaluation.num_prompts", "evaluation.num_prompts"),
        ("evaluation.ks", [1, 8], "--evaluation.ks '[1, 8]'", "evaluation={'ks': [1, 8]}"),
        ("sweep", "KEY=V,V,...", "--sweep KEY=V,V,...", "sweep={'KEY': [V, V, ...]}"),
    ],
)
def test_an_argument_is_an_option_in_a_shell_alone(name: str, value: object, in_a_shell: str, in_python: str) -> None:
    assert option(name, value) == in_python
    with shell_words():
        assert option(name, value) == in_a_shell
    assert option(name, value) == in_python


def test_a_value_is_one_word_of_the_shell() -> None:
    for value in ("a b", "{path: x, name: 'y'}", "it's", "$home", "x;y", "", "[1, 2]"):
        with shell_words():
            assert shlex.split(option("data", value)) == ["--data", value]
        assert eval(f"dict({option('data', value)})") == {"data": value}


def test_a_setting_of_a_source_is_named_as_it_was_given() -> None:
    assert of_source("path") == "data.sources[].path"
    assert of_source("domain", "math") == "data.sources[].domain: math"
    with source_words(lambda key, value: f"{key}={value}"):
        assert (of_source("domain", 1), of_source("split")) == ("domain=1", "split=None")
        with source_words(in_recipe):
            assert of_source("split") == "data.sources[].split"
        assert of_source("split") == "split=None"
    assert of_source("path") == "data.sources[].path"
