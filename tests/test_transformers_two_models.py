"""A cache that two models of one shape are given: refused unless both compute the same."""

import copy
import gc

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hf_models import cache_of, logits, packed, prompt, tiny

from kvcodec.testing import assert_same_bits

pytestmark = pytest.mark.hf


class TestTwoModels:
    """A cache is continued by the model that filled it, or by one that computes the same."""

    @staticmethod
    def half_full(model, **options):
        cache = cache_of(model, **options)
        logits(model, prompt(30), cache=cache)
        return cache

    @staticmethod
    def other():
        model = packed(tiny("Llama"))
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[0, 0] += 1
        return model

    def test_another_model_of_the_same_shape_is_refused(self):
        model, other = packed(tiny("Llama")), self.other()
        for cache in (self.half_full(model), self.half_full(model).copy()):
            with pytest.raises(ValueError, match="cache must be continued by the model that fil"):
                logits(other, prompt(10), cache=cache)
            cache.crop(0)
            logits(model, prompt(10), cache=cache)
            cache.reset()
            logits(other, prompt(10), cache=cache)
            assert cache.get_seq_length() == 10

    def test_the_same_model_as_another_object_is_taken(self):
        model = packed(tiny("Llama"))
        expected = self.half_full(model)
        logits(model, prompt(10), cache=expected)
        for again in (packed(tiny("Llama")), copy.deepcopy(model), model.float()):
            cache = self.half_full(model)
            logits(again, prompt(10), cache=cache)
            assert_same_bits(cache.kv.keys(1), expected.kv.keys(1))

    def test_a_model_that_is_gone_is_not_compared_with(self):
        model = packed(tiny("Llama"))
        cache = self.half_full(model)
        del model
        gc.collect()
        logits(self.other(), prompt(10), cache=cache)
        assert cache.get_seq_length() == 40
