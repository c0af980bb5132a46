"""The public names, and the tree of errors drawn at the top of errors.py."""

from __future__ import annotations

import re

import inferscale
from inferscale import errors

NODE = re.compile(r"^(?P<lead>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: .*?\(also an? (?P<also>\w+)\))?")


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """class → (its parent in the drawing, the builtin that the drawing says it also is)."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    branch: list[str] = []
    lines = (errors.__doc__ or "").splitlines()
    start = lines.index("InferScaleError")
    for line in lines[start : lines.index("", start)]:
        node = NODE.match(line)
        assert node is not None, line
        depth = len(node["lead"]) // 4
        branch[depth:] = [node["name"]]
        tree[node["name"]] = (branch[depth - 1] if depth else None, node["also"])
    return tree


def test_public_names_are_sorted_and_resolve() -> None:
    assert list(inferscale.__all__) == sorted(set(inferscale.__all__))
    for name in inferscale.__all__:
        assert getattr(inferscale, name) is not None


def test_the_drawn_error_tree_is_the_real_one() -> None:
    real = {
        name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    tree = drawn()
    assert set(tree) == set(real)
    for name, (parent, also) in tree.items():
        bases = [base.__name__ for base in real[name].__bases__]
        assert bases == [parent or "Exception", *([also] if also else [])]
