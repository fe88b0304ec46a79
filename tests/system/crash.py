"""Kill a run again and again, go on each time, and compare with a run that nobody has touched.

    python tests/system/crash.py --kills 50     about two minutes

A run of a tiny model saves every few steps.  It is killed (SIGKILL) at random moments, every other
time while a file is being written, and started again with --resume; now and then its newest
checkpoint is damaged before that, cut off or with a bit flipped.  When a run comes to its end, all
that it leaves must equal the untouched one's to the bit: parameters, optimizer, random state,
place in the text, memory, best model, and the lines of metrics.tsv but for their times; and the
next run begins.  Linux and macOS only: the runs are forks of this process, so that none has to wait
for torch to start.
"""
import argparse
import os
import random
import signal
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # the lessons are there
from training import checkpoint, log

train = import_module("train")

FLAGS = ["--model", "tiny", "--dtype", "float32", "--device", "cpu", "--segment", "8", "--mem-len",
         "12", "--eval-segment", "16", "--eval-mem-len", "16", "--log-every", "3", "--eval-every",
         "4", "--dropout", "0.2", "--n-tokens", "20"]
PARTS = "checkpoint.pt.part", "best.pt.part", "metrics.tsv.part"  # files in the making


def differences(a, b, path=""):
    """Where two contents of checkpoints are not equal to the bit; seconds of training do not count.
    """
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
    elif isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [z for key in a if key != "seconds" for z in differences(
            a[key], b[key], f"{path}/{key}")]
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [z for i, pair in enumerate(zip(a, b)) for z in differences(*pair, f"{path}/{i}")]
    else:
        equal = type(a) is type(b) and a == b
    return [] if equal else [path]


def runs_differ(one, two):
    """Where the runs in two folders are not the same."""
    found = []
    for name in ("checkpoint.pt", "best.pt"):
        found += differences(checkpoint.load(one / name), checkpoint.load(two / name), name)
    rows = [[row | {"seconds": ""} for row in log.read_metrics(folder / "metrics.tsv")]
            for folder in (one, two)]
    return found + (["metrics.tsv"] if rows[0] != rows[1] or len(rows[0]) < 4 else [])


def start(argv, printed):
    """train.main(argv) in a process of its own -> its number."""
    number = os.fork()
    if number:
        return number
    try:
        file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))
        log.draw = lambda *arguments: None  # would take longer than all else
        status = train.main(argv)
        sys.stdout.flush(), sys.stderr.flush()
    except BaseException:  # the child must not come back into the loop below
        import traceback
        traceback.print_exc()
        sys.stderr.flush()
        status = 99
    os._exit(status)


def ended(number):
    """The exit status of a process, or None while it runs."""
    done, status = os.waitpid(number, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def kill_at(number, out, draw, in_a_save, longest):
    """Wait for the moment, then kill -> whether it was alive until then, and in a save."""
    until = time.monotonic() + draw.uniform(0, longest)
    saves_to_wait, before, old = draw.randint(1, 6), set(), parts(out)
    while (status := ended(number)) is None:
        saving = parts(out) - old  # (what an earlier kill has left is no save of this run)
        saves_to_wait -= bool(saving - before)
        before = saving
        if (saving and saves_to_wait <= 0) if in_a_save else time.monotonic() > until:
            time.sleep(draw.uniform(0, 0.003) if in_a_save else 0)
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            return True, bool(parts(out) - old)
    if status:
        failed(f"ended by itself with status {status}", out)
    return False, False


def parts(out):
    """The files that are being written, each with the number of its content on the disk."""
    found = set()
    for name in PARTS:
        try:
            found.add((name, os.stat(out / name).st_ino))
        except FileNotFoundError:  # done meanwhile
            pass
    return found


def failed(what, out):
    """End with what a run has printed last."""
    log = Path(f"{out}.log").read_text()[-2000:]
    raise SystemExit(f"crash.py: {out.name} {what}; it has printed\n{log}")


def damage(path, draw):
    """Cut a file off anywhere, or flip one bit of it."""
    data = bytearray(path.read_bytes())
    if draw.random() < 0.5:
        data = data[: draw.randrange(len(data))]
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def main(argv=None):
    """Print what was done, and what was different at the end: nothing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="keep the runs here (default: a temporary folder)")
    parser.add_argument("--between-validations", action="store_true",
                        help="validate at the end only, and save on --save-minutes")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    draw = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text.txt"
        text.write_text(" ".join("".join(draw.choices("abcde", k=draw.randint(1, 6)))
                                 for _ in range(900)))
        argv = [*FLAGS, "--text", str(text), "--steps", str(given.steps)]
        if given.between_validations:
            argv += ["--eval-every", "1000000", "--save-minutes", "1e-9"]
        begun = time.monotonic()
        whole = start([*argv, "--out", str(folder / "whole")], folder / "whole.log")
        if os.waitpid(whole, 0)[1]:
            failed("failed", folder / "whole")
        longest = time.monotonic() - begun

        kills = saves = damaged = resumed = runs = 0
        found, out = [], folder / "run-0"
        while kills < given.kills or out.exists():
            again = any((out / name).exists() for name in ("checkpoint.pt", "previous.pt"))
            if all((out / name).exists() for name in ("checkpoint.pt", "previous.pt")) and (
                    draw.random() < 0.2):
                damage(out / "checkpoint.pt", draw)
                damaged += 1
            resumed += again
            number = start([*argv, "--out", str(out), *["--resume"] * again], f"{out}.log")
            if kills < given.kills:
                alive, saving = kill_at(number, out, draw, kills % 2 == 0, longest)
                kills, saves = kills + alive, saves + saving
            else:
                alive, status = False, os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
                if status:
                    failed(f"ended with status {status}", out)
            if not alive:  # it came to its end
                found += runs_differ(folder / "whole", out)
                runs += 1
                out = folder / f"run-{runs}"
            print(f"\r{kills} kills, {saves} of them in a save, {damaged} checkpoints damaged, "
                  f"{resumed} resumes, {runs} runs ended, {len(found)} differences ", end="",
                  flush=True)
    print(f"in {time.monotonic() - begun:.0f} s")
    for path in found:
        print(f"different: {path}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
