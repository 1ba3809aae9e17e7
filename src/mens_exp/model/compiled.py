"""Decoder layers compiled with torch.compile, in training passes.

Compiled are the parts of a layer between its projections: norms, RoPE, activations, residual sums.
Projections, dropout and attention run outside of the graphs, because they are autograd functions
that request frozen weights again in the backward pass, or depend on the documents of a pack. The
bounds of documents pass around the graphs, so a new packing needs no new graph.

Every graph is made by :meth:`CompiledLayers.warm_up`, from the first micro-batch of the run, and
none is read from disk. Later passes use these graphs; code for which none fits runs eagerly. A
resumed run therefore has the same kernels.
"""

from __future__ import annotations

import warnings
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Final

import torch

from mens_exp.model import attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NUMERICS = "compiled between projections 1"  # as records name it
_CHECKPOINTING: Final = "forward_with_checkpointing"  # transformers' wrapper of a layer's forward


def read_no_stored_graphs() -> None:
    """Switch off torch's caches of compiled graphs in this process.

    A kernel may depend on the sizes from which it was made. The caches do not know the CPU's
    instruction set either: a graph made for AVX2 gave uninitialized numbers under AVX-512.
    """
    import torch._functorch.config as autograd
    import torch._inductor.config as inductor

    inductor.fx_graph_cache = False
    autograd.enable_autograd_cache = False


class CompiledLayers:
    """The decoder layers of a model, compiled in passes that need gradients.

    Attributes:
        graphs: the graphs that :meth:`warm_up` made.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], outside: Iterable[type]) -> None:
        """Replace the forward of layers; :meth:`undo` restores it.

        Args:
            layers: the decoder layers.
            outside: classes of modules that are not compiled, besides those whose forward is
                replaced already.
        """
        self.graphs = 0
        self._is_warm = False
        self._replaced: list[tuple[torch.nn.Module, Any]] = []
        kept = tuple(outside)
        for layer in layers:
            for module in layer.modules():
                if module is not layer and ("forward" in vars(module) or isinstance(module, kept)):
                    self._replace(module, attention.outside_graphs(module.forward))
            self._replace(layer, _Layer(layer, self))
        attention.stay_outside_graphs()

    def _replace(self, module: torch.nn.Module, forward: Any) -> None:
        self._replaced.append((module, vars(module).get("forward")))
        module.forward = forward

    def undo(self) -> None:
        """Restore what each module had."""
        for module, own in reversed(self._replaced):
            del module.forward
            if own is not None:
                module.forward = own
        self._replaced.clear()

    def warm_up(self, one_pass: Callable[[], None]) -> None:
        """Make all graphs, and check that a second pass needs no others.

        Args:
            one_pass: passes a micro-batch forward and backward through the model, as training does.

        Raises:
            RuntimeError: torch cannot compile the layers, or not once and for all.
        """
        from torch._dynamo.utils import counters

        read_no_stored_graphs()
        torch.compiler.reset()  # graphs of an earlier run in this process would fit, too
        before = counters["stats"]["unique_graphs"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing looks at tensors in ways that warn
            one_pass()
            with torch.compiler.set_stance("fail_on_recompile"):
                one_pass()
        self.graphs = counters["stats"]["unique_graphs"] - before
        if not self.graphs:
            raise RuntimeError("torch.compile made no graph")
        self._is_warm = True

    def called(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a compiled function, without making new graphs once all are made."""
        if not self._is_warm:
            return compiled(*args, **kwargs)
        with torch.compiler.set_stance("eager_on_recompile"):
            return compiled(*args, **kwargs)


class _Layer:
    """The forward of one layer: compiled if gradients are needed, otherwise its own."""

    def __init__(self, layer: torch.nn.Module, layers: CompiledLayers) -> None:
        self.layer, self.layers = layer, layers
        self.own = layer.forward
        inner: Any = type(layer).forward
        self.checkpoints = _is_checkpointing(inner)
        while _is_checkpointing(inner):
            inner = inner.__wrapped__
        self.compiled = torch.compile(MethodType(inner, layer), dynamic=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        layer: Any = self.layer
        if self.checkpoints and layer.gradient_checkpointing and layer.training:
            # Older releases of transformers do this around `forward`.
            return layer._gradient_checkpointing_func(  # noqa: SLF001  # no public name
                partial(self._run, **kwargs), *args
            )
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, documents: Any = None, prefixes: Any = None, **kwargs: Any) -> Any:
        with attention.within(documents, prefixes):
            return self.layers.called(self.compiled, *args, **kwargs)


def _is_checkpointing(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_name == _CHECKPOINTING
