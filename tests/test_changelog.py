"""The changelog: it knows the version that the package has."""

import re
from pathlib import Path

import vaswani

CHANGELOG = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()


def test_the_newest_section_is_that_of_this_version() -> None:
    sections = re.findall(r"^## \[(\S+)\] - (unreleased|\d{4}-\d{2}-\d{2})\n(.*?)(?=^## |\Z)", CHANGELOG, re.M | re.S)
    version, _, changes = sections[0]
    assert version == vaswani.__version__
    assert re.findall(r"^- ", changes, re.M)
