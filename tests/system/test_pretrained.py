"""Test the model that is included in the course: its content, and when it is used."""
from unittest.mock import Mock

import train
from support import corpora
from training import checkpoint, flags

CPU = "--n-tokens", "3", "--device", "cpu"


def test_it_is_small_and_described():
    saved = checkpoint.to_evaluate(flags.PRETRAINED)
    assert [path.name for path in flags.PRETRAINED.glob("*.pt")] == ["best.pt"]
    assert saved["path"].stat().st_size <= 8_000_000 and "optimizer" not in saved
    page = (flags.PRETRAINED / "README.md").read_text(encoding="utf-8")
    assert f"checksum {saved['text']}" in page and f"{saved['state']['step']:,} steps" in page


def test_it_is_used_if_there_is_no_run_yet(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(flags, "ROOT", tmp_path)
    other = tmp_path / "runs" / "stdlib-laptop"
    other.mkdir(parents=True), (other / "metrics.tsv").touch()  # it has no checkpoint yet
    assert train.main(["--sample", "class ", *CPU]) == 0
    said = capsys.readouterr().out
    assert "no run in " in said and "class " in said
    assert f"{flags.PRETRAINED / 'best.pt'}: step 29,348\n" in said
    (small() / "best.pt").rename(other / "best.pt")
    assert train.main(["--sample", "a", *CPU]) == 0
    assert str(flags.PRETRAINED) not in capsys.readouterr().out


def test_it_evaluates_any_text_in_its_vocabulary(small, text, tmp_path, capsys, monkeypatch):
    """It predicts LICENSE, the last 20th, as well as when it was added.  So does a run in --out."""
    evaluate, out = Mock(wraps=train.evaluate), small()
    monkeypatch.setattr(train, "evaluate", evaluate)
    license = (flags.PRETRAINED.parent / "LICENSE").read_bytes()
    for folder, name, data, said in (
            (flags.PRETRAINED, "mine.txt", 20 * license, "step 29,348\ntest 1.92"),
            (out, "turned.txt", text.read_bytes()[::-1], "step 3\ntest ")):
        (tmp_path / name).write_bytes(data)
        given = ["--eval-only", "--text", str(tmp_path / name), "--dtype", "float32", *CPU]
        assert train.main(given + ["--out", str(out)] * (folder == out)) == 0
        output = capsys.readouterr().out
        assert said in output and output.endswith(f"; {name}, not the text of its training)\n")
        vocab = checkpoint.to_evaluate(folder)["vocab"]
        assert corpora.as_bytes(evaluate.call_args.args[1], vocab) == data[-(len(data) // 20):]
