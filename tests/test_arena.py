"""Memory for the pages of packed tokens."""

import gc
import os
import sys
import threading
import weakref

import numpy as np
import pytest

from kvcodec import _arena


def layout(size):
    return {"codes": ((size,), np.uint8), "scale": ((3, 5), np.float32), "none": ((0, 4), np.int8)}


SIZES = [1, 1000, _arena.SMALL, _arena.SMALLEST_CHUNK, _arena.LARGE + 1]


@pytest.mark.parametrize("size", SIZES)
def test_arrays_are_zero_apart_and_on_cache_lines(size):
    pages = [_arena.zeros(layout(size)) for _ in range(3)]
    for number, page in enumerate(pages, 1):
        for name, (shape, dtype) in layout(size).items():
            assert page[name].shape == shape
            assert page[name].dtype == dtype
            assert not page[name].any()
            assert page[name].size == 0 or page[name].ctypes.data % _arena.CACHE_LINE == 0
            assert page[name].flags.writeable
            page[name][...] = number
    for number, page in enumerate(pages, 1):
        assert all((x == number).all() for x in page.values())


@pytest.mark.parametrize("size", SIZES)
def test_copies_are_independent(size):
    page = _arena.zeros(layout(size))
    page["codes"][...] = 7
    copied = _arena.copies(page)
    page["codes"][...] = 8
    assert (copied["codes"] == 7).all()
    assert not np.shares_memory(copied["codes"], page["codes"])


def owner(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_a_chunk_is_freed_with_its_last_array(monkeypatch):
    monkeypatch.setattr(_arena, "_chunk", _arena._Chunk())
    many = _arena.PAGES_OF_CHUNK
    size = _arena.SMALLEST_CHUNK // many
    pages = [_arena.zeros({"codes": ((size,), np.uint8)})["codes"] for _ in range(2 * many + 1)]
    owners = [weakref.ref(owner(page)) for page in pages]
    assert owners[0]() is owners[many - 1]()
    assert owners[many - 1]() is not owners[many]()
    del pages[: many - 1]
    gc.collect()
    assert owners[0]() is not None
    del pages[0]
    gc.collect()
    assert owners[0]() is None
    assert owners[many]() is not None


@pytest.mark.parametrize("size", [_arena.SMALL, 1 << 21, 3 << 20, _arena.LARGE])
def test_a_chunk_holds_many_pages_of_the_size_it_was_made_for(monkeypatch, size):
    monkeypatch.setattr(_arena, "_chunk", _arena._Chunk())
    pages = [
        _arena.zeros({"codes": ((size,), np.uint8)})["codes"] for _ in range(_arena.PAGES_OF_CHUNK)
    ]
    kept = {id(owner(page)): owner(page).nbytes for page in pages}
    assert len(kept) == 1
    used = max(size * _arena.PAGES_OF_CHUNK, _arena.SMALLEST_CHUNK)
    assert sum(kept.values()) <= used + _arena.HUGE_PAGE


def in_threads(work):
    """Call it with the numbers 1 to 4, in a thread each."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_get_memory_of_their_own():
    found = []

    def work(number):
        pages = [_arena.zeros({"codes": ((_arena.SMALL,), np.uint8)})["codes"] for _ in range(50)]
        for page in pages:
            page[...] = number
        found.append(all((page == number).all() for page in pages))

    in_threads(work)
    assert found == [True] * 4


@pytest.mark.parametrize("size", SIZES)
def test_buffers_are_zero_and_apart(size):
    for _ in range(2):
        buffers = [_arena.buffer((1, size), np.uint8) for _ in range(20)]
        for number, x in enumerate(buffers, 1):
            assert x.shape == (1, size)
            assert not x.any()
            assert x.flags.writeable
            x[...] = number
        assert all((x == number).all() for number, x in enumerate(buffers, 1))


def test_a_buffer_is_used_again_once_nothing_refers_to_it(monkeypatch):
    monkeypatch.setattr(_arena, "_buffers", {})
    shape = (_arena.SMALL // 4,)
    x = _arena.buffer(shape, np.float32)
    view, place = x[5:], x.ctypes.data
    del x
    gc.collect()
    other = _arena.buffer(shape, np.float32)
    assert other.ctypes.data != place
    view[...] = 1
    del view
    gc.collect()
    again = [
        _arena.buffer(shape, np.float32) for _ in range(2 * _arena.SMALLEST_CHUNK // _arena.SMALL)
    ]
    assert place in [x.ctypes.data for x in again]
    assert not any(x.any() for x in again)


def test_a_chunk_of_buffers_is_freed_with_its_last_one(monkeypatch):
    monkeypatch.setattr(_arena, "_buffers", {})
    buffers = [_arena.buffer((_arena.LARGE,), np.uint8) for _ in range(_arena.PAGES_OF_CHUNK + 1)]
    first, second = map(weakref.ref, _arena._buffers[_arena.LARGE])
    del buffers[-1]
    gc.collect()
    assert second() is None
    assert first() is not None
    buffers.clear()
    gc.collect()
    assert first() is None
    assert _arena._buffers == {_arena.LARGE: []}


def test_threads_take_and_give_back_buffers_at_the_same_time(monkeypatch):
    found, unraised = [], []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)

    def work(number):
        whole = True
        for _ in range(100):
            buffers = [_arena.buffer((_arena.SMALL,), np.uint8) for _ in range(5)]
            for x in buffers:
                whole = whole and not x.any()
                x[...] = number
            whole = whole and all((x == number).all() for x in buffers)
        found.append(whole)

    in_threads(work)
    assert found == [True] * 4
    assert not unraised


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_write_into_its_parent():
    page = _arena.zeros({"codes": ((_arena.SMALL,), np.uint8)})["codes"]
    child = os.fork()
    if child == 0:
        page[...] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert not page.any()


def test_no_room_is_a_memory_error():
    with pytest.raises(MemoryError):
        _arena.zeros({"codes": ((1 << 60,), np.uint8)})


def test_a_system_without_huge_pages(monkeypatch):
    monkeypatch.delattr(_arena.mmap, "MADV_HUGEPAGE", raising=False)
    page = _arena.zeros(layout(_arena.LARGE))
    assert page["codes"].ctypes.data % _arena.CACHE_LINE == 0
    assert not page["codes"].any()
