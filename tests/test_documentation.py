"""Every public name has a page in the API reference and a complete docstring."""

import importlib
import inspect
import re
from dataclasses import is_dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import pytest

import kvcodec as kv

DOCS = Path(__file__).parents[1] / "docs"
AUTOSUMMARY = re.compile(r"^\.\. autosummary::\n   :toctree: generated\n\n((?:   \w+\n)+)", re.M)
HAS_HF = all(find_spec(name) for name in ("torch", "transformers"))
MODULES = (
    "kvcodec",
    "kvcodec.benchmark",
    "kvcodec.evaluation",
    *(["kvcodec.integrations.transformers"] if HAS_HF else []),
    "kvcodec.metrics",
    "kvcodec.reference.codebook_solver",
    "kvcodec.testing",
)
CHECKED = ("kvcodec", "kvcodec.metrics")
ALGORITHMS = {
    "kvcodec": set(kv.__all__)
    - {
        *("config_context", "get_config", "load_sample", "num_threads", "pack", "set_num_threads"),
        *("show_config", "supported_head_dims", "unpack"),
    },
    "kvcodec.evaluation": {"evaluate_attention", "summarize", "wilson_interval"},
    "kvcodec.metrics": {"cosine_similarity", "kl_divergence", "relative_error", "relative_mse"},
    "kvcodec.reference.codebook_solver": {"lloyd_max", "lloyd_step"},
    "kvcodec.testing": {"assert_within_twice", "exact_attention"},
}


class Documented:
    """A public function, class or method, and the numpydoc sections of its docstring."""

    def __init__(self, module, path, obj):
        self.module, self.path, self.obj = module, path, obj

    def __repr__(self):
        return f"{self.module}.{self.path}"

    @cached_property
    def sections(self):
        """The text of each section by its title; that before the first one is left out."""
        parts = re.split(r"^(\w[\w ]+)\n-+\n", inspect.getdoc(self.obj), flags=re.MULTILINE)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    def described(self, title):
        """The names that a section describes, in order."""
        lines = re.findall(r"^[\w*, ]+(?= :|$)", self.sections.get(title, ""), flags=re.MULTILINE)
        return [name.strip(" *") for line in lines for name in line.split(",")]

    @property
    def parameters(self):
        """The names in the signature, without self and cls."""
        names = inspect.signature(self.obj).parameters
        return [name for name in names if name not in ("self", "cls")]

    def describes_all_parameters(self):
        """Whether each parameter is described, and once."""
        names, described = self.parameters, self.described("Parameters")
        return sorted(name for name in described if name in names) == sorted(names)

    @property
    def takes_a_model(self):
        """Whether an example would need a language model of some megabytes."""
        annotations = [p.annotation for p in inspect.signature(self.obj).parameters.values()]
        return "LanguageModel" in annotations or self.path == "measure_on_cluster"

    @property
    def checks_its_input(self):
        """Whether it raises, or calls what does."""
        try:
            source = inspect.getsource(self.obj)
        except OSError:  # a function that hypothesis has made of another one
            return False
        return bool(re.search(r"\braise |_validate\.|\bcheck_\w+\(", source))


def public_objects():
    """All public functions and classes, and which modules they are in."""
    for name in MODULES:
        module = importlib.import_module(name)
        for path in module.__all__:
            obj = getattr(module, path)
            if callable(obj):
                yield Documented(name, path, obj)


def public_methods(documented):
    """The public methods and properties that a class itself defines."""
    for name, member in vars(documented.obj).items():
        if not name.startswith("_"):
            member = getattr(member, "__func__", member)
            if inspect.isfunction(member) or isinstance(member, property):
                yield Documented(documented.module, f"{documented.path}.{name}", member)


OBJECTS = list(public_objects())
CLASSES = [each for each in OBJECTS if inspect.isclass(each.obj)]
FUNCTIONS = [each for each in OBJECTS if not inspect.isclass(each.obj)]
METHODS = [each for documented in CLASSES for each in public_methods(documented)]


def pages():
    """The names that the pages of the API reference list, each with the module it is of."""
    found = []
    for path in (DOCS / "api").glob("*.rst"):
        text = path.read_text(encoding="utf-8")
        module = re.search(r"^\.\. currentmodule:: (\S+)$", text, re.MULTILINE)
        listed = re.findall(r"^\.\. py:data:: (\w+)$", text, re.MULTILINE)
        for block in AUTOSUMMARY.findall(text):
            listed += block.split()
        found += [(module and module[1], name) for name in listed]
    return found


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_page_and_only_those(name):
    public = importlib.import_module(name).__all__
    assert sorted(public) == sorted(listed for about, listed in pages() if about == name)


@pytest.mark.parametrize("documented", FUNCTIONS + METHODS, ids=repr)
def test_functions_and_methods_say_what_they_take_and_return(documented):
    if isinstance(documented.obj, property):
        assert inspect.getdoc(documented.obj)
        return
    assert documented.describes_all_parameters()
    returned = inspect.signature(documented.obj).return_annotation
    if returned not in (None, "None", "Iterator[None]", "NoReturn"):
        assert documented.sections.keys() & {"Returns", "Yields"}


@pytest.mark.parametrize("documented", FUNCTIONS, ids=repr)
def test_functions_say_what_they_raise_and_have_an_example(documented):
    if not documented.takes_a_model:
        assert "Examples" in documented.sections
    if documented.parameters and (documented.module in CHECKED or documented.checks_its_input):
        assert "Raises" in documented.sections


@pytest.mark.parametrize(
    "documented",
    [each for each in FUNCTIONS if each.path in ALGORITHMS.get(each.module, ())],
    ids=repr,
)
def test_algorithms_name_their_source(documented):
    assert "References" in documented.sections


@pytest.mark.parametrize("documented", CLASSES, ids=repr)
def test_classes_are_documented(documented):
    cls = documented.obj
    fields = cls.__dataclass_fields__ if is_dataclass(cls) else getattr(cls, "_fields", ())
    assert set(fields) <= set(documented.described("Attributes"))
    if not fields:
        assert documented.describes_all_parameters()


@pytest.mark.parametrize("documented", CLASSES + METHODS, ids=repr)
def test_classes_and_methods_of_the_package_have_an_example(documented):
    if documented.module == "kvcodec" and not isinstance(documented.obj, property):
        assert "Examples" in documented.sections
        if inspect.isfunction(documented.obj) and documented.parameters:
            assert "Raises" in documented.sections or not documented.checks_its_input


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_once(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)
