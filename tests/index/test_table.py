"""Rows of blocks, compared with a dict."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.masks import MAX_LOAD, SCATTER, BlockTable, as_hashes
from router.types import BlockHash

ROWS = 1 << 10
MANY = 300
"""More than the loops of the few take on."""
U64 = (1 << 64) - 1


def ready(capacity: int = ROWS, scatter: int = SCATTER) -> BlockTable:
    table = BlockTable(capacity, scatter=scatter)
    assert table.prepare(capacity)
    return table


def rows_of(table: BlockTable, blocks: list[BlockHash]) -> list[int]:
    rows: list[int] = table.find(as_hashes(blocks)).tolist()
    return rows


def some_blocks(count: int, seed: int = 0) -> list[BlockHash]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(count)]


@pytest.mark.parametrize("count", [0, 1, 24, 25, MANY])
def test_only_placed_blocks_are_found(count: int) -> None:
    """One by one or many at once."""
    table = ready()
    blocks, others = some_blocks(count), some_blocks(count, seed=1)
    rows: list[int] = table.place(as_hashes(blocks)).tolist()
    assert len(set(rows)) == table.used == count
    assert rows_of(table, blocks) == rows
    assert rows_of(table, others) == [-1] * count
    assert rows_of(table, blocks[::-1] + others) == rows[::-1] + [-1] * count


@pytest.mark.parametrize("count", [5, MANY])
def test_placing_again_returns_the_same_rows(count: int) -> None:
    """Keys are not counted twice."""
    table, hashes = ready(), as_hashes(some_blocks(count))
    rows = table.place(hashes)
    assert table.place(hashes).tolist() == rows.tolist()
    assert table.used == count


@pytest.mark.parametrize("few_first", [True, False])
def test_small_and_large_batches_agree(few_first: bool) -> None:
    table, blocks = ready(), some_blocks(MANY)
    one_by_one = [as_hashes([block]) for block in blocks]
    if few_first:
        rows = [int(table.place(one)[0]) for one in one_by_one]
        assert rows_of(table, blocks) == rows
    else:
        rows = table.place(as_hashes(blocks)).tolist()
        assert [int(table.find(one)[0]) for one in one_by_one] == rows


@pytest.mark.parametrize(("first", "home"), [(1000, 0), (U64 - MANY, ROWS - 1)])
@pytest.mark.parametrize("at_once", [1, 10, MANY])
def test_blocks_with_one_home_row_form_a_cluster(first: BlockHash, home: int, at_once: int) -> None:
    """Without holes, wrapping around the end of the table."""
    table = ready(scatter=1)  # the highest bits of a hash are its home row
    blocks = list(range(first, first + MANY))
    for start in range(0, MANY, at_once):
        table.place(as_hashes(blocks[start : start + at_once]))
    rows = rows_of(table, blocks)
    assert set(rows) == {(home + offset) % ROWS for offset in range(MANY)}
    assert rows_of(table, list(range(first - MANY, first))) == [-1] * MANY
    assert table.keys[rows].tolist() == blocks


def test_a_table_can_be_filled_up_to_its_limit() -> None:
    table = ready()
    fullest = int(MAX_LOAD * ROWS)
    assert table.has_room_for(fullest) and not table.has_room_for(fullest + 1)
    blocks = some_blocks(fullest)
    rows = table.place(as_hashes(blocks)).tolist()
    assert rows_of(table, blocks) == rows and len(set(rows)) == fullest
    assert table.has_room_for(0) and not table.has_room_for(1)


@pytest.mark.parametrize("count", [3, MANY])
def test_hash_zero_is_a_block_like_any_other(count: int) -> None:
    """It does not match a free row."""
    table, blocks = ready(), [0, *some_blocks(count)]
    assert rows_of(table, blocks) == [-1] * (count + 1)
    rows = table.place(as_hashes(blocks)).tolist()
    assert rows_of(table, blocks) == rows and table.used == count + 1
    assert as_hashes(blocks).all()


def test_a_table_is_ready_when_every_slice_is_prepared() -> None:
    """With any previous content of the memory."""
    table = BlockTable(ROWS, planes=[0, 3])
    for column in (table.keys, *table.planes.values()):
        column[:] = np.arange(ROWS)
    assert [table.prepare(400), table.prepare(400), table.prepare(400)] == [False, False, True]
    assert rows_of(table, list(range(ROWS))) == [-1] * ROWS
    assert not table.plane(0).any() and not table.plane(3).any()


def test_a_plane_is_allocated_on_first_use() -> None:
    table = ready()
    assert table.bytes == 8 * ROWS
    table.plane(5)[7] = 1
    assert table.plane(5).nonzero()[0].tolist() == [7]
    assert table.bytes == 2 * 8 * ROWS


batches = st.lists(
    st.lists(st.integers(1, 80) | st.integers(U64 - 80, U64) | st.integers(1, U64), unique=True, max_size=90),
    min_size=1,
    max_size=5,
)


@given(batches, st.sampled_from([1, SCATTER]))
def test_a_table_finds_what_a_dict_finds(batches: list[list[BlockHash]], scatter: int) -> None:
    """For batches of any size, with clusters at both ends of the table."""
    table, known = ready(scatter=scatter), dict[BlockHash, int]()
    for blocks in batches:
        assert rows_of(table, blocks) == [known.get(block, -1) for block in blocks]
        rows: list[int] = table.place(as_hashes(blocks)).tolist()
        assert all(known.setdefault(block, row) == row for block, row in zip(blocks, rows, strict=True))
        assert rows_of(table, list(known)) == list(known.values())
    assert len(set(known.values())) == len(known) == table.used
