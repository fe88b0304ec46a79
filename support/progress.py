"""How far something is that takes more than half a second: one line on stderr that leaves no trace.
"""
import os
import sys
import time


def progress(items, label, total=None, size=None):
    """Yield the items unchanged; every half second a line on stderr says how far we are.

    total is their number, where it is known.  With size(item) -> bytes it counts bytes instead,
    shown in MB.  Of several processes (torchrun) only the first shows anything.
    """
    shown, done, line = time.monotonic(), 0, ""
    try:
        for item in items:
            yield item
            done += size(item) if size else 1
            if time.monotonic() - shown > 0.5 and os.environ.get("RANK", "0") == "0":
                shown = time.monotonic()
                here, end = (f"{n / 1e6:.1f} MB" if size else str(n) for n in (done, total or 0))
                line = f"\r{label} {here}/{end} " if total else f"\r{label} {here} "
                print(line, end="", file=sys.stderr, flush=True)
    finally:
        if line:
            print("\r" + " " * len(line), end="\r", file=sys.stderr, flush=True)
