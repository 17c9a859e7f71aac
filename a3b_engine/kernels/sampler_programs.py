"""Device code of the sampler: scores, short list, choice and book-keeping. `sampler.DeviceSampler` launches it."""

import triton
import triton.language as tl

from ..draw import LOG2_E, POWERS
from .rows import let_next_start, wait_for_inputs

LANES = tl.constexpr(128)  # scores that share a maximum
ROWS = tl.constexpr(64)  # rows of LANES scores looked at together; the largest top_k of `choose`
LISTED = tl.constexpr(256)  # candidates that are ranked against each other at once
FORBIDDEN = tl.constexpr(-2139095041)  # the key of -inf
ENDLESS = tl.constexpr(2139095040)  # the key of +inf, which stands for NaN too
_LOG2_E = tl.constexpr(LOG2_E)
_POWERS = tl.constexpr(POWERS)


@triton.jit
def _mirrored(bits):
    """Bits of a float32 <-> an int32 that orders as the float does. The same both ways."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _to_score(key):
    return _mirrored(key).to(tl.float32, bitcast=True)


@triton.jit
def score(
    logits, bitmask, counts, prompt, floats, keys, maxima, tops, sums, real,
    LOGPROB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Keys of BLOCK scores, the maximum of every LANES of them and of all. The rows are dealt out like cards: neighbours
    among the ids score alike, and a short list is shortest where the best tokens are spread over the programs."""
    let_next_start(PDL)
    temperature, repetition = tl.load(floats), tl.load(floats + 1)  # set from the host, so there is nothing to wait for
    frequency, presence = tl.load(floats + 2), tl.load(floats + 3)
    wait_for_inputs(PDL)
    block = tl.program_id(0)
    rows = tl.arange(0, BLOCK // LANES) * tl.num_programs(0) + block
    ids = rows[:, None] * LANES + tl.arange(0, LANES)[None, :]
    live = ids < real
    x = tl.load(logits + ids, mask=live, other=0.0).to(tl.float32)
    word = tl.load(bitmask + (ids >> 5), mask=live, other=0)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        used = tl.load(counts + ids, mask=live, other=0)
        seen = (used > 0) | (tl.load(prompt + ids, mask=live, other=0) != 0)
        x = tl.where(seen, tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition), x)
        x = x - used.to(tl.float32) * frequency
        x = x - tl.where(used > 0, presence, 0.0)
    x = tl.div_rn(x, temperature)
    x = tl.where(x != x, float("inf"), tl.where(x == 0.0, 0.0, x))  # NaN is reported like inf; -0 is 0
    x = tl.where(live & (((word >> (ids & 31)) & 1) != 0), x, -float("inf"))
    key = _mirrored(x.to(tl.int32, bitcast=True))
    tl.store(keys + ids, key)
    row_tops = tl.max(key, 1)
    tl.store(maxima + rows, row_tops)
    top = tl.max(row_tops, 0)
    tl.store(tops + block, top)
    if LOGPROB:
        best = _to_score(top)
        total = tl.sum(tl.sum(tl.exp(x - tl.where(top == FORBIDDEN, 0.0, best)), 1), 0)
        tl.store(sums + block, total)


@triton.jit
def _kth_largest(keys, k, floor, BITS: tl.constexpr):
    """The largest t with at least k of the keys >= t, cut to its leading BITS bits, but not under `floor`. keys int32 [N]."""
    found = tl.full((), -2147483648, tl.int64)
    for step in range(BITS):
        candidate = found + (tl.full((), 1, tl.int64) << (31 - step))
        enough = tl.sum((keys >= candidate.to(tl.int32)).to(tl.int32), 0) >= k
        found = tl.where(enough, candidate, found)
    return tl.maximum(found.to(tl.int32), floor)


@triton.jit
def shortlist(keys, tops, ints, few, listed, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """List the scores that reach about the k-th largest of the programs' maxima: the top k, what ties with them, and few more.
    listed: how many they are, also where only LISTED of them fit into `few` (keys, then ids), in any order."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + ids)
    k = tl.load(ints + 2).to(tl.int32)
    # 16 bits of a score are enough to keep the list short, and half the work of 32
    floor = _kth_largest(tl.load(tops + tl.arange(0, BLOCKS)), k, FORBIDDEN, 16)
    found = (key >= floor) & (key > FORBIDDEN)
    count = tl.sum(found.to(tl.int32), 0)
    if count > 0:
        slot = tl.atomic_add(listed, count) + tl.cumsum(found.to(tl.int32), 0) - 1
        fits = found & (slot < LISTED)
        tl.store(few + slot, key, mask=fits)
        tl.store(few + LISTED + slot, ids, mask=fits)


@triton.jit
def _keep(values, flags, into):
    """Write the flagged values [N] to `into` in their order, visible to the whole program; returns how many."""
    tl.store(into + tl.cumsum(flags.to(tl.int32), 0) - 1, values, mask=flags)
    tl.debug_barrier()
    return tl.sum(flags.to(tl.int32), 0)


@triton.jit
def _rows(keys, listed, first, count):
    """Keys and ids of ROWS x LANES scores, flat: the rows named by listed[first : first + ROWS], lowest keys behind `count`."""
    place = tl.arange(0, ROWS * LANES)
    entry = first + place // LANES
    ids = tl.load(listed + entry, mask=entry < count, other=0) * LANES + place % LANES
    return tl.load(keys + ids, mask=entry < count, other=-2147483648), ids


@triton.jit
def _fixed_exp(below):
    """`draw.fixed_exp`."""
    scaled = (tl.maximum(below, -64.0) * 16777216.0).to(tl.int64) * _LOG2_E
    fraction = (scaled >> 24) & 1073741823
    power = tl.zeros_like(scaled) + _POWERS[9]
    for i in tl.static_range(9):
        power = _POWERS[8 - i] + ((power * fraction) >> 30)
    return (power << 10) >> tl.minimum(-(scaled >> 54), 63)


@triton.jit
def _share(total, part, BITS: tl.constexpr, extra):
    """`draw.share`."""
    return (total >> BITS) * part + (((total & ((1 << BITS) - 1)) * part + extra) >> BITS)


@triton.jit
def _uniform(seed, step):
    """24 random bits, int64: `sampling.philox_uniform` times 2^24. seed and step are int64 scalars, taken as unsigned."""
    low = tl.full((), 0xFFFFFFFF, tl.uint64)
    key0, key1 = seed.to(tl.uint64) & low, (seed.to(tl.uint64) >> 32) & low
    c0, c1 = step.to(tl.uint64) & low, (step.to(tl.uint64) >> 32) & low
    c2, c3 = low ^ low, low ^ low
    for _ in tl.static_range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ key0, product1 & low, (product0 >> 32) ^ c3 ^ key1, product0 & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    return (c0 >> 8).to(tl.int64)


@triton.jit
def draw_uniform(ints, uniform):
    tl.store(uniform, _uniform(tl.load(ints), tl.load(ints + 1)))


@triton.jit
def _finish(
    chosen, best, keys, tops, sums, ints, counts, ends, token, status, logprob, n_ends,
    LOGPROB: tl.constexpr, BLOCKS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Publish the token and count it, unless it ends the answer: the CPU path does not record those either."""
    problem = tl.where(best >= ENDLESS, 1, tl.where(best <= FORBIDDEN, 2, 0))
    chosen = tl.where(problem == 0, chosen, 0).to(tl.int64)
    entries = tl.arange(0, ENDS)
    is_end = tl.sum((tl.load(ends + entries, mask=entries < n_ends, other=-1) == chosen).to(tl.int32), 0) > 0
    counted = ((problem == 0) & (is_end == 0)).to(tl.int32)
    if LOGPROB:
        blocks = tl.arange(0, BLOCKS)
        best_score = _to_score(best)
        total = tl.sum(tl.load(sums + blocks) * tl.exp(_to_score(tl.load(tops + blocks)) - best_score), 0)
        tl.store(logprob, _to_score(tl.load(keys + chosen)) - best_score - tl.log(total))
    tl.store(counts + chosen, tl.load(counts + chosen) + counted)
    tl.store(ints + 1, tl.load(ints + 1) + counted)
    tl.store(token, chosen)
    tl.store(status, problem)


@triton.jit
def _choose_among_few(few, count, best, k, top_p, min_p, uniform, PIECE: tl.constexpr):
    """The token where all candidates, `count` of them, stand in the list: each is ranked against each."""
    best_score = _to_score(best)
    lane = tl.arange(0, LISTED)
    key = tl.load(few + lane, mask=lane < count, other=FORBIDDEN)
    ids = tl.load(few + LISTED + lane, mask=lane < count, other=0)
    order = (key.to(tl.int64) << 32) - ids.to(tl.int64)  # by score, then by id
    rank, before = tl.zeros_like(key), tl.zeros_like(order)
    for first in range(0, count, PIECE):
        other = first + tl.arange(0, PIECE)
        other_key = tl.load(few + other, mask=other < count, other=FORBIDDEN)
        other_id = tl.load(few + LISTED + other, mask=other < count, other=0)
        ahead = ((other_key.to(tl.int64) << 32) - other_id.to(tl.int64))[None, :] > order[:, None]
        rank += tl.sum(ahead.to(tl.int32), 1)
        before += tl.sum(tl.where(ahead, _fixed_exp(_to_score(other_key) - best_score)[None, :], 0), 1)
    least = tl.max(tl.where(rank >= k - 1, key, FORBIDDEN), 0)
    below = _to_score(key) - best_score
    weight = tl.where((lane < count) & (key >= least), _fixed_exp(below), 0)
    limit = tl.maximum(_share(tl.sum(weight, 0), top_p, 30, 1073741823), 1)
    kept = tl.where((before < limit) & (below >= min_p), weight, 0)
    target = _share(tl.sum(kept, 0), uniform, 24, 0)
    hit = (before <= target) & (target < before + kept)
    return tl.sum(tl.where(hit, ids, 0), 0)


@triton.jit
def _choose_among_many(keys, maxima, listed, few, best, k, top_p, min_p, uniform, SUBS: tl.constexpr):
    """The token where more candidates than fit the list come close: many ties, or few rows with anything allowed in them.

    Nothing is sorted: the tokens above the top-k-th score are fewer than ROWS and are ranked pairwise, the tokens that
    share it are counted, however many.
    """
    best_score = _to_score(best)
    tops = tl.load(maxima + tl.arange(0, SUBS))
    # The k-th largest row maximum is no more than the k-th largest score: fewer than k rows hold anything above it.
    floor = _kth_largest(tops, k, FORBIDDEN, 32)
    wide = _keep(tl.arange(0, SUBS), tops > floor, listed)
    above, ids = _rows(keys, listed, 0, wide)
    least = _kth_largest(above, k, floor, 32)
    strict = _keep(above, above > least, few)
    _keep(ids, above > least, few + ROWS)

    # Fewer than k tokens score above the k-th; before: what weighs more than each of them, in the order score, then id.
    lane = tl.arange(0, ROWS)
    few_key = tl.load(few + lane, mask=lane < strict, other=FORBIDDEN)
    few_id = tl.load(few + ROWS + lane, mask=lane < strict, other=0)
    below = _to_score(few_key) - best_score
    weight = tl.where(lane < strict, _fixed_exp(below), 0)
    rank = (few_key.to(tl.int64) << 32) - few_id.to(tl.int64)
    before = tl.sum(tl.where(rank[None, :] > rank[:, None], weight[None, :], 0), 1)
    strict_total = tl.sum(weight, 0)

    # The tokens that share the k-th score stand behind them in the order of their ids, all of one weight.
    listed += SUBS
    rows = _keep(tl.arange(0, SUBS), (tops >= least) & (tops > FORBIDDEN), listed)
    tied = 0
    for first in range(0, rows, ROWS):
        chunk, ids = _rows(keys, listed, first, rows)
        tied += tl.sum((chunk == least).to(tl.int32), 0)
    tied_below = _to_score(least) - best_score
    tied_weight = tl.where(least > FORBIDDEN, _fixed_exp(tied_below), 0)

    total = strict_total + tied * tied_weight
    limit = tl.maximum(_share(total, top_p, 30, 1073741823), 1)
    kept = (before < limit) & (below >= min_p) & (lane < strict)
    kept_weight = tl.sum(tl.where(kept, weight, 0), 0)
    unit = tl.maximum(tied_weight, 1)
    room = tl.maximum((limit - strict_total + unit - 1) // unit, 0)
    kept_tied = tl.where(tied_below >= min_p, tl.minimum(room, tied), 0)
    target = _share(kept_weight + kept_tied * tied_weight, uniform, 24, 0)
    hit = kept & (before <= target) & (target < before + weight)
    chosen = tl.sum(tl.where(hit, few_id, 0), 0)
    if target >= kept_weight:
        wanted = ((target - kept_weight) // unit).to(tl.int32) + 1
        passed = 0
        for first in range(0, rows, ROWS):
            chunk, ids = _rows(keys, listed, first, rows)
            match = chunk == least
            number = passed + tl.cumsum(match.to(tl.int32), 0)
            chosen += tl.sum(tl.where(match & (number == wanted), ids, 0), 0)
            passed += tl.sum(match.to(tl.int32), 0)
    return chosen


@triton.jit
def choose(
    keys, maxima, tops, sums, floats, ints, counts, ends, few, listed, rows, few_rows, token, status, logprob, n_ends,
    SUBS: tl.constexpr, PIECE: tl.constexpr, LOGPROB: tl.constexpr, BLOCKS: tl.constexpr, ENDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    count = tl.load(listed)
    best = tl.max(tl.load(tops + tl.arange(0, BLOCKS)), 0)
    greedy, k = tl.load(ints + 4), tl.load(ints + 2).to(tl.int32)
    top_p, min_p = tl.load(ints + 3), tl.load(floats + 4)
    uniform = tl.where(greedy != 0, 0, _uniform(tl.load(ints), tl.load(ints + 1)))
    if count <= LISTED:
        chosen = _choose_among_few(few, count, best, k, top_p, min_p, uniform, PIECE)
    else:
        chosen = _choose_among_many(keys, maxima, rows, few_rows, best, k, top_p, min_p, uniform, SUBS)
    tl.debug_barrier()  # every warp has read the count
    tl.store(listed, 0)
    _finish(chosen, best, keys, tops, sums, ints, counts, ends, token, status, logprob, n_ends, LOGPROB, BLOCKS, ENDS)


@triton.jit
def settle(
    chosen, keys, tops, sums, ints, counts, ends, token, status, logprob, n_ends,
    LOGPROB: tl.constexpr, BLOCKS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    best = tl.max(tl.load(tops + tl.arange(0, BLOCKS)), 0)
    _finish(tl.load(chosen), best, keys, tops, sums, ints, counts, ends, token, status, logprob, n_ends, LOGPROB, BLOCKS, ENDS)


@triton.jit(do_not_specialize=["token"])
def count_one(counts, ints, token):
    tl.store(counts + token, tl.load(counts + token) + 1)
    tl.store(ints + 1, tl.load(ints + 1) + 1)


@triton.jit(do_not_specialize=["number"])
def count_all(counts, ints, tokens, number, BLOCK: tl.constexpr):
    """tokens int64 [number]; the same one may come more than once."""
    for first in range(0, number, BLOCK):
        place = first + tl.arange(0, BLOCK)
        ids = tl.load(tokens + place, mask=place < number, other=0)
        tl.atomic_add(counts + ids, 1, mask=place < number)
    tl.store(ints + 1, tl.load(ints + 1) + number)
