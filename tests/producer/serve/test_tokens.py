"""The file of bearer tokens: what is read, and what is refused without quoting a token."""

import pytest

from stoker.serve.settings import Tokens


def test_a_file_has_names_and_tokens(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(f"# people\nann  {'a' * 20}\n\nbob\t{'b' * 20}\nann {'c' * 20}\n")
    tokens = Tokens.from_file(file)
    assert [tokens.name_of(letter * 20) for letter in "abcd"] == ["ann", "bob", "ann", None]
    assert tokens.name_of("") is None


TWICE = f"ann {'s' * 20}\nbob {'s' * 20}\n"
NOBODYS = f"ann {'s' * 20}\nanybody {'t' * 20}\n"
NOT_ASCII = f"ann {'ß' * 20}\n".encode().decode("latin-1")


@pytest.mark.parametrize(
    "text",
    [
        *("", "# only this\n", f"{'s' * 20}\n", "ann short\n", f"a/b {'s' * 20}\n", "a b c\n"),
        *(TWICE, NOBODYS, NOT_ASCII, "\xff"),
    ],
)
def test_a_file_that_lets_nobody_in_or_is_mistyped_is_refused(tmp_path, text):
    file = tmp_path / "tokens"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError) as refused:
        Tokens.from_file(file)
    assert str(file) in str(refused.value)
    assert "s" * 20 not in str(refused.value)
