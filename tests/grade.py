"""Grade a class: one point for each exercise that a student has solved.

    python tests/grade.py submissions/                     a table, progress on stderr
    python tests/grade.py submissions/ --all-mistakes      with every sentence, not only the first
    python tests/grade.py submissions/ --csv grades.csv    the table as a file, too

submissions/ holds one folder for each student (lesson files, or a file of any other name with the
functions alone), or one .py file for each.  Only what a student handed in can give points: where an
exercise is missing, our own solution stands in for those that need it, but counts nothing.

Every submission runs in a process of its own, on a copy of its .py files in a temporary folder,
with limits of time, memory and file size; what it prints is thrown away, and what it leaves running
is killed.  If one exercise hangs or ends the process, it gets no point, and the others are graded
by a new process.
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

from course.exercises import BY_NAME, EXERCISES, ROOT

NAMES = [exercise.name for exercise in EXERCISES]
HONEST = __doc__.strip().splitlines()[-1]
LENGTH = 200  # of a sentence
MEMORY = 2 << 30  # bytes that a submission may have, over what torch itself takes
FILE_SIZE = 100 << 20  # bytes of one file that it writes
Row = namedtuple("Row", "name marks sentences")  # marks: exercise -> True, False; None: not there


# ---- in the worker: the process of one submission -----------------------------------------------

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
    from course import rules, submission
    try:
        state, why = rules.state(name)
        if state == "solved":
            function = inspect.unwrap(submission.function_of(BY_NAME[name]))
            code = getattr(function, "__code__", None)
            if code and Path(code.co_filename).parent == ROOT:
                state, why = "ours", f"{name}: is our own function, from the course's folder"
    except BaseException as error:  # KeyboardInterrupt, or an exception that cannot be printed
        state, why = "failing", f"{name}: raises {type(error).__name__}"
    return state == "solved", (why.splitlines() or [""])[0][:500]


def work():
    """The worker: read the job from stdin, report each step.  What is too bad to catch is for the
    parent to see."""
    send, job = open_channel()
    sys.path.insert(0, str(ROOT))
    folder, seconds = Path(job["folder"]), job["seconds"]
    import_module("course.diagnosis")  # before anything of the student's
    from course import rules, submission
    try:
        submission.lay_over(folder)  # reads the files, and runs nothing yet
    except ValueError as error:
        return send(problem=str(error).removeprefix("XL_CODE: "))
    has = [e.name for e in EXERCISES if submission.overlay.has(e)]
    os.environ.update(dict.fromkeys(("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP"), str(folder)))
    tempfile.tempdir = None  # ask TMPDIR again
    rules.SECONDS = max(1, seconds // 12)
    limit_resources(seconds)
    send(step="import", has=has)
    try:
        submission.import_lessons()
    except BaseException as error:  # not an Exception, so not in submission.broken
        return send(problem=f"at import: raises {type(error).__name__}")
    for name in has:
        if name not in job["done"]:
            send(step=name)
            solved, why = judged(name)
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
            limit = seconds * (0.6 if message["step"] == "import" else 1 / 4)  # 1/12 is the alarm's
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
        step = report["step"]
        if step in NAMES:
            report["results"][step] = False, f"{step}: {how}"
        elif how:
            report["problem"] = f"at {step}: {how}"
        report["results"] = {name: (solved, clean(why, folder))
                             for name, (solved, why) in report["results"].items()}
        report["problem"] = clean(report["problem"], folder)
        return step in NAMES


def grade(submission, seconds, stop):
    """The row of one submission; `seconds` is for all of its processes together."""
    report = {"has": None, "results": {}, "problem": "", "step": "start"}
    deadline = time.monotonic() + seconds
    try:
        while run_worker(submission, report, seconds, deadline, stop):
            if time.monotonic() > deadline:
                report["problem"] = "no time is left for the rest"
                break
    except Exception as error:  # whatever it is, the others must be graded
        report["problem"] = clean(f"the grader failed: {type(error).__name__}: {error}")
    has, results = report["has"] or [], report["results"]
    marks = {name: results.get(name, (False,))[0] if name in has else None for name in NAMES}
    sentences = [report["problem"]] if report["problem"] else []
    sentences += [results[name][1] for name in NAMES if name in results and not results[name][0]]
    if not sentences and not has:
        sentences = ["holds no exercise"]
    elif not sentences:
        missing = f" of the {len(has)} handed in" if len(has) < len(NAMES) else ""
        sentences = [f"all solved{missing}"]
    return Row(clean(submission.name), marks, sentences)


# ---- in the parent: the class -------------------------------------------------------------------

def find_submissions(folder):
    """The students' folders and .py files, by name.  ValueError if there is none."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}; name the folder that holds the submissions")
    there = [path for path in folder.iterdir() if not hidden(path.name)]
    found = [path for path in there if path.is_dir() or path.suffix == ".py"]
    for path in sorted({*there} - {*found}):
        print(f"not graded: {path.name} is neither a folder nor a .py file (unpack archives)",
              file=sys.stderr)
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


def table(rows, all_mistakes=False):
    """What is printed: for each submission the marks and below them its sentences; the legend."""
    numbers = "".join(f"{i:3}" for i in range(1, len(NAMES) + 1))
    lines = [f"{'submission':<30} {'points':>6} {numbers}"]
    for row in rows:
        points = f"{sum(map(bool, row.marks.values()))}/{len(NAMES)}"
        marks = "".join("  -" if mark is None else f"{mark:3d}" for mark in row.marks.values())
        lines += [f"{row.name:<30.30} {points:>6} {marks}"]
        for sentence in row.sentences if all_mistakes else row.sentences[:1]:
            lines += textwrap.wrap(sentence, 96, initial_indent="    ", subsequent_indent="      ")
    legend = ", ".join(f"{i}={name}" for i, name in enumerate(NAMES, 1))
    lines += ["", *textwrap.wrap(f"1 solved, 0 not, - not handed in.  {legend}", 100), HONEST]
    return "\n".join(lines)


def write_csv(path, rows):
    """The rows as a file; a cell that a spreadsheet would take for a formula gets a ' in front."""
    def text(cell):
        return f"'{cell}" if cell.startswith(tuple("=+-@")) else cell
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["submission", "points", *NAMES, "sentences"])
        for row in rows:
            marks = ["" if mark is None else int(mark) for mark in row.marks.values()]
            writer.writerow([text(row.name), sum(map(bool, marks)), *marks,
                             text(" | ".join(row.sentences))])


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
    """The command line -> folder, csv, jobs, seconds, all_mistakes."""
    parser = Parser(prog="grade.py", allow_abbrev=False, description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="SUBMISSIONS", help="folder of the class")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--all-mistakes", action="store_true",
                        help="print a sentence for each exercise that is not solved")
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
        print(table(rows, given.all_mistakes))
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
