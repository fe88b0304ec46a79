"""All command lines: their flags, the parser, and one line for every mistake.  It imports neither
torch, which takes seconds, nor a lesson, which may be broken."""
import argparse
import os
import sys
from dataclasses import field

from support.names import did_you_mean, printable


def flag(name):
    """Return the flag of a field: eval_mem_len -> --eval-mem-len."""
    return "--" + name.replace("_", "-")


def option(default, text, choices=(), least=0):
    """Return the field of a dataclass that becomes a flag; `least` is the smallest number."""
    return field(default=default, metadata={"help": text, "choices": choices, "least": least})


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


def report(program, sentence):
    """Print the reason in one line -> exit status 1."""
    rank = os.environ.get("RANK", "0")
    if rank != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
        sentence = f"rank {rank}: {sentence}"
    print(f"{program}: " + printable(" ".join(str(sentence).split())), file=sys.stderr)
    return 1


def exit_status(program, act, *arguments):
    """Run act(*arguments) -> its exit status, or 1 after one line about what went wrong."""
    try:
        return act(*arguments) or 0
    except ValueError as error:
        return report(program, error)
    except BrokenPipeError:  # as with `| head`
        return 141  # 128 + SIGPIPE, as in a shell
    except OSError as error:
        room = "what was saved before is complete: make room and resume, or "
        return report(program, f"{error}; {room * ('No space' in str(error))}use another folder "
                      "with --out")
    except (MemoryError, RuntimeError) as error:
        kind = type(error).__name__  # of torch's errors, which are not imported here
        if kind in ("MemoryError", "OutOfMemoryError") or "t allocate" in str(error):
            return report(program, "out of memory: train.py --micro-batch 1 makes the same steps "
                          "with the least; a smaller model, segment or memory also needs less")
        if kind.startswith("Dist") or "gloo" in str(error):
            return report(program, "another rank has exited, so this one also exits")
        raise
    except KeyboardInterrupt:
        print(f"\n{program}: stopped", file=sys.stderr)
        return 130
