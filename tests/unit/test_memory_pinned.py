"""Pinned memory: records, refusals, and what may be pinned. Without a card: the driver is one that keeps a list."""

import contextlib
import ctypes
import gc
import sys

import pytest
import torch

from a3b_engine.errors import A3BError
from a3b_engine.memory import pinned, ram
from a3b_engine.memory.pinned import PinnedArena, PinnedMemoryError, pinnable_bytes

GB = 1e9
CARD = torch.device("cuda:0")


def test_records_on_a_cpu_hold_what_is_written_and_do_not_overlap():
    arena = PinnedArena(512, "cpu", segment_bytes=4 * 512)
    records = arena.take_many(10)
    assert arena.nbytes == 10 * 512  # two whole segments and one for the rest
    for number, record in enumerate(records):
        record.host.fill_(number)
        assert record.host.shape == (512,) and record.host.dtype == torch.uint8 and record.address == record.host.data_ptr() and record.address % 256 == 0
    assert all((record.host == number).all() for number, record in enumerate(records))


def test_what_is_given_back_is_handed_out_again():
    arena = PinnedArena(256, "cpu", segment_bytes=1024)
    first = arena.take_many(4)
    arena.give_back(first[2])
    again = arena.take()
    assert again.address == first[2].address and arena.nbytes == 1024
    other = arena.take()
    assert arena.nbytes == 2048 and other.address not in {record.address for record in first}
    arena.give_back(other)
    with pytest.raises(KeyError):
        arena.give_back(other)


def test_memory_made_in_inference_mode_can_be_written_outside_of_it():
    with torch.inference_mode():
        record = PinnedArena(256, "cpu").take()
    record.host.fill_(3)
    assert (record.host == 3).all()


def test_trim_gives_back_segments_nobody_uses():
    arena = PinnedArena(256, "cpu", segment_bytes=512)
    records = arena.take_many(6)
    for record in (records[0], records[2], records[3]):
        arena.give_back(record)
    assert arena.trim() == 512 and arena.nbytes == 1024 and arena.trim() == 0
    records[1].host.fill_(7)
    assert arena.take().address == records[0].address and (records[1].host == 7).all()
    arena.take()
    assert arena.nbytes == 1536


def test_close_leaves_an_arena_as_new():
    arena = PinnedArena(256, "cpu", segment_bytes=512)
    kept = arena.take()
    arena.close()
    assert arena.nbytes == 0
    arena.close()
    with pytest.raises(KeyError):
        arena.give_back(kept)
    assert arena.take_many(3) and arena.nbytes == 768


def test_a_record_larger_than_a_segment_has_one_of_its_own():
    arena = PinnedArena(3000, "cpu", segment_bytes=1000)
    assert [record.host.numel() for record in arena.take_many(2)] == [3000, 3000] and arena.nbytes == 6000


def test_no_record_is_not_a_record():
    with pytest.raises(ValueError, match="0 bytes"):
        PinnedArena(0, "cpu")
    assert PinnedArena(5, "cpu").take_many(0) == []


class Driver:
    """Registers up to `limit` bytes; the device sees them 1 << 40 further on."""

    def __init__(self, limit=1 << 62, blind=False):
        self.limit, self.blind, self.held, self.most = limit, blind, {}, 0

    def register(self, address, nbytes, flags):
        assert flags == 3 and address not in self.held
        if sum(self.held.values()) + nbytes > self.limit:
            return 2
        self.held[address] = nbytes
        self.most = max(self.most, len(self.held))
        return 0

    def unregister(self, address):
        return 0 if self.held.pop(address, 0) else 713

    def device_pointer(self, found, address, flags):
        if self.blind:
            return 1
        found._obj.value = address + (1 << 40)
        return 0

    def name(self, code):
        return f"CUDA_ERROR_{code}"


@pytest.fixture
def card(monkeypatch):
    """Pretend there is a card: `card.driver` is its driver."""

    class Card:
        driver = Driver()

    monkeypatch.setattr(pinned, "_driver", lambda device: Card.driver)
    monkeypatch.setattr(pinned, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(pinned, "pinnable_bytes", lambda: 1 << 40)
    monkeypatch.setattr(pinned, "_pinned", 0)
    yield Card
    gc.collect()  # what a test left registered
    assert not Card.driver.held


def test_what_cannot_be_given_back_is_told_and_no_more(card, caplog):
    arena = PinnedArena(4096, CARD, segment_bytes=8192)
    arena.take()
    card.driver.held.clear()
    arena.close()
    assert "CUDA_ERROR_713" in caplog.text and arena.nbytes == 0


def test_registered_memory_is_touched_and_seen_where_the_driver_says(card):
    arena = PinnedArena(4096, CARD, segment_bytes=1 << 20)
    record = arena.take()
    (address,) = card.driver.held
    assert address % (2 << 20) == 0 and record.address == address + (1 << 40) and record.host.data_ptr() == address
    assert not record.host.any() and pinned._pinned == arena.nbytes == 1 << 20
    assert arena.take().address == record.address + 4096
    arena.close()
    assert not card.driver.held and pinned._pinned == 0


def test_an_arena_nobody_closed_unregisters_only_when_its_records_are_gone(card):
    arena = PinnedArena(4096, CARD, segment_bytes=8192)
    record = arena.take()
    record.host.fill_(9)
    del arena
    gc.collect()
    assert card.driver.held and (record.host == 9).all()
    del record
    gc.collect()
    assert not card.driver.held and pinned._pinned == 0


def test_a_refusal_says_what_was_asked_for_and_what_to_do(card):
    card.driver = Driver(limit=2 << 20)
    arena = PinnedArena(1 << 19, CARD, segment_bytes=1 << 20)
    arena.take_many(4)
    with pytest.raises(PinnedMemoryError) as caught:
        arena.take()
    text = str(caught.value)
    assert isinstance(caught.value, A3BError)
    for part in ("0.001 GB more", "CUDA_ERROR_2", "Pinned so far: 0.002 GB", "available: ", "int4"):
        assert part in text, text
    assert arena.nbytes == 2 << 20 == sum(card.driver.held.values())


def test_many_records_or_none(card):
    card.driver = Driver(limit=3 << 20)
    arena = PinnedArena(1 << 20, CARD, segment_bytes=1 << 20)
    one = arena.take()
    with pytest.raises(PinnedMemoryError):
        arena.take_many(5)
    assert card.driver.most == 3 and arena.nbytes == 1 << 20 == pinned._pinned and len(card.driver.held) == 1
    assert len({record.address for record in arena.take_many(2)} | {one.address}) == 3


def test_memory_the_device_cannot_see_is_not_left_registered(card):
    card.driver = Driver(blind=True)
    arena = PinnedArena(4096, CARD, segment_bytes=8192)
    with pytest.raises(PinnedMemoryError, match="device cannot see it: CUDA_ERROR_1"):
        arena.take()
    assert not card.driver.held and arena.nbytes == 0 and pinned._pinned == 0


def test_a_machine_without_the_drivers_library(card, monkeypatch):
    def missing(device):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(pinned, "_driver", missing)
    with pytest.raises(PinnedMemoryError, match="libcuda"):
        PinnedArena(4096, CARD, segment_bytes=8192).take()


def test_nothing_is_touched_where_ram_is_short(card, monkeypatch):
    monkeypatch.setattr(pinned, "pinnable_bytes", lambda: 1000)
    monkeypatch.setattr(pinned, "_touched", lambda nbytes: pytest.fail("touched"))
    with pytest.raises(PinnedMemoryError, match="may be pinned now"):
        PinnedArena(4096, CARD).take()


def test_memory_is_prepared_beside_the_work(card):
    """Nothing more than asked for is made, takers wait for the worker, and closing in between leaves nothing behind."""
    arena = PinnedArena(1 << 19, CARD, segment_bytes=1 << 20)
    arena.prepare(5)
    records = arena.take_many(5)
    assert arena.nbytes == 5 << 19 and len({record.address for record in records}) == 5
    arena.take()
    assert arena.nbytes == 7 << 19
    arena.prepare(1)  # is there already
    assert arena.nbytes == 7 << 19
    arena.prepare(100)
    arena.close()
    assert arena.nbytes == 0 == pinned._pinned and not card.driver.held
    assert arena.take().host.numel() == 1 << 19


def test_a_refusal_beside_the_work_is_told_by_the_take_it_concerns(card):
    card.driver = Driver(limit=2 << 20)
    arena = PinnedArena(1 << 20, CARD, segment_bytes=1 << 20)
    arena.prepare(10)
    assert arena.take().address != arena.take().address
    with pytest.raises(PinnedMemoryError, match="CUDA_ERROR_2"):
        arena.take()
    arena.prepare(0)


def test_no_memory_at_all_is_a_refusal(card, monkeypatch):
    def full(nbytes):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(pinned, "_touched", full)
    with pytest.raises(PinnedMemoryError, match="no memory"):
        PinnedArena(4096, CARD).take()


@pytest.mark.parametrize(
    "platform, total, available, expected",
    [
        ("linux", 16 * GB, 12 * GB, 12 * GB - 4 * 2**30),
        ("linux", 128 * GB, 100 * GB, 80.8 * GB),  # 15 % of all is more than 4 GB
        ("win32", 64 * GB, 60 * GB, 32 * GB - 5 * GB),  # half of all, without what is pinned already
        ("win32", 64 * GB, 20 * GB, 20 * GB - 0.15 * 64 * GB),
        ("linux", 8 * GB, 3 * GB, 0),
        ("linux", 0, 0, 0),
    ],
)
def test_what_may_be_pinned(monkeypatch, platform, total, available, expected):
    monkeypatch.setattr(ram, "ram", lambda: (int(total), int(available)))
    monkeypatch.setattr(ram, "container_limits", lambda *paths: (sys.maxsize, sys.maxsize))
    monkeypatch.setattr(pinned, "_pinned", int(5 * GB))
    monkeypatch.setattr(ram.sys, "platform", platform)
    assert pinnable_bytes() == pytest.approx(expected, abs=2)


def test_a_container_may_have_less_than_the_machine(monkeypatch):
    monkeypatch.setattr(ram, "ram", lambda: (int(64 * GB), int(60 * GB)))
    monkeypatch.setattr(ram, "container_limits", lambda *paths: (int(40 * GB), int(20 * GB)))
    monkeypatch.setattr(ram.sys, "platform", "linux")
    assert pinnable_bytes() == pytest.approx(20 * GB - 0.15 * 40 * GB, abs=2)


def group(folder, names, limit, used, cached=0):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used)):
        (folder / name).write_text(f"{value}\n", encoding="ascii")
    (folder / "memory.stat").write_text(f"anon 5\nfile 9\ninactive_file {cached}\nactive_file 1\n", encoding="ascii")


SECOND, FIRST = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_limits_of_control_groups_of_the_second_kind(tmp_path):
    """The tightest of the own group and those above it; the page cache is not in use."""
    membership, top = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("0::/user/job\n", encoding="ascii")
    assert ram.container_limits(membership, top) == (sys.maxsize, sys.maxsize)
    group(top / "user" / "job", SECOND, "max", 500)
    assert ram.container_limits(membership, top) == (sys.maxsize, sys.maxsize)
    group(top / "user", SECOND, 2000, 1500, cached=899)
    assert ram.container_limits(membership, top) == (2000, 2000 - 600)
    group(top / "user" / "job", SECOND, 400, 1000, cached=0)
    assert ram.container_limits(membership, top) == (400, 0)


def test_limits_of_control_groups_of_the_first_kind(tmp_path):
    membership, top = tmp_path / "cgroup", tmp_path / "fs"
    membership.write_text("12:cpu,cpuacct:/x\n5:memory:/docker/abc\n", encoding="ascii")
    group(top / "memory", FIRST, 3000, 1000, cached=99)  # inside a container the own path is often not there
    assert ram.container_limits(membership, top) == (3000, 3000 - 900)


def test_files_that_cannot_be_read_limit_nothing(tmp_path):
    membership, top = tmp_path / "cgroup", tmp_path / "fs"
    assert ram.container_limits(membership, top) == (sys.maxsize, sys.maxsize)
    membership.write_text("0::/\nno colons here\n", encoding="ascii")
    top.mkdir()
    (top / "memory.max").write_text("12x", encoding="ascii")
    assert ram.container_limits(membership, top) == (sys.maxsize, sys.maxsize)


def test_without_psutil_the_system_is_asked(monkeypatch):
    total, available = ram.ram()
    monkeypatch.setitem(sys.modules, "psutil", None)
    again = ram.ram()
    if sys.platform == "linux":
        assert again[0] == total and again[1] == pytest.approx(available, rel=0.3)
    else:
        assert again == (0, 0)


def test_touched_memory_is_zeros_from_a_huge_page_on():
    for nbytes in (1, 4096, (5 << 20) + 3):
        memory = pinned._touched(nbytes)
        assert memory.shape == (nbytes,) and memory.data_ptr() % (2 << 20) == 0 and not memory.any()
    assert ctypes.string_at(memory.data_ptr(), 4) == bytes(4)
