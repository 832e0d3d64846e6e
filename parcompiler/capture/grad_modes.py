"""Regions without gradients that torch.export loses, and marks on the nodes made in them.

    with torch.autocast("cpu"):
        with torch.no_grad():        lost: the graph has a region of autocast alone
            y = self.teacher(x)
    with torch.inference_mode():     lost anywhere
        ...

A model that has such a region is exported once more, with a mark on all nodes made there.

>>> with noticed() as lost:
...     with torch.no_grad():
...         pass
...     with torch.autocast("cpu"), torch.no_grad():
...         pass
>>> lost
[<class 'torch.autograd.grad_mode.no_grad'>]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.fx import traceback

from parcompiler.capture.patches import TORCH, patched

MARK = "parcompiler_mode"
_MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.autocast)
_DECORATOR = os.path.join(TORCH, "utils", "_contextlib.py")


@contextmanager
def noticed() -> Iterator[list[type]]:
    """In this context, the list collects regions that an export loses, as they are entered."""
    lost: list[type] = []
    casting = 0  # regions of autocast around, whether they switch it on or off

    def watching(kind: type, enter: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(enter)
        def entered(self: Any) -> Any:
            loses = self.mode if kind is torch.inference_mode else casting
            if loses and torch.is_grad_enabled() and not _is_of_torch(sys._getframe(1)):
                lost.append(kind)
            return enter(self)

        return entered

    def counting(change: int, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def counted(self: Any, *error: Any) -> Any:
            nonlocal casting
            casting += change
            return method(self, *error)

        return counted

    with ExitStack() as stack:
        for kind in (torch.no_grad, torch.inference_mode):
            enter = watching(kind, vars(kind)["__enter__"])
            stack.enter_context(patched(kind, __enter__=enter))
        enter, leave = (vars(torch.autocast)[name] for name in ("__enter__", "__exit__"))
        methods = {"__enter__": counting(1, enter), "__exit__": counting(-1, leave)}
        stack.enter_context(patched(torch.autocast, **methods))
        yield lost


@contextmanager
def marked() -> Iterator[None]:
    """In this context, nodes are marked with the modes around them, the innermost last."""

    def entering(kind: type, enter: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(enter)
        def entered(self: Any) -> Any:
            result = enter(self)
            around = (traceback.current_meta.get("custom") or {}).get(MARK, ())
            modes = (*around, kind.__name__) if getattr(self, "mode", True) else around
            self.__dict__.setdefault(MARK, []).append(traceback.annotate({MARK: modes}))
            self.__dict__[MARK][-1].__enter__()
            return result

        return entered

    def leaving(leave: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(leave)
        def left(self: Any, *error: Any) -> Any:
            self.__dict__[MARK].pop().__exit__(None, None, None)
            return leave(self, *error)

        return left

    with ExitStack() as stack:
        stack.enter_context(traceback.preserve_node_meta())
        for kind in _MODES:
            enter, leave = (vars(kind)[name] for name in ("__enter__", "__exit__"))
            methods = {"__enter__": entering(kind, enter), "__exit__": leaving(leave)}
            stack.enter_context(patched(kind, **methods))
        yield


def is_in_lost_region(node: fx.Node) -> bool:
    """Whether a node was made in a region that the export has lost, and so without gradients."""
    modes = [*(node.meta.get("custom") or {}).get(MARK, ())]
    while modes and modes[-1] == "autocast":
        modes.pop()
    return "inference_mode" in modes or (modes[-1:] == ["no_grad"] and "autocast" in modes)


def _is_of_torch(frame: FrameType) -> bool:
    """Whether torch itself enters a mode, in code or by a decorator."""
    while frame.f_back is not None and frame.f_code.co_filename == _DECORATOR:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(TORCH)
