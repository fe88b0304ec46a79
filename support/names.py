"""Names that do not exist: the most similar one that does."""
from difflib import get_close_matches


def did_you_mean(name, known):
    """Return "; did you mean X?", the end of a message, or "" if no known name is close."""
    return "".join(f"; did you mean {near}?" for near in get_close_matches(name, known, 1, 0.5))
