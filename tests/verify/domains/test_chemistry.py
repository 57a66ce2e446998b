"""Chemical formulas, reactions, nuclides and configurations as text, by hand."""

from brorl.verification.domains.chemistry import same_chemistry
from case_tables import table
from each_row import each_row


@each_row(*table(__file__, "the_same_in_other_notation"))
def test_the_same_in_other_notation(reference: str, answer: str) -> None:
    assert same_chemistry(reference, answer) is True


@each_row(*table(__file__, "others"))
def test_others(reference: str, answer: str) -> None:
    assert same_chemistry(reference, answer) is False


@each_row(*table(__file__, "letters_of_physics_are_no_chemistry"))
def test_letters_of_physics_are_no_chemistry(reference: str) -> None:
    assert same_chemistry(reference, reference) is None
