"""A new run may start from the weights of another one (--init), on any text in its vocabulary."""
import pytest

import train
from helpers import refusal
from support import corpora
from system.conftest import WHOLE, again, last_line
from training import checkpoint, flags, job, log, presets, text as texts


def test_a_run_from_other_weights_has_their_loss_sizes_and_vocabulary(
        finished, text, tmp_path, capsys):
    """At a rate of almost 0 the loss is the run's; optimizer, step and memory are new."""
    run, out, other = finished(*WHOLE)[0], tmp_path / "new", tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1].replace("e", "c "))  # other frequencies
    before = checkpoint.to_evaluate(run)
    corpus = corpora.load(other)
    assert again(out, "--init", str(run), "--text", str(other), "--steps", "1", "--lr", "1e-9",
                 "--muon-lr", "1e-9", "--mem-len", "5", "--dropout", "0") == 0
    score = last_line(capsys)
    new = checkpoint.load(out / "checkpoint.pt")
    assert new["config"] == before["config"] | {"mem_len": 5, "dropout": 0.0}
    assert (new["name"], new["vocab"]) == ("tiny", before["vocab"]) != ("tiny", corpus.vocab)
    assert new["state"]["step"] == 1 and new["state"]["memory"][0].shape[1] == 5
    assert {weight["step"].item() for weight in new["optimizer"]["state"].values()} <= {0, 1}
    tokens = corpora.encode(corpora.decode(corpus.test, corpus.vocab), before["vocab"])
    recipe = presets.Recipe(**new["recipe"])
    nats = train.evaluate(job.load_model(before, "cpu"), tokens, recipe)
    assert score.startswith(f"test {log.in_unit(nats, 'bpc'):.4f} bpc (evaluation T 16, M 16")
    assert again(out, "--eval-only") == 0 and last_line(capsys) == score
    assert again(out, "--sample", "abc", "--n-tokens", "3") == 0
    assert last_line(capsys).startswith("abc")


def test_settings_are_those_of_the_run_or_typed(finished):
    """What is typed replaces the run's; the dtype is chosen again for this machine."""
    run = finished(*WHOLE, "--d-head", "8")[0]
    typed = {"dataset": "enwik8", "minutes": 2.0}
    given = flags.Flags(init=str(run), typed=typed | {"n_head": 2})
    _, config, recipe = flags.choose_model(given, "cpu")
    assert (config.n_head, config.d_head) == (2, 8)
    assert (recipe.dataset, recipe.text, recipe.dtype) == ("enwik8", "", "auto")
    saved = given.start | {"recipe": vars(recipe) | {"drop_newlines": True, "dtype": "bf16"}}
    given = flags.Flags(eval_only=True, typed={"text": "notes.txt"})
    *_, found = flags.restore_settings(given, saved)
    assert (found.text, found.drop_newlines, found.dtype) == ("notes.txt", False, "auto")
    folder = flags.choose_folder(given, "x/../../b\x1b", presets.Recipe(steps=1, dataset="../a"))
    assert folder == flags.ROOT / "runs/a-b "  # a foreign checkpoint writes nowhere else
    found = flags.parse([f"--{name}=~/a" for name in ("data-dir", "init", "out", "text")], "")
    assert {found.data_dir, found.init, found.out, found.typed["text"]} == {flags.expanduser("~/a")}
    saved["recipe"]["plain"] = True
    assert "the run has --plain" in refusal(flags.check_kept, flags.Flags(compile=True), saved, ())
    assert (recipe.steps, recipe.optimizer, recipe.eval_every) == (0, "muon", 3)


@pytest.mark.parametrize("ours, theirs, words", [
    (b"ab", b"cab", ""), (b"ab\xc3", b"ba", "vocabulary lacks: b'\\xc3'; replace them"),
    (b"\tcba", b"abc", ""),  # as Python's library may have
    (["<eos>", "a"], ["<eos>", "a"], ""), (["<eos>", "a"], ["<eos>", "a", "b"], "must be the same"),
    (b"ab", ["<eos>", "a"], "do not mix"), (["<eos>", "a"], b"abc", "others (3): bytes")], ids=str)
def test_bytes_are_encoded_again_and_words_must_be_the_same(ours, theirs, words, capsys):
    split = corpora.torch.arange(len(ours), dtype=corpora.torch.uint8)
    corpus = corpora.Corpus(split, split, split, list(ours), "it")
    given = corpus, {"vocab": list(theirs)}, presets.Recipe(steps=1, text="it" * (9 not in ours))
    if words:
        assert words in refusal(texts.in_vocabulary, *given)
    else:
        found = texts.in_vocabulary(*given)
        assert found.vocab == list(theirs)
        left = corpora.decode(split, list(ours)).replace("\t", "")
        assert corpora.decode(found.test, found.vocab) == left
        assert ("b'\\t' is left out, since" in capsys.readouterr().out) == (9 in ours)
