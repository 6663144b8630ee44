"""On-policy distillation: the policy's own tokens, each judged by a teacher (Lu et al., "On-Policy Distillation",
Thinking Machines 2025; GKD, arXiv 2306.13649, with reverse KL and samples of the student alone).

With x_t = l_t - l_teacher,t at the tokens that the policy wrote, E_pi[x] is KL(pi || teacher) of one position, and its
gradient is E_pi[x grad l] (grad l has mean zero, so the gradient of x itself adds nothing). Two forms of it:

    advantage    A_t <- A_t - c sum_(k >= t) discount^(k-t) sg(x_k)       the policy loss weighs, corrects and clips it
    loss         + c w_t k3(x_t), w = pi / mu, gradient through both      algo/kl.py, `ratio`: gradient w x grad l

At discount 0, without clipping and with an uncapped correction, they are one gradient (tests/algo/test_distill.py). A
discount above 0 lets a token answer for where it leads, at the price of variance.

l is that of the policy in training, at every optimizer step, and not the engine's mu, which other implementations take:
x measured with mu is that of the policy that wrote the token, up to max_staleness versions ago, and weighed with
pi / mu it is the gradient of no KL. The training pass has l, so it costs nothing; and a teacher that equals the policy
gives no advantage, but for the gap between engine and trainer.

Temperature: engines tell the log-probabilities of given tokens at temperature 1 (engine/scorer.py), and tokens are
drawn at T. With logits z, log softmax(z / T) = log softmax(z) / T + what is the same for all tokens of a position, so

    l_T - l_teacher,T = (l_1 - l_teacher,1) / T + a baseline

and E_pi[baseline grad l] = 0: with both sides at temperature 1 and divided by T the gradient at T is the same in
expectation, and a teacher that equals the policy still gives zero (`tempered`). The value is no KL then, and a
baseline that depends on later positions is none: kl/teacher, the discount and the KL's reference need T = 1.

Without the stop-gradient the term vanishes: the teacher's part has no gradient, and l's own has mean zero.
"""

from __future__ import annotations

from torch import Tensor

from asyncrl.algo.kl import ratio
from asyncrl.algo.table import TokenTable, known
from asyncrl.algo.turns import accumulated, chain


def tempered(start: Tensor, plain: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """[N] what stands for the teacher's log-probabilities at `temperature`, up to a baseline: `start` is the policy's l
    there, `plain` its l at temperature 1, as `teacher` is."""
    return start - (plain - teacher) / temperature


def distilled_advantages(logprobs: Tensor, rows: TokenTable, coefficient: float, discount: float) -> Tensor:
    """[T] the rows' advantages less what their distance to the teacher costs, without gradient; `logprobs` [T] are l.

    Tokens that the policy did not write are in no row: the discounted sum goes past them without decay. It ends with
    the sample, not the episode, whose other samples may stand in other micro-batches; at discount 0 that is the same.
    Rows of one sample stand together, in order, and are all there.
    """
    differences = logprobs.detach() - known(rows.teacher)
    if discount:
        differences = accumulated(differences, chain(rows.sample), discount)
    return known(rows.advantages) - coefficient * differences


def distillation_loss(logprobs: Tensor, rows: TokenTable, coefficient: float) -> Tensor:
    """[T] to be added to the policy's loss; `logprobs` [T] carry the gradient."""
    return coefficient * ratio(logprobs, known(rows.teacher), rows.behaviour)
