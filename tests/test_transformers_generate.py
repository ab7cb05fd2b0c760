"""`generate` in all its modes: on a cache without codecs the tokens are those without it."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hf_models import (
    EXACT,
    cache_of,
    codec_blocks,
    generate,
    left_padded,
    logits,
    packed,
    prompt,
    relative,
    tiny,
)

pytestmark = pytest.mark.hf
every_kind = pytest.mark.parametrize("name", ["Llama", "Gemma3"])
MODES = {
    "beams": {"num_beams": 3},
    "beams and sequences": {"num_beams": 4, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "sampled sequences": {"do_sample": True, "num_return_sequences": 3},
    "chunked prefill": {"prefill_chunk_size": 16},
}


@every_kind
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [1, 2])
def test_modes(name, mode, batch):
    model, ids = tiny(name), prompt(50, batch)
    torch.manual_seed(3)
    expected = generate(model, ids, **MODES[mode])
    cache = cache_of(packed(model), **EXACT)
    torch.manual_seed(3)
    assert torch.equal(generate(model, ids, cache, **MODES[mode]), expected)
    assert min(codec_blocks(cache)) > 0
    coded = cache_of(model)
    assert generate(model, ids, coded, **MODES[mode]).shape == expected.shape
    assert coded.get_seq_length() == 50 + 24 - 1


@every_kind
def test_lookup_decoding(name):
    model = tiny(name)
    ids = prompt(12).repeat(1, 4)
    expected = generate(model, ids, tokens=30)
    cache = cache_of(packed(model), **EXACT, rollback=10)
    assert torch.equal(generate(model, ids, cache, tokens=30, prompt_lookup_num_tokens=8), expected)


@every_kind
def test_assisted_decoding(name):
    """Of the drafts of an assistant that is not quite the model some are taken back."""
    model, assistant, ids = tiny(name), tiny(name), prompt(40)
    assistant.generation_config.assistant_confidence_threshold = 0.0
    with torch.no_grad():
        for x in assistant.parameters():
            x += 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    expected = generate(model, ids, tokens=40)
    cache = cache_of(packed(model), **EXACT, rollback=20)
    removed = []
    crop, cache.crop = cache.crop, lambda count: (removed.append(count), crop(count))
    found = generate(model, ids, cache, tokens=40, assistant_model=assistant)
    assert torch.equal(found, expected)
    assert min(removed) < 0
    assert cache.get_seq_length() == 40 + 40 - 1


@every_kind
def test_a_draft_leaves_no_trace_within_rollback(name):
    """Packed in int4, a cache that took drafts back is bit for bit one that never saw them."""
    model, ids = packed(tiny(name)), prompt(90)
    plain, drafted = cache_of(model, rollback=6), cache_of(model, rollback=6)
    for at in range(60, 90):
        start = drafted.get_seq_length()
        logits(model, ids[:, start:at], cache=plain)
        logits(model, ids[:, start:at], cache=drafted)
        logits(model, prompt(5, seed=at), cache=drafted)
        drafted.crop(-5)
    for layer in range(2):
        for side in ("keys", "values"):
            assert (getattr(plain.kv, side)(layer) == getattr(drafted.kv, side)(layer)).all()
    assert (plain.kv.seq_lengths == drafted.kv.seq_lengths).all()


@every_kind
def test_a_left_padded_batch(name):
    model, lengths = tiny(name), [60, 37, 5]
    ids, mask, _ = left_padded(prompt(60, 3), lengths)
    expected = generate(model, ids, attention_mask=mask)
    packed(model)
    cache = cache_of(model, **EXACT)
    assert torch.equal(generate(model, ids, cache, attention_mask=mask), expected)
    assert cache.kv.seq_lengths[0].tolist() == [length + 23 for length in lengths]
    assert cache.get_seq_length() == 60 + 23
    chunked = cache_of(model, **EXACT)
    found = generate(model, ids, chunked, attention_mask=mask, prefill_chunk_size=7)
    assert torch.equal(found, expected)
    beams = {"num_beams": 3, "attention_mask": mask}
    found = generate(model, ids, cache_of(model, **EXACT), **beams)
    model.set_attn_implementation("sdpa")
    assert torch.equal(found, generate(model, ids, **beams))


@every_kind
def test_a_row_of_a_padded_batch_is_what_it_is_alone(name):
    model, lengths = packed(tiny(name)), [60, 37, 5]
    ids, mask, positions = left_padded(prompt(60, 3), lengths)
    together = cache_of(model)
    found = logits(model, ids, [40, 41, 50], together, mask, positions)
    for row, length in enumerate(lengths):
        own = slice(60 - length, 60)
        alone = cache_of(model)
        expected = logits(model, ids[row : row + 1, own], (), alone)
        assert relative(found[row : row + 1, own], expected) < 0.02
        assert alone.kv.keys(1).shape[2] == min(length, together.kv.keys(1).shape[2])


@every_kind
def test_turns_of_a_conversation(name):
    """One cache through three turns, each given as the whole text or as its new tokens."""
    model = tiny(name)
    whole, texts = prompt(30), []
    for turn in range(3):
        answer = generate(model, whole, tokens=10)
        texts.append((whole, answer))
        whole = torch.cat([whole, answer, prompt(15, seed=turn + 1)], 1)
    packed(model)
    full, new = cache_of(model, **EXACT), cache_of(model, **EXACT)
    for text, answer in texts:
        assert torch.equal(generate(model, text, full, tokens=10), answer)
        held = new.get_seq_length()
        mask = torch.ones_like(text)
        part = generate(model, text[:, held:], new, tokens=10, attention_mask=mask)
        assert torch.equal(part, answer)
    assert full.get_seq_length() == new.get_seq_length() == texts[-1][0].shape[1] + 9


def test_turns_of_a_padded_batch():
    """New turns may be padded on their left: real tokens of a row follow each other."""
    model = packed(tiny("Llama"))
    ids, mask, _ = left_padded(prompt(60, 2), [60, 60])
    mask[0, :10] = 0
    mask[1, 30:37] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = cache_of(model, **EXACT)
    found = logits(model, ids, [30], cache, mask, positions)
    for row in range(2):
        real = mask[row].bool()
        expected = logits(tiny("Llama"), ids[row, real][None])
        assert relative(found[row, real][None], expected) < 1e-4
    assert cache.kv.seq_lengths[0].tolist() == [50, 53]


def test_a_prompt_cache_for_many_continuations():
    model, ids = packed(tiny("Llama")), prompt(50)
    cache = cache_of(model, **EXACT)
    logits(model, ids[:, :-1], cache=cache)
    alone = generate(model, ids, cache.copy())
    cache.batch_repeat_interleave(3)
    assert cache.batch_size == 3
    assert torch.equal(generate(model, ids.repeat(3, 1), cache), alone.repeat(3, 1))
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.batch_size == 1
