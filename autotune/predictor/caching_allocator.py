"""The pieces of memory that torch's CUDA caching allocator hands out for a recorded step, worked out without a GPU.

`max_memory_allocated` counts pieces, not requests. From the large pool (requests over 1 MiB) a
piece that is at most 1 MiB too large is handed out whole, and a request of 10 MiB or more gets a
segment of the next multiple of 2 MiB: a tensor of 63.3 MiB counts as 64. With expandable segments
every piece is split.

Default settings otherwise, one stream. Source: c10/cuda/CUDACachingAllocator.cpp, should_split,
get_allocation_size, get_free_block and alloc_found_block. What it explains of a published table:
`studies/peak_memory/`.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from autotune.memory.recording import Block, Recording

MIB = 1024**2
SMALLEST_PIECE_BYTES = 512
"""kMinBlockSize; every request is rounded up to a multiple of it."""
LARGEST_SMALL_BYTES = MIB
"""kSmallSize: of the small pool, and what is left over of a large piece without being split off."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
LEAST_OWN_SEGMENT_BYTES = 10 * MIB
"""kMinLargeAlloc: from here on a request gets a segment of its own size, in multiples of 2 MiB."""
STEPS = 3
"""From the second on a step finds the cache as the one before it left it."""


def round_up(size_bytes: int) -> int:
    """The bytes that a request of `size_bytes` becomes."""
    return _up_to(size_bytes, SMALLEST_PIECE_BYTES)


def count_pieces(recording: Recording, *, workspaces: Iterable[int]) -> int:
    """Makes every block of a steady step as large as the piece it gets; returns the bytes of the workspaces' pieces.

    `recording`: of one step, its sizes multiples of 512. `workspaces`: sizes of what was allocated
    before and stays.
    """
    allocator, pieces = CachingAllocator(), dict[int, Piece]()
    kept = [allocator.allocate(size_bytes) for size_bytes in workspaces]
    for block in recording.resident:
        _allocate(allocator, pieces, block)
    sizes = {key: piece.size_bytes for key, piece in pieces.items()}
    for _ in range(STEPS):
        for sign, block in recording.events:
            if sign > 0:
                _allocate(allocator, pieces, block)
                sizes[id(block)] = pieces[id(block)].size_bytes if block.size_bytes else 0
            else:
                _free(allocator, pieces, block)
        _begin_again(allocator, pieces, recording)
    for block in (*recording.resident, *(block for sign, block in recording.events if sign > 0)):
        block.size_bytes = sizes.get(id(block), block.size_bytes)
    return sum(piece.size_bytes for piece in kept)


def _begin_again(
    allocator: "CachingAllocator", pieces: dict[int, "Piece"], recording: Recording
) -> None:
    """What the step leaves behind goes; what it took the place of, as state that is made anew, is there again."""
    for sign, block in recording.events:
        if sign > 0:
            _free(allocator, pieces, block)
    for block in recording.resident:
        if id(block) not in pieces:
            _allocate(allocator, pieces, block)


def _allocate(allocator: "CachingAllocator", pieces: dict[int, "Piece"], block: Block) -> None:
    if block.size_bytes:
        pieces[id(block)] = allocator.allocate(block.size_bytes)


def _free(allocator: "CachingAllocator", pieces: dict[int, "Piece"], block: Block) -> None:
    """Nothing where it is not held, as what a step before has freed."""
    piece = pieces.pop(id(block), None)
    if piece is not None:
        allocator.free(piece)


@dataclass(slots=True, eq=False)
class Piece:
    """A stretch of a segment, in use or free, and its neighbours there."""

    size_bytes: int
    address: int
    is_small: bool
    before: "Piece | None" = None
    after: "Piece | None" = None
    is_free: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.size_bytes, self.address


@dataclass
class CachingAllocator:
    """Which piece each request gets. Sizes are multiples of 512."""

    _next_address: int = 0
    _free_pieces: dict[bool, list[Piece]] = field(default_factory=lambda: {True: [], False: []})
    """By whether they are of the small pool; smallest first."""

    def allocate(self, size_bytes: int) -> Piece:
        is_small = size_bytes <= LARGEST_SMALL_BYTES
        piece = self._take(size_bytes, is_small=is_small)
        rest_bytes = piece.size_bytes - size_bytes
        if rest_bytes >= SMALLEST_PIECE_BYTES if is_small else rest_bytes > LARGEST_SMALL_BYTES:
            self._split(piece, size_bytes)
        return piece

    def free(self, piece: Piece) -> None:
        """Joins it with free neighbours."""
        piece.is_free = True
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and neighbour.is_free:
                self._take_out(neighbour)
                self._join(piece, neighbour)
        insort(self._free_pieces[piece.is_small], piece, key=lambda one: one.key)

    def _take(self, size_bytes: int, *, is_small: bool) -> Piece:
        """The smallest free piece that is large enough, else a new segment."""
        free = self._free_pieces[is_small]
        index = bisect_left(free, (size_bytes, 0), key=lambda one: one.key)
        if index < len(free):
            piece = free.pop(index)
            piece.is_free = False
            return piece
        segment_bytes = _segment_bytes(size_bytes)
        piece = Piece(segment_bytes, self._next_address, is_small)
        self._next_address += segment_bytes
        return piece

    def _take_out(self, piece: Piece) -> None:
        free = self._free_pieces[piece.is_small]
        free.pop(bisect_left(free, piece.key, key=lambda one: one.key))

    def _split(self, piece: Piece, size_bytes: int) -> None:
        rest = Piece(
            size_bytes=piece.size_bytes - size_bytes,
            address=piece.address + size_bytes,
            is_small=piece.is_small,
            before=piece,
            after=piece.after,
            is_free=True,
        )
        if piece.after is not None:
            piece.after.before = rest
        piece.size_bytes, piece.after = size_bytes, rest
        insort(self._free_pieces[piece.is_small], rest, key=lambda one: one.key)

    @staticmethod
    def _join(piece: Piece, neighbour: Piece) -> None:
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
    return (
        LARGE_SEGMENT_BYTES
        if size_bytes < LEAST_OWN_SEGMENT_BYTES
        else _up_to(size_bytes, SMALL_SEGMENT_BYTES)
    )


def _up_to(size_bytes: int, unit_bytes: int) -> int:
    return -(-size_bytes // unit_bytes) * unit_bytes
