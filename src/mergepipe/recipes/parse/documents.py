"""Order the documents of a recipe file so that each comes after the documents whose results it merges."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.errors import RecipeError
from mergepipe.recipes.parse.fields import DocumentReader
from mergepipe.recipes.parse.problems import Findings
from mergepipe.recipes.parse.recipe import Recipe
from mergepipe.recipes.parse.yaml_source import YamlSource, shortened


def document_names(sources: Sequence[YamlSource], findings: Findings) -> frozenset[str]:
    """Collect the names of several documents' results; report names used twice."""
    if len(sources) == 1:
        return frozenset()
    first: dict[str, str] = {}
    for source in sources:
        name = source.root.get("name") if isinstance(source.root, dict) else None
        if not isinstance(name, str) or not name.strip():
            continue
        if name in first:
            message = f"the name '{shortened(name)}' is taken, by {first[name]}"
            findings.add(RecipeError, "recipe.documents.name", source.where("name"), message, "choose another name")
        first.setdefault(name, source.where("name").split(" ")[0])
    return frozenset(first)


def sort_documents(readers: Sequence[DocumentReader], recipes: Sequence[Recipe]) -> tuple[Recipe, ...]:
    """Sort recipes so that each comes after those whose results it merges; the output comes last.

    Reports cycles, and documents other than the output that nothing merges.
    """
    by_name = {recipe.name: index for index, recipe in enumerate(recipes) if recipe.name is not None}
    needs = [[by_name[name] for name in recipe.intermediates()] for recipe in recipes]
    cycle = _cycle(needs)
    if cycle:
        names = " -> ".join(f"'{recipes[index].name}'" for index in cycle)
        message, hint = f"documents wait for each other: {names}", "a document merges models made before it"
        readers[cycle[0]].refuse("recipe.documents.cycle", ("name",), message, hint)
        return ()
    output = _output(recipes, needs)
    order: list[int] = []
    _visit(output, needs, order)
    for index in sorted(set(range(len(recipes))) - set(order)):
        message = "nothing merges the result of this document"
        hint = "name it as a model of the output, or keep it in a file of its own"
        readers[index].refuse("recipe.documents.unused", ("name",) if recipes[index].name else (), message, hint)
    return tuple(recipes[index] for index in order)


def _output(recipes: Sequence[Recipe], needs: Sequence[Sequence[int]]) -> int:
    """Find the document of the output: of those that nothing merges the one without a name, else the last."""
    used = {index for need in needs for index in need}
    free = [index for index in range(len(recipes)) if index not in used]
    return next((index for index in free if recipes[index].name is None), free[-1])


def _visit(index: int, needs: Sequence[Sequence[int]], order: list[int]) -> None:
    if index in order:
        return
    for needed in needs[index]:
        _visit(needed, needs, order)
    order.append(index)


def _cycle(needs: Sequence[Sequence[int]]) -> list[int]:
    """Find a cycle of documents, its first one repeated at the end; empty if there is none."""
    done: set[int] = set()
    for start in range(len(needs)):
        path = [start] if start not in done else []
        while path:
            ahead = next((index for index in needs[path[-1]] if index not in done), None)
            if ahead is None:
                done.add(path.pop())
            elif ahead in path:
                return [*path[path.index(ahead) :], ahead]
            else:
                path.append(ahead)
    return []
