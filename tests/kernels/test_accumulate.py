import pytest
import torch

from moeplan.kernels.accumulate import accumulate_


@pytest.mark.parametrize("num_elements", [0, 1, 4095, 10_000])
def test_parts_add_up_in_the_type_of_the_total(num_elements: int) -> None:
    total_N, part_N = torch.ones(num_elements), torch.full((num_elements,), 0.5, dtype=torch.bfloat16)
    assert accumulate_(total_N, part_N) is total_N
    assert total_N.tolist() == [1.5] * num_elements


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled for the GPU: test_on_gpu.py")
@pytest.mark.parametrize("num_elements", [0, 1, 4095, 10_000])
def test_the_kernel_adds_what_torch_adds(num_elements: int) -> None:
    from moeplan.kernels import accumulate_triton

    generator = torch.Generator().manual_seed(0)
    total_N, part_N = torch.randn(2, num_elements, generator=generator)
    expected = total_N + part_N.bfloat16()
    torch.testing.assert_close(accumulate_triton.accumulate_(total_N, part_N.bfloat16()), expected, rtol=0, atol=0)
