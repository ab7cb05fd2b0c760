"""A language model and its tokenizer, from a folder or a GGUF file, and the text to run it on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

__all__ = ["LanguageModel", "cut_chunks", "load_language_model", "read_text"]

GGUF = ".gguf"


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model in float32 on the CPU, and its tokenizer.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        The model, in evaluation mode.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    source : str
        Its name: that of the folder or of the file.
    """

    model: Any
    tokenizer: Any
    source: str

    @property
    def exact_attention(self) -> str:
        """The attention function of Transformers that computes what the model defines."""
        config = self.model.config.get_text_config(decoder=True)
        softcap = getattr(config, "attn_logit_softcapping", None)
        return "sdpa" if softcap is None and self.model._supports_sdpa else "eager"

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that the tokenizer would put around it.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        list of int
            Its tokens.
        """
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @property
    def first_tokens(self) -> list[int]:
        """What the tokenizer puts before a text: a token of the beginning, or nothing."""
        first = self.tokenizer.bos_token_id
        around = self.tokenizer("a", verbose=False)["input_ids"]
        return [first] if first is not None and around[0] == first else []


def load_language_model(path: str | os.PathLike[str], *, weights: bool = True) -> LanguageModel:
    """Load a model and its tokenizer in float32, without a network.

    Parameters
    ----------
    path : str or path
        A folder as `save_pretrained` of Transformers writes it, or a file ending in .gguf.
    weights : bool, default True
        False makes a model without memory for its weights, which has a config and cannot be run.

    Returns
    -------
    LanguageModel
        The model.

    Raises
    ------
    ValueError
        If the extra ``hf`` is not installed, there is no such model, or it cannot be loaded, lacks
        weights or has some that are not finite, or is of a kind that `KVCodecCache` does not
        support.

    Examples
    --------
    >>> from kvcodec.evaluation import load_language_model
    >>> load_language_model("nowhere.gguf")
    Traceback (most recent call last):
    ValueError: model must be a folder or a .gguf file, but 'nowhere.gguf' is neither.
    """
    is_file = check_model_path(path)
    path = Path(path)
    import torch
    import transformers

    from kvcodec.integrations.transformers import KVCodecCache

    folder = path.parent if is_file else path
    # Transformers would ask on the terminal whether to run code that comes with a model.
    options = {"local_files_only": True, "trust_remote_code": False}
    if is_file:
        options["gguf_file"] = path.name
    try:
        with _quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
            if weights:
                model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, output_loading_info=True, **options
                )
            else:
                config = transformers.AutoConfig.from_pretrained(folder, **options)
                with torch.device("meta"):
                    model = transformers.AutoModelForCausalLM.from_config(config)
                loading = {"missing_keys": []}
    # Readers of models raise whatever a damaged or foreign file leads to.
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise ValueError(f"model {str(path)!r} cannot be loaded: {reason}.") from error
    # Transformers would run the model with random numbers in their place.
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"model {str(path)!r} cannot be loaded: it lacks {len(missing)} of its weights, "
            f"{missing[0]} among them."
        )
    if weights and (name := _not_finite(model)):
        raise ValueError(
            f"model {str(path)!r} cannot be run: its weights {name} are not all finite numbers."
        )
    KVCodecCache(model.config)
    return LanguageModel(model.eval(), tokenizer, path.resolve().name)


def check_model_path(path: str | os.PathLike[str]) -> bool:
    """Whether the path is that of a .gguf file, and not of a folder.

    Parameters
    ----------
    path : str or path
        The path of a model.

    Returns
    -------
    bool
        True for a file, False for a folder.

    Raises
    ------
    ValueError
        If it is neither, or the extra ``hf`` is not installed.
    """
    given = os.fspath(path)
    is_file = Path(given).is_file() and Path(given).suffix.lower() == GGUF
    if not given or not (is_file or Path(given).is_dir()):
        raise ValueError(f"model must be a folder or a .gguf file, but {given!r} is neither.")
    check_extra(is_file)
    return is_file


def _not_finite(model: Any) -> str | None:
    """The name of weights with a number that is not finite, which all predictions depend on."""
    import torch

    # A token that is never used may have any numbers.
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    left_out = {id(weights) for each in embeddings if each for weights in each.parameters()}
    for name, weights in model.named_parameters():
        if id(weights) not in left_out and not bool(torch.isfinite(weights).all()):
            return name
    return None


def check_extra(gguf: bool) -> None:
    """Raise a ValueError that names the extra ``hf`` unless what it installs can be imported."""
    try:
        import kvcodec.integrations.transformers  # noqa: F401
    except ImportError as error:
        raise ValueError(str(error)) from None
    try:
        for name in ("gguf",) if gguf else ():
            import_module(name)
    except ImportError as error:
        raise ValueError(
            f"a .gguf model needs {error.name}, which is missing; install the extra 'hf': "
            'pip install "kvcodec-cpu[hf]".'
        ) from None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without notes and progress bars, not all of which have a switch."""
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.set_verbosity(level)


def read_text(path: str | os.PathLike[str] | None = None) -> str:
    """The text of a file; by default the help texts on Python that Python itself ships.

    These are the topics of ``help()``, of the module `pydoc_data.topics`, in the order of their
    names, with a newline between them: some 440,000 characters of technical English with tables
    and code, under Python's licence. They differ between releases of Python.

    Parameters
    ----------
    path : str or path, optional
        A file of text in UTF-8.

    Returns
    -------
    str
        The text.

    Raises
    ------
    ValueError
        If the file cannot be read or is no text in UTF-8, or this Python ships no topics.

    Examples
    --------
    >>> from kvcodec.evaluation import read_text
    >>> 'The "assert" statement' in read_text()
    True
    """
    if path is not None:
        try:
            return Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"text must be a file in UTF-8, but {path} is not: {error}.") from None
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"text must be a file in UTF-8, but {path} cannot be read: {reason}."
            ) from None
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError:
        raise ValueError("text must be given: this Python ships no pydoc_data.topics.") from None
    return "\n".join(topics[name] for name in sorted(topics))


def cut_chunks(tokens: Sequence[int], first: Sequence[int], length: int, count: int) -> list:
    """Cut chunks out of a text, evenly spaced from its beginning.

    Parameters
    ----------
    tokens : sequence of int
        The tokens of the text.
    first : sequence of int
        Tokens that each chunk begins with, those that the model expects before a text.
    length : int
        Tokens of a chunk, `first` included.
    count : int
        Chunks.

    Returns
    -------
    list of list of int
        Each of ``length + 1`` tokens: the last is only predicted.

    Raises
    ------
    ValueError
        If the text is shorter than the chunks together.

    Examples
    --------
    >>> from kvcodec.evaluation import cut_chunks
    >>> cut_chunks(range(10, 20), [1], length=3, count=2)
    [[1, 10, 11, 12], [1, 15, 16, 17]]
    """
    taken = length + 1 - len(first)
    if taken * count > len(tokens):
        raise ValueError(
            f"text must have at least {taken * count} tokens for {count} chunks of {length}, "
            f"but has {len(tokens)}."
        )
    starts = (index * len(tokens) // count for index in range(count))
    return [[*first, *tokens[start : start + taken]] for start in starts]
