"""Where temporaries of a GPU program lie."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tilework.compiler.cuda.launches import ALIGNED, placed

LIVES = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 20)), max_size=30)


@given(LIVES)
def test_what_lives_at_the_same_time_lies_apart(items: list[tuple[int, int, int]]) -> None:
    sizes = {i: size for i, (size, _, _) in enumerate(items)}
    alive = {i: (min(a, b), max(a, b)) for i, (_, a, b) in enumerate(items)}
    places, end = placed(sizes, alive)
    for i in sizes:
        assert places[i] % ALIGNED == 0 and places[i] + sizes[i] <= end
        for j in range(i):
            together = alive[i][0] <= alive[j][1] and alive[j][0] <= alive[i][1]
            if together and sizes[i] and sizes[j]:
                assert places[i] + sizes[i] <= places[j] or places[j] + sizes[j] <= places[i]
