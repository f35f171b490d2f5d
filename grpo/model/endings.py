"""Which token ends an answer.

A model's files declare its end tokens, and its chat template shows one: the control token that it
writes after an assistant's turn. The two may differ. Base models with a chat template declare the
end of a document, and the GGUF reader of `transformers` takes the first token of a turn for the
last one. The template is right: the model was trained on it.
"""

from grpo.model.encoding import Tokenizer, one_of

QUESTION = "Which?"
ANSWER = "This"  # one plain word, which no template changes


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the token that the chat template writes after an assistant's answer.

    It is a token that was added to the vocabulary, "special" or not. Returns None if there is no
    template, if it takes no assistant's turn, or if plain text follows the answer.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    if not tokenizer.chat_template or not added:
        return None

    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # the template may raise anything
        return None

    _, answer, rest = text.rpartition(ANSWER)
    found = one_of(added).match(rest.lstrip()) if answer else None
    return tokenizer.convert_tokens_to_ids(found[0]) if found else None


def name_of(tokenizer: Tokenizer, token: int | None) -> str:
    """Return a token as messages show it, e.g. "<|im_end|>"."""
    return "no token" if token is None else str(tokenizer.convert_ids_to_tokens(token))
