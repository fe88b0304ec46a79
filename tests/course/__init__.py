"""The exercises: finding, testing and diagnosing them.  Judging needs assertions, and pytest."""
import sys
from importlib.util import find_spec
from pathlib import Path

if not __debug__:
    sys.exit("without assertions nothing can be judged: run python without -O or PYTHONOPTIMIZE")
if (script := Path(sys.argv[0]).name).startswith("test_"):
    sys.exit(f"python does not run tests: use pytest tests/{script}, or pytest -k and an exercise")
if not (find_spec("torch") and find_spec("pytest")):
    sys.exit(f"{sys.executable} has no torch or no pytest: use .venv/bin/python (see README.md)")
