"""Parts that the lessons use but do not teach.  Importing them changes the environment of threads
and figures, before torch and matplotlib read it, and streams that are closed or lack symbols."""
import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # torch's idle threads sleep and do not spin
os.environ.pop("MPLBACKEND", None)  # a notebook's may be missing here; we only write files
sys.stdout, sys.stderr = (
    stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # >&-
if hasattr(sys.stdout, "reconfigure"):  # a notebook's stream has no such method
    sys.stdout.reconfigure(errors="replace")  # for symbols that the terminal lacks


def run_lesson(main, about):
    """Run a lesson's main; --help prints what it is about, and Ctrl-C prints no traceback."""
    if sys.argv[1:]:
        print(f"{about}\nIt takes no arguments.")
        sys.exit(sys.argv[1:] not in (["-h"], ["--help"]))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
