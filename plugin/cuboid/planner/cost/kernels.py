"""Time of what one GPU computes."""

from __future__ import annotations

from cuboid.planner.description.cluster import Gpu

#: Matrix products of flash attention's backward for each of its forward: five instead of two.
ATTENTION_BACKWARD = 2.5
_ELEMENT_BYTES = 2


class Kernels:
    """Times of kernels on one kind of GPU.

    Args:
        gpu: the kind of GPU.
        products_speed: speed of products with weights, relative to 16 bits.
    """

    def __init__(self, gpu: Gpu, products_speed: float = 1.0) -> None:
        #: Operations a second of large products.
        self.product_flops = gpu.peak_flops * gpu.matmul_efficiency * products_speed
        self._fp8_flops = self.product_flops * gpu.fp8_speed
        self._attention_flops = gpu.peak_flops * gpu.attention_efficiency
        self._sheet_bytes = gpu.memory_bytes_per_s
        self._bytes = gpu.memory_bytes_per_s * gpu.memory_efficiency
        self.kernel_s = gpu.kernel_s

    def matmul_s(
        self, rows: float, outputs: float, inputs: float, count: int = 1, *, grouped: bool = False, fp8: bool = False
    ) -> float:
        """``count`` products of ``[rows, inputs]`` and ``[inputs, outputs]``, each a kernel or grouped in one.

        The time of the bytes is added to that of the operations, as the two overlap only in part. That makes small
        products slow: with I inputs the result's bytes alone take peak/(memory's rate · I) of the operations' time.
        """
        moved = _ELEMENT_BYTES * (rows * inputs + inputs * outputs + rows * outputs)
        flops = self._fp8_flops if fp8 else self.product_flops
        product_s = 2 * rows * outputs * inputs / flops + moved / self._sheet_bytes
        return count * product_s + (1 if grouped else count) * self.kernel_s

    def attention_s(self, pairs: float, features: float) -> float:
        """Forward of flash attention: ``pairs`` (query, key) in all heads, ``features`` of one query and one value."""
        return 2 * pairs * features / self._attention_flops + self.kernel_s

    def elementwise_s(self, moved_bytes: float, kernels: int = 1) -> float:
        """Kernels that read and write ``moved_bytes`` in total."""
        return moved_bytes / self._bytes + kernels * self.kernel_s
