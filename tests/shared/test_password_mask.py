import pytest

from stoker_shared.password_mask import mask_text, mask_url


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("rediss://user:secret@host", "rediss://user:***@host"),
        ("redis://host/0?password=secret&db=1", "redis://host/0?password=***&db=1"),
        ("rediss://host/0?ssl_password=secret", "rediss://host/0?ssl_password=***"),
        ("redis://:sec/ret@host:1/0", "redis://:***@host:1/0"),  # not quoted: to a parser the host ends at the slash
        ("redis://:sec@ret@host:1/0", "redis://:***@host:1/0"),
        ("redis://:sec\nret@host:1/0", "redis://:***@host:1/0"),
        ("secret", "***"),
    ],
)
def test_a_url_is_shown_without_its_passwords(url, masked):
    assert mask_url(url) == masked


def test_an_error_that_quotes_the_password_is_shown_without_it():
    assert mask_text("unknown command 'AUTH' 'secret'", "secret") == "unknown command 'AUTH' '***'"
    assert mask_text("refused", None) == "refused"
    assert mask_text("refused", "") == "refused"
