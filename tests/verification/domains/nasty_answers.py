"""Answers that hang, crash or bloat a naive verifier; by name, for the tests and for benchmarks/verification.py."""


def boxed(answer: str) -> str:
    return rf"so \boxed{{{answer}}}"


def tower(depth: int) -> str:
    return "9" if depth == 0 else f"9^{{{tower(depth - 1)}}}"


def nested(command: str, depth: int, core: str = "1") -> str:
    return command * depth + core + "}" * depth


ANSWERS: dict[str, str] = {
    # Arithmetic that grows without bound.
    "power tower": tower(4),
    "high power tower": tower(60),
    "power tower without braces": "9^9^9^9",
    "plain power tower": "9**9**9**9",
    "big power": "123456789^{123456789}",
    "power of fractions": r"(\frac{7}{3})^{10^{9}}",
    "difference of towers": tower(3) + "-" + tower(3),
    "factorial": "(10^{10})!",
    "factorial tower": "9" + "!" * 40,
    "factorial of a factorial": "((30!)!)!",
    "binomial": r"\binom{10^{12}}{5 \cdot 10^{11}}",
    "modulo of a tower": r"9^{9^{9^{9}}} \bmod 7",
    "hundred roots": nested(r"\sqrt{", 100, "2"),
    "logarithm of a tower": r"\log_{2}(9^{9^{9^{9}}})",
    # Things that a computer algebra system tries to evaluate.
    "integral": r"\int_0^1 \sin(x^x) \cdot e^{\cos(x^3)} \, dx",
    "nested integrals": r"\int_0^1 \int_0^1 \int_0^1 \frac{\sin(xyz)}{1+x^2y^2z^2} \, dx \, dy \, dz",
    "sum": r"\sum_{n=1}^{10^{12}} \frac{1}{n^3+n+1}",
    "sums of sums": r"\sum_{a=1}^{9999} \sum_{b=1}^{9999} \sum_{c=1}^{9999} \frac{1}{a+b+c}",
    "infinite sum": r"\sum_{n=1}^{\infty} \frac{\sin(n)}{n^2+\sqrt{n}}",
    "product": r"\prod_{n=1}^{10^{9}} (1+\frac{1}{n^2})",
    "limit": r"\lim_{x \to 0} \frac{\sin(\tan(x))-\tan(\sin(x))}{x^7}",
    "high polynomial": "(x+y+z+1)^{500}",
    "equation of high degree": "x^{97}+x^{41}-3x^{5}+x-1=0",
    "trigonometric tangle": "+".join(rf"\sin^{{{k}}}(x)\cos^{{{k}}}(y)" for k in range(1, 40)),
    "chain of inequalities": " < ".join(f"x^{{{k}}}" for k in range(1, 60)),
    # Depth and size.
    "deep parentheses": "(" * 900 + "1" + ")" * 900,
    "deep braces": "{" * 900 + "1" + "}" * 900,
    "nested fractions": nested(r"\frac{1}{1+", 150),
    "deep fractions": r"\frac{" * 300 + "1" + "}{2}" * 300,
    "deep left right": r"\left(" * 150 + "1" + r"\right)" * 150,
    "million digits": "7" * 1_000_000,
    "two thousand digits": "7" * 1_999,
    "many decimals": "0." + "3" * 1_900,
    "huge exponent of ten": "10^{99999999999}",
    "scientific notation": "1e999999999",
    "giant set": r"\{" + ",".join(str(k) for k in range(450)) + r"\}",
    "giant tuple": "(" + ",".join(["x"] * 900) + ")",
    "huge matrix": r"\begin{pmatrix}" + r"\\".join("&".join("1" * 20) for _ in range(20)) + r"\end{pmatrix}",
    "power of a matrix": r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^{10^{8}}",
    "determinant": r"\det\begin{pmatrix}a&b&c&d\\e&f&g&h\\i&j&k&l\\m&n&o&p\end{pmatrix}^{9}",
    "long sum": "+".join("x" for _ in range(900)),
    "alternating operators": "1" + "-+" * 900 + "1",
    "thousand commas": "1" + "," * 1_000 + "2",
    "long intervals": r" \cup ".join(f"({k},{k + 1})" for k in range(120)),
    # Text that is no mathematics.
    "nothing but backslashes": "\\" * 1_500,
    "unmatched braces": "{" * 700,
    "unmatched brackets": r"\left[\left(\left\{" * 60,
    "command without an end": r"\frac{1}{",
    "text in text": nested(r"\text{", 200, "a"),
    "percent signs": "%" * 1_500,
    "dollars": "$" * 1_500,
    "digits of another script": "\u0663\u0664\u0665",
    "full-width digits": "\uff13\uff14\uff15",
    "superscripts": "x²³⁴",
    "NUL": "1\x002\x00",
    "lone surrogate": "1\ud800",
    "right to left": "\u202e12\u202c",
    "combining marks": "1" + "\u0301" * 1_500,
    "zero width": "1\u200b2\ufeff",
    "emoji": "🧮" * 700,
    "new lines": "\n" * 1_500 + "1",
    "control characters": "".join(map(chr, range(32))) * 40,
    "code": "__import__('os').system('touch verifier_was_here')",
    "code in an exponent": "2^(__import__('os').abort())",
    "lambda": "(lambda f: f(f))(lambda f: f(f))",
    "format string": "{0.__class__.__mro__}%s%n",
    "infinity": r"\infty-\infty",
    "not a number": r"\frac{0}{0}",
    "division by zero": r"\frac{1}{0^{0}-1}",
}

RESPONSES: dict[str, str] = {
    **{name: boxed(answer) for name, answer in ANSWERS.items()},
    # Nastiness of the whole response.
    "nothing": "",
    "a million open boxes": r"\boxed{" * 150_000,
    "a million nested boxes": r"\boxed{" * 70_000 + "1" + "}" * 70_000,
    "a box in braces": "{" * 400_000 + r"\boxed{1}",
    "answers without an end": "the answer is " * 70_000,
    "formulas without an end": "$" + r"\$" * 400_000,
    "digits and commas": "1," * 400_000,
    "a formula in the answer's sentence": "the answer is " + "$" * 1_001 + tower(4),
}
