"""What makes a LoRA's own forward compute its branch first.

While that forward runs, a mode of torch's takes the product of the Linear and the last product of the branch when they
are asked for and answers with a stand-in each. Where the two are added, everything that backward needs of the branch is
saved, then the Linear computes, then the branch is added in place. Whatever else the forward does with a stand-in makes
it the tensor that it stands for, so that a forward which does more than that computes what it always did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from viking.lora.function import added, saved
from viking.nn import linear

if TYPE_CHECKING:
    from viking.lora.branches import Branch

#: Functions across which a product may be put off: they write to no tensor and draw nothing that it could notice.
_HARMLESS = frozenset((
    "__get__", "linear", "add", "mul", "__add__", "__radd__", "__mul__", "__rmul__", "to", "type", "float", "half",
    "bfloat16", "size", "dim", "view", "reshape", "unsqueeze", "repeat_interleave", "dropout",
))
_ADDS = frozenset(("add", "__add__", "__radd__"))
_MULS = frozenset(("mul", "__mul__", "__rmul__"))
#: The dtypes that autocast casts.
_CAST = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Unsuitable(RuntimeError):
    """A forward uses again what went into its sum already: it cannot be fused."""


class Deferred:
    """Stands for a tensor that is not computed yet."""

    __slots__ = ("_creates_graph", "_is_spent", "_mode", "_run", "_value", "device", "dtype", "shape")

    def __init__(
        self, mode: BranchFirst, run: Callable[[], torch.Tensor] | None, shape: tuple[int, ...], dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._mode, self._run, self.dtype, self.device = mode, run, dtype, device
        self.shape = torch.Size(shape)
        self._value: torch.Tensor | None = None
        self._is_spent = False
        self._creates_graph = torch.is_grad_enabled()

    @property
    def is_open(self) -> bool:
        return self._value is None and not self._is_spent

    def value(self) -> torch.Tensor:
        """The tensor, computed now unless it was."""
        if self._is_spent:
            raise Unsuitable("its forward uses the Linear's output or the branch again after it added them")
        if self._value is None:
            if torch.is_grad_enabled() != self._creates_graph:
                raise Unsuitable("its forward gives the Linear's output to a function with a backward of its own")
            with self._mode.paused():
                self._value = self._compute()
        return self._value

    def _compute(self) -> torch.Tensor:
        run, self._run = self._run, None  # and with it the input
        assert run is not None
        return run()

    def spend(self) -> torch.Tensor:
        """The tensor, for the caller alone to change."""
        value = self.value()
        self._value, self._is_spent = None, True
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self if args == (self.dtype,) and not kwargs else self.value().to(*args, **kwargs)

    def dim(self) -> int:
        return len(self.shape)

    def __add__(self, other: Any) -> Any:
        return _sum_of(self, other)

    def __mul__(self, other: Any) -> Any:
        return _product_of(self, other)

    __radd__, __rmul__ = __add__, __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*computed(args), **computed(kwargs or {}))


class Product(Deferred):
    """h B^T, times numbers: the last product of a branch. h: (*, rank), B: (out, rank)."""

    __slots__ = ("factors", "h", "root", "weight")

    def __init__(
        self, mode: BranchFirst, h: torch.Tensor, weight: torch.Tensor, root: Product | None = None,
        factors: tuple[float, ...] = (),
    ) -> None:
        super().__init__(mode, None, (*h.shape[:-1], weight.shape[0]), h.dtype, h.device)
        self.h, self.weight, self.factors = h, weight, factors
        self.root = root  # of which this is a multiple: computed once, whoever asks

    def _compute(self) -> torch.Tensor:
        if self.root is None:
            return functional.linear(self.h, self.weight)
        return self.root.value() * self.factors[-1]

    def times(self, factor: float) -> Product:
        return Product(self._mode, self.h, self.weight, self, (*self.factors, factor))

    @property
    def is_whole(self) -> bool:
        """Nothing of it was computed or used so far."""
        return self.is_open and (self.root is None or self.root.is_whole)

    def close(self) -> None:
        self._is_spent = True
        if self.root is not None:
            self.root.close()


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Deferred, *others: Any) -> Any:
        return getattr(torch.Tensor, name)(self.value(), *computed(others))

    return apply


for _name in (
    "sub", "rsub", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "pow", "rpow", "matmul", "rmatmul", "neg",
    "abs", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "setitem", "len", "iter", "bool", "float", "int", "contains",
):
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))


def _version_of(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _sum_of(a: Any, b: Any) -> Any:
    if isinstance(a, Product):
        a, b = b, a
    if isinstance(a, Deferred) and not isinstance(a, Product) and a.is_open:
        if isinstance(b, Product) and b.is_whole and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device):
            b.close()
            with a._mode.paused():
                placeholder = saved(b)
                return added(a.spend(), placeholder, b)
        b = computed(b)  # first
    return computed(a) + computed(b)


def _product_of(a: Any, b: Any) -> Any:
    if isinstance(b, Product):
        a, b = b, a
    if isinstance(a, Product) and a.is_whole and type(b) in (int, float):
        return a.times(b)
    return computed(a) * computed(b)


def computed(value: Any) -> Any:
    """The same without stand-ins, in tuples, lists and dicts too."""
    if isinstance(value, Deferred):
        return value.value()
    if type(value) in (tuple, list):
        return type(value)(computed(item) for item in value)
    if type(value) is dict:
        return {key: computed(item) for key, item in value.items()}
    return value


class BranchFirst(TorchFunctionMode):
    """For one call of a LoRA's forward."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.branch = branch
        self.open: list[Deferred] = []
        self.has_base = False
        self.is_paused = False

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.open.clear()  # a cycle otherwise, which would keep the activations until Python collects its garbage

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is computed inside is not put off."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        if not kwargs:
            if func is functional.linear:
                stand_in = self._linear(*args)
                if stand_in is not None:
                    return stand_in
            elif func is linear.apply:
                x, manager = args[:2]
                weight = manager.module._parameters["weight"]
                if manager.module is self.branch.base and self._is_deferrable(x, weight):
                    return self._base(x, weight, manager.forward)
            elif len(args) == 2:
                if name in _ADDS:
                    return _sum_of(*args)
                if name in _MULS:
                    return _product_of(*args)
        if self.open and (name not in _HARMLESS or (kwargs and (kwargs.get("inplace") or "out" in kwargs))):
            self.compute_all()
        return func(*computed(args), **computed(kwargs or {}))

    def compute_all(self) -> None:
        """In the order in which the forward asked for them."""
        waiting, self.open = self.open, []
        for deferred in waiting:
            if deferred.is_open:
                deferred.value()

    def _is_deferrable(self, x: Any, weight: Any) -> bool:
        if self.has_base or type(x) not in _PLAIN or x.dim() == 0 or not self.branch.is_unwatched():
            return False
        if not torch.is_autocast_enabled(x.device.type):
            return x.dtype == weight.dtype
        # Of a leaf, autocast keeps one cast for all who read it, and their gradients are added in its order.
        return x.dtype in _CAST and not (x.is_leaf and x.requires_grad)

    def _linear(self, x: Any, weight: Any, bias: Any = None) -> Deferred | None:
        own: Any = self.branch.base._parameters.get("weight")
        if weight is own:
            if self._is_deferrable(x, weight):
                return self._base(x, weight, lambda given: functional.linear(given, weight, bias))
        elif (
            bias is None
            and any(weight is up._parameters.get("weight") for up in self.branch.ups)
            and type(x) is torch.Tensor
            and x.dim() > 1
            and x.dtype == weight.dtype
            and x.device == weight.device
            and x.is_contiguous()
            and weight.is_contiguous()
            and not torch.is_autocast_enabled(x.device.type)
            and self.branch.is_unwatched()
        ):
            self.open.append(Product(self, x, weight))
            return self.open[-1]
        return None

    def _base(self, x: torch.Tensor, weight: Any, product: Callable[[torch.Tensor], torch.Tensor]) -> Deferred:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        self.has_base = True
        version = _version_of(x)
        # Autograd adds up the gradients of x in the order in which the nodes were made, and sums of three and more
        # depend on it: this node is made now, where the Linear's would have been.
        given = x.view_as(x) if x.requires_grad and torch.is_grad_enabled() else x

        def run() -> torch.Tensor:
            if _version_of(x) != version:
                raise Unsuitable("its forward writes to its input before the Linear's output is used")
            return product(given)

        self.open.append(Deferred(self, run, (*x.shape[:-1], weight.shape[0]), dtype, x.device))
        return self.open[-1]
