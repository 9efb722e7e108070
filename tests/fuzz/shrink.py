"""Makes a recipe smaller while it still fails. Our own rather than hypothesis's: a program that ends the process is shrunk too,
each attempt in a process of its own, and compiles are dear, so every step here takes away as much as it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from programs import Recipe, source


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes a little simpler than this one, the simplest first."""
    operations = recipe["operations"]
    for length in (len(operations) // 2, 2, 1):
        for i in range(0, len(operations) - length + 1, max(1, length)) if 0 < length < len(operations) else ():
            yield {**recipe, "operations": operations[:i] + operations[i + length :]}
    plain = {
        "optimizers": (0,),
        "groups": False,
        "clip": "",
        "micro": 1,
        "loss": "inside",
        "variant": "fused",
        "input": 0,
        "objective": 0,
    }
    for key, value in plain.items():
        if recipe[key] != value:
            yield {**recipe, key: value}
    for i in range(3):
        if recipe["sizes"][i]:
            yield {**recipe, "sizes": (*recipe["sizes"][:i], 0, *recipe["sizes"][i + 1 :])}
    for i, (kind, first, second, number) in enumerate(operations):
        for other in ((kind, 0, second, number), (kind, first, 0, number)):
            if other != operations[i]:
                yield {**recipe, "operations": (*operations[:i], other, *operations[i + 1 :])}


def shrink(recipe: Recipe, fails: Callable[[Recipe], bool], attempts: int = 60) -> Recipe:
    """`fails` says whether a recipe shows the same fault. Recipes that write the same program are tried once."""
    tried = {source(recipe) + recipe["variant"]}
    again = True
    while again and attempts > 0:
        again = False
        for candidate in smaller(recipe):
            text = source(candidate) + candidate["variant"]
            if text in tried:
                continue
            tried.add(text)
            attempts -= 1
            if fails(candidate):
                recipe, again = candidate, True
                break
            if attempts <= 0:
                break
    return recipe
