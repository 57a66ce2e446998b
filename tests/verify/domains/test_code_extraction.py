"""The code of a response: against blocks written by hand, and blocks assembled at random."""

import numpy as np
import pytest

from brorl.verification.domains.code import extract_code


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```py\nx = 1\n```", "x = 1"),
        ("```Python3 \nx = 1\n```", "x = 1"),
        ("```{.python}\nx = 1\n```", "x = 1"),
        ('```python title="a.py"\nx = 1\n```', "x = 1"),
        ("``` python\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("~~~python\nx = 1\n~~~", "x = 1"),
        ("text\r\n```python\r\nx = 1\r\ny = 2\r\n```\r\n", "x = 1\ny = 2"),
        # The last block counts, and blocks of other languages never do.
        ("```python\nx = 1\n```\nor\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\n```text\n3\n```", "x = 1"),
        ("```python\nx = 1\n```\nOutput:\n```\n3\n```", "x = 1"),
        ("```\nx = 1\n```\nthen\n```\nx = 2\n```", "x = 2"),
        ("```cpp\nint x;\n```", None),
        ("```bash\npython a.py\n```\n```\nx = 1\n```", "x = 1"),
        # Unclosed and blank blocks.
        ("```python\nx = 1", "x = 1"),
        ("```python\nx = 1\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1\n```\n```", "x = 1"),
        ("```python\n \n```", None),
        ("```python\nx = 1\n```\n```python\n```", "x = 1"),
        ("```python", None),
        # Fences within code, and code within other text.
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("~~~python\ns = '```'\n~~~", "s = '```'"),
        ("```python\ns = '~~~'\n~~~\n```", "s = '~~~'\n~~~"),
        ("<answer>```python\nx = 1\n```</answer>", "x = 1"),
        ("Here it is: ```python\nx = 1\n```", "x = 1"),
        ("```python\nx = 1```", "x = 1"),
        ("1. This\n   ```python\n   if x:\n       y = 1\n   ```", "if x:\n    y = 1"),
        ("> no\n\t```python\n\tx = 1\n\t```", "x = 1"),
        ("  ```python\n  x = 1\n y = 2\n  ```", "x = 1\ny = 2"),
        ("```python\ndef f():\n    '''a ``` b'''\n    return 1\n```", "def f():\n    '''a ``` b'''\n    return 1"),
        # No fence at all.
        ("x = 1", None),
        ("`x = 1`", None),
        ("a ``` b", None),
        ("```python x = 1```", None),
        ("", None),
    ],
)  # fmt: skip
def test_each_rule(response: str, code: str | None) -> None:
    assert extract_code(response) == code


def test_the_last_block_of_python_is_taken(rng: np.random.Generator) -> None:
    """Blocks of random languages, fences and lengths, with text between them."""
    for _ in range(300):
        marked, unmarked, parts = None, None, []
        for number in range(rng.integers(0, 5)):
            language = str(rng.choice(["python", "py", "", "text", "c++"]))
            fence = str(rng.choice(["`", "~"])) * int(rng.integers(3, 6))
            lines = [f"x{number} = {line}" if rng.random() < 0.8 else "" for line in range(rng.integers(0, 4))]
            parts += [str(rng.choice(["so", "", "`a`"])), f"{fence}{language}", *lines, fence]
            if any(lines) and language in ("python", "py"):
                marked = "\n".join(lines)
            elif any(lines) and not language:
                unmarked = "\n".join(lines)
        assert extract_code("\n".join(parts)) == (unmarked if marked is None else marked), parts


def test_a_long_response_takes_linear_time() -> None:
    """Patterns that make a regular expression backtrack; a quadratic pass over these would take minutes."""
    for text in (
        "`" * 200_000,
        "```" + " " * 200_000,
        "a ```\n" * 50_000,
        "~~~`" * 100_000,
        "\t" * 200_000 + "```py",
        "`" * 200_000 + "x`",
        "~~~`" * 50_000,
        "``` ` " * 50_000,
    ):
        extract_code(text)
        extract_code(f"```python\n{text}")
