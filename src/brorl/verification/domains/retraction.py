r"""Finds whether the text after an answer takes the answer back, in linear time.

    `\boxed{34}. Nope, that's not right: 36.`  ->  `36`        `\boxed{34}. Check: 2 * 17 = 34.`  ->  None

Each sentence becomes a shape, one letter per word: `S` for the answer, `O` for a different value, and for some words
the letter of their meaning (`_MEANINGS`). A sentence takes the answer back if its shape denies the answer, or names a
different value as the answer. The last such sentence counts, unless a later one affirms the answer. A sentence that
supposes something (`if`, `would`) or asks takes nothing back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

_READ = 1_000  # characters read after an answer, and at the end
_SHOWN = 80
_LEAD = 4  # words before an answer that may name it: `the total is`

# English, German, Spanish, Chinese, then some French, Portuguese, Italian, Polish and Russian. `_` is a space, and `*`
# any ending. The first meaning that has a word counts.
_MEANINGS = {
    "T": (  # takes back on its own
        "i_doubt_it scratch_that scratch_this strike_that disregard_* ignore_that ignore_this ignore_my "
        "ignore_the_above ignore_the_previous ignore_the_last ignore_the_boxed never_mind nevermind "
        "retract withdraw take_that_back take_this_back "
        "take_it_back miscounted miscalculated misread misspoke i_forgot i_overlooked we_forgot "
        "verrechnet verzählt vertan geirrt vergiss* habe_vergessen "
        "equivoqué confundí olvida olvidé retiro "
        "算错 看错 数错 搞错 弄错 写错 我错 忽略 忘了 忘记 漏了 "
        "trompé trompée errei enganei sbagliato ошибся ошиблась"
    ),
    "I": (  # supposes, or tells what others think
        "if whether suppose* assum* would could might may unless otherwise common hope expect* tempting naive* "
        "wenn falls ob angenommen wäre* würde* könnte* hätte* häufig* typisch* "
        "si fuera sería hubiera podría común frecuente "
        "如果 若 假如 假设 要是 可能 常见 容易 有人 是否 "
        "serait comum если бы"
    ),
    "x": (  # has a word of denial, and denies nothing
        "no_doubt without_doubt no_question not_only not_just no_other nicht_nur no_solo no_sólo "
        "不过 不仅 不同 不难 无论"
    ),
    "W": (  # wrong
        "wrong wrongly incorrect incorrectly invalid false untrue flawed mistaken mistake mistakes error errors "
        "erroneous off slip falsch* fehler* inkorrekt* ungültig* "
        "incorrecto incorrecta incorrectos erróneo errónea equivocado equivocada error errores falso falsa mal "
        "不对 不正确 错误 有误 有问题 错 "
        "faux fausse erreur errado errada errato errata sbagliata неверн* неправильн* ошиб* błęd* błąd"
    ),
    "V": (  # says of a value, but of `this` only about a case, that it is wrong
        "fails violates contradicts impossible excluded scheitert verletzt unmöglich falla imposible "
        "不符合 不满足 不可能 不成立"
    ),
    "Q": (  # says that a value passes
        "work works satisfy satisfies hold holds fit fits meet meets solve solves "
        "stimmt stimmen passt erfüllt löst cumple satisface funciona 满足 符合 成立"
    ),
    "R": (  # right
        "right correct correctly best final true valid accurate actual real requested desired "
        "stands confirmed confirms verified richtig* korrekt* gesucht* correcto correcta correctos "
        "cierto verdadero verdadera válido válida "
        "正确 没错 无误 对 juste exact exacte bonne correta correto corretta corretto giusta giusto "
        "верн* правильн* ✓ ✅"
    ),
    "A": (  # answer
        "answer answers result solution antwort ergebnis lösung resultat respuesta resultado solución 答案 结果 "
        "réponse résultat resposta risposta risultato odpowiedź ответ"
    ),
    # should be
    "D": "should must has_to have_to sollte* müsste muss debería debe 应该 应 必须 devrait deveria",
    "B": (  # is
        "is are was were be been equals comes_to becomes ist sind war sein lautet beträgt es son era ser sea está "
        "就是 是 为 等于 选 est sont é são è sono to_jest"
    ),
    "C": (  # announces a correction
        "wait actually hold_on correction corrected edit sorry apologies oops ups hmm* rather instead "
        "in_fact i_mean i_meant make_that make_it on_second_thought on_second_thoughts "
        "moment halt stopp korrektur korrigiere entschuldigung eigentlich tatsächlich vielmehr sondern stattdessen "
        "espera quise_decir perdón corrección en_realidad más_bien lo_siento mejor_dicho "
        "等等 等一下 其实 实际上 更正 纠正 修正 抱歉 对不起 而是 "
        "attends attendez désolé désolée pardon en_fait desculpe espere na_verdade aspetta scus* in_realtà correzione "
        "подожд* извин* точнее"
    ),
    # yes
    "Y": "yes yep indeed ja sí 是的 对的 oui sim да",
    # not
    "N": "not never cannot instead_of rather_than nicht statt anstatt nunca en_lugar_de 不是 并不 并非 pas não nie не",
    # no, as in `No, it is 36` and `no 36`
    "n": "no nope not_sure nein kein* 不 没有 没 无 non нет",
    "P": (  # this
        "that this it which above das dies* eso esto esa ese esta este "
        "这 那 它 该 上面 ce c_est cela ça isso isto questo это"
    ),
    # I
    "F": "i we my our ich wir mein* yo mi cometí 我们 我 je mon eu meu я",
    # made, there (is)
    "M": "made have there gemacht habe gibt hay 有 犯",
    # because
    "J": "since because as weil da denn porque ya_que pues 因为 由于 car",
    "y": (  # changes nothing
        "so thus hence therefore then now just simply also the but and *ly *mente aber und daher folglich somit nun "
        "jetzt leider die der pero y por_tanto por_lo_tanto entonces ahora el la lo mais donc 因此 所以 那么 了 的 但"
    ),
}  # fmt: skip

_LONGEST = 4  # words, or Chinese characters, of a phrase
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_MEANING_OF = {text: meaning for meaning, texts in reversed(_MEANINGS.items()) for text in texts.split()}
_STEMS = {text[:-1]: meaning for text, meaning in _MEANING_OF.items() if text.endswith("*")}
_ENDINGS = tuple(text[1:] for text in _MEANING_OF if text.startswith("*"))  # of adverbs
_PHRASES = {text.replace("_", ""): meaning for text, meaning in _MEANING_OF.items()}
_BEGIN_PHRASES = frozenset(
    text.partition("_")[0] if "_" in text else text[0] for text in _MEANING_OF if "_" in text or text[0] > "\u3000"
)

_NUMBER = r"[-\u2212]?\$?(?:\d[\d.,/]{0,40})?\d(?:\\?%)?"
_WORD = rf"[^\W\d_{_CJK}]"
_OPERATOR = r"\s{0,4}[-+*/^=\u00d7\u00b7\u2212]\s{0,4}"
_OPERAND = rf"(?:{_NUMBER}[a-zA-Z]?|[a-zA-Z])(?!{_WORD})"
_TOKEN = re.compile(
    r"(?P<item>(?<=\n)[ \t]*+(?:\(?\d{1,2}[.)]|[-*+\u2022])\s)|"
    r"(?P<value>\$\$[^$]{1,200}\$\$|\$[^$\n]{1,200}\$(?!\d)|\\\(.{1,200}?\\\)|\\\[(?s:.{1,200}?)\\\]|"
    r"-?\\[dt]?frac\s*\{[^{}]{1,40}\}\s*\{[^{}]{1,40}\}|"
    r"[(\[{]\s{0,4}-?[\w./]{1,12}(?:\s{0,4},\s{0,4}-?[\w./]{1,12}){1,9}\s{0,4}[)\]}]|"
    rf"{_NUMBER}(?:{_OPERATOR}{_OPERAND}){{0,9}}|(?<![^\W\d_])(?!\w/){_OPERAND}(?:{_OPERATOR}{_OPERAND}){{1,9}}(?!{_WORD}))|"
    rf"(?P<word>[^\W\d_{_CJK}]++(?:['\u2019]t\b)?|[{_CJK}]|[\u2713\u2705])|(?P<answer>####)|\\[a-zA-Z]+|"
    r"(?P<is>['\u2019](?:s|re|m|ve)\b)|(?P<end>[.!?](?!\w)|[\u3002\uff01\uff1f\n])|"
    r"(?P<comma>[,;\uff0c\uff1b\u3001()\u2013\u2014]|\s-\s)|(?P<mark>[:\uff1a=])|(?P<unequal>\u2260)"
)
_VERDICTS = frozenset("WRYn")  # the meanings of `false`, `true`, `yes`, `no`
_LETTERS = {"item": "x", "is": "B", "comma": ",", "unequal": "N", "answer": "A:"}
_OPTION, _BARE = re.compile(r"\(?([A-HJ])\)?"), re.compile(r"^\(([A-Ja-j])\)")
_MARKUP = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf|boldsymbol|left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ()\[\]]|[\s${}*]"
)

_CLOSES = r"(?=[,:=J]|$|x?A)"  # follows `that is wrong`; `it is wrong to assume` takes nothing back
_DENIES = re.compile(
    r"(?:^|,)[CyFMB,:n]*x?[Cy]*T|"  # I miscounted
    r"(?:S|Ax?)[Cy]*B[BCyx]{0,2}[WV]|S[BCy]*[WV]|^S,[Nn][yx]{0,2}[RA]|"  # my answer was off, 34 fails
    r"F[CyBM]{1,4}x{0,2}W|FW|MFx{0,2}W|^[C,yB]*MB?[yx]{0,2}W|"  # I made a mistake, my mistake, there is an error
    r"[SA][BCyx]{0,2}[Nn](?:[BCyxP]{0,3}[RQ]|y?R?A)|^S,*B?[Nn](?:P?$|,)|"  # 34 does not work, 34 is not the answer
    r"[SPA][Cy]?Q[yxC]{0,2}[Nn](?!x)|"  # das stimmt nicht
    r"(?:N|nB)S|"  # it is not 34
    r"^[ny,]*C[^NnOS]{0,8}W(?=[,:=J]|$)|^y*C:[^S]*$"  # wait, the sign is wrong; correction: add 2
)
_DENIES_THIS = re.compile(
    rf"P[BCyx]{{0,3}}W{_CLOSES}|"  # that is wrong
    rf"P[BCyx]{{0,2}}[Nn](?:[BCyx]{{0,2}}R|yA){_CLOSES}|"  # this cannot be right
    r"P[BCyx]{0,2}[Nn][yx]?Q(?!.*O)|"  # it does not satisfy the equation
    rf"[Nn]F?x[xFP]{{0,2}}P[BCy]{{0,2}}R{_CLOSES}|"  # I don't think that's correct
    rf"^S?(?:[C,:y]|n[,:])*B?(?:W|[Nn]B?y?R){_CLOSES}"  # Incorrect!
)
_NO = re.compile(r"(?:S(?=C))?[Cy,:]*[nN][CPnNy,:]*")
_CUE = r"(?:^|,)[yF]*(?:n*C[Cn,:y]*|n+[,:][Cn,:y]*)"
_NAMES = re.compile(
    r"(?<!W)A[Cy]*[BD:=][BDC:=y,]*([OS])|"  # the answer is 36
    r"(?<![Nn])R[yx]?A?[BD:][BDC:y,]*([OS])|"  # the correct value is 36
    r"(?:(?:^|[,PAC])[BCy,]*|^[ny,]*C[^Nn]{0,40})D[BCMy]*([OS])|"  # it should be 36
    rf"{_CUE}(?:[PB][yPB]*([OS])x{{0,2}}|([OS])|[xyPAFM]{{0,4}}B[BC:y]*([OS]))(?=[,J]|$)|"  # no, it is 36
    r"([OS])[yxC]{0,2}B[yC]{0,2}(?:R?A|R(?=[,J]|$))|"  # 36 is the right answer
    r"([OS])x{0,2}C$"  # the total is 36 instead
)
_AFFIRMS = re.compile(r"^[Cy,]*Y|[SPA][BCyx]{0,3}[RQ]|^[C,y]*R(?:,|$)|[nN][yx]{0,2}W")
_COMES_TO_ANSWER = re.compile(r"S[^OWNnC]*$")


class _Sentence(NamedTuple):
    shape: str
    words: list[str]  # one per letter of the shape
    asks: bool


def retraction(before: str, answer: str, after: str) -> str | None:
    """Return the words after an answer that take it back, or the different value that they name; None without any.

    Args:
        before: The text before the answer; its last words may name the answer, such as `the total is`.
        answer: The answer as it is written.
        after: The text after the answer.
    """
    if len(answer) > _READ:
        return None  # no verifier reads so long an answer
    lead = _lead(before)
    found, is_value, other_value, question = None, False, False, ""
    for shape, words, asks in _sentences(answer, after):
        if asks:
            question = shape
            continue
        named = _named(shape, words, lead)
        if _denies(shape, question, other_value):
            found, is_value = " ".join(words)[:_SHOWN], False
        elif named is not None and shape[named] == "O":
            found, is_value = words[named], True
        elif named is not None or _AFFIRMS.search(shape) or (is_value and _COMES_TO_ANSWER.search(shape)):
            found = None
        question, other_value = "", _ends_with_other(shape, other_value)
    return found


def _ends_with_other(shape: str, default: bool) -> bool:
    """Whether the last value of a shape is a different one."""
    same, other = shape.rfind("S"), shape.rfind("O")
    return default if same == other else other > same


def _denies(shape: str, question: str, other_value: bool) -> bool:
    """Whether a sentence denies the answer; `this` is the last value before it."""
    if _NO.fullmatch(shape):
        return not question or (set("WO").isdisjoint(question) and not set("SRQ").isdisjoint(question))
    this = _DENIES_THIS.search(shape)
    if this and _ends_with_other(shape[: this.start()], other_value):
        this = None
    return any(match is not None and "I" not in shape[: match.end()] for match in (this, _DENIES.search(shape)))


def _named(shape: str, words: list[str], lead: list[str]) -> int | None:
    """Return the place of the value that a sentence names as the answer."""
    match = _NAMES.search(shape)
    if match and "I" not in shape[: match.end()] and not re.search("NB?O", shape[: match.end()]):  # not 35, but 36
        return match.start(match.lastindex or 0)
    start = len(shape) - len(shape.lstrip("CynN,"))
    value = re.search("[OS]x?$", shape)
    name = [word.casefold() for word in words[start : value.start()]] if value else []
    return value.start() if value and len(name) > 1 and lead[-len(name) :] == name else None


def _lead(before: str) -> list[str]:
    """Return the words that name an answer, directly before it, in lower case."""
    line = re.split(r"[.,;:!?()\n]", before[-_READ:].rstrip(" \t\n$*_([{\\"))[-1]
    words = [word.casefold() for word in re.findall(rf"[^\W\d_{_CJK}]+|[{_CJK}]|\S", line)][-_LEAD:]
    while words and _meaning_of_word(words[0]) in ("y", "C", "F"):
        words = words[1:]
    return words if len(words) > 1 and all(map(str.isalpha, words)) else []


def _sentences(answer: str, after: str) -> Iterator[_Sentence]:
    """Yield the sentences after an answer; the first begins with the answer itself."""
    text = after if len(after) <= 2 * _READ else f"{after[:_READ]}\n{after[-_READ:]}"
    letter_of = _Letters(answer)
    shape, words = "S", [answer]
    tokens = [token for token in _TOKEN.finditer(text) if token.lastgroup]
    at = 0
    while at < len(tokens):
        kind, word, length = tokens[at].lastgroup, tokens[at][0], 1
        if kind == "end":
            if shape and (word != "\n" or shape[-1] not in "B:="):
                yield _Sentence(shape, words, word in "?\uff1f")
                shape, words = "", []
            at += 1
            continue
        if kind == "value":
            letter = letter_of.value(word)
        elif kind == "word":
            letter, length = letter_of.words(tokens, at)
            word = " ".join(token[0] for token in tokens[at : at + length])
        else:
            letter = _LETTERS.get(str(kind)) or word.replace("\uff1a", ":")
        shape, at = shape + letter, at + length
        words.extend([word] * len(letter))
    if shape:
        yield _Sentence(shape, words, asks=False)


class _Letters:
    """Letters of values and words beside an answer, which is a value, one option, or one word such as `false`."""

    def __init__(self, answer: str) -> None:
        self._answer = _skeleton(answer)
        self._option = _OPTION.fullmatch(self._answer[:4])
        self._is_word = _meaning_of_word(self._answer.casefold()) in _VERDICTS

    def value(self, text: str) -> str:
        if self._option or self._is_word:
            return "x"
        return "S" if _is_same(self._answer, _skeleton(text)) else "O"

    def words(self, tokens: list[re.Match[str]], at: int) -> tuple[str, int]:
        """Return the letter of the longest phrase at a place, and how many words it has."""
        word = tokens[at][0]
        if self._option and _OPTION.fullmatch(word):
            return "S" if word == self._option[1] else "O", 1
        letter, length = _meaning_of_word(word.casefold().replace("\u2019", "'")), 1
        if word.casefold() in _BEGIN_PHRASES:
            phrase = ""
            for count, token in enumerate(tokens[at : at + _LONGEST], 1):
                phrase += token[0].casefold()
                letter, length = (_PHRASES[phrase], count) if phrase in _PHRASES else (letter, length)
        if self._is_word and letter in _VERDICTS:
            letter = "S" if word.casefold() == self._answer.casefold() else "O"
        return letter, length


@lru_cache(maxsize=4096)
def _meaning_of_word(word: str) -> str:
    if word in _PHRASES:
        return _PHRASES[word]
    if word.endswith("n't"):
        return "N"
    stem = next((word[:end] for end in range(len(word), 2, -1) if word[:end] in _STEMS), None)
    return _STEMS[stem] if stem else "y" if word.endswith(_ENDINGS) else "x"


def _skeleton(text: str) -> str:
    return _BARE.sub(r"\1", _MARKUP.sub("", text).rstrip(".,;:!"))


def _is_same(answer: str, later: str) -> bool:
    """Whether answers are the same, apart from words after or a name before one: `4`, `x = 4`, `4 apples`."""
    short, long = sorted((answer, later), key=len)
    begins = long.startswith(short) and not re.match(r"[\d.,/^!]", long[len(short) :])
    return begins or long.endswith(f"={short}") or later in answer.strip("()[]{}\\").split(",")
