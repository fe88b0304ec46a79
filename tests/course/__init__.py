"""The exercises: finding, testing and diagnosing them.  Judging needs assertions."""
import sys

if not __debug__:
    sys.exit("assertions are off, so nothing can be judged: run python without -O, and unset "
             "PYTHONOPTIMIZE")
