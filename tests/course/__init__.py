"""The exercises: finding, testing and diagnosing them.  Judging needs assertions."""
import sys

if not __debug__:
    sys.exit("without assertions nothing can be judged: run python without -O or PYTHONOPTIMIZE")
