"""Rows and tallies: what a changed copy is, and that it shares the rest."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planner_ext.core.values import Tally, row_of, with_item
from support.values import each_of


@given(st.lists(st.integers(), max_size=300), st.data())
def test_a_row_is_a_tuple_that_changes_one_item_at_a_time(
    items: list[int], data: st.DataObject
) -> None:
    """Every copy has its own items, and the row that it was made of keeps them."""
    row, model = row_of(items), list(items)
    for _ in range(5 if items else 0):
        index, before = data.draw(st.integers(0, len(items) - 1)), list(row)
        after = with_item(row, index, -1)
        assert list(row) == before
        model[index], row = -1, after
    assert list(row) == [row[index] for index in range(len(row))] == model
    assert (len(row), row) == (len(model), row_of(model))
    assert hash(row) == hash(row_of(model))


def test_a_changed_row_shares_all_blocks_but_one() -> None:
    """What a copy takes does not grow with what is in it."""
    row: Any = row_of(range(10_000))
    after: Any = with_item(row, 5_000, -1)
    kept = [one is other for one, other in zip(row.blocks, after.blocks, strict=True)]
    assert (kept.count(False), len(kept)) == (1, 157)
    assert max(map(len, row.blocks)) == 64


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc") | st.integers(0, 300).map(str),
            st.sampled_from([1, 1, -1]),
        )
    )
)
def test_a_tally_counts_as_a_dict_does(steps: list[tuple[str, int]]) -> None:
    """However many keys there are, old tallies stay as they were."""
    tally, counts = Tally(), dict[str, int]()
    for key, more in steps:
        before = dict(tally)
        after = tally.plus(key, more)
        assert dict(tally) == before
        counts[key], tally = counts.get(key, 0) + more, after
    assert tally == counts
    assert (len(tally), sorted(tally)) == (len(counts), sorted(counts))
    assert "z" not in tally
    assert eval(repr(tally)) == tally


def test_a_tally_of_many_keys_copies_only_the_latest() -> None:
    """Of ten thousand keys a copy takes some hundred."""
    tally = Tally()
    for number in range(10_000):
        tally = tally.plus(str(number), 1)
    assert len(tally) == 10_000
    assert len(tally._lately) <= 101
    assert tally.plus("x", 1)._counts is tally._counts


@each_of("size", [1, 64, 65, 128, 200])
def test_a_row_of_any_size_reads_and_changes_as_a_list_does(size: int) -> None:
    """Also at the edges of its blocks."""
    row = row_of(range(size))
    assert len(row) == size
    assert list(row) == [*range(size)]
    assert [row[index] for index in range(size)] == [*range(size)]
    for index in {0, 1, 62, 63, 64, 65, size - 2, size - 1} & {*range(size)}:
        expected = list(range(size))
        expected[index] = -1
        assert list(with_item(row, index, -1)) == expected
