"""The parser of all command lines.  It imports neither torch nor a lesson, which may be broken."""
import argparse

from support.names import did_you_mean


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
