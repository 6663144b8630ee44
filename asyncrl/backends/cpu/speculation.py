"""Stand-ins in torch and Python for the compiled parts of SGLang's speculative decoding with n-grams, under SGLang's
names. The shim (sglang_shim.py) installs them.

SGLang's own path on a CPU accepts drafts greedily, whatever the temperature is. Here a token is drawn at every node of
the tree of drafts from the target's distribution there, and the drafts that equal the drawn tokens are accepted
(SpecInfer, arXiv 2305.09781, without a draft distribution). Each token of an answer is thus drawn from the target's
distribution after the tokens before it, as without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

LONGEST = 4
"""Number of tokens at the end of a context by which continuations are found."""


class NgramCorpus:
    """The tokens that have followed each sequence of up to LONGEST tokens, the latest first. SGLang's trie of n-grams
    is a C++ program that is compiled when an engine starts."""

    def __init__(self, capacity: int, max_bfs_breadth: int, draft_token_num: int, **_: Any) -> None:
        self._capacity, self._breadth, self._size = capacity, max_bfs_breadth, draft_token_num
        self._followed: dict[tuple[int, ...], list[int]] = {}

    def insert(self, batch_tokens: Sequence[Sequence[int]]) -> None:
        """Learn from the ends of sequences."""
        for tokens in batch_tokens:
            for end in range(1, len(tokens)):
                for start in range(max(0, end - LONGEST), end):
                    known = self._followed.setdefault(tuple(tokens[start:end]), [])
                    known[:] = [tokens[end], *(token for token in known if token != tokens[end])][: self._breadth]
        if len(self._followed) > self._capacity:
            self._followed.clear()

    def match_stateful(
        self, state_ids: Sequence[int], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the trees of drafts after these contexts: their tokens, int64 [requests * size], whose first is the
        context's last, and which nodes are on the way to each, int64 [requests * size * size]."""
        trees = [self._tree(tokens) for tokens in batch_tokens]
        tokens, ways = zip(*trees, strict=True)
        return np.array(tokens, dtype=np.int64).reshape(-1), np.array(ways, dtype=np.int64).reshape(-1)

    def _tree(self, context: Sequence[int]) -> tuple[list[int], np.ndarray]:
        tokens, parents = [context[-1]], [0]
        ends = [tuple(context[-LONGEST:])]
        for node in range(self._size):
            if node < len(ends):
                for token in self._after(ends[node])[: self._size - len(tokens)]:
                    tokens.append(token)
                    parents.append(node)
                    ends.append((*ends[node], token)[-LONGEST:])
        missing = self._size - len(tokens)  # filled, as SGLang does it, with drafts of token 0 after the context
        ways = np.eye(self._size, dtype=bool)
        for node, parent in enumerate([*parents, *[0] * missing]):
            ways[node] |= ways[parent]
        return [*tokens, *[0] * missing], ways

    def _after(self, end: tuple[int, ...]) -> list[int]:
        """Return the tokens that followed the longest known end of a context."""
        found = (self._followed.get(end[start:]) for start in range(len(end)))
        return next((tokens for tokens in found if tokens), [])

    def synchronize(self) -> None:
        """Return at once: `insert` has finished."""

    def erase_states(self, state_ids: Sequence[int]) -> None:
        """Return at once: there are no states of requests."""

    def reset(self) -> None:
        """Forget everything."""
        self._followed.clear()


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor, verified_seq_len: Tensor, positions: Tensor, index: Tensor, child: Tensor, sibling: Tensor,
    batch_size: int, draft_token_num: int,
) -> None:  # fmt: skip
    """Fill positions, row, first child and next sibling of each node of the trees of drafts."""
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    ways = tree_mask[: batch_size * draft_token_num**2].view(batch_size, draft_token_num, draft_token_num)
    positions.copy_((verified_seq_len[:, None] + ways.sum(-1) - 1).view(-1))
    index.copy_(torch.arange(batch_size * draft_token_num).view(batch_size, -1))
    next_token, next_sibling = _derive_tree_links(ways.numpy(), batch_size, draft_token_num)
    child.copy_(next_token)
    sibling.copy_(next_sibling)


def sample_uno_tree_target_tokens(
    *, next_token_logits: Tensor, sampling_info: Any, batch_size: int, verify_width: int, max_top_k: int | None
) -> Tensor:
    """Draw a token at every node from the target's distribution there -> [requests, nodes]."""
    from sglang.srt.layers import sampler

    def of_nodes(values: Tensor) -> Tensor:
        return values.repeat_interleave(verify_width, dim=0)

    info = sampling_info
    probabilities = torch.softmax(next_token_logits.float() / of_nodes(info.temperatures), -1)
    if info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling:
        limits = (of_nodes(values) for values in (info.top_ks, info.top_ps, info.min_ps))
        drawn = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probabilities, *limits, info.need_min_p_sampling, None, None
        )
    else:
        drawn = sampler.sampling_from_probs_torch(probabilities)
    return drawn.view(batch_size, verify_width)


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Accept the drafts that equal the target's tokens, from the root on. Fill the target's token at each accepted
    node, the rows of these nodes, and their number without the root."""
    for request, (drafts, targets) in enumerate(zip(candidates.tolist(), target_predict.tolist(), strict=True)):
        child, sibling = retrive_next_token[request].tolist(), retrive_next_sibling[request].tolist()
        accepted, draft = [0], child[0]
        while draft >= 0:
            if drafts[draft] == targets[accepted[-1]]:
                accepted.append(draft)
                draft = child[draft]
            else:
                draft = sibling[draft]
        rows = retrive_index[request, accepted]
        predicts[rows] = target_predict[request, accepted].to(predicts.dtype)
        accept_index[request, : len(accepted)] = rows.to(accept_index.dtype)
        accept_token_num[request] = len(accepted) - 1


def _slots(
    table: Tensor, requests: Tensor, start: Tensor, end: Tensor, flat: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each request's cache slots from `start` to `end`, and their places in a flat tensor, as views."""
    done = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        yield table[request, first:last], flat[done : done + last - first]
        done += last - first


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, start: Tensor, end: Tensor, flat: Tensor, _: int
) -> None:
    """Write new cache slots into the table of requests."""
    for slots, new in _slots(table, requests, start, end, flat):
        slots.copy_(new)


def assign_extend_cache_locs_cpu(
    requests: Tensor, table: Tensor, start: Tensor, end: Tensor, flat: Tensor, _: int
) -> None:
    """Read cache slots from the table of requests."""
    for slots, out in _slots(table, requests, start, end, flat):
        out.copy_(slots)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """List the cache slots of all accepted nodes."""
    rows = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(rows)] = out_cache_loc[rows]


def copy_all_layer_kv_cache_cpu(*_: Any) -> None:
    """Return at once: SGLang calls this when it starts, and then moves entries of the cache with torch
    (SGLANG_NATIVE_MOVE_KV_CACHE)."""
