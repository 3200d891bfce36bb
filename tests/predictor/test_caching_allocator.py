"""The simulated CUDA caching allocator: examples, properties, and the real one on a GPU."""

import gc
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.memory.recording import Block, Recording
from autotune.predictor.caching_allocator import CachingAllocator, count_pieces, round_up
from autotune.predictor.predict import _FakeTraining, predict
from autotune.spec.config import TrainingConfig
from autotune.spec.prediction import PredictionRequest
from autotune.spec.workload import make_workload

MIB = 1024**2
SHARDED = {"layers": 2, "width": 32, "heads": 2, "sequence_length": 16, "global_batch": 4}


def piece_of(size_bytes, allocator=None):
    return (allocator or CachingAllocator()).allocate(size_bytes).size_bytes


@pytest.mark.parametrize(
    ("requested", "handed_out"),
    [
        (512, 512),
        (MIB, MIB),
        (MIB + 512, MIB + 512),  # cut from a segment of 20 MiB
        (19 * MIB, 20 * MIB),
        (19 * MIB - 512, 19 * MIB - 512),
        (64 * MIB - 300 * 1024 - 512, 64 * MIB),
        (63 * MIB, 64 * MIB),
        (63 * MIB - 512, 63 * MIB - 512),
        (64 * MIB, 64 * MIB),
    ],
)
def test_a_piece_up_to_a_mebibyte_too_large_is_not_split(requested, handed_out):
    assert piece_of(requested) == handed_out


def test_the_rest_of_a_piece_in_the_large_pool_serves_the_next_request():
    allocator = CachingAllocator()
    first, second = allocator.allocate(5 * MIB), allocator.allocate(5 * MIB)
    assert second.address == first.address + 5 * MIB


def test_what_one_stream_has_freed_is_not_given_to_another():
    allocator = CachingAllocator()
    first = allocator.allocate(30 * MIB, stream=1)
    address = first.address
    allocator.free(first)
    assert allocator.allocate(30 * MIB, stream=2).address != address
    assert allocator.allocate(30 * MIB, stream=1).address == address


def test_gathered_weights_are_recorded_on_a_stream_of_their_own():
    workload = make_workload("cpu", {**SHARDED, "devices_per_trial": 2})
    config = TrainingConfig(sharding="zero3", micro_batch_size=2)
    request = PredictionRequest(workload=workload, config=config, device="cuda")
    events = _FakeTraining(request)._record().events
    assert len({block.stream for _, block in events}) == 3  # compute, all-gather, reduce-scatter


def test_freed_pieces_are_reused():
    allocator = CachingAllocator()
    first = allocator.allocate(30 * MIB)
    allocator.free(first)
    assert allocator.allocate(30 * MIB).address == first.address


def test_of_several_free_pieces_the_smallest_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, small = allocator.allocate(60 * MIB), allocator.allocate(40 * MIB)
    small_address = small.address
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(30 * MIB).address == small_address


def test_free_neighbours_become_one():
    allocator = CachingAllocator()
    pieces = [allocator.allocate(5 * MIB) for _ in range(4)]
    start = pieces[0].address
    for place in (0, 2, 1, 3):
        allocator.free(pieces[place])
    whole = allocator.allocate(20 * MIB)
    assert (whole.address, whole.size_bytes) == (start, 20 * MIB)


def test_the_small_pool_is_not_served_from_the_large_one():
    allocator = CachingAllocator()
    large = allocator.allocate(5 * MIB)
    allocator.free(large)
    assert allocator.allocate(512).address >= 20 * MIB


SIZES = st.one_of(st.integers(1, 4 * 1024), st.integers(1, 4 * MIB), st.integers(1, 100 * MIB))


@settings(max_examples=60)
@given(sizes=st.lists(SIZES, min_size=1, max_size=60), seed=st.integers(0, 1000))
def test_pieces_in_use_never_overlap_and_are_as_large_as_requested(sizes, seed):
    allocator, draw, used = CachingAllocator(), random.Random(seed), []
    for size_bytes in map(round_up, sizes):
        piece = allocator.allocate(size_bytes)
        assert 0 <= piece.size_bytes - size_bytes <= MIB
        used.append(piece)
        if draw.random() < 0.4:
            allocator.free(used.pop(draw.randrange(len(used))))
        ranges = sorted((piece.address, piece.address + piece.size_bytes) for piece in used)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


@settings(max_examples=30)
@given(sizes=st.lists(SIZES, min_size=1, max_size=40))
def test_when_all_is_freed_every_segment_is_whole_again(sizes):
    """The same requests may still need a new segment: 5 MiB get another one than at first."""
    allocator = CachingAllocator()
    for piece in [allocator.allocate(round_up(size_bytes)) for size_bytes in sizes]:
        allocator.free(piece)
    free = [piece for pool in allocator._free_pieces.values() for piece in pool]
    assert sum(piece.size_bytes for piece in free) == allocator._next_address
    assert all(piece.before is None and piece.after is None for piece in free)


def test_requests_that_follow_one_another_can_need_more_the_second_time():
    """The smallest piece that fits 5 MiB is then the one of 16 MiB of the next request."""
    allocator, ends = CachingAllocator(), []
    for _ in range(2):
        pieces = [allocator.allocate(size * MIB) for size in (5, 16, 15)]
        ends.append(max(piece.address for piece in pieces))
        for piece in pieces:
            allocator.free(piece)
    assert ends == [20 * MIB, 36 * MIB]


# -- a recorded step -------------------------------------------------------------------------------


def block(size_bytes, **fields):
    return Block(size_bytes=size_bytes, module="", operator="", born=0, **fields)


def step(*sizes):
    """Returns a recording that allocates blocks of these sizes and frees them in that order."""
    blocks = [block(size_bytes) for size_bytes in sizes]
    return Recording(
        events=[*((+1, block) for block in blocks), *((-1, block) for block in blocks)]
    ), blocks


def count(recording, first_step=None):
    """Counts the pieces of a step that follows a first one which is like it, or another."""
    return count_pieces(first_step or Recording(), recording, warmup_steps=2)


def test_a_block_becomes_as_large_as_its_piece():
    recording, (odd, even) = step(63 * MIB, 62 * MIB)
    count(recording)
    assert (odd.size_bytes, even.size_bytes) == (64 * MIB, 62 * MIB)


def test_what_is_resident_is_counted_by_its_pieces_too():
    weights = block(63 * MIB, resident="parameters")
    resident = block(63 * MIB, resident="parameters", earlier=weights)
    count(Recording(resident=[resident]), Recording(resident=[weights]))
    assert resident.size_bytes == 64 * MIB


def test_workspaces_are_allocated_once_and_are_pieces_besides_those_of_the_step():
    workspaces = [block(63 * MIB), block(2 * MIB)]
    first, _ = step(1 * MIB)
    first.workspaces.extend(workspaces)
    later, _ = step(1 * MIB)
    assert count(later, first) == 66 * MIB


def test_state_takes_a_piece_that_the_first_step_has_freed():
    """Of 24 MiB that are free then, 16 remain: too few for the 23 MiB of the next steps."""
    first, (activation,) = step(24 * MIB)
    state = block(8 * MIB)
    first.events.append((+1, state))
    later, (again,) = step(23 * MIB)
    kept = block(8 * MIB, resident="optimizer_state", earlier=state)
    later.resident.append(kept)
    count(later, first)
    assert (activation.size_bytes, kept.size_bytes, again.size_bytes) == tuple(
        size * MIB for size in (24, 8, 24)
    )


def test_the_cache_is_emptied_after_the_warm_up():
    """The 20 MiB would fit into the 21 that the first step has left, and get a segment instead."""
    first, _ = step(21 * MIB)
    later, (again,) = step(20 * MIB)
    count(later, first)
    assert again.size_bytes == 20 * MIB


def test_an_empty_block_has_no_piece():
    recording, (nothing,) = step(0)
    count(recording)
    assert nothing.size_bytes == 0


def test_a_block_that_outlives_the_step_is_freed_before_the_next():
    kept = block(63 * MIB)
    count(Recording(events=[(+1, kept)]))
    assert kept.size_bytes == 64 * MIB


def test_replaced_state_is_present_when_the_next_step_begins():
    """A resident block is freed in the step and replaced: the cache fits one more, not two."""
    before, after = block(30 * MIB, resident="optimizer_state"), block(30 * MIB)
    late = block(29 * MIB)
    events = [(+1, after), (-1, before), (+1, late), (-1, late)]
    count(Recording(events=events, resident=[before]))
    assert (before.size_bytes, after.size_bytes, late.size_bytes) == (30 * MIB, 30 * MIB, 30 * MIB)


@pytest.mark.slow
def test_an_expandable_segment_is_split_to_the_requested_size(workload):
    """One matrix of 1.9 MiB per layer: the tenth in a segment of 20 MiB gets the rest, 2.9 MiB.

    In an expandable segment it is split off.
    """
    wide = type(workload)(**{**workload.to_dict(), "width": 704, "heads": 2, "vocab_size": 256})
    peaks = {
        allocator: predict(
            PredictionRequest(
                workload=wide,
                config=TrainingConfig(allocator=allocator, micro_batch_size=wide.global_batch),
                device="cuda",
            )
        ).peak_memory_bytes
        for allocator in ("default", "expandable")
    }
    assert peaks["expandable"] < peaks["default"]


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
def test_the_real_allocator_returns_the_same_bytes(seed):
    # Otherwise tensors in reference cycles that earlier tests left behind may be freed by a
    # garbage collection in the middle of this test, and the counter falls without our doing.
    gc.collect()
    before, pool = torch.cuda.memory_allocated(), torch.cuda.MemPool()
    allocator, draw, held = CachingAllocator(), random.Random(seed), []
    for _ in range(300):
        if held and draw.random() < 0.45:
            allocator.free(held.pop(draw.randrange(len(held)))[1])
        else:
            size_bytes = draw.choice(
                (draw.randint(1, 4096), draw.randint(1, 4 * MIB), draw.randint(1, 90 * MIB))
            )
            with torch.cuda.use_mem_pool(pool):  # no pieces that earlier tests left partly used
                tensor = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
            held.append((tensor, allocator.allocate(round_up(size_bytes))))
            del tensor
        assert torch.cuda.memory_allocated() - before == sum(piece.size_bytes for _, piece in held)
