"""Command lines: a parser that reports a mistake in one line, with the most similar name."""
import argparse
from difflib import get_close_matches


def did_you_mean(name, known):
    """Return "; did you mean X?", the end of a message, or "" if no known name is close."""
    return "".join(f"; did you mean {z}?" for z in get_close_matches(name, known, 1, 0.5))


class Parser(argparse.ArgumentParser):
    """argparse with a ValueError of one line for a mistake."""

    def __init__(self, **options):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter,
                            "allow_abbrev": False} | options)

    def error(self, message):
        """Raise ValueError, with the most similar flag."""
        wrong = message.partition("unrecognized arguments: ")[2].split("=")[0].split(" ")[0]
        raise ValueError(f"{message}{did_you_mean(wrong, self._option_string_actions)} "
                         "(--help lists all flags)")
