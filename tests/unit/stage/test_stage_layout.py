"""How parameters lie in one flat vector, and digests of tensors."""

from __future__ import annotations

import pytest
import torch

from swarm.stage.digest import digest_of
from swarm.stage.layout import Layout

torch.set_num_threads(1)


class Odd(torch.nn.Module):
    """A scalar, an empty parameter, a frozen one, a matrix and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.nothing = torch.nn.Parameter(torch.zeros(0, 3))
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.linear = torch.nn.Linear(3, 2)
        self.tied = self.linear


def test_a_layout_covers_every_trainable_parameter_once_in_order() -> None:
    layout = Layout.of(Odd())
    assert layout.names == ("scale", "nothing", "linear.weight", "linear.bias")
    assert layout.offsets == (0, 1, 1, 7, 9)
    assert layout.num_elements == 9


def test_flatten_and_views_are_inverse() -> None:
    module = Odd()
    layout = Layout.of(module)
    trainable = [p for p in module.parameters() if p.requires_grad]
    flat = layout.flatten(trainable, dtype=torch.float64, device="cpu")
    assert (flat.dtype, flat.shape, flat.requires_grad) == (torch.float64, (9,), False)
    for parameter, view in zip(trainable, layout.views(flat), strict=True):
        assert view.shape == parameter.shape
        assert torch.equal(view.float(), parameter.detach())
    again = layout.flatten(layout.views(flat), dtype=torch.float64, device="cpu")
    assert torch.equal(again, flat)


def test_views_write_through_and_flatten_copies() -> None:
    layout = Layout.of(torch.nn.Linear(3, 2))
    flat = torch.zeros(8)
    layout.named(flat)["bias"].fill_(5.0)
    assert flat.tolist() == [0.0] * 6 + [5.0] * 2
    source = [torch.ones(2, 3), torch.ones(2)]
    copy = layout.flatten(source, dtype=torch.float32, device="cpu")
    source[0].zero_()
    assert copy.tolist() == [1.0] * 8


def test_non_contiguous_tensors_are_flattened_by_value() -> None:
    layout = Layout.of(torch.nn.Linear(3, 2, bias=False))
    matrix = torch.arange(6.0).view(3, 2).t()
    assert layout.flatten([matrix], dtype=torch.float32, device="cpu").tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]


@pytest.mark.parametrize("tensors", [[torch.ones(2, 3)], [torch.ones(2, 3), torch.ones(2), torch.ones(1)]])
def test_a_wrong_number_of_tensors_is_an_error(tensors: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="zip"):
        Layout.of(torch.nn.Linear(3, 2)).flatten(tensors, dtype=torch.float32, device="cpu")


# ---------------------------------------------------------------------------------------------------- digests


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_a_digest_depends_on_every_element(dtype: torch.dtype) -> None:
    tensor = torch.arange(10).to(dtype)
    whole = digest_of([tensor])
    assert digest_of([tensor.clone()]) == whole
    for index in range(10):
        other = tensor.clone()
        other[index] += 1
        assert digest_of([other]) != whole


def test_a_digest_tells_zero_from_minus_zero() -> None:
    """Bit-identical is more than equal."""
    assert digest_of([torch.tensor([0.0])]) != digest_of([torch.tensor([-0.0])])


def test_a_digest_is_over_values_in_order_and_not_over_memory() -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.ones(2)
    assert digest_of([a, b]) != digest_of([b, a])
    assert digest_of([a.t().contiguous().t()]) == digest_of([a])
    assert digest_of([torch.cat([b, a.flatten()])[2:]]) == digest_of([a])
    assert digest_of([a.requires_grad_(True)]) == digest_of([a.detach()])


def test_empty_tensors_have_a_digest() -> None:
    assert digest_of([]) == digest_of([torch.zeros(0, 3)])
    assert len(digest_of([])) == 64


def test_a_scalar_has_a_digest() -> None:
    """A parameter may be 0-d (a learned scale)."""
    assert digest_of([torch.tensor(1.0)]) == digest_of([torch.ones(1)])
    assert digest_of([torch.tensor(1.0)]) != digest_of([torch.tensor(2.0)])
