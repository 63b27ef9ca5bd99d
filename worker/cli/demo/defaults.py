"""Defaults of parameters that are made once and shared by all calls: lists, dicts, sets, and calls that make one."""

from __future__ import annotations

import ast

__all__ = ["MutableDefaults", "dotted"]

_DISPLAYS: dict[type[ast.AST], tuple[str, str]] = {
    ast.List: ("[]", "[...]"),
    ast.Dict: ("{}", "{...}"),
    ast.Set: ("{...}", "{...}"),
    ast.ListComp: ("[... for ...]", "[... for ...]"),
    ast.DictComp: ("{... for ...}", "{... for ...}"),
    ast.SetComp: ("{... for ...}", "{... for ...}"),
}
_BUILTINS = frozenset({"list", "dict", "set", "bytearray"})
_COLLECTIONS = frozenset({"ChainMap", "Counter", "OrderedDict", "UserDict", "UserList", "defaultdict", "deque"})


class MutableDefaults:
    """Collects the defaults of one file, and judges them once all its imports are known."""

    def __init__(self) -> None:
        self._displays: list[tuple[int, str]] = []
        self._calls: list[tuple[int, str, str]] = []  # line, detail, dotted name of what is called
        self._modules = {"collections"}  # the names that the module goes by in this file
        self._makers = set(_BUILTINS)

    def see_import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Learn by which names this file knows what `collections` has."""
        if isinstance(node, ast.Import):
            self._modules.update(alias.asname for alias in node.names if alias.name == "collections" and alias.asname)
        elif node.module == "collections" and node.level == 0:
            self._makers.update(alias.asname or alias.name for alias in node.names if alias.name in _COLLECTIONS)

    def see_parameters(self, arguments: ast.arguments, function: str) -> None:
        """Look at the defaults of one function or lambda."""
        positional = [*arguments.posonlyargs, *arguments.args]
        late = positional[len(positional) - len(arguments.defaults) :]
        pairs = [*zip(late, arguments.defaults, strict=True)]
        pairs += [
            (argument, default)
            for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        ]
        for argument, default in pairs:
            place = f"{function}({argument.arg}="
            if type(default) in _DISPLAYS:
                empty, filled = _DISPLAYS[type(default)]
                shown = filled if getattr(default, "elts", None) or getattr(default, "keys", None) else empty
                self._displays.append((default.lineno, f"{place}{shown})"))
            elif isinstance(default, ast.Call) and (called := dotted(default.func)):
                shown = "(...)" if default.args or default.keywords else "()"
                self._calls.append((default.lineno, f"{place}{called}{shown})", called))

    def found(self) -> list[tuple[int, str]]:
        """Line and detail of each, when the whole file has been seen: an import counts wherever it stands."""
        makers = self._makers | {f"{module}.{name}" for module in self._modules for name in _COLLECTIONS}
        return self._displays + [(line, detail) for line, detail, called in self._calls if called in makers]


def dotted(node: ast.expr) -> str:
    """`a.b.c` for the expression that says so, an empty string for any other."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""
