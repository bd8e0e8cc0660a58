import re

from diloco import errors
from diloco.errors import ALL_ERRORS, DilocoError


def subclasses(cls: type[DilocoError]) -> list[type[DilocoError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in subclasses(child))]


def test_the_flat_tree_holds_every_class_parents_first():
    ours = {cls for cls in subclasses(DilocoError) if cls.__module__ == "diloco.errors"}
    assert set(ALL_ERRORS) == ours
    for position, cls in enumerate(ALL_ERRORS[1:], start=1):
        assert cls.__base__ in ALL_ERRORS[:position]


def test_the_docstring_draws_the_tree_as_it_is():
    drawn = re.findall(r"^ *[*x+] (\w+)", errors.__doc__ or "", re.MULTILINE)
    assert drawn == [cls.__name__ for cls in ALL_ERRORS]
    indented = re.findall(r"^ *\+ (\w+)", errors.__doc__ or "", re.MULTILINE)
    special = [cls for cls in ALL_ERRORS[1:] if cls.__base__ is not DilocoError]
    assert indented == [cls.__name__ for cls in special]


def test_every_class_has_a_reason_of_its_own_that_is_one_camel_case_word():
    reasons = [cls.reason for cls in ALL_ERRORS]
    assert len(set(reasons)) == len(reasons)
    assert all(re.fullmatch(r"[A-Z][A-Za-z]+", reason) for reason in reasons)
    assert {cls.__name__.removesuffix("Error") for cls in ALL_ERRORS[1:]} == set(reasons[1:])
