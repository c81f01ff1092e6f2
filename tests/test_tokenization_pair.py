"""The tokenizer with a pipeline for each side: its own ids for sources and targets, saved and loaded."""

import json
import pickle
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer

from tests.nn_transformer import BOS, EOS, SOURCE, TARGET, Seq2Seq, write_folder
from vaswani import VaswaniPairTokenizer
from vaswani.convert.nn_transformer import from_nn_transformer
from vaswani.hub.loading import check_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> VaswaniPairTokenizer:
    folder = write_folder(tmp_path / "source", Seq2Seq(), source_begins_with_bos=True, lowercase=True)
    return from_nn_transformer(folder)[1]


def test_each_side_has_its_characters_and_its_ends(tokenizer: VaswaniPairTokenizer) -> None:
    assert tokenizer("A b\t7")["input_ids"] == [BOS, *(SOURCE.index(each) for each in "a b"), 0, 0, EOS]
    assert tokenizer(text_target="Да!")["input_ids"] == [*(TARGET.index(each) for each in "да!"), EOS]
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == [4, 5]
    both = tokenizer("ab", text_target="где", return_special_tokens_mask=True)
    assert (both["input_ids"], both["labels"]) == ([BOS, 4, 5, EOS], [7, 8, 9, EOS])
    assert both["special_tokens_mask"] == [1, 0, 0, 1]


def test_targets_are_decoded_to_the_text_that_they_came_from(tokenizer: VaswaniPairTokenizer) -> None:
    for text in ("да, конечно.", "я", "где он ? !"):
        ids = tokenizer(text_target=text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode([7, EOS, 1]) == "г<eos><pad>"


def test_it_comes_back_equal_from_a_folder_and_a_pickle(tokenizer: VaswaniPairTokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "saved")
    for other in (AutoTokenizer.from_pretrained(tmp_path / "saved"), pickle.loads(pickle.dumps(tokenizer))):
        assert type(other) is VaswaniPairTokenizer
        for given in ({"text": "a b"}, {"text_target": "где я"}):
            assert other(**given)["input_ids"] == tokenizer(**given)["input_ids"]
        assert other.decode([4, 5, EOS]) == tokenizer.decode([4, 5, EOS])


def test_words_are_split_at_spaces(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("\n".join([*SOURCE[:4], "good", "morning"]))
    names = {"source_vocabulary": "words.txt", "target_vocabulary": "words.txt", "split": "words"}
    model = Seq2Seq(sizes=(6, 6))
    tokenizer = from_nn_transformer(write_folder(tmp_path, model, source_ends_with_eos=False, **names))[1]
    assert tokenizer("good  new morning")["input_ids"] == [4, 0, 5]
    assert tokenizer(text_target="morning")["input_ids"] == [5, EOS]
    assert tokenizer.decode([4, 5, EOS], skip_special_tokens=True) == "good morning"


def test_threads_that_encode_sources_and_targets_do_not_disturb_each_other(tokenizer: VaswaniPairTokenizer) -> None:
    wrong: list[bool] = []

    def encode(name: str, text: str) -> None:
        wanted = [(SOURCE if name == "text" else TARGET).index(each) for each in text]
        wrong.extend(tokenizer(**{name: text}, add_special_tokens=False)["input_ids"] != wanted for _ in range(200))

    threads = [threading.Thread(target=encode, args=side) for side in [("text", "abc"), ("text_target", "где")] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)


def test_files_that_are_damaged_or_lengthen_text_without_bounds_are_refused(
    tokenizer: VaswaniPairTokenizer, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    paths = [str(tmp_path / name) for name in ("vocab.json", "tokenizer.json", "target_tokenizer.json")]
    long = Tokenizer(models.WordLevel(json.loads((tmp_path / "vocab.json").read_text()), unk_token="<unk>"))
    long.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 9000)] * 2)
    long.save(paths[1])
    with pytest.raises(ValueError, match=r"the normalizer of its tokenizer can make a text \d+ times as long"):
        check_tokenizer(VaswaniPairTokenizer(*paths), len(SOURCE))
    Path(paths[1]).write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer.json: "):
        VaswaniPairTokenizer(*paths)
    Path(paths[1]).unlink()
    with pytest.raises(ValueError, match=r"There is no tokenizer.json in"):
        VaswaniPairTokenizer(*paths)
