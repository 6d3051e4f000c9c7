"""Text with its invisible characters shown. Pure, and imports nothing of the project."""

import unicodedata

SHOWN_WHITESPACE = " \n\t\u3000"
# Join Persian and Indic letters, emoji, and the letters of flags
JOINERS = {"\u200c", "\u200d", *map(chr, range(0xE0020, 0xE0080))}
HIDDEN_CATEGORIES = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp", "Zs"}


def make_visible(text: str) -> str:
    """Return a text with invisible and control characters written as `⟨U+202E⟩`."""
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character in SHOWN_WHITESPACE or character in JOINERS:
        return character
    if unicodedata.category(character) in HIDDEN_CATEGORIES:
        return f"⟨U+{ord(character):04X}⟩"
    return character
