"""Device code of expert slots (expert_slots): choosing slots for the experts of a step, and fetching experts.

All of it waits before it lets the kernel behind start. That keeps true what the kernels of the experts rest on: what was
complete when the kernel ahead of `fetch` let it start (the token's vector, among other things) was complete when `fetch`
let `up` start; and `down`, which `up` lets start only after its own wait, may read ids, rows of the table and weights ahead of
its wait, because by then all of these kernels have ended.
"""

import triton
import triton.language as tl

from .rows import TABLE_COLUMNS, let_next_start, wait_for_inputs

LONG_AGO = tl.constexpr(1 << 20)  # steps, as in expert_slots: a slot not used for longer is no older


@triton.jit
def warm(table, line, EXPERTS: tl.constexpr):
    """Ask the L2 cache for a table of 8-byte entries that was last read a token ago; nothing uses what comes."""
    tl.load(table + line, mask=line < EXPERTS, other=0, volatile=True)


@triton.jit
def take_slots_kernel(
    ids, slots, occupant, slot_of, stamp, home, clock, counts, host_serves, pointers, offsets, copies,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TOP_K: tl.constexpr, TOP_WIDTH: tl.constexpr, ADVANCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As expert_slots.take_slots_reference. One program of one warp: what its lanes tell each other takes no barriers.

    Keys of slots are small enough for the one instruction that finds the largest of a warp: age times WIDTH, the lower slot
    first where ages are equal, empty ones above all, -1 where a slot may not be taken. The loop is not unrolled: a kernel that runs
    once a layer finds none of its instructions in the cache.
    """
    slot, choice = tl.arange(0, WIDTH), tl.arange(0, TOP_WIDTH)
    inside, taken = slot < EXPERTS, choice < TOP_K
    if PDL:
        line = tl.arange(0, WIDTH // 16) * 16
        warm(slots, line, EXPERTS)
        warm(stamp, line, EXPERTS)
        warm(home, line, EXPERTS)
        warm(occupant, line, EXPERTS)
        warm(slot_of, line, EXPERTS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    expert = tl.load(ids + choice, mask=taken, other=0)
    address = tl.load(slots + slot, mask=inside, other=0)
    tenant = tl.load(occupant + slot, mask=inside, other=-1)
    used = tl.load(stamp + slot, mask=inside, other=0)
    now = tl.load(clock)
    serves = tl.load(host_serves)
    kept = tl.load(home + tenant, mask=tenant >= 0, other=0)
    held = tl.load(slot_of + expert, mask=taken, other=0)
    found = tl.load(home + expert, mask=taken, other=0)
    column = tl.arange(0, 16)
    named = column < TABLE_COLUMNS
    shift = tl.load(offsets + column, mask=named, other=0)
    asked = tl.load(counts)
    fetched = tl.load(counts + 1)
    base = choice.to(tl.int64) * 0
    missing = tl.sum((held < 0).to(tl.int32), 0)
    if missing > 0:
        age = tl.where(tenant < 0, LONG_AGO + 1, tl.minimum(now - used, LONG_AGO).to(tl.int32))
        key = tl.where((address != 0) & ((tenant < 0) | (kept != 0) | (serves != 0)), age * WIDTH + (WIDTH - 1 - slot), -1)
        for number in tl.static_range(TOP_K):
            key = tl.where(slot == tl.max(tl.where(choice == number, held, -1), 0), -1, key)
        place = choice * 0 - 1
        open = held < 0
        for _ in range(missing):
            best = tl.max(key, 0)
            first = tl.min(tl.where(open, choice * 1024 + expert, 1 << 30), 0)
            victim = tl.where(best >= 0, WIDTH - 1 - best % WIDTH, -1)  # for nobody, where one expert was missing twice
            same = open & (expert == first % 1024)
            open = open & (expert != first % 1024)
            place = tl.where(choice == first // 1024, victim, place)
            held = tl.where(same, victim, held)
            key = tl.where(slot == victim, -1, key)
        fresh = place >= 0
        base = tl.load(slots + place, mask=fresh, other=0)
        old = tl.load(occupant + place, mask=fresh, other=-1)
        tl.debug_barrier()  # everything is read before anything is written
        tl.store(occupant + place, expert, mask=fresh)
        tl.store(slot_of + old, -1, mask=fresh & (old >= 0))
        tl.store(slot_of + expert, place, mask=fresh)
        row = base[:, None] + shift[None, :]
        entry = pointers + expert.to(tl.int64)[:, None] * TABLE_COLUMNS + column[None, :]
        tl.store(entry, row, mask=fresh[:, None] & named[None, :])
        source = tl.where(fresh & (found != 0), found, tl.where(fresh | (held < 0), -(expert + 1).to(tl.int64), 0))
        tl.store(copies + choice * 2, source, mask=taken)
        tl.store(copies + choice * 2 + 1, base, mask=taken)
        tl.store(counts + 1, fetched + tl.sum(fresh.to(tl.int32), 0))
    else:
        tl.store(copies + choice * 2, base, mask=taken)
        tl.store(copies + choice * 2 + 1, base, mask=taken)
    if ADVANCES:
        now += 1
        tl.store(clock, now)
    tl.store(stamp + held, now, mask=taken & (held >= 0))
    tl.store(counts, asked + TOP_K)


@triton.jit
def fetch_kernel(
    copies,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copies records of WORDS int32 from `copies` int64 [ROWS, 2] = (source, destination), where source > 0.

    Grid (STRIDE, PARTS): PARTS programs share a record in pieces of BLOCK words. Every program asks for its next piece
    before it writes the one in hand, so that two of them are on their way.
    """
    wait_for_inputs(PDL)
    let_next_start(PDL)
    part = tl.program_id(1)
    for row in range(tl.program_id(0), ROWS, STRIDE):
        source = tl.load(copies + row * 2)
        if source > 0:
            target = tl.load(copies + row * 2 + 1)
            read = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
            write = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
            index = tl.arange(0, BLOCK)
            ahead = tl.load(read + (part * BLOCK + index), mask=part * BLOCK + index < WORDS, other=0, cache_modifier=CACHE)
            for first in range(part * BLOCK, WORDS, PARTS * BLOCK):
                word, further = first + index, first + PARTS * BLOCK + index
                piece = ahead
                ahead = tl.load(read + further, mask=further < WORDS, other=0, cache_modifier=CACHE)
                tl.store(write + word, piece, mask=word < WORDS)


@triton.jit(do_not_specialize=["count"])
def mark_kernel(ids, chosen, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """chosen int32 [E] = 1 for every expert among ids int32 [count]."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + index, mask=index < count, other=0)
    tl.store(chosen + expert, 1, mask=index < count)


@triton.jit(do_not_specialize=["places"])
def visit_kernel(
    chosen, slot_of, stamp, home, clock, pointers, offsets, copies, visiting, staging, places,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, RECORD: tl.constexpr, ADVANCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As expert_slots.visit_reference, from `chosen` int32 [EXPERTS], which is all zeros afterwards. One program."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    expert = tl.arange(0, WIDTH)
    inside = expert < EXPERTS
    wanted = tl.load(chosen + expert, mask=inside, other=0) > 0
    held = tl.load(slot_of + expert, mask=inside, other=-1)
    found = tl.load(home + expert, mask=inside, other=0)
    now = tl.load(clock)
    column = tl.arange(0, 16)
    named = column < TABLE_COLUMNS
    shift = tl.load(offsets + column, mask=named, other=0)
    at = expert.to(tl.int64)[:, None] * TABLE_COLUMNS + column[None, :]
    live = inside[:, None] & named[None, :]
    rows = tl.load(pointers + at, mask=live, other=0)
    shared = tl.load(pointers + EXPERTS * TABLE_COLUMNS + column, mask=named, other=0)
    missing = wanted & (held < 0)
    place = tl.cumsum(missing.to(tl.int32), 0) - 1
    served = missing & (place < places)
    total = tl.sum(served.to(tl.int32), 0)
    base = staging.to(tl.int64) + place.to(tl.int64) * RECORD
    tl.debug_barrier()  # everything is read before anything is written
    tl.store(chosen + expert, 0, mask=inside)
    if ADVANCES:
        now += 1
        tl.store(clock, now)
    tl.store(stamp + held, now, mask=wanted & (held >= 0))
    tl.store(copies + place * 2, tl.where(found != 0, found, -(expert + 1).to(tl.int64)), mask=served)
    tl.store(copies + place * 2 + 1, base, mask=served)
    idle = inside & (expert >= total)
    tl.store(copies + expert * 2, base * 0, mask=idle)
    tl.store(copies + expert * 2 + 1, base * 0, mask=idle)
    tl.store(visiting + at, tl.where(served[:, None], base[:, None] + shift[None, :], rows), mask=live)
    tl.store(visiting + EXPERTS * TABLE_COLUMNS + column, shared, mask=named)
