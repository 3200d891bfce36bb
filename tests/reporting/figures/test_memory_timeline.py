"""The figure of one step's memory, from predictions written by hand."""

import dataclasses

from autotune.reporting.figures import memory_timeline
from autotune.spec.prediction import CATEGORIES, Holder, Prediction, Timeline

MIB = 1024**2


def prediction(*, workspace=0):
    sizes = dict.fromkeys(CATEGORIES, 0) | {"parameters": 2 * MIB, "activations": 6 * MIB}
    layers = dict.fromkeys(CATEGORIES, (0, 0, 0))
    layers |= {"parameters": (2 * MIB,) * 3, "activations": (0, 6 * MIB, MIB)}
    return Prediction(
        device="cpu",
        fake_device="cpu",
        parameters=1000,
        peak_memory_bytes=8 * MIB,
        upper_bound_bytes=9 * MIB,
        lower_bound_bytes=7 * MIB,
        phase="forward",
        module="blocks.0",
        operator="aten.mm",
        bytes_by_category=sizes | {"workspace": workspace},
        holders=(
            Holder(
                category="activations",
                module="<b>",
                operator="aten.mm",
                count=3,
                size_bytes=6 * MIB,
            ),
        ),
        timeline=Timeline(
            events=(-1, 4, 9),
            bytes_by_category=layers,
            phases=(("forward", 0, 5), ("backward", 5, 10)),
            peak_event=4,
        ),
    )


def figure(**fields):
    return memory_timeline.compute(
        prediction(**fields), title="t", about="a", answer="b", cap_bytes=10 * MIB
    )


def test_only_categories_with_bytes_are_drawn():
    assert [category for category, _ in figure().layers] == ["parameters", "activations"]


def test_sizes_are_in_the_unit_that_suits_the_peak():
    drawn = figure()
    assert (drawn.unit.name, drawn.peak, dict(drawn.layers)["activations"]) == (
        "MiB",
        8.0,
        (0.0, 6.0, 1.0),
    )


def test_workspaces_stand_under_the_whole_step():
    assert dict(figure(workspace=MIB).layers)["workspace"] == (1.0, 1.0, 1.0)


def test_a_timeline_from_before_a_category_existed_is_drawn_without_it():
    made = prediction()
    older = {name: s for name, s in made.timeline.bytes_by_category.items() if name != "gradients"}
    timeline = dataclasses.replace(made.timeline, bytes_by_category=older)
    drawn = memory_timeline.compute(
        dataclasses.replace(made, timeline=timeline), title="t", about="a", answer="b"
    )
    assert [category for category, _ in drawn.layers] == ["parameters", "activations"]


def test_the_drawing_stacks_one_area_a_category():
    drawing = memory_timeline.draw(figure())
    assert [(trace.name, trace.stackgroup) for trace in drawing.data] == [
        ("parameters", "memory"),
        ("activations", "memory"),
    ]


def test_hover_labels_have_units_that_suit_each_size():
    drawing = memory_timeline.draw(figure(workspace=4))
    assert {trace.hovertemplate for trace in drawing.data} == {"%{text}"}
    assert any(text == "4 B" for trace in drawing.data for text in trace.text)


def test_the_peak_is_marked_where_it_is():
    notes = memory_timeline.draw(figure()).layout.annotations
    assert any("peak 8 MiB" in note.text and note.x == 4 for note in notes)


def test_the_cap_has_its_unit():
    assert any(
        note.text == "cap 10 MiB" for note in memory_timeline.draw(figure()).layout.annotations
    )


def test_the_page_opens_offline_and_escapes_names():
    page = memory_timeline.page(figure())
    assert "<b>" not in page.split("Largest at the peak")[1]
    assert 'src="http' not in page
