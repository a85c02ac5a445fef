"""Stop strings across tokens, characters across tokens: nothing shown is taken back."""

from hypothesis import given
from hypothesis import strategies as st

from harness.serving.answers import AnswerText


class Letters:
    """A tokenizer whose tokens are strings."""

    def decode(self, tokens, **_):
        return "".join(tokens)


@given(
    st.lists(st.text("abc", max_size=3), max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(tokens, stops):
    text, shown = AnswerText(Letters(), stops), ""
    for token in tokens:
        shown += text.add(token)
        if text.stopped:
            break
    if not text.stopped:
        shown += text.rest()
    # the first place at which a stop string is whole: a shorter one may hide in a longer one
    whole, seen = "".join(tokens), ""
    for token in tokens:
        seen += token
        found = [seen.find(stop) for stop in stops if stop in seen]
        if found:
            whole = seen[: min(found)]
            break
    assert shown == whole and text.stopped == any(stop in "".join(tokens) for stop in stops)


def test_a_character_of_two_tokens_comes_whole(tiny_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = AnswerText(tokenizer, ["é"])
    pieces = [text.add(token) for token in tokenizer("aßbé")["input_ids"]]
    assert "".join(pieces) == "aßb" and text.stopped and pieces[1] == ""
