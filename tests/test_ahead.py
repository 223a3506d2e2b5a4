"""Parts of a generation made ahead: who stops early keeps caches, and no state of another text."""

import pytest

from tp.ahead import Ahead


def parts():
    """Three parts; their states say after how many of them they stand."""
    for number in range(1, 4):
        yield [number], {"after": number}


@pytest.mark.parametrize("ahead", [True, False])
def test_all_parts_come_in_order_and_leave_the_last_states(ahead):
    made = Ahead(parts(), ahead=ahead)
    assert list(made) == [[1], [2], [3]]
    assert made.finish() == {"after": 3}


def test_who_stops_early_has_the_states_of_the_part_made_ahead():
    made = Ahead(parts(), ahead=True)
    assert next(iter(made)) == [1]
    assert made.finish() == {"after": 2}


def test_without_going_ahead_states_stand_where_the_tokens_do():
    made = Ahead(parts(), ahead=False)
    assert next(iter(made)) == [1]
    assert made.finish() == {"after": 1}


@pytest.mark.parametrize(("ahead", "left"), [(True, {"after": 1}), (False, None)])
def test_a_part_that_was_interrupted_before_it_was_handed_out(monkeypatch, ahead, left):
    made = Ahead(parts(), ahead=ahead)
    ask = made._ask

    def interrupted():
        ask().result()  # the part is made, and the wait for it never returns
        raise KeyboardInterrupt

    monkeypatch.setattr(made, "_ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(made))
    assert made.finish() == left


@pytest.mark.parametrize("ahead", [True, False])
def test_an_interrupt_before_a_part_is_known_of_leaves_no_states(monkeypatch, ahead):
    """The part may have been given the states already."""
    made = Ahead(parts(), ahead=ahead)
    made._states = {"after": 0}

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(made._thread, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(made))
    assert made.finish() is None


def test_a_generation_that_fails_leaves_no_states():
    def failing():
        yield [1], {"after": 1}
        raise ValueError("lost")

    made = Ahead(failing(), ahead=False)
    with pytest.raises(ValueError, match="lost"):
        list(made)
    made.finish()
