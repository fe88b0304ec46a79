"""Grade a class: one point for each exercise that a student has solved.

    python tests/grade.py submissions/                     a table, progress on stderr
    python tests/grade.py submissions/ --csv grades.csv    the table as a file, too

submissions/ holds one folder for each student (lesson files, or a file of any other name with the
functions alone), or one .py file for each.  Only what a student handed in can give points: where an
exercise is missing, our own solution stands in for those that need it, but counts nothing.

Every submission runs in a process of its own, on a copy of its .py files in a temporary folder,
with limits of time, memory and file size; what it prints is thrown away, and what it leaves running
is killed.  If one exercise hangs or ends the process, it gets no point, and the others are graded
by a new process.  If torch, NumPy, Python's builtins or the tests are changed from inside, the
grading of that submission ends there.
This guards against accidents, not against a determined attacker: read what looks odd.
"""
import argparse
import csv
import inspect
import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

from course import exercises

NAMES = [exercise.name for exercise in exercises.EXERCISES]
HONEST = __doc__.strip().splitlines()[-1]
LENGTH = 120  # of a sentence
MEMORY = 2 << 30  # bytes that a submission may have, over what torch itself takes
FILE_SIZE = 100 << 20  # bytes of one file that it writes
WATCHED = ("torch", "torch.nn", "torch.nn.functional", "torch.autograd", "torch.optim",
           "torch.random", "torch.linalg", "numpy", "numpy.random", "math", "builtins", "signal",
           "time", "inspect", "traceback", "importlib", "course.exercises", "course.checks", "course.diagnosis",
           "__main__")
Row = namedtuple("Row", "name marks sentence")  # marks: exercise -> True, False; None: not there


# ---- in the worker: the process of one submission -----------------------------------------------

def contents(owner):
    """name -> value of a dict, a module, or a class with all that it inherits."""
    if isinstance(owner, type):
        return {k: v for base in reversed(owner.__mro__) for k, v in vars(base).items()}
    return dict(owner if isinstance(owner, dict) else vars(owner))


def snapshot():
    """[(label, owner, its contents)] of all that a submission must leave as it is."""
    import torch
    modules = [(name, import_module(name)) for name in WATCHED]
    owners = [("torch.Tensor", torch.Tensor), ("torch.nn.Module", torch.nn.Module), *modules]
    owners += [(f"{label}.{name}", value) for label, module in modules
               for name, value in vars(module).items() if isinstance(value, type)]
    owners += [("checks.CHECKS", import_module("course.checks").CHECKS), ("exercises", exercises.BY_NAME)]
    once = {}
    for label, owner in owners:  # under its first label: torch.Tensor, not torch.nn.Buffer
        once.setdefault(id(owner), (label, owner, contents(owner)))
    loaded = {name: sys.modules[name] for name in WATCHED}
    return [*once.values(), ("sys.modules", sys.modules, loaded)]


def wrapped_by_torch(before, now):
    """torch wraps some of its own functions late (Adam.step by a profiler): no student's doing."""
    file = getattr(getattr(now, "__code__", None), "co_filename", "")
    return (file.startswith(str(Path(sys.modules["torch"].__file__).parent))
            and inspect.unwrap(now) is inspect.unwrap(before))


def changed(taken):
    """The first thing that is not as in the snapshot, or None.  New names are no change: torch and
    NumPy load some of their modules late."""
    for label, owner, before in taken:
        now = contents(owner)
        for name, value in before.items():
            if now.get(name, taken) is not value and not wrapped_by_torch(value, now.get(name)):
                return f"{label}.{name}".replace("__main__", "grade")
    return None


def limit_resources(seconds):
    """No endless memory or file, and an end even if nobody is left to kill this process."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limits = {resource.RLIMIT_FSIZE: FILE_SIZE, resource.RLIMIT_CPU: 2 * seconds}
    if Path("/proc/self/statm").exists():  # macOS has no such limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + MEMORY
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def open_channel():
    """(send, job): a private pipe to the parent, and what it asks for.  Afterwards stdin is empty,
    and what is printed is thrown away."""
    job, channel, worker = json.loads(sys.stdin.read()), os.dup(1), os.getpid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)

    def send(**message):
        if os.getpid() != worker:  # a child that a student's fork has left in our code
            os._exit(0)
        os.write(channel, f"{job['token']}{json.dumps(message)}\n".encode())
    return send, job


def judged(name):
    """(solved?, one line why not) for one exercise, whatever it raises."""
    exercises.states.clear()
    try:
        state, why = exercises.state(name)
        exercise = exercises.BY_NAME[name]
        if state == "solved":
            code = getattr(inspect.unwrap(exercises.function_of(exercise)), "__code__", None)
            if code and Path(code.co_filename).parent == exercises.ROOT:
                state, why = "ours", f"{name}: is our own function, from the course's folder"
    except BaseException as error:  # KeyboardInterrupt, or an exception that cannot be printed
        state, why = "failing", f"{name}: raises {type(error).__name__}"
    return state == "solved", (why.splitlines() or [""])[0][:500]


def work():
    """The worker: read the job from stdin, report each step.  What is too bad to catch is for the
    parent to see."""
    send, job = open_channel()
    sys.path.insert(0, str(exercises.ROOT))
    folder, seconds = Path(job["folder"]), job["seconds"]
    try:
        overlay = exercises.Overlay(folder)  # reads the files, and runs nothing yet
    except Exception as error:
        return send(problem=str(error) or type(error).__name__)
    has = [e.name for e in exercises.EXERCISES if overlay.has(e)]
    for name in ("matplotlib.figure", *WATCHED):  # before anything of the student's
        import_module(name)
    os.environ.update(dict.fromkeys(("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP"), str(folder)))
    tempfile.tempdir = None  # ask TMPDIR again
    exercises.SECONDS = max(1, seconds // 12)
    limit_resources(seconds)
    exercises.lay_over(folder)
    taken = snapshot()
    send(step="import", has=has)
    try:
        exercises.import_lessons()
    except BaseException as error:  # not an Exception, so not in exercises.broken
        return send(problem=f"at import: raises {type(error).__name__}")
    for name in ["import", *(name for name in has if name not in job["done"])]:
        if name != "import":
            send(step=name)
            solved, why = judged(name)
        change = changed(taken)
        if change:
            return send(problem=f"{'at import' if name == 'import' else name}: changes {change}: "
                        "not graded")
        if name != "import":
            send(name=name, solved=solved, why=why)
    send(end=True)


# ---- in the parent: one submission --------------------------------------------------------------

def hidden(name):
    """.git, ._notes.py, __pycache__, __MACOSX: no student's work."""
    return name.startswith((".", "__"))


def copy(submission, folder):
    """The .py files of a submission; no links, no virtual environment."""
    def left_out(directory, names):
        paths = {name: Path(directory, name) for name in names}
        return [name for name, path in paths.items() if hidden(name) or path.is_symlink() or not (
            path.is_file() and path.suffix == ".py"
            or path.is_dir() and not (path / "pyvenv.cfg").exists())]
    if submission.is_dir():
        shutil.copytree(submission, folder, ignore=left_out)
    else:
        folder.mkdir()
        shutil.copyfile(submission, folder / submission.name)


def clean(text, folder=None):
    """One printable line of at most LENGTH characters, without the path of the temporary folder."""
    if folder is not None:
        text = text.replace(f"{folder}{os.sep}", "").replace(str(folder), "the submission")
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= LENGTH else text[: LENGTH - 3] + "..."


def listen(stdout, token, messages):
    """The worker's messages into the queue, then None; lines without the token are not its own."""
    with stdout:
        for line in iter(lambda: stdout.readline(10_000), b""):
            if line.startswith(token.encode()):
                messages.put(json.loads(line[len(token):]))
    messages.put(None)


def follow(worker, messages, report, seconds, deadline, stop):
    """Enter the worker's messages into the report until it ends; how, in words, or "" if well."""
    limit, until = seconds, deadline
    while True:
        try:
            message = messages.get(timeout=0.1)
        except queue.Empty:
            if stop.is_set() or time.monotonic() > until:
                return f"still running after {seconds if until == deadline else limit:.0f} seconds"
            message = {} if worker.poll() is None else None
        if message is None:
            try:
                status = worker.wait(timeout=1)
            except subprocess.TimeoutExpired:  # it has closed our pipe
                status = "unknown"
            return f"ended the process (status {status})"  # -n: by signal n
        if "step" in message:
            report["step"], report["has"] = message["step"], message.get("has", report["has"])
            limit = seconds * (0.6 if message["step"] == "import" else 1 / 8)  # 1/12 is the alarm's
            until = min(deadline, time.monotonic() + limit)
        if "name" in message:
            report["results"][message["name"]] = message["solved"], message["why"]
        report["problem"] = report["problem"] or message.get("problem", "")
        if "end" in message or "problem" in message:
            report["step"] = "end"
            return ""


def kill(worker):
    """The worker and all that it has started."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(worker.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # nobody is left
            pass
    worker.kill()
    worker.wait()


def run_worker(submission, report, seconds, deadline, stop):
    """Grade what has no result yet in a new process.  False: there is nothing more to do."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder, token = Path(temporary).resolve() / "submission", secrets.token_hex(8)
        copy(submission, folder)
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        environment.pop("XL_CODE", None)
        worker = subprocess.Popen(
            [sys.executable, __file__, "--worker"], cwd=folder, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True)
        try:
            messages = queue.Queue()
            threading.Thread(target=listen, args=(worker.stdout, token, messages),
                             daemon=True).start()
            with worker.stdin as stdin:
                stdin.write(json.dumps({"folder": str(folder), "seconds": seconds, "token": token,
                                        "done": list(report["results"])}).encode())
            how = follow(worker, messages, report, seconds, deadline, stop)
        finally:
            kill(worker)
        for name, (solved, why) in report["results"].items():
            report["results"][name] = solved, clean(why, folder)
        step = report["step"]
        if step in NAMES:
            report["results"][step] = False, clean(f"{step}: {how}")
            report["problem"] = report["problem"] or f"{step}: {how}"
        elif how:
            report["problem"] = f"at {step}: {how}"
        report["problem"] = clean(report["problem"], folder)
        return step in NAMES


def grade(submission, seconds, stop):
    """The row of one submission; `seconds` is for all of its processes together."""
    report = {"has": None, "results": {}, "problem": "", "step": "start"}
    deadline = time.monotonic() + seconds
    try:
        while run_worker(submission, report, seconds, deadline, stop):
            if time.monotonic() > deadline:
                report["problem"] = clean(f"{report['problem']}; no time for the rest")
                break
    except Exception as error:  # whatever it is, the others must be graded
        report["problem"] = clean(f"the grader failed: {type(error).__name__}: {error}")
    has, results = report["has"] or [], report["results"]
    marks = {name: results.get(name, (False,))[0] if name in has else None for name in NAMES}
    wrong = [results[name][1] for name in NAMES if name in results and not results[name][0]]
    sentence = report["problem"] or (wrong[0] if wrong else "all solved")
    if not has:
        sentence = report["problem"] or "holds no exercise"
    elif sentence == "all solved" and len(has) < len(NAMES):
        sentence = f"all solved of the {len(has)} handed in"
    return Row(clean(submission.name), marks, sentence)


# ---- in the parent: the class -------------------------------------------------------------------

def find_submissions(folder):
    """The students' folders and .py files, by name.  ValueError if there is none."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}; name the folder that holds the submissions")
    found = [path for path in folder.iterdir() if not hidden(path.name)
             and (path.is_dir() or path.suffix == ".py" and path.is_file())]
    if not found:
        raise ValueError(f"{folder} holds no submission; put a folder or a .py file for each "
                         "student into it")
    return sorted(found, key=lambda path: path.name)


def grade_all(submissions, jobs, seconds):
    """The rows, in the order of the submissions; progress on stderr."""
    stop, pool = threading.Event(), ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(grade, path, seconds, stop) for path in submissions]
        for k, future in enumerate(as_completed(futures), 1):
            print(f"{k} of {len(futures)}: {future.result().name}", file=sys.stderr, flush=True)
        return [future.result() for future in futures]
    finally:
        stop.set()  # after Ctrl-C the workers still run
        pool.shutdown(cancel_futures=True)


def table(rows):
    """What is printed: for each submission the marks and below them its sentence; the legend."""
    numbers = "".join(f"{i:3}" for i in range(1, len(NAMES) + 1))
    lines = [f"{'submission':<30} {'points':>6} {numbers}"]
    for row in rows:
        points = f"{sum(map(bool, row.marks.values()))}/{len(NAMES)}"
        marks = "".join("  -" if mark is None else f"{mark:3d}" for mark in row.marks.values())
        lines += [f"{row.name:<30.30} {points:>6} {marks}"]
        lines += [f"    {part}" for part in textwrap.wrap(row.sentence, 96)]
    legend = ", ".join(f"{i}={name}" for i, name in enumerate(NAMES, 1))
    lines += ["", *textwrap.wrap(f"1 solved, 0 not, - not handed in.  {legend}", 100), HONEST]
    return "\n".join(lines)


def write_csv(path, rows):
    """The rows as a file; a cell that a spreadsheet would take for a formula gets a ' in front."""
    def text(cell):
        return f"'{cell}" if cell.startswith(tuple("=+-@")) else cell
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["submission", "points", *NAMES, "sentence"])
        for row in rows:
            marks = ["" if mark is None else int(mark) for mark in row.marks.values()]
            writer.writerow([text(row.name), sum(map(bool, marks)), *marks, text(row.sentence)])


def reserve(path):
    """Where the csv stands until it is whole.  ValueError now, not after the grading."""
    part = Path(f"{path}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "is a folder")
        part.open("w").close()
    except OSError as error:
        raise ValueError(f"--csv {path}: {error.strerror}; name a file in a folder that exists and "
                         "can be written") from None
    return part


class Parser(argparse.ArgumentParser):
    """argparse, with one line for a mistake instead of the usage page."""

    def error(self, message):
        """Raise what main prints."""
        raise ValueError(f"{message} (python tests/grade.py --help lists all flags)")


def parse(argv):
    """The command line -> folder, csv, jobs, seconds."""
    parser = Parser(prog="grade.py", allow_abbrev=False, description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="SUBMISSIONS", help="folder of the class")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--jobs", type=int, metavar="N", default=os.cpu_count() or 1,
                        help="submissions at a time (default: the cores, %(default)s)")
    parser.add_argument("--seconds", type=int, metavar="S", default=120,
                        help="for one submission; a twelfth of it for one exercise (default: 120)")
    given = parser.parse_args(argv)
    if given.jobs < 1 or given.seconds < 12:
        raise ValueError(f"--jobs {given.jobs} --seconds {given.seconds}: at least 1 job and 12 "
                         "seconds are needed")
    return given


def main(argv=None):
    """Grade the class.  Exit status: 0, 1 for a mistake, 130 after Ctrl-C."""
    part = None
    try:
        given = parse(argv)
        submissions = find_submissions(given.folder)
        part = given.csv and reserve(given.csv)
        rows = grade_all(submissions, given.jobs, given.seconds)
        print(table(rows))
        if part:
            write_csv(part, rows)
            os.replace(part, given.csv)
        return 0
    except (ValueError, OSError) as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngrade.py: stopped, and nothing was written", file=sys.stderr)
        return 130
    finally:
        if part:
            part.unlink(missing_ok=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        try:
            work()
        finally:
            os._exit(1)  # waits for no thread of the student's
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a name that the terminal cannot show
    sys.exit(main())
