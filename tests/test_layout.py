"""The layout that docs/design draws holds in the code: who may import whom. Files are parsed, not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "inferscale"
FOUNDATION = {"core", "errors", "config"}
STAGES = [
    "facts", "decoder", "models", "encode", "store", "index", "retrieve", "compose", "engine",
    "shapes", "intake", "mirror", "upkeep", "answer", "memory", "doctor", "demo", "serve", "cli",
]  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Absolute names of everything that `file` imports at run time, inside functions too."""
    todo: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: import absolutely"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        todo.extend(ast.iter_child_nodes(node))


def stage(name: str) -> str | None:
    """`inferscale.store.ram` → store; None for other packages and for `inferscale` itself."""
    parts = name.split(".")
    if parts[0] != "inferscale" or len(parts) < 2:
        return None
    return parts[1] if (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists() else None


def where(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def importers(package: str) -> set[str]:
    return {where(file) for file in FILES if any(name.split(".")[0] == package for name in imports(file))}


def test_transformers_is_imported_only_by_its_decoder_and_its_engine() -> None:
    assert importers("transformers") <= {"decoder/transformers.py", "engine/transformers.py"}


def test_vllm_is_imported_only_by_its_decoder_and_its_engine() -> None:
    assert {file for file in importers("vllm") if not file.startswith("engine/vllm/")} <= {"decoder/vllm.py"}


@pytest.mark.parametrize("file", FILES, ids=where)
def test_imports_run_downward(file: Path) -> None:
    own = where(file).split("/")[0].removesuffix(".py")
    if own in ("__init__", "__main__"):  # the front doors
        return
    above = FOUNDATION if own in FOUNDATION else {*FOUNDATION, *STAGES[: STAGES.index(own) + 1]}
    wrong = {name for name in imports(file) if (found := stage(name)) is not None and found not in above}
    assert not wrong, f"{where(file)} imports {sorted(wrong)}, which stand below it"


def test_every_module_has_its_place_in_the_order() -> None:
    own = {where(file).split("/")[0].removesuffix(".py") for file in FILES}
    assert own <= {*FOUNDATION, *STAGES, "__init__", "__main__"}


def test_a_forbidden_import_is_seen_wherever_it_hides(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "if TYPE_CHECKING:\n    import vllm\ndef f():\n    try:\n        from transformers import x\n    finally: ...\n"
    )
    assert list(imports(file)) == ["transformers.x"]
