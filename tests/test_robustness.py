"""Memory, processes and hand-made objects: nothing is read out of bounds, freed early or stuck."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import kvcodec as kv
from kvcodec.encoded import ARRAYS
from kvcodec.testing import assert_equivalent, assert_same_bits


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def every_encoded():
    x = random(1, 2, 70, 64)
    for name in kv.PRESETS:
        for side in ("key", "value"):
            yield kv.codec(name, equalize=False).encode(x, side=side)


@pytest.mark.parametrize("encoded", list(every_encoded()), ids=repr)
@pytest.mark.parametrize("name", ARRAYS)
def test_an_encoded_with_a_wrong_array_cannot_be_made(encoded, name):
    array = getattr(encoded, name)
    if array is None:
        with pytest.raises(ValueError, match=f"{name} must (be|have)"):
            replace(encoded, **{name: np.zeros((1, 2, 3), np.int16)})
        return
    wrong = [None, array[:, :, :1], array[..., :0], array.astype(np.float64), array[0]]
    for other in wrong:
        with pytest.raises(ValueError, match=r"must (have|be)"):
            replace(encoded, **{name: other})


def test_an_encoded_takes_arrays_of_any_memory_layout():
    encoded = kv.codec("kivi4").encode(random(1, 2, 70, 64), side="value")
    strided = {
        name: np.asfortranarray(getattr(encoded, name))
        for name in ("packed", "scale", "zero_point")
    }
    made = replace(encoded, **strided)
    assert_same_bits(encoded.codec.decode(made), encoded.codec.decode(encoded))


def test_what_is_encoded_cannot_be_changed():
    k, q = random(1, 2, 70, 64), random(1, 2, 3, 64)
    codec = kv.codec("int4", side="key")
    weights = np.ones((1, 2, 64), np.float32)
    encoded = codec.encode(k, weights=weights)
    weights *= 2
    assert (encoded.weights == 1).all()
    for made in (encoded, codec.encode(k, queries=q)):
        for name in ARRAYS:
            array = getattr(made, name)
            assert array is None or not array.flags.writeable


def test_unaligned_and_swapped_input_is_read_as_it_is_meant():
    x = random(3, 64)
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(3, 64)
    for other in (unaligned, x.astype(x.dtype.newbyteorder())):
        assert_same_bits(kv.fwht(other), kv.fwht(x))


def test_tables_live_as_long_as_a_call_that_uses_them():
    """Threads that make the same tables at the same time each keep their own."""
    x = random(1, 4, 256, 64)
    expected = kv.codec("lm4", seed=1).encode(x, side="value")
    expected = expected.codec.decode(expected)
    wrong = []

    def work(barrier, seed):
        codec = kv.codec("lm4", seed=seed, side="value")
        barrier.wait()
        decoded = codec.decode(codec.encode(x))
        if np.abs(decoded - x).max() > 1:
            wrong.append(seed)

    for seed in range(2, 12):
        barrier = threading.Barrier(4)
        workers = [threading.Thread(target=work, args=(barrier, seed)) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_computes_the_same():
    program = (
        "import os, signal, numpy as np, kvcodec as kv\n"
        "x = np.ones((4096, 128), np.float32)\n"
        "kv.set_num_threads(2)\n"
        "before = kv.fwht(x)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(60)\n"
        "    os._exit(0 if (kv.fwht(x) == before).all() and kv.num_threads() == 1 else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], timeout=120, capture_output=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("softcap", [1e-6, 0.5, 50.0, 1e4, 1e8, 1e20])
def test_softcap_of_any_size_is_as_right_as_float32(softcap):
    q, k, v = random(1, 2, 3, 16), random(1, 2, 40, 16), random(1, 2, 40, 16)
    s = np.einsum("bhqd,bhtd->bhqt", q.astype(float), k.astype(float)) / 4
    p = np.exp(softcap * np.tanh(s / softcap))
    truth = np.einsum("bhqt,bhtd->bhqd", p / p.sum(axis=-1, keepdims=True), v.astype(float))
    for backend in ("auto", "reference"):
        output = kv.attention(q, k, v, softcap=softcap, backend=backend)
        np.testing.assert_allclose(output, truth, atol=2e-6)


@pytest.mark.parametrize("shape", [(5, 0), (0, 4), (0, 0), (2, 3, 0)])
def test_merging_of_nothing(shape):
    parts = [np.zeros(shape)] * 2
    sums = [np.arange(np.prod(shape[:-1]), dtype=np.float64).reshape(shape[:-1])] * 2
    assert_equivalent(kv.merge_attention, parts, sums)


@pytest.mark.parametrize(
    "call",
    [
        lambda n: kv.quantize_asymmetric(random(8, 8), 4, group_size=n),
        lambda n: kv.quantize_kivi_keys(random(8, 8), 4, residual=n),
        lambda n: kv.windowed_attention(*[random(1, 1, 8, 16)] * 3, sinks=n),
        lambda n: kv.windowed_attention(*[random(1, 1, 8, 16)] * 3, recent=n),
        lambda n: kv.attention(*[random(1, 1, 8, 16)] * 3, causal=True, window=n),
        lambda n: kv.codec("kivi4", group_size=n),
        lambda n: kv.codec("int4", block=n),
    ],
)
@pytest.mark.parametrize("number", [2**63 - 1, 2**64, 10**30, 10**400])
def test_counts_beyond_every_integer_type_are_refused(call, number):
    with pytest.raises(ValueError, match="must be a whole number"):
        call(number)


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("number", [2.0**101, 10**400, np.inf, 1e-40, 0, -1.0, np.nan])
def test_factors_beyond_float32_are_refused(name, number):
    with pytest.raises(ValueError, match=f"{name} must be a number from"):
        kv.attention(*[random(1, 1, 8, 16)] * 3, **{name: number})
