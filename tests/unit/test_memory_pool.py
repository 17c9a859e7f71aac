"""Experts in slots: records that hold them bit by bit, rows that come and go, homes in pinned RAM, ordinary RAM and files."""

import pytest
import torch

from a3b_engine.checkpoint.packed import PackedWeight
from a3b_engine.checkpoint.scaled import ScaledWeight
from a3b_engine.memory import homes as homes_module
from a3b_engine.memory.homes import Homes
from a3b_engine.memory.pinned import PinnedMemoryError
from a3b_engine.memory.pool import SlotPool
from a3b_engine.memory.pooled import PooledExperts
from a3b_engine.memory.record import ALIGNMENT, RecordLayout, fields_of
from a3b_engine.model.moe import ExpertWeights

LAYERS, EXPERTS, TOP_K = 2, 8, 2
CPU = torch.device("cpu")


def stack(kind: str, rows: int, columns: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 120, (EXPERTS, rows, columns), dtype=torch.uint8, generator=generator)
    if kind == "fp8":
        return ScaledWeight(codes.view(torch.float8_e4m3fn), torch.rand(EXPERTS, -(-rows // 16), -(-columns // 16), generator=generator), (16, 16))
    if kind == "int4":
        scale = torch.rand(EXPERTS, rows, columns // 32, generator=generator).half()
        return PackedWeight(codes[..., : columns // 2].contiguous(), scale, (codes[..., : columns // 32] % 16).contiguous(), None, "int", 32)
    if kind == "nvfp4":
        scale = torch.rand(EXPERTS, rows, columns // 16, generator=generator).to(torch.float8_e4m3fn)
        return PackedWeight(codes[..., : columns // 2].contiguous(), scale, None, torch.rand(EXPERTS, 1, 1, generator=generator), "e2m1", 16)
    return torch.randn(EXPERTS, rows, columns, generator=generator).to(torch.bfloat16)


def layer_of(kind: str, layer: int) -> ExpertWeights:
    return ExpertWeights(stack(kind, 48, 64, 3 * layer), stack(kind, 48, 64, 3 * layer + 1), stack(kind, 64, 64, 3 * layer + 2))


def shapes_of(experts: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(each.to("meta") for each in (experts.gate, experts.up, experts.down)))


def equal(ours: ExpertWeights, theirs: ExpertWeights) -> bool:
    pairs = [pair for a, b in zip((ours.gate, ours.up, ours.down), (theirs.gate, theirs.up, theirs.down)) for pair in zip(fields_of(a), fields_of(b))]
    return all((a is None) == (b is None) and (a is None or torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))) for a, b in pairs)


class World:
    """A pool of two layers, the experts it was made of, and what was read from the files."""

    def __init__(self, kind="fp8", rows=EXPERTS, *, readable=True, everything=False):
        self.layers = [layer_of(kind, layer) for layer in range(LAYERS)]
        self.reads = []
        shapes = shapes_of(self.layers[0])
        self.homes = Homes(RecordLayout(shapes), LAYERS, EXPERTS, CPU, self.read if readable else lambda layer, ids: None)
        self.pool = SlotPool(shapes, LAYERS, TOP_K, CPU, self.homes)
        self.pool.add_rows(rows)
        self.homes.plan(rows, everything)
        for layer, experts in enumerate(self.layers):
            self.pool.take_in(layer, experts)
        self.pool.settle()
        self.reads.clear()

    def read(self, layer, ids):
        self.reads.append((layer, list(ids)))
        return self.layers[layer].of_token(torch.tensor(ids))

    def whole(self) -> bool:
        """Whether every expert of every layer can be had, as it was."""
        ids = torch.arange(EXPERTS)
        return all(equal(PooledExperts(self.pool, layer).of_group(ids), self.layers[layer]) for layer in range(LAYERS))

    def use(self, layer, *ids):
        ids = torch.tensor(ids)
        return equal(PooledExperts(self.pool, layer).of_token(ids), self.layers[layer].of_token(ids))

    def present(self, layer):
        return {expert for expert in self.pool.tables[layer].occupant.tolist() if expert >= 0}


@pytest.fixture
def short_of_ram(monkeypatch):
    monkeypatch.setattr(homes_module, "pinnable_bytes", lambda: 0)

    def refuse(self):
        raise PinnedMemoryError("no pinned RAM in this test")

    monkeypatch.setattr(homes_module.PinnedArena, "take", refuse)


@pytest.mark.parametrize("kind", ["fp8", "int4", "nvfp4", "dense"])
def test_a_record_holds_an_expert_bit_by_bit(kind):
    experts = layer_of(kind, 0)
    layout = RecordLayout(shapes_of(experts))
    records = torch.full((EXPERTS, layout.nbytes), 255, dtype=torch.uint8)
    layout.write(experts, records)
    assert equal(layout.read(records), experts)
    assert layout.nbytes % ALIGNMENT == 0 and all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert len(layout.offsets) == 12 and len({*layout.offsets}) == {"fp8": 6, "int4": 9, "nvfp4": 9, "dense": 3}[kind]


@pytest.mark.parametrize("kind", ["fp8", "int4", "nvfp4", "dense"])
@pytest.mark.parametrize("rows", [EXPERTS, 5])
def test_all_experts_can_be_had_wherever_they_are(kind, rows):
    world = World(kind, rows)
    assert world.whole() and world.pool.rows == rows and world.pool.full == (rows == EXPERTS)
    assert not world.reads and world.pool.nbytes == rows * world.pool.row_bytes


def test_the_table_points_at_the_parts_of_each_slot():
    world = World(rows=5)
    tables = world.pool.tables[1]
    for expert in range(5):
        record = tables.slots[tables.slot_of[expert]].item()
        assert tables.pointers[expert].tolist() == [record + offset for offset in world.pool.layout.offsets]
    assert tables.pointers[5:EXPERTS].sum() == 0 and (tables.slots[5:] == 0).all() and (tables.home[5:] != 0).all()


def test_a_token_s_experts_take_the_places_of_the_coldest():
    world = World(rows=4)
    assert world.use(0, 0, 1) and world.use(0, 2, 3) and world.use(0, 1, 7)
    assert world.present(0) == {1, 2, 3, 7} and world.present(1) == {0, 1, 2, 3}
    assert world.use(0, 6, 5) and world.present(0) == {1, 5, 6, 7}
    assert world.pool.counts() == (8, 3) and world.whole()


def test_giving_rows_back_keeps_the_warm_experts():
    world = World(rows=6, everything=True)
    world.use(0, 5, 4)
    world.use(0, 1, 5)
    assert world.pool.remove_rows(3) == 3 * world.pool.row_bytes and world.pool.rows == 3
    assert world.present(0) == {1, 4, 5} and len(world.present(1)) == 3
    assert world.whole() and not world.pool.host_serves


def test_experts_without_a_home_get_one_when_they_leave():
    world = World()
    assert world.homes.pinned == 0 and world.pool.full
    world.pool.remove_rows(5)
    assert world.homes.pinned == 5 * LAYERS and world.whole() and not world.reads and not world.pool.full
    assert world.pool.host_serves  # none of those left on the device could give way
    assert world.use(0, 6, 7) and world.homes.pinned == EXPERTS * LAYERS and not world.pool.host_serves and not world.reads


def test_rows_come_back_and_are_filled():
    world = World(rows=3)
    assert world.pool.add_rows(2) == 2 * world.pool.row_bytes
    world.pool.fill()
    assert len(world.present(0)) == 5 and world.whole() and not world.pool.full
    world.pool.add_rows(99)
    world.pool.fill()
    assert world.pool.rows == EXPERTS and world.pool.full and world.whole()


def test_nothing_grows_over_many_rounds():
    world = World(rows=6, everything=True)
    pinned = world.homes.pinned_bytes
    for number in range(50):
        world.use(number % 2, number % EXPERTS, (number + 3) % EXPERTS)
        world.pool.remove_rows(3)
        assert world.pool.rows == 3
        world.pool.add_rows(3)
        world.pool.fill()
    assert world.pool.rows == 6 and world.homes.pinned_bytes == pinned and world.whole()


def test_without_pinned_ram_experts_come_from_the_files(short_of_ram):
    world = World(rows=3)
    assert world.pool.host_serves and world.pool.without_home == 5 * LAYERS and world.homes.plain_bytes == 0
    assert world.use(0, 6, 7) and (0, [6]) in world.reads and world.present(0) == {2, 6, 7} and world.whole()


def test_without_pinned_ram_and_files_experts_wait_in_ordinary_ram(short_of_ram):
    world = World(rows=3, readable=False)
    assert world.homes.plain_bytes == 5 * LAYERS * world.pool.layout.nbytes
    assert world.use(1, 4, 7) and world.whole() and world.pool.host_serves
    world.pool.remove_rows(1)
    assert world.whole()


def test_part_of_the_experts_in_pinned_ram(monkeypatch):
    """Those that are outside the device have it first, then as many as may give way to them."""
    record = RecordLayout(shapes_of(layer_of("fp8", 0))).nbytes
    monkeypatch.setattr(homes_module, "pinnable_bytes", lambda: 5 * LAYERS * record)
    world = World(rows=5)
    assert world.homes.pinned == 5 * LAYERS and not world.pool.host_serves and (world.pool.tables[0].home[5:] != 0).all()
    assert world.use(0, 6, 7) and world.present(0) == {2, 3, 4, 6, 7} and world.whole()
    monkeypatch.setattr(homes_module, "pinnable_bytes", lambda: 2 * LAYERS * record)
    world = World(rows=5)
    assert world.homes.pinned == 2 * LAYERS and world.pool.without_home == LAYERS and world.whole()


def test_the_host_serves_what_the_device_cannot_fetch():
    world = World(rows=3)
    layer, record = 1, world.pool.layout.nbytes
    slot = world.pool.tables[layer].slots[0].item()
    world.pool.serve(layer, torch.tensor([[-8, slot], [0, 0], [12345, slot]]))
    assert torch.equal(world.pool._rows[0][layer], world.pool.records(layer, [7])[0])
    places = torch.zeros((2, record), dtype=torch.uint8)
    world.pool.serve(layer, torch.tensor([[-6, places[1].data_ptr()]]), places)
    assert torch.equal(places[1], world.pool.records(layer, [5])[0]) and not places[0].any()


def test_homes_give_their_ram_back():
    world = World(rows=3)
    assert world.homes.pinned_bytes > 0
    world.homes.close()
    assert world.homes.pinned_bytes == world.homes.plain_bytes == 0


def test_giving_rows_back_that_fails_moves_no_expert_out_of_sight(monkeypatch):
    for failing in range(1, 7):
        world = World()
        for layer in range(LAYERS):
            world.pool.tables[layer].stamp.copy_(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]))
        secure, calls = world.homes.secure, []

        def sometimes(*args):
            calls.append(1)
            if len(calls) == failing:
                raise MemoryError("no RAM")
            secure(*args)

        monkeypatch.setattr(world.homes, "secure", sometimes)
        with pytest.raises(MemoryError):
            world.pool.remove_rows(5)
        monkeypatch.setattr(world.homes, "secure", secure)
        assert world.whole() and world.pool.rows == EXPERTS
        world.pool.make_ready()
        assert world.whole() and world.pool.full


def test_growing_that_fails_leaves_empty_slots_that_are_filled_later(monkeypatch):
    world = World(rows=3)
    world.pool.add_rows(2)

    def fail(*args):
        raise OSError("the disk is away")

    bring = world.homes.bring
    monkeypatch.setattr(world.homes, "bring", fail)
    with pytest.raises(OSError):
        world.pool.fill()
    monkeypatch.setattr(world.homes, "bring", bring)
    assert world.pool.rows == 5 and world.whole()
    world.pool.make_ready()
    assert len(world.present(0)) == 5 and world.whole()
