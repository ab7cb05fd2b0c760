"""Models with trained weights: float32 is kept, codecs cost what they do, generation agrees."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hf_models import CACHE
from hf_text import REAL

from kvcodec.evaluation import ChunkOptions, codec_pair, cut_chunks, read_text
from kvcodec.evaluation.language_model import evaluate_chunk, packed_run

pytestmark = pytest.mark.hf
OPTIONS = ChunkOptions(chunk=16)


@pytest.fixture(scope="module", params=REAL)
def model(request):
    return REAL[request.param]()


def text_of(model, tokens):
    [chunk] = cut_chunks(model.encode(read_text())[5000:], model.first_tokens, tokens, 1)
    return chunk


def test_codecs_are_close_to_float32(model):
    pairs = [codec_pair(name) for name in ("fp32", "int8", "int4")]
    found = evaluate_chunk(model, text_of(model, 132), pairs, OPTIONS)
    exact, int8, int4 = (sum(each.kl[100:]) / len(each.kl[100:]) for each in found)
    assert abs(exact) < 1e-9
    assert all(found[0].same_top)
    # What 99% of the predictions of longer texts stay below.
    assert 1e-9 < int8 < 8e-3
    assert 1e-7 < int4 < 2e-2


def test_generation_and_evaluation_give_the_same_logits(model):
    """With a packed cache, steps of `generate` are those of an evaluation that is fed as they are.

    Fed in other pieces, a model's own products may round otherwise, and a key that lies between
    two codes may get the other one.
    """
    tokens, count = text_of(model, 108)[:-1], 6
    cache = packed_run(model, codec_pair("int4"), OPTIONS).cache
    before = model.model.config._attn_implementation
    model.model.set_attn_implementation("kvcodec")
    try:
        written = model.model.generate(
            torch.tensor([tokens]),
            **{CACHE: cache},
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    finally:
        model.model.set_attn_implementation(before)
    stepwise = torch.cat(written.logits)
    run = packed_run(model, codec_pair("int4"), OPTIONS)
    fed = [run.feed(tokens, 1)]
    fed += [run.feed([token], 1) for token in written.sequences[0, len(tokens) : -1].tolist()]
    assert float((torch.cat(fed) - stepwise).abs().max()) < 1e-4
