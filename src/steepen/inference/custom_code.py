"""The source of custom blocks and boundaries as files that need no steepen, for exports.

Of each module only the top-level statements are kept that a custom object needs: a module that also defines
arms (`find_arm(…)`) or trains something is not run where the model is loaded. What comes from
`steepen.model.block` travels the same way.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from steepen.errors import UsageError

BLOCK_MODULE = "steepen.model.block"
_FUTURE = "from __future__ import annotations"  # annotations are not evaluated, so their names are not needed


def source_files(names: Iterable[str]) -> dict[str, str]:
    """File name → source of the modules that "module:attribute" objects need, with relative imports."""
    names = list(names)
    collector = _Collector({_root(name.partition(":")[0]) for name in names})
    for name in names:
        module, _, attribute = name.partition(":")
        collector.need(module, attribute.partition(".")[0])
    for module in collector.modules.values():
        module.check()
    return {f"{file_stem(name)}.py": module.source(collector) for name, module in collector.modules.items()}


def file_stem(module: str) -> str:
    """lab.blocks → lab_blocks: transformers copies the files of one folder."""
    return module.replace(".", "_")


def _root(module: str) -> Path:
    """The directory of a custom module's top-level package: what is below it travels."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise UsageError(f"the source of {module} cannot be read, so it cannot be exported.")
    return Path(found.origin).resolve().parents[module.count(".")]


class _Collector:
    """The modules that travel, and which of their top-level names are needed."""

    def __init__(self, roots: set[Path]) -> None:
        self.roots = roots
        self.modules: dict[str, _Module] = {}

    def travels(self, module: str) -> bool:
        """Whether a module is the block API, or lies beside the custom code."""
        if module == BLOCK_MODULE:
            return True
        if module.split(".", maxsplit=1)[0] in {"steepen", *sys.stdlib_module_names}:
            return False
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return False
        if spec is None or spec.origin is None:
            return False
        file = Path(spec.origin).resolve()
        installed = {"site-packages", "dist-packages"} & set(file.parts)
        return not installed and any(root in file.parents for root in self.roots)

    def need(self, module: str, name: str) -> None:
        """Keep a top-level name of a module, and all that it uses."""
        if module not in self.modules:
            self.modules[module] = _Module(module)
        found = self.modules[module]
        if name in found.needed:
            return
        found.needed.add(name)
        if name not in found.defined:
            raise UsageError(f"{module} does not define {name!r} by a statement that can be exported.")
        statement = found.defined[name]
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._follow(found, name)
            return
        for used in _used_names(statement) & found.defined.keys():
            self.need(module, used)
        for node in _evaluated(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                target = found.modules_named.get(node.value.id)
                if target is not None and self.travels(target):
                    self.need(target, node.attr)

    def _follow(self, module: _Module, name: str) -> None:
        """Keep what an imported name stands for, if its module travels."""
        source, original = module.imported[name]
        if original is None or (original and self.travels(f"{source}.{original}")):
            return  # a module: the attributes that are used are kept one by one
        if self.travels(source):
            self.need(source, original)
        elif source.split(".")[0] == "steepen":
            raise UsageError(
                f"{module.name} uses {original} of {source}, which an export does not contain: of steepen, a "
                f"block that is exported may use {BLOCK_MODULE} only."
            )


class _Module:
    """The top-level statements of a module by the names that they define."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        self.name, self.needed, self.lines = name, set[str](), text.splitlines()
        self.defined: dict[str, ast.stmt] = {}
        self.changing: list[ast.stmt] = []  # statements that define nothing, or define it again
        self.imported: dict[str, tuple[str, str | None]] = {}  # name → module, and its attribute if it is one
        for statement in ast.parse(text).body:
            condition = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
            if "TYPE_CHECKING" in condition or "__name__" in condition:
                continue  # for type checkers, or for a script only
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for bound, source in _imported(statement, package):
                    self.defined[bound], self.imported[bound] = statement, source
            elif names := _bound_names(statement):
                self.changing += [statement] * any(name in self.defined for name in names)
                self.defined |= dict.fromkeys(names, statement)
            else:
                self.changing.append(statement)

    def check(self) -> None:
        """Raise if a needed name is changed after its definition, by a statement that does not travel."""
        for statement in self.changing:
            for name in sorted(_used_names(statement) & self.needed):
                raise UsageError(
                    f"{self.name}, line {statement.lineno}, changes or uses {name} when the module is "
                    "imported, which does not travel with an export: define it by one statement."
                )

    @property
    def modules_named(self) -> dict[str, str]:
        """Names that may stand for modules → their full names."""
        return {
            name: source if original is None else f"{source}.{original}"
            for name, (source, original) in self.imported.items()
        }

    def source(self, collector: _Collector) -> str:
        """The needed statements in their order, imports first, those of travelling modules relative."""
        imports: list[str] = []
        for name in sorted(self.needed & self.imported.keys()):
            source, original = self.imported[name]
            whole = self.modules_named[name]
            if original is None and not collector.travels(source):
                statement, usual = f"import {source}", source.partition(".")[0]
            elif collector.travels(whole):
                statement = f"from . import {(usual := file_stem(whole))}"
            else:
                place = f".{file_stem(source)}" if collector.travels(source) else source
                statement, usual = f"from {place} import {original}", original
            imports.append(statement if name == usual else f"{statement} as {name}")
        kept = {id(self.defined[name]): self.defined[name] for name in self.needed - self.imported.keys()}
        body = [self._text(node) for node in sorted(kept.values(), key=lambda node: node.lineno)]
        return "\n\n".join([_FUTURE, *(["\n".join(imports)] if imports else []), *body]) + "\n"

    def _text(self, statement: ast.stmt) -> str:
        """A statement as it was written, with its decorators and comments."""
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(node.lineno for node in decorators)])
        return "\n".join(self.lines[first - 1 : statement.end_lineno])


def _imported(
    statement: ast.Import | ast.ImportFrom, package: str
) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """The names that an import binds, each with its module, and its attribute there if it is one."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], (alias.name, None)
        return
    source = "." * statement.level + (statement.module or "")
    if statement.level:
        source = importlib.util.resolve_name(source, package)
    for alias in statement.names:
        yield alias.asname or alias.name, (source, alias.name)


def _bound_names(statement: ast.stmt) -> list[str]:
    """Names that a definition or a plain assignment binds; [] for any other statement."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign):
        targets: list[ast.expr] = [statement.target] if statement.value is not None else []
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
    flat = [one for target in targets for one in getattr(target, "elts", [target])]
    names = [one.id for one in flat if isinstance(one, ast.Name)]
    return names if len(names) == len(flat) else []


def _evaluated(statement: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement without its annotations."""
    yield statement
    for field, value in ast.iter_fields(statement):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _evaluated(child)


def _used_names(statement: ast.stmt) -> set[str]:
    return {node.id for node in _evaluated(statement) if isinstance(node, ast.Name)}
