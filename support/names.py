"""Names that do not exist, and how names and texts of others are printed."""
import re
from difflib import get_close_matches


def did_you_mean(name, known):
    """Return "; did you mean X?", the end of a message, or "" if no known name is close."""
    return "".join(f"; did you mean {found}?" for found in get_close_matches(name, known, 1, 0.5))


def printable(name):
    """Return a name in one line; what is not printable becomes a space."""
    return "".join(c if c.isprintable() else " " for c in name)


def visible(text):
    """Return a text whose control characters, except newline and tab, are U+FFFD."""
    return re.sub("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", text)
