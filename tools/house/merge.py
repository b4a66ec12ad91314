"""Merge modules into a target layout without changing a statement of a body: texts move, imports and names follow.

    python tools/merge.py MAP.json      rewrite this checkout (run in its root, in a clean tree)

MAP.json: {"targets": {target file: [member files, in their order]}, "titles": {target file: docstring},
"rewrite": [folders whose files import members], "names": {"member.py:name": new name}}.
"""

from __future__ import annotations

import ast
import collections
import json
import re
import sys
from pathlib import Path

PACKAGES = {f"kvexp.{name}" for name in ["core", "methods", "retrieval", "generate", "tasks", "lm_eval", "run", "results", "diagnose"]}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_of(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".")
    if name.startswith("tests."):  # on the path of pytest
        name = name.rpartition(".")[2] if ".test_" in name and ".faults." not in name else name.removeprefix("tests.")
    return name.removesuffix(".__init__")


class Scope:
    def __init__(self, kind, parent, node=None):
        self.kind, self.parent, self.node = kind, parent, node
        self.names: set[str] = set()
        self.imports: dict[str, tuple[ast.stmt, ast.alias]] = {}


def bound_in(body, scope):
    """Names that statements bind in this scope, nested scopes apart."""
    globals_ = set()

    def visit(node):
        if isinstance(node, FUNCTIONS + (ast.ClassDef,)):
            scope.names.add(node.name)
            return
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, COMPREHENSIONS):
            for sub in ast.walk(node):
                if isinstance(sub, ast.NamedExpr):
                    scope.names.add(sub.target.id)
            return
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            globals_.update(node.names)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                scope.names.add(local)
                scope.imports[local] = (node, alias)
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            scope.names.add(node.id)
        if isinstance(node, ast.ExceptHandler) and node.name:
            scope.names.add(node.name)
        if isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            scope.names.add(node.name)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in body:
        visit(statement)
    scope.names -= globals_


class Source:
    def __init__(self, path: str, root: Path):
        self.path, self.module = path, module_of(path)
        self.text = (root / path).read_text("utf-8")
        self.tree = ast.parse(self.text)
        self.is_package = path.endswith("__init__.py")
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = self.text.splitlines(keepends=True)
        self.globals = Scope("module", None, self.tree)
        bound_in(self.tree.body, self.globals)
        self.typing_only: set[str] = set()
        for node in self.tree.body:
            if is_type_checking(node):
                for sub in node.body:
                    if isinstance(sub, (ast.Import, ast.ImportFrom)):
                        self.typing_only.update(a.asname or a.name.partition(".")[0] for a in sub.names)
        self.refs: list[tuple[ast.AST, str, Scope, list[Scope], ast.AST | None]] = []
        self.local_imports: list[tuple[ast.stmt, Scope, list]] = []
        self._walk(self.tree, self.globals, [])
        self.defs = {name for name in self.globals.names if name not in self.globals.imports}

    def offset(self, line, col):
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return self.starts[line - 1] + len(text.encode()[:col].decode())

    def span(self, node):
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def _walk(self, tree, scope, above):
        def use(node, name, scope, above, attribute=None):
            chain = [scope, *above]
            for place, each in enumerate(chain):
                if each.kind == "class" and place:
                    continue
                if name in each.names:
                    self.refs.append((node, name, each, chain[:place], attribute))
                    return

        def args_of(node):
            a = node.args
            every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            return every

        def visit(node, scope, above, attribute=None):
            if isinstance(node, FUNCTIONS + (ast.Lambda,)):
                if not isinstance(node, ast.Lambda):
                    for d in node.decorator_list:
                        visit(d, scope, above)
                    if node.returns:
                        visit(node.returns, scope, above)
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    visit(default, scope, above)
                inner = Scope("function", scope, node)
                for arg in args_of(node):
                    inner.names.add(arg.arg)
                    if arg.annotation:
                        visit(arg.annotation, scope, above)
                body = [node.body] if isinstance(node, ast.Lambda) else node.body
                bound_in(body, inner)
                for statement in body:
                    visit(statement, inner, [scope, *above])
                return
            if isinstance(node, ast.ClassDef):
                for sub in [*node.decorator_list, *node.bases, *[k.value for k in node.keywords]]:
                    visit(sub, scope, above)
                inner = Scope("class", scope, node)
                bound_in(node.body, inner)
                for statement in node.body:
                    visit(statement, inner, [scope, *above])
                return
            if isinstance(node, COMPREHENSIONS):
                visit(node.generators[0].iter, scope, above)
                inner = Scope("function", scope, node)
                for generator in node.generators:
                    for sub in ast.walk(generator.target):
                        if isinstance(sub, ast.Name):
                            inner.names.add(sub.id)
                for number, generator in enumerate(node.generators):
                    if number:
                        visit(generator.iter, inner, [scope, *above])
                    visit(generator.target, inner, [scope, *above])
                    for condition in generator.ifs:
                        visit(condition, inner, [scope, *above])
                parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                for part in parts:
                    visit(part, inner, [scope, *above])
                return
            if isinstance(node, (ast.Import, ast.ImportFrom)) and scope.kind != "module":
                self.local_imports.append((node, scope, above))
                return
            if isinstance(node, ast.Name):
                use(node, node.id, scope, above, attribute)
                return
            if isinstance(node, ast.Attribute):
                visit(node.value, scope, above, node if isinstance(node.value, ast.Name) else None)
                return
            if isinstance(node, (ast.Global,)):
                for name in node.names:
                    if name in self.globals.names:
                        self.refs.append((node, name, self.globals, [scope], None))
                return
            for child in ast.iter_child_nodes(node):
                visit(child, scope, above)

        for statement in tree.body:
            visit(statement, scope, above)


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_main_guard(node):
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


class House:
    """All sources, where each goes and what its names become."""

    def __init__(self, plan: dict, root: Path):
        self.plan, self.root = plan, root
        self.sources: dict[str, Source] = {}
        self.target: dict[str, str] = {}  # module -> target file
        for target, members in plan["targets"].items():
            for path in members:
                source = Source(path, root)
                assert source.module not in self.sources, path
                self.sources[source.module] = source
                self.target[source.module] = target
        self.new: dict[tuple[str, str], str] = {}  # (module, definition) -> its name in the target
        for key, name in plan.get("names", {}).items():
            path, _, old = key.partition(":")
            self.new[module_of(path), old] = name
        self.problems: list[str] = []
        self.dropped: set[tuple[str, str]] = set()  # definitions that are twice the same

    # where a name of a module is really defined
    def origin(self, module, name):
        seen = set()
        while module in self.sources and (module, name) not in seen:
            seen.add((module, name))
            source = self.sources[module]
            if name in source.globals.imports:
                statement, alias = source.globals.imports[name]
                if isinstance(statement, ast.Import):
                    return (alias.name, None)
                inner = f"{statement.module}.{alias.name}"
                if inner in self.sources and not (
                    statement.module in self.sources
                    and alias.name in self.sources[statement.module].globals.names
                ):
                    return (inner, None)
                if statement.module == module:
                    return (module, name)
                module, name = statement.module, alias.name
                continue
            if name not in source.globals.names and f"{module}.{name}" in self.sources:
                return (f"{module}.{name}", None)
            return (module, name)
        return (module, name)

    def new_name(self, module, name):
        return self.new.get((module, name), name)

    def target_module(self, module):
        return module_of(self.target[module])

    def choose_names(self):
        """Names that two members of a target define: one keeps it, the others get the name of their module in front."""
        used = collections.Counter()
        for source in self.sources.values():
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ImportFrom) and node.module in self.sources:
                    for alias in node.names:
                        used[self.origin(node.module, alias.name)] += 1
        for target, members in self.plan["targets"].items():
            modules = [module_of(path) for path in members]
            where = collections.defaultdict(list)
            for module in modules:
                source = self.sources[module]
                skip = {"__all__"} if source.is_package and not target.endswith("__init__.py") else set()
                for name in sorted(source.defs - skip - {"__getattr__"}):
                    if (module, name) not in self.new:
                        where[name].append(module)
            for name, each in where.items():
                if len(each) < 2:
                    continue
                same = {self._dump(module, name) for module in each}
                if len(same) == 1 and None not in same:
                    for module in each[1:]:
                        self.dropped.add((module, name))
                    continue
                keeper = max(each, key=lambda module: (used[module, name], -each.index(module)))
                for module in each:
                    if module != keeper:
                        self.new[module, name] = self._qualified(module, name)

    def _qualified(self, module, name):
        parts = module.split(".")
        stem = parts[-1] if parts[-1] not in ("__main__", "__init__") else parts[-2]
        stem = re.sub(r"_(table|command|section|curves)$", "", stem)
        if stem.startswith("test_"):
            stem = stem.removeprefix("test_")
        if name.startswith("test_"):
            return f"{name}_of_{stem}"
        if stem.endswith(name.strip("_").lower()):
            stem = stem[: -len(name.strip("_"))].strip("_") or stem
        if name.isupper() or (name.upper() == name and name.startswith("_")):
            stem = stem.upper()
        elif name[:1].isupper() or name[:2].lstrip("_")[:1].isupper():
            stem = "".join(word.capitalize() for word in stem.split("_"))
            return f"_{stem}{name[1:]}" if name.startswith("_") else f"{stem}{name}"
        return f"_{stem}{name}" if name.startswith("_") else f"{stem}_{name}"

    def _dump(self, module, name):
        """A definition that refers to no global that could differ: its dump; else None."""
        for node in self.sources[module].tree.body:
            names = [node.name] if isinstance(node, FUNCTIONS + (ast.ClassDef,)) else [
                sub.id for sub in ast.walk(node) if isinstance(sub, ast.Name) and isinstance(sub.ctx, ast.Store)
            ]
            if name in names:
                text = ast.dump(node)
                free = {s.id for s in ast.walk(node) if isinstance(s, ast.Name) and isinstance(s.ctx, ast.Load)}
                own = free & self.sources[module].defs - {name}
                origins = sorted(str(self.origin(module, n)) for n in free if n in self.sources[module].globals.imports)
                return None if own else text + str(origins)
        return None

    # a reference: what stands there afterwards
    def edits_of(self, source: Source, target: str | None, wanted, typing):
        """Text edits of a source's body. wanted, typing: sets that get the imports the target needs."""
        edits = []
        own = module_of(target) if target else None
        used_aliases = {}

        def import_info(statement, alias):
            """(module, name or None) in kvexp's own sources, or None for others' modules."""
            if isinstance(statement, ast.ImportFrom) and statement.module:
                inner = f"{statement.module}.{alias.name}"
                if statement.module in self.sources and alias.name in self.sources[statement.module].globals.names:
                    return self.origin(statement.module, alias.name)
                if inner in self.sources:
                    return (inner, None)
                if statement.module in self.sources:
                    return (statement.module, alias.name)
            elif isinstance(statement, ast.Import) and alias.name in self.sources and alias.asname:
                return (alias.name, None)
            return None

        def goes_to(module):
            return self.target_module(module)

        # imports that stay in functions
        for statement, scope, above in source.local_imports:
            kept, texts = [], []
            for alias in statement.names:
                info = import_info(statement, alias)
                local = alias.asname or alias.name
                if info is None or info[0] not in self.sources:
                    kept.append(alias)
                    continue
                module, name = info
                if goes_to(module) == own:
                    continue
                if name is None:
                    pkg, _, stem = goes_to(module).rpartition(".")
                    texts.append(f"from {pkg} import {stem}" + (f" as {local}" if stem != local else ""))
                else:
                    place = self._import_place(statement, source, module)
                    new = self.new_name(module, name)
                    texts.append(f"from {place} import {new}" + (f" as {local}" if new != local else ""))
            if kept:
                if isinstance(statement, ast.ImportFrom):
                    texts.append(f"from {statement.module} import " + ", ".join(map(ast.unparse, kept)))
                else:
                    texts.append("import " + ", ".join(map(ast.unparse, kept)))
            start, end = source.span(statement)
            indent = " " * statement.col_offset
            if texts:
                edits.append((start, end, f"\n{indent}".join(texts)))
            else:
                line_start = source.starts[statement.lineno - 1]
                edits.append((line_start, source.starts[statement.end_lineno], ""))

        if target and len(self.plan["targets"][target]) > 1:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Name) and node.id == "__doc__":
                    edits.append((*source.span(node), self.doc_name(source)))
        for node, name, scope, inner, attribute in source.refs:
            info = None
            if name in scope.imports:
                if scope.kind == "class":
                    continue
                statement, alias = scope.imports[name]
                info = import_info(statement, alias)
                if info is None or info[0] not in self.sources:
                    if scope.kind == "module" and info is not None and info[1] is not None:  # it came through
                        (wanted if name not in source.typing_only else typing).add((info, name))
                        continue
                    if scope.kind == "module":
                        key = self._external(statement, alias)
                        new = used_aliases.get((name, key), self.alias_of(target, name, key))
                        if new != name:
                            edits.append((*source.span(node), new))
                    continue
            elif scope.kind != "module" or name not in source.defs:
                continue
            else:
                info = (source.module, name)
                if source.module not in self.sources:  # a file that only imports
                    continue
            module, origin = info
            shadow = set().union(*(each.names for each in inner)) if inner else set()
            if goes_to(module) == own:
                if origin is None:
                    if attribute is None:
                        self.problems.append(f"{source.path}:{node.lineno}: {name} is used as a module")
                        continue
                    real = self.origin(module, attribute.attr)
                    if real[1] is None:
                        self.problems.append(f"{source.path}:{node.lineno}: {name}.{attribute.attr} is a module")
                        continue
                    new = self.new_name(*real)
                    if goes_to(real[0]) != own:
                        self.problems.append(f"{source.path}:{node.lineno}: {name}.{attribute.attr} is elsewhere")
                    if new in shadow:
                        self.new[real] = self._qualified(real[0], real[1])
                        self.again = True
                    edits.append((*source.span(attribute), new))
                    continue
                new = self.new_name(module, origin)
                if new in shadow and new != name:
                    self.new[module, origin] = self._qualified(module, origin)
                    self.again = True
                if new != name:
                    if isinstance(node, ast.Global):
                        self.problems.append(f"{source.path}:{node.lineno}: global {name} is renamed")
                    edits.append((*source.span(node), new))
                continue
            # imported from another target
            if origin is None and attribute is not None:
                real = self.origin(module, attribute.attr)
                if real[0] in self.sources and real[1] is not None:
                    if goes_to(real[0]) != goes_to(module):  # the definition went elsewhere than its module
                        new = self.new_name(*real)
                        if goes_to(real[0]) != own:
                            key = (goes_to(real[0]), new)
                            new = self.alias_of(target, new, key)
                            (typing if name in source.typing_only else wanted).add((key, new))
                        if new in shadow:
                            self.problems.append(f"{source.path}:{node.lineno}: {new} is a local name")
                        edits.append((*source.span(attribute), new))
                        continue
                    new = self.new_name(*real)
                    if new != attribute.attr:
                        end = source.span(attribute)[1]
                        edits.append((end - len(attribute.attr), end, new))
            if scope.kind == "module":
                statement, alias = scope.imports[name]
                place = (
                    goes_to(module) if origin is None else self._import_place(statement, source, module)
                )
                new = self.new_name(module, origin) if origin else None
                if origin:  # two members may import it from a package and from its module: once is enough
                    place = self.places.setdefault((target, module, new), place)
                key = (place, new)
                local = self.alias_of(target, name, key)
                (typing if name in source.typing_only else wanted).add((key, local))
                if local != name:
                    edits.append((*source.span(node), local))
        return edits

    def _external(self, statement, alias):
        return (statement.module if isinstance(statement, ast.ImportFrom) else None, alias.name)

    def _reexported(self, module, name):
        return False

    def _import_place(self, statement, source, module):
        """A public package stays the place to import from; else the target of the definition."""
        if isinstance(statement, ast.ImportFrom) and statement.module in self.sources:
            asked = self.target[statement.module]
            if asked.endswith("__init__.py") and not self.target_module(source.module if source.module in self.sources else statement.module + ".x" if False else statement.module).startswith("\0"):
                own = self.target.get(source.module, source.path)
                package = module_of(asked)
                if not module_of(own).startswith(package + ".") and package != "kvexp":
                    return package
        return self.target_module(module)

    aliases: dict = {}

    def alias_of(self, target, name, key):
        """The name under which a target imports something: that of the member, unless another thing has it there."""
        if target is None:
            return name
        table = self.aliases.setdefault(target, {})
        taken = self.taken.get(target, set())
        for number in range(9):
            local = name if not number else f"{name}_{'of_' + (str(key[0]).rpartition('.')[2])}" + ("" if number == 1 else str(number))
            if local in taken:
                continue
            if table.setdefault(local, key) == key:
                return local
        raise AssertionError((target, name, key))

    def doc_name(self, source):
        parts = [part for part in source.module.split(".") if part not in ("__main__", "kvexp")]
        return re.sub(r"_(TABLE|COMMAND)$", "", parts[-1].upper()) + "_DOC"

    def order(self, modules):
        """Members so that what one needs when it is imported stands before it."""
        needs = {}
        for module in modules:
            source = self.sources[module]
            found = set()
            for local, (statement, alias) in source.globals.imports.items():
                if local in source.typing_only or not isinstance(statement, ast.ImportFrom):
                    continue
                inner = f"{statement.module}.{alias.name}"
                real, what = self.origin(statement.module, alias.name)
                for each in (real,):
                    if each in modules and each != module:
                        found.add(each)
            needs[module] = found
        done, out = set(), []

        def take(module, path):
            if module in done:
                return
            if module in path:
                self.problems.append(f"circle of members: {' '.join(path)} {module}")
                return
            for each in modules:
                if each in needs[module]:
                    take(each, (*path, module))
            done.add(module)
            out.append(module)

        for module in modules:
            take(module, ())
        return out

    def body(self, source, target, edits):
        """The text of a member without docstring and imports."""
        cuts = []
        package_away = source.is_package and not target.endswith("__init__.py")
        mains = sum(
            any(is_main_guard(n) for n in self.sources[module_of(p)].tree.body) for p in self.plan["targets"][target]
        )
        first = True
        for number, node in enumerate(source.tree.body):
            is_doc = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = []
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [t.id for t in targets if isinstance(t, ast.Name)]
            elif isinstance(node, FUNCTIONS + (ast.ClassDef,)):
                names = [node.name]
            gone = (
                is_doc
                or isinstance(node, (ast.Import, ast.ImportFrom))
                or is_type_checking(node)
                or (package_away and names == ["__all__"])
                or (is_main_guard(node) and mains > 1)
                or (names and all((source.module, n) in self.dropped for n in names))
            )
            if gone:
                line = min([node.lineno, *[d.lineno for d in getattr(node, "decorator_list", [])]])
                cuts.append((source.starts[line - 1], source.starts[node.end_lineno]))
        edits = [e for e in edits if not any(a <= e[0] < b for a, b in cuts)] + [(a, b, "") for a, b in cuts]
        return apply(source.text, edits).strip("\n")

    def rename_definitions(self, source, edits):
        for node in source.tree.body:
            for sub in [node]:
                if isinstance(sub, FUNCTIONS + (ast.ClassDef,)):
                    new = self.new_name(source.module, sub.name)
                    if new != sub.name:
                        start = source.offset(sub.lineno, sub.col_offset)
                        match = re.compile(r"(?:async\s+)?(?:def|class)\s+(\w+)").match(source.text, start)
                        edits.append((match.start(1), match.end(1), new))

    def write(self):
        for _ in range(6):
            self.again, self.aliases, self.problems, self.places = False, {}, [], {}
            self.taken = {
                target: {
                    self.new_name(module_of(path), name)
                    for path in members
                    for name in self.sources[module_of(path)].defs
                    if name != "__all__"
                }
                for target, members in self.plan["targets"].items()
            }
            out = {target: self.file_of(target) for target in self.plan["targets"]}
            if not self.again:
                break
        others = {}
        for folder in self.plan["rewrite"]:
            for path in sorted(self.root.glob(folder)):
                name = str(path.relative_to(self.root))
                if module_of(name) not in self.sources and path.suffix == ".py":
                    others[name] = self.rewritten(name)
        for problem in self.problems:
            print("PROBLEM", problem)
        for members in self.plan["targets"].values():
            for path in members:
                (self.root / path).unlink()
        for target, text in {**out, **others}.items():
            path = self.root / target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")

    def file_of(self, target):
        members = [module_of(path) for path in self.plan["targets"][target]]
        wanted, typing = set(), set()
        externals: dict = {}
        bodies = []
        title = self.plan.get("titles", {}).get(target)
        many = len(members) > 1
        for module in self.order(members) if many else members:
            source = self.sources[module]
            need, hint = set(), set()
            edits = self.edits_of(source, target, need, hint) + self.string_edits(source)
            self.rename_definitions(source, edits)
            text = self.body(source, target, edits)
            doc = ast.get_docstring(source.tree, clean=True)
            uses_doc = many and any(isinstance(n, ast.Name) and n.id == "__doc__" for n in ast.walk(source.tree))
            if uses_doc:
                import textwrap

                said = doc if "\n" in doc else textwrap.fill(doc, 100)
                end = "\n" if "\n" in doc else ""
                text = f'{self.doc_name(source)} = """{said}{end}"""\n\n\n{text}'
            elif many and doc and text and self.plan.get("titles", {}).get(target, "")[1:] != source.path:
                note = "\n".join(f"# {line}".rstrip() for line in doc.splitlines())
                text = f"{note}\n\n\n{text}" if not source.is_package or len(doc) > 60 else text
            if text:
                bodies.append(text)
            for sink, found in ((wanted, need), (typing, hint)):
                sink |= {item for item in found if isinstance(item[0], tuple)}
            # imports of others' modules, all of the member's: what is unused ruff removes
            for local, (statement, alias) in source.globals.imports.items():
                if isinstance(statement, ast.ImportFrom) and (
                    statement.module in self.sources or f"{statement.module}.{alias.name}" in self.sources
                ):
                    if target.endswith("__init__.py"):  # what a package offers
                        real = self.origin(statement.module, alias.name)
                        if real[1] is not None and self.target_module(real[0]) != module_of(target):
                            wanted.add(((self.target_module(real[0]), self.new_name(*real)), local))
                    continue
                if isinstance(statement, ast.Import) and alias.name in self.sources and alias.asname:
                    continue
                key = self._external(statement, alias)
                new = self.alias_of(target, local, key) if alias.asname or isinstance(statement, ast.ImportFrom) or "." not in alias.name else local
                where = typing if local in source.typing_only else wanted
                if isinstance(statement, ast.ImportFrom):
                    if statement.module == "__future__":
                        continue
                    where.add(((statement.module, alias.name), new))
                else:
                    where.add((("", alias.name), new if alias.asname or new != local else None))
        for module, name in self.plan.get("imports", {}).get(target, []):
            wanted.add(((module, name), name if module else None))
        lines = []
        if title and title.startswith("@"):
            title = ast.get_docstring(self.sources[module_of(title[1:])].tree, clean=False)
        doc = title or ast.get_docstring(self.sources[members[0]].tree, clean=False) or ""
        lines.append(f'"""{doc}"""')
        lines.append("from __future__ import annotations")
        strong = {(key, local) for key, local in wanted}
        lines += self._import_lines(strong)
        weak = {item for item in typing if item not in strong}
        if weak:
            if not any(key == ("typing", "TYPE_CHECKING") for key, _ in strong):
                lines.append("from typing import TYPE_CHECKING")
            lines.append("if TYPE_CHECKING:")
            lines += [f"    {line}" for line in self._import_lines(weak)]
        bodies += [self.plan["append"][target]] if target in self.plan.get("append", {}) else []
        return "\n".join(lines) + "\n\n\n" + "\n\n\n".join(bodies) + "\n"

    def _import_lines(self, items):
        lines = []
        for (module, name), local in sorted(items, key=str):
            if name is None:
                pkg, _, stem = module.rpartition(".")
                lines.append(f"from {pkg} import {stem}" + (f" as {local}" if local != stem else ""))
            elif module == "":
                lines.append(f"import {name}" + (f" as {local}" if local else ""))
            else:
                lines.append(f"from {module} import {name}" + (f" as {local}" if local != name else ""))
        return lines

    places: dict = {}

    def rewritten(self, name):
        """A file that is no member: its imports follow."""
        source = Source(name, self.root)
        edits = []
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                texts, touched = collections.defaultdict(list), False
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    local = alias.asname or alias.name
                    if node.module in self.sources and alias.name in self.sources[node.module].globals.names:
                        module, real = self.origin(node.module, alias.name)
                        if real is None and module in self.sources:
                            pkg, _, stem = self.target_module(module).rpartition(".")
                            texts[pkg].append(stem + (f" as {local}" if stem != local else ""))
                        elif module in self.sources:
                            place = self._import_place(node, source, module)
                            new = self.new_name(module, real)
                            texts[place].append(new + (f" as {local}" if new != local else ""))
                        else:  # it came through from elsewhere
                            texts[module].append(f"{real}" + (f" as {local}" if real != local else ""))
                        touched = True
                    elif inner in self.sources:
                        pkg, _, stem = self.target_module(inner).rpartition(".")
                        if pkg:
                            texts[pkg].append(stem + (f" as {local}" if stem != local else ""))
                        else:
                            texts[""].append(stem + (f" as {local}" if stem != local else ""))
                        touched = True
                    elif node.module in self.sources:
                        texts[self.target_module(node.module)].append(ast.unparse(alias))
                        touched = True
                    else:
                        texts[node.module].append(ast.unparse(alias))
                if touched:
                    indent = " " * node.col_offset
                    new = f"\n{indent}".join(
                        (f"from {place} import " if place else "import ") + ", ".join(each) for place, each in texts.items()
                    )
                    edits.append((*source.span(node), new))
            if isinstance(node, ast.Import):
                changed = [
                    f"{self.target_module(a.name)}" + (f" as {a.asname}" if a.asname else "")
                    if a.name in self.sources
                    else ast.unparse(a)
                    for a in node.names
                ]
                if changed != [ast.unparse(a) for a in node.names]:
                    edits.append((*source.span(node), "import " + ", ".join(changed)))
        edits += self.attribute_edits(source)
        return apply(source.text, edits)

    def attribute_edits(self, source):
        """Attributes of imported modules, and names in strings of setattr, that have other names now."""
        edits, local_modules = [], {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    if inner in self.sources and not (
                        node.module in self.sources and alias.name in self.sources[node.module].globals.names
                        and self.origin(node.module, alias.name)[1] is not None
                    ):
                        local_modules[alias.asname or alias.name] = inner
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname and alias.name in self.sources:
                        local_modules[alias.asname] = alias.name
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in local_modules:
                new = self.attribute(local_modules[node.value.id], node.attr)
                if new != node.attr:
                    end = source.span(node)[1]
                    edits.append((end - len(node.attr), end, new))
            if isinstance(node, ast.Call) and len(node.args) >= 2 and isinstance(node.args[0], ast.Name):
                words = node.args[1]
                if node.args[0].id in local_modules and isinstance(words, ast.Constant) and isinstance(words.value, str):
                    new = self.attribute(local_modules[node.args[0].id], words.value)
                    if new != words.value:
                        edits.append((*source.span(words), f'"{new}"'))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"kvexp(\.\w+)+(:\w+)?", node.value) and node.value not in PACKAGES:
                colon = ":" in node.value
                new = self.dotted(node.value.replace(":", "."))
                new = ":".join(new.rsplit(".", 1)) if colon else new
                if new != node.value:
                    edits.append((*source.span(node), f'"{new}"'))
        return edits

    def string_edits(self, source):
        """Strings that are dotted names of kvexp."""
        found = []
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if re.fullmatch(r"kvexp(\.\w+)+(:\w+)?", node.value) and node.value not in PACKAGES:
                    new = self.dotted(node.value.replace(":", "."))
                    new = ":".join(new.rsplit(".", 1)) if ":" in node.value else new
                    if new != node.value:
                        found.append((*source.span(node), f'"{new}"'))
        return found

    def attribute(self, module, name):
        if name not in self.sources[module].globals.names:
            return name
        real = self.origin(module, name)
        return self.new_name(*real) if real[0] in self.sources and real[1] else name

    def dotted(self, words):
        parts = words.split(".")
        for cut in range(len(parts), 1, -1):
            module = ".".join(parts[:cut])
            if module in self.sources:
                rest = parts[cut:]
                if rest:
                    rest[0] = self.attribute(module, rest[0])
                    if self.target[module].endswith("__init__.py"):
                        return ".".join([self.target_module(module), *rest])
                    real = self.origin(module, parts[cut])
                    if real[0] in self.plan.get("split", []) and real[1]:
                        module = real[0]
                return ".".join([self.target_module(module), *rest])
        return words


def apply(text, edits):
    out, place = [], 0
    for start, end, new in sorted(set(edits)):
        if start < place:
            raise AssertionError(f"edits overlap: {text[start - 40 : end + 40]!r}")
        out += [text[place:start], new]
        place = end
    return "".join([*out, text[place:]])


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    house = House(plan, Path.cwd())
    house.choose_names()
    house.write()
    renamed = {f"{m}:{n}": new for (m, n), new in sorted(house.new.items())}
    print(f"{len(house.sources)} files -> {len(plan['targets'])}; {len(renamed)} definitions renamed, {len(house.dropped)} dropped as doubles")
    Path("build/house/renamed.json").write_text(json.dumps(renamed, indent=1))
