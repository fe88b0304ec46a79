"""Parts that the lessons use but do not teach; to import them first prepares the process."""
import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # torch's idle threads sleep and do not spin
os.environ.pop("MPLBACKEND", None)  # a notebook's may be missing here; we only write files
sys.excepthook = lambda kind, *rest: (  # Ctrl-C prints no traceback, even during an import
    sys.stderr.write("stopped\n") if kind is KeyboardInterrupt else sys.__excepthook__(kind, *rest))
sys.stdout = sys.stdout or open(os.devnull, "w")  # None if it is closed (>&-)
sys.stderr = sys.stderr or open(os.devnull, "w")
if sys.argv[1:] and (about := sys.modules["__main__"].__doc__ or "").startswith("Lesson "):
    print(f"{about}\nIt takes no arguments.")
    sys.exit(sys.argv[1:] not in (["-h"], ["--help"]))
if hasattr(sys.stdout, "reconfigure"):  # a notebook's stream has no such method
    sys.stdout.reconfigure(errors="replace")  # for symbols that the terminal lacks
