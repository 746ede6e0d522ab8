"""A second device for machines that have none: its tensors lie in ordinary memory, and refuse to meet those of the CPU.

Importing this file registers a device called "elsewhere" with PyTorch, for the whole process and for good; so do it in
a process of its own (`test_placement.py`). What a real second device would refuse, this one refuses: an operation on
tensors of both devices, unless it copies from one to the other or the one on the CPU is a single number.
"""

import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


class ElsewhereTensor(torch.Tensor):
    """A tensor on the device "elsewhere"; `held` has its numbers, on the CPU."""

    @staticmethod
    def __new__(cls, held: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("elsewhere", 0),
        )

    def __init__(self, held: torch.Tensor):
        self.held = held

    def tolist(self):  # PyTorch has none for subclasses
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run_elsewhere(operation, *args, **(kwargs or {}))


def run_elsewhere(operation, *args, **kwargs):
    """Run `operation` on the numbers, if its tensors are where they should be."""
    places: list[torch.Tensor] = []
    held_args, held_kwargs = fetch(args, places), {name: fetch(value, places) for name, value in kwargs.items()}
    is_here = any(isinstance(tensor, ElsewhereTensor) for tensor in places)
    if is_here and operation not in COPIES:
        for tensor in places:
            if not isinstance(tensor, ElsewhereTensor) and tensor.ndim > 0:
                raise RuntimeError(f"{operation} got tensors on the CPU and elsewhere, of shape {list(tensor.shape)}")
    wanted = kwargs.get("device")
    if wanted is not None:
        held_kwargs["device"] = "cpu"
    result = operation(*held_args, **held_kwargs)
    if operation._schema.is_mutable:  # what was written to is what comes back
        written = [arg for arg, field in zip(args, operation._schema.arguments) if field.is_write]
        return written[0] if written else kwargs.get("out", result)
    goes_elsewhere = is_here if wanted is None else torch.device(wanted).type == "elsewhere"
    return send(result) if goes_elsewhere else result


def fetch(value, places: list):
    """`value` with the numbers in place of the tensors elsewhere; every tensor met is added to `places`."""
    if isinstance(value, (list, tuple)):
        return type(value)(fetch(item, places) for item in value)
    if isinstance(value, torch.Tensor):
        places.append(value)
    return value.held if isinstance(value, ElsewhereTensor) else value


def send(value):
    """`value` with its tensors elsewhere."""
    if isinstance(value, (list, tuple)):
        return type(value)(send(item) for item in value)
    return ElsewhereTensor(value) if isinstance(value, torch.Tensor) else value


class Backend(_DummyBackendModule):
    """What PyTorch asks about the device; transformers switches autocast off by its name."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("elsewhere", Backend())
_factories = torch.library.Library("_", "IMPL")
_factories.fallback(run_elsewhere, "PrivateUse1")  # operations that make a tensor there out of nothing

_tensor_on_cpu = torch.tensor


def _tensor(data, *, device=None, **options):
    """`torch.tensor`, which knows no devices made in Python."""
    made = _tensor_on_cpu(data, **options)
    return made if device is None else made.to(device)


torch.tensor = _tensor
