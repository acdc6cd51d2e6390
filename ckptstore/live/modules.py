"""Modules: the parameters, buffers and extra states that they hold, by path, and the places in which they hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from ckptstore.errors import CkptStoreError, RefusedError
from ckptstore.format import values
from ckptstore.format.page import BUFFER, WEIGHT, Role
from ckptstore.live.tensors import type_name

T = TypeVar("T")

_EXTRA = "_extra_state"


def asked(what: str, call: Callable[[], T]) -> T:
    """What the user's own ``call`` returns. RefusedError naming ``what`` if it raises."""
    try:
        return call()
    except CkptStoreError:
        raise
    except Exception as error:
        raise RefusedError(what, f"it raised {type(error).__name__}: {error}", "see the cause above") from error


def module_tensors(modules: Mapping[str, nn.Module]) -> dict[str, tuple[Role, Tensor]]:
    """Live parameters and persistent buffers by path, with their roles; every name of a shared one.

    What a module's ``state_dict`` names is its state (a module decides by it what is kept), and of that the very
    tensors are taken.

    Raises:
        RefusedError: two modules give the same path, or a ``state_dict`` holds what is neither a tensor nor an extra
            state.
    """
    found: dict[str, tuple[Role, Tensor]] = {}
    for prefix, module in modules.items():
        parameters = dict(module.named_parameters(remove_duplicate=False))
        held = parameters.keys() | dict(module.named_buffers(remove_duplicate=False))
        extras = len(_extra_modules({prefix: module}))
        state = asked(f"state_dict of {_of(prefix)}", partial(module.state_dict, keep_vars=True))
        for name, value in state.items():
            path = f"{prefix}.{name}" if prefix else name
            values.check_text(path, f"tensor {path!r:.120}")
            if extras and name not in held and name.rpartition(".")[2] == _EXTRA:
                extras -= 1  # its module is asked for it, see extra_states
                continue
            if not isinstance(value, Tensor):
                why = f"a state_dict holds a {type_name(value)} here, and only tensors can be put back in place"
                raise RefusedError(f"state {path!r:.120}", why, "return it from get_extra_state instead")
            if path in found:
                raise RefusedError(f"tensor {path!r:.120}", "two modules give this path", "name them differently")
            found[path] = (WEIGHT if name in parameters or isinstance(value, nn.Parameter) else BUFFER, value)
    return found


def extra_states(modules: Mapping[str, nn.Module]) -> dict[str, tuple[nn.Module, Any]]:
    """Extra state of modules (``get_extra_state``) by path, with the module that takes it back.

    Raises:
        RefusedError: a module gives extra state and cannot take it back.
    """
    found: dict[str, tuple[nn.Module, Any]] = {}
    for path, module in _extra_modules(modules).items():
        what = f"extra state {path!r:.120}"
        if type(module).set_extra_state is nn.Module.set_extra_state:
            raise RefusedError(what, f"{type_name(module)} has no set_extra_state to put it back", "write one")
        found[path] = (module, asked(what, module.get_extra_state))
    return found


def _extra_modules(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        ".".join(part for part in (prefix, name, _EXTRA) if part): module
        for prefix, root in modules.items()
        for name, module in root.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


@dataclass(frozen=True, slots=True)
class Slot:
    """The attribute in which a module holds a parameter or buffer."""

    module: nn.Module
    attribute: str

    @property
    def holds_parameter(self) -> bool:
        """Whether it is a parameter's."""
        return self.attribute in self.module._parameters

    def put(self, tensor: Tensor) -> None:
        """Let the module hold ``tensor``. A buffer shares the memory of a parameter and does not become one."""
        is_buffer = not self.holds_parameter
        value = tensor.detach() if is_buffer and isinstance(tensor, nn.Parameter) else tensor
        setattr(self.module, self.attribute, value)  # not into its tables: some modules keep lists of their own


def find_slot(modules: Mapping[str, nn.Module], path: str, tensor: Tensor) -> Slot | None:
    """Where ``tensor``, which the modules' state names ``path``, is held; None if it is not held under that name."""
    for prefix, root in modules.items():
        if prefix and not path.startswith(f"{prefix}."):
            continue
        parent, _, attribute = (path[len(prefix) + 1 :] if prefix else path).rpartition(".")
        try:
            module = root.get_submodule(parent)
        except AttributeError:
            continue
        if module._parameters.get(attribute) is tensor or module._buffers.get(attribute) is tensor:
            return Slot(module, attribute)
    return None


def _of(prefix: str) -> str:
    return f"module {prefix!r:.120}" if prefix else "the model"
