"""One layer of a KVCodecCache, as Transformers asks for it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcodec.attention import AttentionResult
from kvcodec.integrations._attention import HandedOver, check_tensor
from kvcodec.integrations._extra import torch, transformers
from kvcodec.integrations._padding import Columns, NewColumns

if TYPE_CHECKING:
    from kvcodec.integrations.transformers import KVCodecCache

Floats = NDArray[np.float32]


class KVCodecLayer(transformers.cache_utils.CacheLayerMixin):
    """A layer of the one `KVCache` that its `KVCodecCache` holds."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, owner: KVCodecCache, index: int, window: int | None) -> None:
        super().__init__()
        # The cache holds its layers: the other way round, only the garbage collector would free it.
        self._owner = weakref.ref(owner)
        self.index, self.window = index, window
        self.columns = Columns()
        self.record_past = False
        self.module: weakref.ref[torch.nn.Module] | None = None  # what filled it

    @property
    def owner(self) -> KVCodecCache:
        """The cache that it is a layer of."""
        owner = self._owner()
        if owner is None:
            raise ReferenceError(
                f"cache must be kept as long as its layers are used, but that of layer "
                f"{self.index} is gone."
            )
        return owner

    @property
    def is_sliding(self) -> bool:
        """Whether queries see a window only."""
        return self.window is not None

    @property
    def is_croppable(self) -> bool:
        """Whether a crop may leave no trace."""
        return self.owner.rollback > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the cache for the batch and the number type of these keys, if it is empty."""
        self.owner._begin(key_states.shape[0], key_states.dtype)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand the new keys and values to the attention function, which appends them."""
        for states, name in ((key_states, "key"), (value_states, "value")):
            check_tensor(states, name)
        self.lazy_initialization(key_states, value_states)
        return HandedOver.of(self, key_states), HandedOver.of(self, value_states)

    def check_module(self, module: torch.nn.Module) -> None:
        """Raise if another model with other weights, which is still there, has filled the layer."""
        known = None if self.module is None else self.module()
        if self.columns.count and known is not None and not _same_weights(known, module):
            raise ValueError(
                f"cache must be continued by the model that filled it, but layer {self.index} of "
                "another one with other weights was called; give each model a KVCodecCache of its "
                "own."
            )
        self.module = weakref.ref(module)

    def append_attend(
        self, q: Floats, k: Floats, v: Floats, columns: NewColumns, **options: Any
    ) -> Floats | AttentionResult:
        """What the attention function calls."""
        if not self.index:  # a later layer would notice when the first ones have grown again
            self.owner._check_even()
        self.columns.check(columns)
        result = self.owner.kv.append_attend(
            self.index, q, k, v, window=self.window, lengths=columns.lengths, **options
        )
        self.columns.append(columns)
        return result

    def get_seq_length(self) -> int:
        """Columns seen, padding included."""
        return self.columns.count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a mask covers, and the first of them."""
        return self.columns.count + query_length, 0

    def get_max_length(self) -> int:
        """Most tokens, or -1 for no limit."""
        capacity = self.owner.kv.capacity
        return -1 if capacity is None else capacity


def _same_weights(module: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two modules compute the same, as copies of a model do."""
    if module is other:
        return True
    one, two = dict(module.named_parameters()), dict(other.named_parameters())
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
