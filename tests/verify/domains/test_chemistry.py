"""Chemical formulas, reactions, nuclides and configurations as text, by hand."""

from brorl.verification.domains.chemistry import same_chemistry
from each_row import each_row

SAME = [
    ("H_2O", r"\text{H}_2\text{O}"),
    ("H_2O", "H₂O"),
    ("CO_2", r"\ce{CO2}"),
    ("SO_4^{2-}", "SO₄²⁻"),
    ("SO_4^{2-}", "SO42-"),
    ("Fe^{3+}", "Fe3+"),
    ("NH_4^+", "NH4+"),
    ("Na^+", r"\text{Na}^{+}"),
    ("Ca(OH)_2", r"\mathrm{Ca(OH)_2}"),
    ("CuSO_4 \\cdot 5H_2O", "CuSO4·5H2O"),
    ("2H_2 + O_2 \\to 2H_2O", "O2 + 2H2 -> 2H2O"),
    ("NaCl(aq)", "NaCl"),
    ("Zn + 2H^+ -> Zn^{2+} + H_2", r"Zn(s) + 2H^+(aq) \rightarrow Zn^{2+}(aq) + H_2(g)"),
    ("^{14}C", "carbon-14"),
    ("^{235}_{92}U", "U-235"),
    ("helium", "He"),
    ("1s^2 2s^2 2p^4", "1s^22s^22p^4"),
    ("1s^2 2s^2 2p^4", "[He] 2s^2 2p^4"),
    ("[Ar] 3d^{10} 4s^1", "[Ar]4s¹3d¹⁰"),
    ("sp^3", "sp3"),
    ("CO_2", "X = CO_2"),
]
OTHERS = [
    ("CO_2", "Co_2"),
    ("CO_2", "C_2O"),
    ("CO", "Co"),
    ("NaCl", "NaCI"),
    ("SO_4^{2-}", "SO_4^{-}"),
    ("Fe^{3+}", "Fe^{2+}"),
    ("2H_2 + O_2 \\to 2H_2O", "2H_2O -> 2H_2 + O_2"),
    ("2H_2 + O_2 \\to 2H_2O", "H_2 + O_2 -> H_2O"),
    ("^{14}C", "^{12}C"),
    ("^{14}_6C", "^{14}_7C"),
    ("helium", "H"),
    ("4s^2 3d^1", "3s^2 4d^1"),
    ("[Ar] 4s^2", "[Ne] 4s^2"),
    ("H_2O", "water"),
    ("NH_3", "NH_3 or NH_4"),
]
NO_CHEMISTRY = [
    "PV",
    "P_1V_1",
    "mgh",
    "IR",
    "east",
    "no",
    "5 C",
    "2 Pa",
    "x",
    "42",
    r"\frac{1}{2}",
    "CV^2",
    "",
    "C",
    "qvB",
    "nRT",
]


@each_row(("reference", "answer"), SAME)
def test_the_same_in_other_notation(reference: str, answer: str) -> None:
    assert same_chemistry(reference, answer) is True


@each_row(("reference", "answer"), OTHERS)
def test_others(reference: str, answer: str) -> None:
    assert same_chemistry(reference, answer) is False


@each_row("reference", NO_CHEMISTRY)
def test_letters_of_physics_are_no_chemistry(reference: str) -> None:
    assert same_chemistry(reference, reference) is None
