"""Packages of Argos Translate in an archive: only the files of the model are unpacked, within bounds."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.convert.test_ctranslate2_reader import marian_folder, package_of, their_folder  # noqa: F401
from vaswani import convert_model
from vaswani.convert import argos_package
from vaswani.convert.argos_package import unpacked_package

ROOT = "translate-zh_en-1_9"
FILES = {"metadata.json": b"{}", "model/config.json": b"{}", "model/model.bin": b"abc"}


def archive_of(path: Path, files: dict[str, bytes], root: str = ROOT) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents in files.items():
            archive.writestr(f"{root}/{name}", contents)
    return path


def test_an_archive_is_converted_like_its_folder(their_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    package = package_of(their_folder, tmp_path / "packed" / ROOT)
    (package / "stanza").mkdir()
    (package / "stanza" / "code.pt").write_bytes(b"code")
    archive = Path(shutil.make_archive(str(tmp_path / "package"), "zip", tmp_path / "packed"))
    archive.rename(tmp_path / "translate-zh_en-1_9.argosmodel")
    with unpacked_package(tmp_path / "translate-zh_en-1_9.argosmodel") as folder:
        assert not (folder / "stanza").exists()
    found = convert_model(tmp_path / "translate-zh_en-1_9.argosmodel", tmp_path / "out")["conversion"]
    assert found["about"]["languages"] == ["zh", "en"]
    assert found["check"]["equal_tokens"] == found["check"]["sentences"]
    assert not folder.exists()


def test_names_that_lead_outside_are_never_used(tmp_path: Path) -> None:
    files = {**FILES, "../../escaped": b"a", "model/../../../escaped": b"a", "/escaped": b"a"}
    with unpacked_package(archive_of(tmp_path / "a.zip", files)) as folder:
        assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == sorted(FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b"abc"), "is not a package of Argos Translate, or is damaged"),
        (lambda path: archive_of(path, {"metadata.json": b"{}"}), "it has no metadata.json or no model"),
        (lambda path: archive_of(path, {**FILES, "metadata.json": bytes(1_000_001)}), "at most 1000000"),
        (lambda path: archive_of(path, {**FILES, "model/model.bin": bytes(20_000_000)}), "model/model.bin that grows"),
        (lambda path: path.write_bytes(archive_of(path, FILES).read_bytes()[:-40]), "or is damaged"),
    ],
)
def test_other_archives_are_refused_in_one_line(make: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.argosmodel"
    make(path)
    with pytest.raises(ValueError, match=reason) as error, unpacked_package(path):
        pass
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=reason):
        convert_model(path, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["a.argosmodel"]


def test_two_folders_in_an_archive_are_refused(tmp_path: Path) -> None:
    path = archive_of(tmp_path / "a.zip", FILES)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("other/metadata.json", b"{}")
    with pytest.raises(ValueError, match=r"has several files metadata.json"), unpacked_package(path):
        pass
    assert argos_package.FILES["model/model.bin"] == 10_000_000_000
