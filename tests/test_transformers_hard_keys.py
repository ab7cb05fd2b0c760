"""Keys with a large constant offset in two channels a head, which Qwen2.5 has from its biases."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_models import cache_of, hard_keys, int4, logits, packed, prompt, relative, tiny

pytestmark = pytest.mark.hf
KEYS = {
    "plain": int4(center=False),
    "centered": int4(center=True),
    "preset": "int4",  # equalized too
    "exact": None,
}


def test_centering_repairs_what_int4_loses_on_hard_keys():
    errors = {}
    for hard in (False, True):
        model, ids = tiny("Qwen2"), prompt(200)
        if hard:
            hard_keys(model)
        truth = logits(model, ids)
        packed(model)
        for name, key in KEYS.items():
            cache = cache_of(model, key=key, value=None)
            errors[hard, name] = relative(logits(model, ids, [120], cache), truth)
    assert errors[True, "exact"] < 1e-4
    assert errors[False, "plain"] < 0.2
    assert errors[True, "plain"] > 4 * errors[False, "plain"]
    for name in ("centered", "preset"):
        assert errors[True, name] < 1.5 * errors[False, "plain"]
