"""A cache layout as one line of text: read back as it was, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_worker.ports.cache_spec import ITEM_BYTES, ArraySpec, LayerKind, LayerSpec, ModelCacheSpec

numbers = st.integers(0, 2**40)
dtypes = st.sampled_from(sorted(ITEM_BYTES))
arrays = st.builds(ArraySpec, st.lists(numbers, max_size=4).map(tuple), dtypes)
LAYERS = {
    LayerKind.FULL: st.builds(LayerSpec, st.just(LayerKind.FULL), numbers, numbers, numbers, is_packed=st.booleans()),
    LayerKind.WINDOW: st.builds(LayerSpec, st.just(LayerKind.WINDOW), numbers, numbers, numbers, numbers),
    LayerKind.RECURRENT: st.builds(
        LayerSpec, st.just(LayerKind.RECURRENT), arrays=st.lists(arrays, max_size=3).map(tuple)
    ),
    LayerKind.UNKNOWN: st.just(LayerSpec(LayerKind.UNKNOWN)),
}
specs = st.builds(
    ModelCacheSpec,
    st.lists(st.one_of(*(LAYERS[kind] for kind in LayerKind)), max_size=5).map(tuple),
    dtypes,
    st.sampled_from(["native", "q8", "q4"]),
)


@given(specs)
def test_a_layout_is_read_back_as_it_was_described(spec: ModelCacheSpec) -> None:
    assert ModelCacheSpec.parse(spec.describe()) == spec


@pytest.mark.parametrize(
    "text",
    [
        *("", "float32", "float64|full:1:2:3", "float32|full:1:2", "float32|full:1:2:3:4", "float32|full:1:2:-3"),
        *("float32|full:1:2:٣", "float32|full:1:2:03", "float32|full:1:2:3|q9", "float32|full:1:2:3|native"),
        *("float32|window:1:2:3", "float32|other:1:2:3", "float32|full:1:2:3;", "float32|recurrent:1x2"),
        *("float32|window:1:2:3:4:packed", "float32|unknown:1:2:3:packed", "float32|full:1:2:3:packed:packed"),
        *("float32|recurrent:1x/float32", "float32|recurrent:1/float64", "float32|full:1:2:3|q8|q8"),
    ],
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ModelCacheSpec.parse(text)
