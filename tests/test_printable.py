"""Text from outside is shown with an escape for each character that cannot be seen."""

from unicodedata import category

import pytest

from autotune.printable import printable, printable_values

READABLE = [
    "plain text, 100 %",
    "C:\\studies\\new",
    "été Straße 東京　モデル модель",
    "مدل‌ها",  # a joiner inside a Persian word
    "👩‍👩‍👧 ❤️",
    "a\N{NO-BREAK SPACE}b",
]


@pytest.mark.parametrize("text", READABLE)
def test_letters_signs_and_spaces_of_any_script_stay(text):
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;aGk=\x07", r"\x1b]52;c;aGk=\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202eexe", r"\u202eexe"),
        ("\U000e0061", r"\U000e0061"),
        ("\udc80", r"\udc80"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("a\u200db", r"a\u200db"),
        ("東\u200d\u200d京", r"東\u200d\u200d京"),
        ("\u200d東", r"\u200d東"),
    ],
    ids=ascii,
)
def test_what_cannot_be_seen_is_an_escape(text, shown):
    assert printable(text) == shown


def test_no_control_or_format_character_is_left_unseen():
    unseen = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    numbers = [*range(0x20000), *range(0xE0000, 0xE0200)]  # Unicode has no other format characters
    text = "".join(chr(number) for number in numbers if category(chr(number)) in unseen)
    assert printable(text).isascii()


def test_lines_and_tabs_stay_where_a_text_may_have_lines():
    assert printable("a\r\n\tb\x0cc\u2028d", keep_lines=True) == "a\n\tb\\x0cc\\u2028d"


def test_every_text_inside_a_value_is_shown():
    value = {"\x1b": ["\x07", ("\u202e", 1, None)], "b": True}
    assert printable_values(value) == {r"\x1b": [r"\x07", (r"\u202e", 1, None)], "b": True}
