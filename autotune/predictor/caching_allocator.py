"""Simulates, without a GPU, which blocks torch's CUDA caching allocator returns for a step.

The blocks of the allocator are called pieces here, to tell them from the blocks of a recording.
`max_memory_allocated` counts pieces, not requests. In the large pool (requests over 1 MiB) a piece
that is at most 1 MiB too large is used whole, and a request of 10 MiB or more gets a segment of the
next multiple of 2 MiB: a tensor of 63.3 MiB counts as 64. With expandable segments every piece is
split.

A free piece of one stream is not used for another. Assumes default settings otherwise. Source:
c10/cuda/CUDACachingAllocator.cpp, should_split, get_allocation_size, get_free_block and
alloc_found_block. `studies/peak_memory/` explains a published table with it.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from autotune.memory.recording import Block, Recording
from autotune.spec.workload import MEMORY_STEPS

MIB = 1024**2
SMALLEST_PIECE_BYTES = 512
"""kMinBlockSize; every request is rounded up to a multiple of it."""
LARGEST_SMALL_BYTES = MIB
"""kSmallSize: the largest request for the small pool, and the largest rest of a large piece that is
not split off."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
LEAST_SEPARATE_SEGMENT_BYTES = 10 * MIB
"""kMinLargeAlloc: a request of at least this size gets a separate segment, rounded up to 2 MiB."""


def round_up(size_bytes: int) -> int:
    """Returns the bytes of a request of `size_bytes` after rounding."""
    return _round_up_to(size_bytes, SMALLEST_PIECE_BYTES)


def count_pieces(
    first_step: Recording, recording: Recording, *, warmup_steps: int, empties_cache: bool = True
) -> int:
    """Sets the size of every block of a later step to that of its piece in the allocator.

    Returns the bytes of the pieces of workspaces. `first_step` creates the optimizer's state among
    the free pieces that the backward pass has left. As in a trial, the cache is emptied after
    `warmup_steps` steps, so that the next ones find the gaps between what stayed, and new segments;
    without `empties_cache` it is not, as in most loops.
    Sizes in the recordings are multiples of 512.
    """
    allocator = CachingAllocator()
    pieces: dict[int, Piece] = {}
    for block in first_step.resident:
        _allocate(allocator, pieces, block)
    workspace_bytes = _run_step(allocator, pieces, first_step)
    _continue(allocator, pieces, first_step=first_step, recording=recording)
    for _ in range(1, warmup_steps):
        workspace_bytes += _run_step(allocator, pieces, recording)
        _restore_start(allocator, pieces, recording)
    if empties_cache:
        allocator.empty_cache()
    sizes: dict[int, int] = {}
    for _ in range(MEMORY_STEPS):
        workspace_bytes += _run_step(allocator, pieces, recording, sizes)
        _restore_start(allocator, pieces, recording)
    allocated = [block for sign, block in recording.events if sign > 0]
    for block in [*recording.resident, *allocated]:
        block.size_bytes = sizes.get(id(block), block.size_bytes)
    return workspace_bytes


def _run_step(
    allocator: "CachingAllocator",
    pieces: dict[int, "Piece"],
    recording: Recording,
    sizes: dict[int, int] | None = None,
) -> int:
    """Allocates and frees what the step does; sets the sizes of its pieces in `sizes`.

    Returns the bytes of the pieces of workspaces, which are allocated only once.
    """
    workspace_bytes = 0
    if sizes is not None:
        sizes.update({key: piece.size_bytes for key, piece in pieces.items()})
    for number, (sign, block) in enumerate(recording.events):
        while recording.workspaces and recording.workspaces[0].born <= number:
            workspace = recording.workspaces.pop(0)
            piece = allocator.allocate(workspace.size_bytes, stream=workspace.stream)
            workspace_bytes += piece.size_bytes
        if sign < 0:
            _free(allocator, pieces, block)
            continue
        _allocate(allocator, pieces, block)
        if sizes is not None and block.size_bytes:
            sizes[id(block)] = pieces[id(block)].size_bytes
    return workspace_bytes


def _continue(
    allocator: "CachingAllocator",
    pieces: dict[int, "Piece"],
    *,
    first_step: Recording,
    recording: Recording,
) -> None:
    """Gives the pieces of what the first step left to the same memory in the next recording."""
    for block in recording.resident:
        if block.earlier is not None and id(block.earlier) in pieces:
            pieces[id(block)] = pieces.pop(id(block.earlier))
    for block in [*first_step.resident, *(block for _, block in first_step.events)]:
        _free(allocator, pieces, block)  # what does not last
    for block in recording.resident:
        if id(block) not in pieces:
            _allocate(allocator, pieces, block)


def _restore_start(
    allocator: "CachingAllocator", pieces: dict[int, "Piece"], recording: Recording
) -> None:
    """Frees what the step leaves behind, and allocates again the resident blocks that it freed.

    A step frees a resident block when it replaces it, for example optimizer state that is created
    anew in each step.
    """
    for sign, block in recording.events:
        if sign > 0:
            _free(allocator, pieces, block)
    for block in recording.resident:
        if id(block) not in pieces:
            _allocate(allocator, pieces, block)


def _allocate(allocator: "CachingAllocator", pieces: dict[int, "Piece"], block: Block) -> None:
    if block.size_bytes:
        pieces[id(block)] = allocator.allocate(block.size_bytes, stream=block.stream)


def _free(allocator: "CachingAllocator", pieces: dict[int, "Piece"], block: Block) -> None:
    """Frees the piece of `block`, if it has one: an earlier step may have freed it."""
    piece = pieces.pop(id(block), None)
    if piece is not None:
        allocator.free(piece)


class Pool(NamedTuple):
    """What free pieces are kept for: large or small requests of one stream."""

    stream: int
    is_small: bool


@dataclass(slots=True, eq=False)
class Piece:
    """A part of a segment, in use or free, with its neighbours in the segment."""

    size_bytes: int
    address: int
    pool: Pool
    before: "Piece | None" = None
    after: "Piece | None" = None
    is_free: bool = False

    def sort_key(self) -> tuple[int, int]:
        return self.size_bytes, self.address


@dataclass
class CachingAllocator:
    """Simulates which piece each request gets. Sizes are multiples of 512 bytes."""

    _next_address: int = 0
    _free_pieces: dict[Pool, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    """The free pieces of each pool, sorted by size."""

    def allocate(self, size_bytes: int, *, stream: int = 0) -> Piece:
        is_small = size_bytes <= LARGEST_SMALL_BYTES
        piece = self._find(size_bytes, Pool(stream=stream, is_small=is_small))
        rest_bytes = piece.size_bytes - size_bytes
        if is_small:
            is_split = rest_bytes >= SMALLEST_PIECE_BYTES
        else:
            is_split = rest_bytes > LARGEST_SMALL_BYTES
        if is_split:
            self._split(piece, size_bytes)
        return piece

    def empty_cache(self) -> None:
        """Returns the segments to the driver that are free as a whole."""
        for pool, pieces in self._free_pieces.items():
            self._free_pieces[pool] = [
                piece for piece in pieces if piece.before is not None or piece.after is not None
            ]

    def free(self, piece: Piece) -> None:
        """Frees the piece and merges it with free neighbours."""
        piece.is_free = True
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and neighbour.is_free:
                free = self._free_pieces[neighbour.pool]
                free.pop(bisect_left(free, neighbour.sort_key(), key=Piece.sort_key))
                self._merge(piece, neighbour)
        insort(self._free_pieces[piece.pool], piece, key=Piece.sort_key)

    def _find(self, size_bytes: int, pool: Pool) -> Piece:
        """Returns the smallest free piece that is large enough, otherwise a new segment."""
        free = self._free_pieces[pool]
        index = bisect_left(free, (size_bytes, 0), key=Piece.sort_key)
        if index < len(free):
            piece = free.pop(index)
            piece.is_free = False
            return piece
        segment_bytes = _segment_bytes(size_bytes)
        piece = Piece(segment_bytes, self._next_address, pool)
        self._next_address += segment_bytes
        return piece

    def _split(self, piece: Piece, size_bytes: int) -> None:
        rest = Piece(
            size_bytes=piece.size_bytes - size_bytes,
            address=piece.address + size_bytes,
            pool=piece.pool,
            before=piece,
            after=piece.after,
            is_free=True,
        )
        if piece.after is not None:
            piece.after.before = rest
        piece.size_bytes, piece.after = size_bytes, rest
        insort(self._free_pieces[piece.pool], rest, key=Piece.sort_key)

    @staticmethod
    def _merge(piece: Piece, neighbour: Piece) -> None:
        if neighbour is piece.before:
            piece.address, piece.before = neighbour.address, neighbour.before
            if piece.before is not None:
                piece.before.after = piece
        else:
            piece.after = neighbour.after
            if piece.after is not None:
                piece.after.before = piece
        piece.size_bytes += neighbour.size_bytes


def _segment_bytes(size_bytes: int) -> int:
    if size_bytes <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < LEAST_SEPARATE_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return _round_up_to(size_bytes, SMALL_SEGMENT_BYTES)


def _round_up_to(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes
