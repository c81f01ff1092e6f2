"""ARCHITECTURE.md: its table of layers holds for every import, and its map has every module. Files are short."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import vaswani

PACKAGE = Path(vaswani.__file__).parent
DOCUMENT = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
MODULES = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
LONGEST = 500  # lines of code


def tables() -> list[list[list[str]]]:
    """Return the cells of each table of the document, without its head."""
    found = re.findall(r"^\|[-|]+\|\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    return [[[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()] for table in found]


def quoted(cell: str) -> list[str]:
    """Return what stands between backticks in a cell."""
    return re.findall(r"`([^`]+)`", cell)


LAYERS = next(table for table in tables() if table and len(table[0]) == 3)
ALLOWED = {quoted(place)[0]: quoted(imports) for place, imports, _ in LAYERS}
BY_NAME = {quoted(place)[0] for place, _, by_name in LAYERS if by_name}


def layer(module: str) -> str:
    """Return the row of a module: its file if it lies directly in the package, else its first folder."""
    folder, slash, _ = module.partition("/")
    return folder + slash


def file_of(dotted: str) -> str | None:
    """Return the file of a module of the package by its full name, or None if there is no such module."""
    path = "/".join(dotted.split(".")[1:])
    return next((file for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if file in MODULES), None)


def imported(module: str, code: str) -> Iterator[str]:
    """Yield the file of every module of the package that the code imports, wherever in it."""
    package = ["vaswani", *module.split("/")[:-1]]
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*origin, *([node.module] if node.module else [])])
            # what is imported from a package may be one of its modules
            names = [inner if file_of(inner := f"{base}.{alias.name}") else base for alias in node.names]
        for name in names:
            if name.split(".")[0] == "vaswani":
                file = file_of(name)
                assert file, f"{module} imports {name}, which does not exist"
                yield file


def forbidden(module: str, code: str) -> list[str]:
    """Return the files that a module imports although the table does not allow it."""
    here = layer(module)
    return [file for file in imported(module, code) if layer(file) not in (here, *ALLOWED[here])]


def lines_of_code(code: str) -> int:
    """Count the lines that have something besides comments and docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(code).readline) if token.type not in skipped]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


# --- layers


def test_a_row_of_the_table_names_only_rows_above_it() -> None:
    rows = list(ALLOWED)
    assert len(rows) == len(LAYERS)
    for rank, row in enumerate(rows):
        assert set(ALLOWED[row]) <= set(rows[:rank]), row


def test_the_table_has_every_file_and_folder_of_the_package() -> None:
    assert {layer(module) for module in MODULES} == set(ALLOWED)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_what_the_table_allows(module: str) -> None:
    assert not forbidden(module, MODULES[module])


@pytest.mark.parametrize("folder", sorted(place for place in ALLOWED if place.endswith("/")))
def test_the_modules_of_a_folder_do_not_import_each_other_in_a_circle(folder: str) -> None:
    waiting = {
        module: {file for file in imported(module, code) if layer(file) == folder} - {module}
        for module, code in MODULES.items()
        if layer(module) == folder and not module.endswith("__init__.py")
    }
    while ready := [module for module, others in waiting.items() if not others & waiting.keys()]:
        for module in ready:
            del waiting[module]
    assert not waiting


@pytest.mark.parametrize(
    "line",
    [
        "import vaswani.training.recipe",
        "from vaswani.training import recipe",
        "from vaswani import training",
        "from ..training.recipe import RECIPE_FILE",
        "from .. import training",
        "def later():\n    from ..training import VaswaniTrainer",
        "if TYPE_CHECKING:\n    from ..training.trainer import VaswaniTrainer",
    ],
)
def test_a_forbidden_import_is_noticed_however_it_is_written(line: str) -> None:
    (found,) = forbidden("hub/about.py", line)
    assert found.startswith("training/")
    assert not forbidden("hub/about.py", "import os\nfrom .card import write_card\nfrom ..modeling_vaswani import x")


def test_modules_are_imported_by_name_only_where_the_table_says_so() -> None:
    callers = {layer(module) for module, code in MODULES.items() if re.search(r"\b(import_module|__import__)\(", code)}
    assert callers == BY_NAME


# --- the map and the size of files


def test_the_map_has_a_line_for_every_module_and_no_other() -> None:
    rows = [row for table in tables() if table is not LAYERS for row in table if len(row) == 2]
    places = [name for place, _ in rows for name in quoted(place) if name.endswith(".py")]
    modules = {module for module in MODULES if "/" not in module or not module.endswith("__init__.py")}
    assert sorted(places) == sorted(modules)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_file_has_at_most_500_lines_of_code(module: str) -> None:
    assert lines_of_code(MODULES[module]) <= LONGEST


def test_comments_docstrings_and_empty_lines_are_not_code() -> None:
    code = '"""A\n\ndocstring."""\n\n# a comment\nx = [\n    1,\n]\n\n\ndef f():\n    """Another."""\n    return x\n'
    assert lines_of_code(code) == 5
