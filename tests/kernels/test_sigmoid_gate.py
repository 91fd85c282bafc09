import torch

from moeplan.kernels.sigmoid_gate import sigmoid_gate


def test_values_and_gradients_are_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.testing.assert_close(sigmoid_gate(x, gate), x * torch.sigmoid(gate))
    assert torch.autograd.gradcheck(sigmoid_gate, (x, gate))


def test_backward_keeps_its_inputs_alone() -> None:
    x, gate = (torch.ones(6, 4, requires_grad=True) for _ in range(2))
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        sigmoid_gate(x, gate)
    assert saved == [x.data_ptr(), gate.data_ptr()]
