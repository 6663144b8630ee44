"""Stop strings, which the client looks for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class StopStrings:
    """Texts that end an answer (rollout.stop, and the request's own). Engines work without a tokenizer and cannot look
    for them, so the client does, in the tokens that have arrived."""

    def __init__(self, texts: Sequence[str] = (), decode: Callable[[Sequence[int]], str] = str) -> None:
        """`decode` returns the text of tokens, special tokens included."""
        self.texts = texts
        self._decode = decode
        self._most = max((len(text.encode()) for text in texts), default=0)  # tokens that a text may take

    def and_also(self, texts: Sequence[str]) -> StopStrings:
        """Return these texts with further ones."""
        return StopStrings([*self.texts, *texts], self._decode)

    def end(self, token_ids: Sequence[int], new: int) -> int | None:
        """Return the number of tokens up to the end of the first of these texts; None if there is none. Only a text
        whose last token is among the last `new` ones is found."""
        if not new:
            return None
        seen = len(token_ids) - new
        start = max(0, seen - self._most)
        if not self._found(token_ids[start:]):
            return None
        return next(end for end in range(seen + 1, len(token_ids) + 1) if self._found(token_ids[start:end]))

    def _found(self, token_ids: Sequence[int]) -> bool:
        text = self._decode(token_ids)
        return any(one in text for one in self.texts)
