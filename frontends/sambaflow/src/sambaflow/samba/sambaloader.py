"""SambaLoader: a torch DataLoader, or any iterable of batches, that loads ahead and gives named SambaTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tilework
from tilework.frontend.ahead import ahead

from .sambatensor import SambaTensor, from_torch_tensor, to_torch


class SambaLoader:
    """maxsize: batches that are loaded ahead. function_hook(batch) chooses or changes what becomes inputs. With
    return_original_batch it yields (samba_batch, original_batch). timeout: seconds to wait for a batch."""

    def __init__(
        self,
        dataloader: Iterable[Any],
        names: Sequence[str],
        maxsize: int = 10,
        function_hook: Callable[[Any], Any] | None = None,
        return_original_batch: bool = False,
        ignore_dataloader_exception: bool = False,
        timeout: float = 900,
    ) -> None:
        self.dataloader, self.names, self.maxsize = dataloader, list(names), max(1, maxsize)
        self.function_hook, self.return_original_batch = function_hook, return_original_batch
        self.ignore_dataloader_exception, self.timeout = ignore_dataloader_exception, timeout
        self._current: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        self._current = self._batches()
        return self._current

    def __next__(self) -> Any:
        if self._current is None:
            self._current = self._batches()
        try:
            return next(self._current)
        except StopIteration:
            self._current = None
            raise

    def _named(self, batch: Any) -> list[SambaTensor]:
        chosen = self.function_hook(batch) if self.function_hook is not None else batch
        if isinstance(chosen, Mapping):
            chosen = [chosen[n] for n in self.names] if set(self.names) <= set(chosen) else list(chosen.values())
        tensors = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
        if len(tensors) != len(self.names):
            raise tilework.UserError("sambaflow-loader", "a batch has a different number of tensors than there are names",
                                     found=f"{len(tensors)} tensors", expected=f"{len(self.names)}: {', '.join(self.names)}",
                                     fix="choose with function_hook=, or give as many names")  # fmt: skip
        return [from_torch_tensor(to_torch(t), name=n, batch_dim=0) for t, n in zip(tensors, self.names, strict=True)]

    def _batches(self) -> Iterator[Any]:
        def made(batch: Any) -> Any:
            named = self._named(batch)
            return (named, batch) if self.return_original_batch else named

        return ahead(self.dataloader, made, self.maxsize, timeout=self.timeout, ends_on_error=self.ignore_dataloader_exception)
