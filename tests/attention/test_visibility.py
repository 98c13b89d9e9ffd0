"""What is visible to some queries is that part of the whole, and no key more than is needed."""

import pytest
import torch

from mmpos.attention.prepared import prepare
from mmpos.attention.visibility import Visibility, as_pairs

ORDERS = [
    {},
    {"causal": True},
    {"window": 1},
    {"window": 3},
    {"causal": True, "window": 1},
    {"causal": True, "window": 4},
    {"causal": True, "window": 99},
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (4, 9), (1, 6), (9, 4)])
def test_the_span_of_some_queries_is_what_they_see_and_no_more(order, queries, keys):
    if order.get("causal") and queries > keys:
        pytest.skip("refused before")
    for start in range(queries):
        for stop in range(start + 1, queries + 1):
            places = range(start + keys - queries, stop + keys - queries)
            near = order.get("window", 999)
            seen = [
                j
                for j in range(keys)
                if any(abs(i - j) < near and not (order.get("causal") and j > i) for i in places)
            ]
            first, last = Visibility(queries, keys, **order).span(start, stop)
            if seen:
                assert (first, last) == (seen[0], seen[-1] + 1)
            assert 0 <= first < last <= keys


def test_indices_of_their_own_may_see_everything():
    index = torch.tensor([5, 0, 3])
    assert Visibility(3, 8, causal=True, q_index=index).span(0, 1) == (0, 8)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("more", ["", "segments", "keys", "pairs", "index"])
def test_a_part_is_cut_from_the_whole(order, more):
    named = {
        "": {},
        "segments": {
            "q_segments": torch.tensor([[0, 0, 1, 1]]),
            "k_segments": torch.arange(6) // 3,
        },
        "keys": {"mask": as_pairs(torch.rand(2, 6) < 0.5)},
        "pairs": {"mask": torch.rand(2, 3, 4, 6) < 0.5},
        "index": {
            "q_index": torch.tensor([[5, 0, 3, 300]]),
            "k_index": torch.tensor([0, 3, 5, 300, 1, 2]),
        },
    }[more]
    visibility = Visibility(4, 6, **order, **named)
    whole, blind = visibility.visible()
    assert (whole is None) == (visibility.everything)
    if whole is None:
        return
    for start, stop in ((0, 1), (1, 3), (0, 4)):
        part, own = visibility.visible(slice(start, stop), slice(0, 6))
        rows = whole.expand(*whole.shape[:-2], 4, 6)[..., start:stop, :]
        assert part is not None
        assert torch.equal(part.expand(rows.shape), rows)
        if blind is None:
            assert own is None
        else:
            rows = blind.expand(*blind.shape[:-2], 4, 1)[..., start:stop, :]
            assert torch.equal(own.expand(rows.shape), rows)


def test_how_many_rows_of_a_batch_differ():
    index = torch.zeros(5, 4, dtype=torch.long)
    assert Visibility(4, 4, causal=True).rows == 1
    assert Visibility(4, 4, q_index=index[0]).rows == 1
    assert Visibility(4, 4, q_index=index).rows == 5
    assert Visibility(4, 4, k_segments=index[:2]).rows == 2
    assert Visibility(4, 4, mask=torch.ones(3, 1, 1, 4).bool()).rows == 3


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 6), (6, 3)])
@pytest.mark.parametrize("same", [True, False])
def test_a_query_is_called_reflexive_only_where_it_sees_itself(order, queries, keys, same):
    """Which tokens these are is known where there is one query for each key, or by alignment."""
    index = torch.tensor([[5, 0, 3, 3, 9, 1]])
    segments = torch.tensor([[0, 0, 2, 1, 1, 0]])
    own = {"q_index": index[..., :queries], "q_segments": segments[..., :queries]}
    others = {"k_index": index[..., :keys], "k_segments": segments[..., :keys]}
    if same and queries == keys:
        others = dict(zip(others, own.values(), strict=True))
    elif not same:
        others = {name: value + 1 for name, value in others.items()}
    segmented = {name: value for name, value in {**own, **others}.items() if "segments" in name}
    for named in ({}, segmented, {**own, **others}):
        visibility = Visibility(queries, keys, **order, **named)
        whole, blind = visibility.visible()
        if visibility.reflexive and whole is not None:
            late = keys - queries
            pairs = whole.expand(*whole.shape[:-2], queries, keys)
            assert all(pairs[..., i, i + late].all() for i in range(queries))
            assert blind is None
        surely = same and queries == keys if named else queries <= keys
        assert visibility.reflexive == surely


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_of_one_document_each_need_no_mask(rows):
    segments = torch.arange(rows).unsqueeze(-1).expand(-1, 6)
    alone = prepare(6, 6, causal=True, q_segments=segments, k_segments=segments)
    assert alone.causal
    assert alone.mask is None
    if rows > 1:
        mixed = segments.clone()
        mixed[0, 3:] = 7
        both = prepare(6, 6, causal=True, q_segments=mixed, k_segments=mixed)
        assert not both.causal
        assert both.mask is not None
        assert both.mask[0, 0, 3].tolist() == [-torch.inf] * 3 + [0.0] + [-torch.inf] * 2
        assert both.mask[1, 0, 3].tolist() == [0.0] * 4 + [-torch.inf] * 2
    shifted = prepare(6, 6, causal=True, q_segments=segments, k_segments=segments + 1)
    assert shifted.blind is not None
    assert shifted.blind.all()
