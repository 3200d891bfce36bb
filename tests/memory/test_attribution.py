"""Peak, holders and timeline of recordings written by hand."""

from autotune.memory.attribution import bytes_by_category, find_peak, largest_holders, make_timeline
from autotune.memory.recording import Block, Phase, Recording, Scope


def block(size_bytes, *, module="", operator="aten.mm", **fields):
    return Block(size_bytes=size_bytes, module=module, operator=operator, born=0, **fields)


def recording_of(events, *, resident=(), phases=()):
    """`events` are (+1 or -1, block); sets `born` and `died` of each block from them."""
    for number, (sign, block) in enumerate(events):
        if sign > 0:
            block.born = number
        else:
            block.died = number
    return Recording(events=list(events), resident=list(resident), phases=list(phases))


def weight(size_bytes=100):
    return block(size_bytes, module="head", operator="weight", resident="parameters")


def test_the_peak_is_the_most_that_is_alive_at_once():
    a, b, c = block(10), block(20), block(15)
    peak = find_peak(
        recording_of([(+1, a), (+1, b), (-1, b), (+1, c), (-1, a), (-1, c)], resident=[weight()])
    )
    assert peak.size_bytes == 130


def test_the_blocks_at_the_peak_add_up_to_it():
    a, b, c = block(10), block(20), block(15)
    peak = find_peak(
        recording_of([(+1, a), (-1, a), (+1, b), (+1, c), (-1, b)], resident=[weight()])
    )
    assert sum(block.size_bytes for block in peak.blocks) == peak.size_bytes


def test_the_block_that_completes_the_peak_is_known():
    a, b = block(10), block(20)
    assert find_peak(recording_of([(+1, a), (+1, b), (-1, a), (-1, b)])).last_block is b


def test_a_step_that_allocates_nothing_peaks_at_what_was_there():
    peak = find_peak(recording_of([], resident=[weight()]))
    assert (peak.size_bytes, peak.last_block, peak.phase) == (100, None, "between")


def test_the_phase_of_the_peak_is_the_one_that_was_running():
    a, b = block(10), block(20)
    phases = [
        Phase(name="forward", first_event=0, last_event=1),
        Phase(name="backward", first_event=1, last_event=4),
    ]
    assert (
        find_peak(recording_of([(+1, a), (+1, b), (-1, a), (-1, b)], phases=phases)).phase
        == "backward"
    )


def test_what_outlives_the_forward_pass_is_an_activation():
    scope = Scope(ended=1)
    kept = block(10, scope=scope, in_phase="forward")
    recording_of([(+1, kept), (+1, block(1)), (-1, kept)])
    assert kept.category == "activations"


def test_what_dies_within_the_forward_pass_is_a_temporary():
    scope = Scope(ended=5)
    passing = block(10, scope=scope, in_phase="forward")
    recording_of([(+1, passing), (-1, passing)])
    assert passing.category == "temporaries"


def test_a_gradient_is_one_whenever_it_was_born():
    assert block(10, scope=Scope(), in_phase="backward", is_gradient=True).category == "gradients"


def test_what_is_born_between_the_phases_is_an_input():
    assert block(10).category == "inputs"


def test_every_category_is_listed_also_without_bytes():
    assert bytes_by_category(())["gradients"] == 0


def test_the_same_module_in_every_block_of_the_model_is_one_holder():
    holders = largest_holders(
        tuple(block(10, module=f"blocks.{i}.attention", in_phase="forward") for i in range(3))
    )
    assert [(h.module, h.count, h.size_bytes) for h in holders] == [("blocks.*.attention", 3, 30)]


def test_holders_come_largest_first():
    holders = largest_holders(
        (block(1, operator="aten.add"), block(5), block(3, operator="aten.mul"))
    )
    assert [h.size_bytes for h in holders] == [5, 3, 1]


def test_a_shortened_timeline_contains_the_peak():
    blocks = [block(1) for _ in range(2000)]
    tall = block(50)
    events = (
        [(+1, block) for block in blocks]
        + [(+1, tall), (-1, tall)]
        + [(-1, block) for block in blocks]
    )
    recording = recording_of(events)
    peak = find_peak(recording)
    timeline = make_timeline(recording, peak)
    totals = [sum(sizes) for sizes in zip(*timeline.bytes_by_category.values(), strict=True)]
    assert (max(totals), len(totals) < 500) == (peak.size_bytes, True)
