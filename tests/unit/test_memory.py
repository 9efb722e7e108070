"""Where temporaries lie: two that live at the same time never share a place, whatever other names they go by."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.compiler.memory import Place, arrange, families, plan_temporaries


def allocation(name: str, size: int) -> str:
    return (
        f"    static constexpr int64_t shape_{name}[] = {{{size}L}};\n"
        f"    static constexpr int64_t stride_{name}[] = {{1L}};\n"
        f"    AtenTensorHandle {name}_handle;\n"
        f"    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, shape_{name}, stride_{name}, cached_torch_dtype_float32, "
        f"cached_torch_device_type_cpu, 0, &{name}_handle));\n"
        f"    RAIIAtenTensorHandle {name}({name}_handle);\n"
    )


def offsets(body: str) -> dict[str, int]:
    planned, _, _ = plan_temporaries(body, "")
    return {n: int(o) for n, o in re.findall(r"Temporary (\w+) = workspace\.temporary\(\d+, (\d+),", planned)}


def test_a_place_is_used_again_when_its_owner_is_gone() -> None:
    body = allocation("buf0", 100) + "    f(buf0);\n    buf0.reset();\n" + allocation("buf1", 100) + "    f(buf1);\n"
    assert offsets(body) == {"buf0": 0, "buf1": 0}
    planned, count, size = plan_temporaries(body, "")
    assert count == 2 and size == 448 and "aoti_torch_empty_strided" not in planned


def test_another_name_for_the_same_memory_keeps_it_alive() -> None:
    body = (
        allocation("buf0", 100)
        + "    auto buf1 = std::move(buf0);  // reuse\n"
        + allocation("buf2", 100)
        + "    f(buf1, buf2);\n"
    )
    found = offsets(body)
    assert found["buf0"] != found["buf2"]
    view = "    auto buf1 = wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf0, 1, a, b, 4L));\n"
    body = allocation("buf0", 100) + view + "    buf0.reset();\n" + allocation("buf2", 100) + "    f(buf1, buf2);\n"
    found = offsets(body)
    assert found["buf0"] != found["buf2"]


def test_a_library_call_may_return_its_argument() -> None:
    call = "    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_view_as_real(buf0, &buf1_handle));\n"
    call += "    RAIIAtenTensorHandle buf1(buf1_handle);\n"
    body = allocation("buf0", 100) + call + allocation("buf2", 100) + "    f(buf1, buf2);\n"
    assert offsets(body)["buf0"] != offsets(body)["buf2"]


def test_families_follow_every_name() -> None:
    body = "    auto buf1 = view(buf0, 3);\n    auto buf2 = std::move(buf1);\n    auto buf5 = view(buf4);\n"
    found = families(body)
    assert found["buf0"] == found["buf1"] == found["buf2"] != found["buf4"] == found["buf5"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40), st.integers(0, 15)), max_size=25))
def test_no_two_meet(given_places: list[tuple[int, int, int]]) -> None:
    places = [Place(str(i), 64 * size, first, first + length) for i, (size, first, length) in enumerate(given_places)]
    total = arrange(places)
    for i, a in enumerate(places):
        assert a.offset % 64 == 0 and a.offset + a.size <= total
        for b in places[:i]:
            if a.first <= b.last and b.first <= a.last:
                assert a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
