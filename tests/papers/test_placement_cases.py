"""Placements worked out by hand, each of which a wrong kernel once missed or would miss."""

from dataclasses import replace

from reference.placement import best_published

from phaze_fast.papers import LayerTable, PipelineProblem, PublishedProblem, place


def test_narrow_ends_make_room_for_a_wide_middle():
    table = LayerTable(
        names="abcd",
        forward_s=[1.0] * 4,
        backward_s=[1.0] * 4,
        resident_bytes=[1.0] * 4,
        wide=[0, 1, 1, 0],
    )
    found = place(PublishedProblem({4: table}, 6, memory_bytes=2.0, micro_batches=1))
    assert (found.time_s, found.stages) == (12.0, ((0,), (1, 2), (3,)))


def test_what_fits_exactly_fits():
    table = LayerTable(names="abc", forward_s=[1.0] * 3, backward_s=[1.0] * 3)
    table = replace(table, resident_bytes=[0.3, 0.1, 0.2])
    found = place(PublishedProblem({1: table}, 3, 0.1 + 0.2, 1, stages=2))
    assert found.stages == ((0,), (1, 2))


def test_two_edges_from_one_layer_are_sent_once():
    times = {"names": "ab", "forward_s": [1.0] * 2, "backward_s": [1.0] * 2}
    one = LayerTable(**times, edges=[(0, 1)], edge_s=[1.0])
    two = LayerTable(**times, edges=[(0, 1), (0, 1)], edge_s=[1.0, 1.0])
    once, twice = (place(PipelineProblem(table, 1.0, 4, stages=(2, 2))) for table in (one, two))
    assert once.time_s == twice.time_s


def test_more_stages_than_layers_do_not_fit():
    table = LayerTable(names="ab", forward_s=[1.0] * 2, backward_s=[1.0] * 2)
    assert place(PipelineProblem(table, 1.0, 4, stages=(3, 9))).status == "infeasible"


def test_a_layer_that_is_slow_backward_alone_may_be_the_first_stage():
    # Found by search: its work with the forward pass twice is less than that of lighter sets.
    table = LayerTable(
        names="abcd", forward_s=[2] * 4, backward_s=[0, 0, 3, 0], wide=[0, 0, 1, 0], edges=()
    )
    problem = PublishedProblem({2: table}, 3, memory_bytes=1, micro_batches=2, recompute=True)
    assert best_published(problem)[0] == 21
    assert place(problem).time_s == 21
