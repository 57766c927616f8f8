"""docs/design.md lists the files that are there, one line each."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = re.compile(r"([a-z_/]+)/")
FILE = re.compile(r"  (\w+\.py) +\S")


def listed_files() -> list[str]:
    """Paths in the block under `## Layout`."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = text.split("## Layout", 1)[1].split("```", 2)[1]
    files, folder = [], ""
    for line in block.strip().splitlines():
        if found := FOLDER.fullmatch(line):
            folder = found[1]
        else:
            found = FILE.match(line)
            assert found is not None, f"neither a folder nor a file with its line: {line!r}"
            files.append(f"{folder}/{found[1]}")
    return files


def test_every_file_has_its_line_and_every_line_its_file() -> None:
    there = {
        path.relative_to(ROOT).as_posix()
        for part in ("engine", "kernels", "transport", "console")
        for path in (ROOT / part).rglob("*.py")
        if path.name != "__init__.py"
    }
    listed = listed_files()
    assert sorted(listed) == sorted(set(listed))
    assert not there - set(listed), "files without a line under Layout"
    assert not set(listed) - there, "lines of files that are gone"


def test_the_documents_name_only_files_that_exist() -> None:
    missing = []
    for document in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`([\w./-]+\.(?:py|md|toml|jsonl|svg))`", document.read_text(encoding="utf-8")):
            if "/" in name and not any((root / name).exists() for root in (ROOT, ROOT / "engine")):
                missing.append(f"{document.name}: {name}")
    assert not missing
