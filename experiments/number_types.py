"""Does bf16 cost anything?  The same run twice: float32, and bf16 autocast.

Matrix products in bf16; weights, norms, loss and optimizer in float32.  Same seed, so the same
first weights, dropouts and order of the text.  Prints the last validation and the largest distance
of the two training curves behind the first tenth; draws both to runs/number_types.png.

    python experiments/number_types.py          2,000 steps of the default model, with Adam
    python experiments/number_types.py --steps 200 --model tiny     any flags of train.py
"""
import sys
from importlib import import_module
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the lessons are one folder up
from support import log
from optimizers import FLAGS

train, lesson_1 = import_module("train"), import_module("01_vanilla_segments")


def main(argv=None):
    """Two runs into runs/number_types-*, unless they are there; a figure of both."""
    flags = [*FLAGS["adam"], *(sys.argv[1:] if argv is None else argv)]
    flags = flags if "--steps" in flags else ["--steps", "2000", *flags]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, curves = figure.subplots(), []
    for dtype, style in (("float32", "-"), ("bf16", "--")):
        out = lesson_1.RUNS / f"number_types-{dtype}"
        if not (out / "checkpoint.pt").exists():
            status = train.main([*flags, "--dtype", dtype, "--out", str(out)])
            if status:
                return status
        rows = log.read_metrics(out / "metrics.tsv")
        curve = [(int(row["step"]), float(row["train"])) for row in rows if row["train"]]
        axes.plot(*zip(*curve), style, label=dtype)
        curves.append(curve)
        valid = [row["valid"] for row in rows if row["valid"]][-1]
        print(f"{dtype:8} validation {valid} after {rows[-1]['step']} steps, "
              f"{float(rows[-1]['seconds']):.0f} s of training")
    rest = [abs(a - b) for (_, a), (_, b) in zip(*curves)][len(curves[0]) // 10 :]
    print(f"largest distance of the training curves behind the first tenth: {max(rest):.4f}")
    axes.set(xlabel="step", ylabel="training loss (bits per byte)", xlim=(0, None),
             ylim=(0, None), title="The same run in two number types")
    axes.grid(alpha=0.4)
    axes.legend()
    figure.savefig(lesson_1.RUNS / "number_types.png", dpi=120)
    print(f"figure: {lesson_1.RUNS.name}/number_types.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
