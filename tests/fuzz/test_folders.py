"""Model folders with files that are cut, swapped, linked or full of nonsense: they translate, or one clear error."""

import json
import math
import shutil
import struct
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from tests.conftest import tiny_model
from tests.fuzz.oracle import result_of, share_of_cases
from tests.numbers_corpus import number_corpus
from vaswani import VaswaniConfig, VaswaniTokenizer
from vaswani.generation_vaswani import paper_generation_config
from vaswani.inference.translator import Translator

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS]
DEEP = 3000
# What a change raises after another one has broken its file.
IMPOSSIBLE = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError, struct.error)

NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**63, 10**30, -(2**40), 10**9, 10**12]),
    st.floats(),
    st.sampled_from([1e308, 1e-320, math.nan, math.inf]),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.sampled_from(["", "x", "../../etc/passwd", "/etc/passwd", "\ud800", "vaswani", "0", "float16", "a" * 5000]),
    st.lists(st.one_of(NUMBERS, st.none(), st.text(max_size=2)), max_size=4),
    st.just([]),
    st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2),
)
# Fields that a file may have without being there now.
FIELDS = {
    "config.json": sorted(
        [*VaswaniConfig.__annotations__, "dtype", "quantization_config", "auto_map", "architectures", "model_type"]
    ),
    "generation_config.json": sorted(each for each in vars(GenerationConfig()) if not each.startswith("_")),
    "tokenizer_config.json": ["tokenizer_class", "auto_map", "model_max_length", "added_tokens_decoder", "eos_token"],
    "tokenizer.json": ["added_tokens", "normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"],
}


@pytest.fixture(scope="session")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("good"))


def make_folder(folder: Path) -> Path:
    """Save a tiny model with its tokenizer; its translations are short."""
    tokenizer = VaswaniTokenizer.learn(number_corpus(60), vocab_size=300, show_progress=False)
    model = tiny_model(vocab_size=len(tokenizer), encoder_layers=1, decoder_layers=1, d_ff=8)
    model.generation_config = paper_generation_config(model.config)
    model.generation_config.max_tokens_beyond_input = 3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Draw one to three changes of a folder."""
    return draw(st.lists(st.one_of(_bytes(), _json_edits(), _links(), _headers()), min_size=1, max_size=3))


def _bytes() -> st.SearchStrategy[tuple[Any, ...]]:
    name, place = st.sampled_from([*FILES, INDEX]), st.floats(0, 1)
    return st.one_of(
        st.tuples(st.just("cut"), name, place),
        st.tuples(st.sampled_from(["empty", "delete", "directory"]), name),
        st.tuples(st.just("swap"), name, name),
        st.tuples(st.just("overwrite"), name, place, st.binary(min_size=1, max_size=8)),
        st.tuples(st.just("write"), name, st.sampled_from([b"[]", b"null", b"1", b"{}", b'"x"', b"\xff\xfe", b"{"])),
    )


def _json_edits() -> st.SearchStrategy[tuple[Any, ...]]:
    steps = st.lists(st.integers(0, 400), min_size=1, max_size=5)
    name = st.sampled_from([each for each in FILES if each != WEIGHTS])
    return st.one_of(
        st.tuples(st.just("replace"), name, steps, VALUES),
        st.tuples(st.just("remove"), name, steps),
        st.tuples(st.just("nest"), name, steps),
        name.flatmap(lambda file: st.tuples(st.just("set"), st.just(file), st.sampled_from(FIELDS[file]), VALUES)),
        st.tuples(st.just("set"), st.just("generation_config.json"), st.sampled_from(FIELDS["config.json"]), VALUES),
    )


def _links() -> st.SearchStrategy[tuple[Any, ...]]:
    targets = st.sampled_from(["/etc/passwd", "/nowhere", "/", "itself", "outside", "../outside.json"])
    return st.tuples(st.just("link"), st.sampled_from([*FILES, INDEX]), targets)


def _headers() -> st.SearchStrategy[tuple[Any, ...]]:
    place = st.integers(0, 60)
    named = st.sampled_from(["../outside.safetensors", "/etc/passwd", "x", WEIGHTS, "", 1, None])
    sizes = st.sampled_from([0, 1, 7, 2**31, 2**63, 2**64 - 1, 10**8])
    return st.one_of(
        st.tuples(st.just("header size"), sizes),
        st.tuples(st.just("header"), place, st.sampled_from(["dtype", "shape", "data_offsets"]), VALUES),
        st.tuples(st.just("header"), st.integers(0, 60), st.just("shape"), st.lists(NUMBERS, max_size=4)),
        st.tuples(st.just("header"), st.integers(0, 60), st.just("data_offsets"), st.lists(NUMBERS, max_size=3)),
        st.tuples(
            st.just("header"), st.integers(0, 60), st.just("dtype"), st.sampled_from(["F16", "I8", "BOOL", "F64"])
        ),
        st.tuples(st.just("rename"), st.integers(0, 60), st.sampled_from(["x", "", "lm_head.weight", "__metadata__"])),
        st.tuples(st.just("weights"), st.sampled_from([math.nan, math.inf, 1e38, 0.0]), st.floats(0, 1)),
        st.tuples(st.just("index"), named),
    )


def apply_change(folder: Path, kind: str, *rest: Any) -> None:
    """Make one change; one that is impossible after those before it is left out."""
    if kind in ("header size", "header", "rename", "weights"):
        _change_weights(folder / WEIGHTS, kind, *rest)
    elif kind == "index":
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": rest[0]}}))
    elif kind in ("replace", "remove", "nest", "set"):
        _change_json(folder / rest[0], kind, *rest[1:])
    else:
        _change_file(folder, kind, *rest)


def _change_file(folder: Path, kind: str, name: str, *rest: Any) -> None:
    path = folder / name
    content = path.read_bytes() if path.is_file() else b""
    if kind == "swap":
        other = folder / rest[0]
        path.write_bytes(other.read_bytes() if other.is_file() else b"")
        other.write_bytes(content)
        return
    path.unlink(missing_ok=True)
    if kind == "cut":
        path.write_bytes(content[: int(rest[0] * len(content))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "directory":
        path.mkdir()
    elif kind == "overwrite":
        place = int(rest[0] * len(content))
        path.write_bytes(content[:place] + rest[1] + content[place + len(rest[1]) :])
    elif kind == "write":
        path.write_bytes(rest[0])
    elif kind == "link":
        outside = folder.parent / "outside"
        outside.write_bytes(content)
        path.symlink_to({"itself": path, "outside": outside}.get(rest[0], Path(rest[0])))


def _change_json(path: Path, kind: str, where: Any, *value: Any) -> None:
    content = json.loads(path.read_text())
    if kind == "set":
        content[where] = value[0]
    else:
        *steps, last = where
        inner = content
        for step in steps:
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            below = inner[keys[step % len(keys)]]
            if not isinstance(below, dict | list) or not below:
                break
            inner = below
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        key = keys[last % len(keys)]
        if kind == "remove":
            del inner[key]
        else:
            inner[key] = "DEEP" if kind == "nest" else value[0]
    path.write_text(json.dumps(content).replace('"DEEP"', "[" * DEEP + "]" * DEEP))


def _change_weights(path: Path, kind: str, *rest: Any) -> None:
    content = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    if kind == "header size":
        path.write_bytes(struct.pack("<Q", rest[0]) + content[8:])
        return
    header, numbers = json.loads(content[8 : 8 + size]), content[8 + size :]
    if kind == "weights":
        place = 4 * int(rest[1] * (len(numbers) // 4 - 1))
        numbers[place : place + 4] = struct.pack("<f", rest[0])
    else:
        names = [name for name in header if name != "__metadata__"]
        name = names[rest[0] % len(names)]
        if kind == "rename":
            header[rest[1]] = header.pop(name)
        else:
            header[name][rest[1]] = rest[2]
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + numbers)


def translate(folder: Path) -> list[Any]:
    translator = Translator.from_pretrained(folder, device="cpu")
    return list(translator.translate(["one two three", ""]))


@share_of_cases(0.08)
@given(st.data())
@pytest.mark.filterwarnings("ignore")
def test_a_broken_folder_translates_or_says_why_not(good_folder: Path, data: st.DataObject) -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        shutil.copytree(good_folder, folder)
        for change in data.draw(changes()):
            try:
                apply_change(folder, *change)
            except (
                OSError,
                ValueError,
                TypeError,
                KeyError,
                IndexError,
                ZeroDivisionError,
                RecursionError,
                struct.error,
            ):
                continue  # a file that an earlier change took away
        found = result_of(lambda: translate(folder), (ValueError, OSError))
        assert isinstance(found, Exception) or len(found) == 2
