"""W3C trace contexts as the mesh carries them: what is broken is left out, children keep the caller's state."""

import pytest

from meshkit.traceparent import context_of, is_sampled, new_traceparent, state_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "state, kept",
    [
        ("vendor=00f067aa0ba902b7", "vendor=00f067aa0ba902b7"),
        (" a=1 , b@t=x y ,", "a=1,b@t=x y"),
        ("", ""),
        ("no-value", ""),
        ("A=1", ""),
        ("a=b=c", ""),
        (",".join(f"k{n}=1" for n in range(33)), ""),
        ("a=" + "x" * 600, ""),
    ],
)
def test_a_sound_state_is_kept_and_another_left_out(state, kept):
    context = context_of(PARENT, state)
    assert state_of(context) == kept and context.split(" ")[0] == PARENT and is_sampled(context)


def test_without_a_sound_traceparent_there_is_no_context():
    assert context_of("00-abc-01", "a=1") == "" and context_of("", "a=1") == ""


def test_a_child_has_the_state_and_a_span_of_its_own():
    child = new_traceparent(context_of(PARENT, "a=x-y"))
    assert state_of(child) == "a=x-y" and child.split("-")[1] == PARENT.split("-")[1]
    assert child.split(" ")[0] != PARENT and is_sampled(child)
    assert state_of(new_traceparent()) == ""
