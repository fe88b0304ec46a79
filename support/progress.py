"""Progress of anything that takes over half a second: one line on stderr, erased at the end."""
import sys
import time

is_quiet = False  # True on all ranks but rank 0 (training/ranks.py)


def progress(items, label, total=None, size=None):
    """Yield the items unchanged; print a line on stderr every half second, with their number.

    total is their number, if it is known.  With size(item) -> bytes, bytes are counted instead, and
    printed in MB.  A file or a pipe, where no line can be overwritten, gets one every ten seconds.
    """
    terminal = getattr(sys.stderr, "isatty", bool)()  # False if the stream has no isatty
    every = 0.5 if terminal else 10
    shown, done, line = time.monotonic(), 0, ""
    try:
        for item in items:
            yield item
            done += size(item) if size else 1
            if time.monotonic() - shown > every and not is_quiet:
                shown = time.monotonic()
                here, end = (f"{n / 1e6:.1f} MB" if size else str(n) for n in (done, total or 0))
                line = f"{label} {here}/{end} " if total else f"{label} {here} "
                print("\r" * terminal + line, end="" if terminal else "\n", file=sys.stderr,
                      flush=True)
    finally:
        if line and terminal:
            print("\r" + " " * len(line), end="\r", file=sys.stderr, flush=True)
