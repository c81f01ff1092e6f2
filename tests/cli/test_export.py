"""`vaswani export`: what it prints, and one line for each mistake."""

import re
from pathlib import Path

import pytest

from tests.conftest import tiny_model
from vaswani import VaswaniTokenizer
from vaswani.cli import main
from vaswani.convert import writer


def test_the_check_and_what_is_not_the_same_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.txt").write_text("Where is the station?\n\nI am tired.\n")
    out = tmp_path / "out"
    main(["export", "tatoeba-en-de", str(out), "--to", "marian", "--sentences", str(tmp_path / "lines.txt")])
    first, *notes = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"Exported tatoeba-en-de to {out}: logits differ by at most \d\.\de-0\d, and 2 of 2 translations are equal to "
        r"those of the original; its tokenizer has equal ids for 2 of them\.",
        first,
    )
    assert len(notes) == 4
    assert all(note.endswith(".") for note in notes)


def test_mistakes_of_the_caller_are_named_in_a_line(
    tmp_path: Path, tokenizer: VaswaniTokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = tmp_path / "learned"
    tiny_model(vocab_size=400, position_encoding="learned").save_pretrained(learned)
    tokenizer.save_pretrained(learned)
    (tmp_path / "there").mkdir()
    (tmp_path / "empty.txt").write_text(" \n")
    names = sorted(path.name for path in tmp_path.iterdir())
    out = str(tmp_path / "out")
    for words, message in [
        (["tatoeba-en-de", out, "--to", "keras"], "There is no export to 'keras'; it must be one of marian"),
        (["tatoeba-en-de", str(tmp_path / "there"), "--to", "marian"], "exists already: choose another folder"),
        (["./nowhere", out, "--to", "marian"], "nowhere"),
        ([str(learned), out, "--to", "marian"], f"{learned} cannot be exported to marian: The model has position_enc"),
        (["tatoeba-en-de", out, "--to", "marian", "--sentences", str(tmp_path / "none")], "There is no file"),
        (["tatoeba-en-de", out, "--to", "marian", "--sentences", str(tmp_path / "empty.txt")], "There are 0 sentences"),
        (["tatoeba-en-de", out], "the following arguments are required: --to"),
    ]:
        with pytest.raises(SystemExit) as end:
            main(["export", *words])
        line = capsys.readouterr().err.splitlines()[-1]
        assert end.value.code == 2
        assert message in line
        assert "Traceback" not in line
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_a_package_that_is_not_installed_is_named_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = writer.Writer("other", ("torch", "nonesuch"), lambda *_: [], lambda *_: None, "")
    with pytest.raises(ValueError, match=r"to other needs nonesuch, not installed here: pip install nonesuch"):
        missing.check_packages()
